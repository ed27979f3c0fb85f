"""Trains a GPT of 11 million parameters on packed documents, an hour in all, and records every step.

    python examples/train_long.py

The runs differ in the dtype (float32, bfloat16 by autocast) and in the way of attention:

    torch        torch's scaled_dot_product_attention with a mask of the documents
    activate     the same call after flash_attn_ext.activate()
    varlen       flash_attn_varlen
    2 processes  context_parallel_attn on two processes, each with half of every sequence

All runs start from the same parameters and see the same packs. The run with the least time so far computes the next
step, so other work on the machine slows all runs alike. Ctrl-C ends the program after a step. The same command then
continues. record.json is written as the runs go on, and train_long.png is drawn from it.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path

import torch
from gpt_report import machine
from interruption import catch_interruption
from long_run import History, LongTrainer, Member, Settings
from packed_attention import WAYS
from packed_text import Documents, as_documents, read_texts
from tqdm import tqdm
from training_process import TrainingProcess

DTYPES = ("float32", "bfloat16")
SAVE_SECONDS = 120
RECORD_SECONDS = 10


class Run:
    """One run: its processes and its numbers."""

    def __init__(self, dtype: str, way: str, settings: Settings, out: Path, rendezvous: Path):
        self.dtype, self.way, self.name = dtype, way, f"{dtype}, {way}"
        processes = 2 if way == "2 processes" else 1
        threads = max(1, torch.get_num_threads() // processes)
        checkpoint = out / (self.name.replace(", ", "-").replace(" ", "-") + ".pt")
        self.processes = [
            TrainingProcess(LongTrainer, settings, way, dtype, out / "documents.pt", checkpoint,
                            Member(rank, processes, threads, rendezvous / checkpoint.stem))
            for rank in range(processes)
        ]  # fmt: skip
        self.history = History()

    def call(self, method: str) -> None:
        """Calls a method on all processes. step() and past() return the numbers, and rank 0 speaks for all."""
        for process in self.processes:
            process.ready.result()
        results = [future.result() for future in [process.submit(method) for process in self.processes]]
        if results[0] is not None:
            self.history = results[0]
            self.history.peak_memory = max(history.peak_memory for history in results)

    def seconds(self) -> float:
        return sum(self.history.seconds)

    def close(self) -> None:
        for process in self.processes:
            process.close()

    def as_json(self, context: int) -> dict:
        steps, seconds = len(self.history.loss), self.seconds()
        rate = {"tokens_per_second": context * steps / seconds} if steps else {}
        return {"name": self.name, "dtype": self.dtype, "way": self.way, **rate, **asdict(self.history)}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help="default: all")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="default: both")
    text = "of each run, validation not counted (default: %(default)s, so that all eight runs take an hour)"
    parser.add_argument("--minutes", type=float, default=7.5, help=text)
    parser.add_argument("--steps", type=int, default=sys.maxsize, help="end each run after this step (default: never)")
    for setting in fields(Settings):
        option = "--" + setting.name.replace("_", "-")
        parser.add_argument(option, type=setting.type, default=setting.default, help="default: %(default)s")
    parser.add_argument("--note", default="", help="text for the record and the figure, such as: busy machine")
    parser.add_argument("--out", type=Path, default=Path("build/long"), metavar="FOLDER", help="default: %(default)s")
    return parser.parse_args(argv)


def prepare_documents(path: Path) -> Documents:
    """Reads the text, or the tokens that an earlier start wrote: installed packages may have changed since."""
    if not path.exists():
        torch.save(as_documents(read_texts()), path)
    return torch.load(path, weights_only=False)


def write_record(path: Path, runs: list[Run], settings: Settings, corpus: str, note: str) -> None:
    record = {
        "note": note,
        "settings": asdict(settings),
        "machine": machine("cpu"),
        "corpus": corpus,
        "runs": [run.as_json(settings.context) for run in runs],
    }
    new = path.with_suffix(".new")
    new.write_text(json.dumps(record) + "\n")
    new.replace(path)


def train_in_turns(runs: list[Run], minutes: float, steps: int, write: Callable[[], None]) -> bool:
    """Trains all runs. Returns whether all reached their end; False after Ctrl-C or SIGTERM."""
    with catch_interruption() as interrupted:
        for run in runs:
            run.call("past")
        _take_turns(runs, minutes, steps, write, interrupted)
        for run in runs:
            run.call("save")
        write()
    return not interrupted()


def _take_turns(runs: list[Run], minutes: float, steps: int, write: Callable[[], None], interrupted) -> None:
    saved = written = time.monotonic()
    with tqdm(total=round(60 * minutes * len(runs)), unit="s", bar_format="{l_bar}{bar}| {elapsed}{postfix}") as bar:
        while not interrupted():
            unfinished = [run for run in runs if run.seconds() < 60 * minutes and len(run.history.loss) < steps]
            if not unfinished:
                return
            run = min(unfinished, key=Run.seconds)
            run.call("step")
            bar.n = min(round(sum(run.seconds() for run in runs)), bar.total)
            bar.set_postfix_str(f"{run.name}: step {len(run.history.loss)}, loss {run.history.loss[-1]:.3f}")
            now = time.monotonic()
            if now - saved > SAVE_SECONDS:
                saved = now
                for each in runs:
                    each.call("save")
            if now - written > RECORD_SECONDS:
                written = now
                write()


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    settings = Settings(**{setting.name: getattr(arguments, setting.name) for setting in fields(Settings)})
    out = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    corpus = prepare_documents(out / "documents.pt").description()
    print(corpus, flush=True)
    record, figure = out / "record.json", out / "train_long.png"
    with ExitStack() as stack:
        rendezvous = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        runs = [
            stack.enter_context(closing(Run(dtype, way, settings, out, rendezvous)))
            for dtype in arguments.dtypes
            for way in arguments.ways
        ]
        write = partial(write_record, record, runs, settings, corpus, arguments.note)
        ended = train_in_turns(runs, arguments.minutes, arguments.steps, write)
    from long_plot import plot  # here, because every training process imports this file and none needs matplotlib

    plot(json.loads(record.read_text()), figure)
    print(f"Record: {record}\nFigure: {figure}")
    if not ended:
        print("Interrupted. The same command continues.")
    return 0 if ended else 130


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError) as problem:
        print(f"train_long.py: {problem}", file=sys.stderr)
    except BrokenProcessPool:
        print("train_long.py: a training process was killed; is there enough memory?", file=sys.stderr)
    sys.exit(2)
