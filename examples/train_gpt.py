"""Trains a small GPT on Python's standard library through three attentions, and compares the runs.

The attentions are torch's math kernel, torch's default kernel and this project's. Two distances to the math kernel's
run are compared: from this project's run, and from the default kernel's run. The runs agree if the first is not larger
than the second times the factor of loss_agreement.py. Afterwards the program measures attention alone, forward and
backward, at several sequence lengths.

All runs start from the same seed and see the same batches. Each has a process, so peak memory is its own. The
processes alternate step by step, so other work on the machine slows all of them alike. The exit status is 0 if the runs
agree, 1 if they do not, and 2 if the program cannot run.
"""

import argparse
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import fields
from pathlib import Path

import torch
from gpt_model import ATTENTION_NAMES, AttentionUnavailable, attention_by_name
from gpt_report import Run, comparison_as_json, print_checks, table, write_json
from gpt_training import DTYPES, Settings, Trainer
from loss_agreement import ROUNDING, compare
from rich.console import Console
from stdlib_text import Corpus, load_corpus
from tqdm import tqdm
from training_process import TrainingProcess

VALIDATIONS = 6
SAMPLE_CHARACTERS = 300
REFERENCE, YARDSTICK = "sdpa-math", "sdpa"

NUMBERS = {
    "steps": "optimiser steps of each run",
    "batch_size": "windows of text in one step",
    "context": "tokens of a window, which is the sequence length",
    "d_model": "width of the model",
    "heads": "attention heads; the head dimension is d_model divided by heads",
    "layers": "transformer layers",
    "learning_rate": "highest learning rate of the schedule",
    "seed": "seed of the parameters, the batches and the sample",
}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line. Settings has the defaults."""
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    names = "; ".join(f"{name}: {meaning}" for name, meaning in ATTENTION_NAMES.items())
    parser.add_argument(
        "--attention",
        nargs="+",
        choices=ATTENTION_NAMES,
        default=["flash_attn_ext"],
        metavar="NAME",
        help=f"what to compare with {REFERENCE}; {YARDSTICK} always runs too (default: flash_attn_ext). {names}",
    )
    for setting in fields(Settings):
        if setting.name in NUMBERS:
            option = "--" + setting.name.replace("_", "-")
            text = f"{NUMBERS[setting.name]} (default: {setting.default})"
            parser.add_argument(option, type=setting.type, default=setting.default, metavar="N", help=text)
    text = "bfloat16 means torch.autocast with float32 parameters (default: float32)"
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help=text)
    text = "cpu, cuda or cuda:N; auto means cuda if every attention runs there, otherwise cpu (default: auto)"
    parser.add_argument("--device", default="auto", help=text)
    text = "sequence lengths of the second figure (default: 512 to 8192); without a length there is no figure"
    parser.add_argument("--lengths", type=int, nargs="*", metavar="S", default=[2**n for n in range(9, 14)], help=text)
    text = "folder for results.json, loss_curves.png and attention.png (default: build/demo)"
    parser.add_argument("--out", type=Path, default=Path("build/demo"), metavar="FOLDER", help=text)
    return parser.parse_args(argv)


def choose_device(wanted: str, names: list[str], dtype: str = "float32") -> str:
    """Returns the device of all runs. Raises AttentionUnavailable if an attention cannot run on the wanted device."""
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
    """Calls the attention once on a tiny input, so a missing part is reported before the training."""
    attention = attention_by_name(name)
    try:
        query = torch.ones(1, 1, 2, 8, device=device, dtype=dtype)
        attention(query, query, query, is_causal=True)
    except Exception as error:
        raise AttentionUnavailable(f"{name} does not run on device {device!r}: {error}") from error


def make_runs(names: list[str]) -> list[Run]:
    """Makes one run for each name. A repeated name gets a number."""
    seen = [names[:index].count(name) for index, name in enumerate(names)]
    return [Run(name, f"{name} #{count + 1}" if count else name) for name, count in zip(names, seen, strict=True)]


def train_in_turns(runs: list[Run], settings: Settings, corpus: Corpus) -> None:
    """Trains all runs: step 1 of each run, then step 2 of each run, and so on."""
    validate_at = {round(settings.steps * part / VALIDATIONS) for part in range(1, VALIDATIONS + 1)}
    with ExitStack() as stack:
        processes = []
        for run in runs:
            process = TrainingProcess(Trainer, settings, run.attention, corpus)
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
    """Prints the table of attention_scaling.py, and writes its figure and numbers."""
    import attention_scaling

    if not attention_scaling.can_measure_memory(device):
        console.print("\nNo measurement of attention alone: on a CPU, peak memory is read from Linux's /proc.")
        return
    console.print("\n[bold]Part 2 of 2.[/] Attention alone, forward and backward. About one minute on two idle cores.")
    rows = attention_scaling.measure_lengths(lengths, device)
    measured = list(tqdm(rows, total=len(lengths), unit="length", leave=False))
    console.print(attention_scaling.table(measured))
    picture, numbers = out / "attention.png", out / "attention.json"
    attention_scaling.write(measured, device, picture, numbers)
    console.print(f"Plot: {picture}\nNumbers: {numbers}")


def main(argv: list[str] | None = None) -> int:
    started = time.monotonic()
    arguments = parse_arguments(argv)
    values = {setting.name: getattr(arguments, setting.name) for setting in fields(Settings)}
    names = [REFERENCE, YARDSTICK, *arguments.attention]
    values["device"] = choose_device(arguments.device, names, arguments.dtype)
    settings = Settings(**values)
    runs = make_runs(names)
    reference, yardstick, *candidates = runs
    arguments.out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)

    with_figure = "flash_attn_ext" in names and bool(arguments.lengths)
    parts = 2 if with_figure else 1
    console.print("Reading Python's standard library ...")
    corpus = load_corpus()
    console.print(corpus.description())
    text = ", then ".join(run.name for run in runs)
    console.print(f"[bold]Part 1 of {parts}.[/] Training one GPT on {settings.device}: each step through {text}")
    console.print("With the default settings this takes about two minutes on two idle cores.")
    train_in_turns(runs, settings, corpus)

    console.print(f"\n[bold]After {settings.steps} steps the model trained through {runs[-1].name} writes:[/]")
    console.print(runs[-1].sample, markup=False, style="cyan")
    console.print(table(runs, yardstick, settings))
    comparisons = []
    for run in candidates:
        checks = compare(reference.curves, yardstick.curves, run.curves, ROUNDING[settings.dtype])
        print_checks(console, reference, yardstick, run, checks)
        comparisons.append(comparison_as_json(reference, yardstick, run, checks))

    from gpt_plot import plot  # here, because every training process imports this file and none needs matplotlib

    picture, numbers = arguments.out / "loss_curves.png", arguments.out / "results.json"
    plot(picture, runs, settings)
    write_json(numbers, runs, comparisons, settings, corpus)
    console.print(f"\nPlot: {picture}\nNumbers: {numbers}")
    if with_figure:
        compare_attention_alone(console, arguments.lengths, settings.device, arguments.out)
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    console.print(f"\nDone in {minutes} min {seconds} s.")
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
