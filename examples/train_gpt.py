"""Trains a small GPT on Python's standard library, once through each attention, and compares the runs.

Then it measures attention alone, forward and backward, against the sequence length.

The runs start from the same seed, see the same batches, and take turns step by step, each in a process of its
own: what else the machine does slows both alike, and peak memory is each run's own. The exit status is 1 if the
loss curves do not agree, and 2 if the demo cannot run.
"""

import argparse
import sys
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import fields
from pathlib import Path

import torch
from gpt_model import ATTENTION_NAMES, AttentionUnavailable, attention_by_name
from gpt_report import Run, comparison_as_json, print_checks, table, write_json
from gpt_training import DTYPES, Settings, TrainingProcess
from loss_agreement import TOLERANCES, compare
from rich.console import Console
from stdlib_text import Corpus, load_corpus
from tqdm import tqdm

VALIDATIONS = 6
SAMPLE_CHARACTERS = 300

NUMBERS = {
    "steps": "optimiser steps per run",
    "batch_size": "windows of text per step",
    "context": "tokens per window: the sequence length of the attention",
    "d_model": "width of the model",
    "heads": "attention heads; the head dimension is d_model / heads",
    "layers": "transformer layers",
    "learning_rate": "highest learning rate of the schedule",
    "seed": "of the weights, the batches and the sample",
}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line; every default is that of Settings."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    names = "; ".join(f"{name}: {what}" for name, what in ATTENTION_NAMES.items())
    parser.add_argument(
        "--attention",
        nargs="+",
        choices=ATTENTION_NAMES,
        default=["sdpa", "flash_attn_ext"],
        metavar="NAME",
        help=f"the runs; each is compared with the first (default: sdpa flash_attn_ext). {names}",
    )
    for setting in fields(Settings):
        if setting.name in NUMBERS:
            option = "--" + setting.name.replace("_", "-")
            text = f"{NUMBERS[setting.name]} (default: {setting.default})"
            parser.add_argument(option, type=setting.type, default=setting.default, metavar="N", help=text)
    text = "bfloat16 is torch.autocast, with float32 weights (default: float32)"
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help=text)
    text = (
        "cpu, cuda or cuda:N; auto takes cuda if every attention asked for runs there (flash_attn_ext only once "
        "it has CUDA kernels), otherwise cpu (default: auto)"
    )
    parser.add_argument("--device", default="auto", help=text)
    text = "sequence lengths of the second figure (default: 512 to 8192); none leaves it out"
    parser.add_argument("--lengths", type=int, nargs="*", metavar="S", default=[2**n for n in range(9, 14)], help=text)
    text = "folder for results.json, loss_curves.png and attention.png (default: build/demo)"
    parser.add_argument("--out", type=Path, default=Path("build/demo"), metavar="FOLDER", help=text)
    return parser.parse_args(argv)


def choose_device(wanted: str, names: list[str], dtype: str = "float32") -> str:
    """The device of all runs; AttentionUnavailable if one of them cannot run on the device asked for."""
    if wanted == "auto" and torch.cuda.is_available():
        try:
            return choose_device("cuda", names, dtype)
        except AttentionUnavailable as problem:
            print(f"On the CPU, because {problem}", file=sys.stderr)
    device = "cpu" if wanted == "auto" else wanted
    for name in names:
        try_attention(name, device, DTYPES[dtype])
    return device


def try_attention(name: str, device: str, dtype: torch.dtype) -> None:
    """Calls the attention once on a tiny input, so that a missing part is reported before the training."""
    attention = attention_by_name(name)
    try:
        query = torch.ones(1, 1, 2, 8, device=device, dtype=dtype)
        attention(query, query, query, is_causal=True)
    except Exception as error:
        raise AttentionUnavailable(f"{name} does not run on device {device!r}: {error}") from error


def make_runs(names: list[str]) -> list[Run]:
    """One run per name, numbered where a name comes more than once."""
    seen = [names[:index].count(name) for index, name in enumerate(names)]
    return [Run(name, f"{name} #{count + 1}" if count else name) for name, count in zip(names, seen, strict=True)]


def train_in_turns(runs: list[Run], settings: Settings, corpus: Corpus) -> None:
    """Fills the runs: every step of the first is followed by the same step of the next."""
    validate_at = {round(settings.steps * part / VALIDATIONS) for part in range(1, VALIDATIONS + 1)}
    with ExitStack() as stack:
        processes = []
        for run in runs:
            process = TrainingProcess(settings, run.attention, corpus)
            processes.append(stack.enter_context(closing(process)))
        progress = stack.enter_context(tqdm(range(1, settings.steps + 1), unit="step", mininterval=0.5))
        for done in progress:
            for run, process in zip(runs, processes, strict=True):
                run.steps.append(process.call("step"))
                if done in validate_at:
                    run.validation.append((done, process.call("validation_loss")))
            progress.set_postfix_str(" | ".join(run.status() for run in runs), refresh=False)
        for run, process in zip(runs, processes, strict=True):
            run.peak_memory, run.memory_at_start = process.call("memory")
            run.first_gradients = process.call("first_gradient_norms")
            run.kernel = process.call("kernel")
            run.sample = process.call("sample", SAMPLE_CHARACTERS)


def compare_attention_alone(console: Console, lengths: list[int], device: str, out: Path) -> None:
    """Table, figure and numbers of attention_scaling.py."""
    import attention_scaling

    if not attention_scaling.can_measure_memory(device):
        console.print("\nAttention alone is left out: on CPU, peak memory is read from Linux's /proc.")
        return
    console.print("\nAttention alone, forward and backward, by sequence length ...")
    measured = list(tqdm(attention_scaling.measure_lengths(lengths, device), total=len(lengths), leave=False))
    console.print(attention_scaling.table(measured))
    picture, numbers = out / "attention.png", out / "attention.json"
    attention_scaling.write(measured, device, picture, numbers)
    console.print(f"Plot: {picture}\nNumbers: {numbers}")


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    values = {setting.name: getattr(arguments, setting.name) for setting in fields(Settings)}
    values["device"] = choose_device(arguments.device, arguments.attention, arguments.dtype)
    settings = Settings(**values)
    runs = make_runs(arguments.attention)
    arguments.out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)

    console.print("Reading Python's standard library ...")
    corpus = load_corpus()
    console.print(corpus.description())
    names = ", then ".join(run.name for run in runs)
    console.print(f"Training one GPT on {settings.device}, step by step through {names}")
    train_in_turns(runs, settings, corpus)

    console.print(f"\n[bold]After {settings.steps} steps the model trained through {runs[-1].name} writes:[/]")
    console.print(runs[-1].sample, markup=False, style="cyan")
    console.print(table(runs, settings))
    tolerance = TOLERANCES[settings.dtype]
    comparisons = []
    for run in runs[1:]:
        checks = compare(runs[0].curves, run.curves, tolerance)
        print_checks(console, runs[0], run, checks)
        comparisons.append(comparison_as_json(runs[0], run, checks))

    from gpt_plot import plot  # here, as every training process imports this file and none needs matplotlib

    picture, numbers = arguments.out / "loss_curves.png", arguments.out / "results.json"
    plot(picture, runs, settings, tolerance.curve)
    write_json(numbers, runs, comparisons, settings, corpus)
    console.print(f"\nPlot: {picture}\nNumbers: {numbers}")
    if "flash_attn_ext" in arguments.attention and arguments.lengths:
        compare_attention_alone(console, arguments.lengths, settings.device, arguments.out)
    return 0 if all(comparison["agree"] for comparison in comparisons) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (AttentionUnavailable, OSError, ValueError) as problem:
        print(f"train_gpt.py: {problem}", file=sys.stderr)
    except BrokenProcessPool:
        print("train_gpt.py: a training process was killed; is there enough memory?", file=sys.stderr)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(2)
