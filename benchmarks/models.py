"""Compares whole models on CPU, unchanged torch with flash_attn_ext.activate(): step time, peak memory, loss.

Both run the same module with the same parameters and inputs, alternating in one process. A ratio is torch's time
divided by ours, pair by pair: above 1, ours is faster. Attention's share is the fraction of torch's step in its
attention operators, from torch's profiler. If attention took no time, a step would be 1 / (1 - share) times as fast. A
step is the forward, and in training the backward; there is no optimiser. `--layers` limits the depth (model_zoo.py).
"""

import argparse
import ctypes
import gc
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import output
from benchmarks.harness import Paired, environment, machine, quartiles, time_in_turn
from benchmarks.model_zoo import MODELS, Problem
from benchmarks.peak_memory import status
from benchmarks.watch import Watch, measure_all, note
from flash_attn_ext import activate, activation_report, deactivate

MODES = ("train fp32", "train bf16", "inference fp32", "train fp32 compiled")
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}  # relative


def step_of(problem: Problem, length: int, layers: int, mode: str) -> Callable[[], float]:
    """Runs one step of the model and returns the loss."""
    torch.manual_seed(0)
    model, forward = problem.build(length, layers)
    training = mode.startswith("train")
    model.train(training)
    if mode.endswith("compiled"):
        model.compile()
    autocast = torch.autocast("cpu", torch.bfloat16) if "bf16" in mode else nullcontext()

    def step() -> float:
        with torch.set_grad_enabled(training):
            with autocast:
                loss = forward()
            if training:
                model.zero_grad()
                loss.backward()
        return loss.item()

    return step


def ours(step: Callable[[], float]) -> Callable[[], float]:
    def run() -> float:
        activate()
        try:
            return step()
        finally:
            deactivate()

    return run


def peak_bytes(step: Callable[[], float]) -> int:
    """Returns the growth of the resident set at its peak in one step."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # otherwise the step would reuse freed memory, which would not count
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    step()
    return status("VmHWM") - before


def attention_share(step: Callable[[], float]) -> float:
    """Returns the fraction of a step in torch's attention."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step()
    events = recorded.key_averages()
    total = sum(event.self_cpu_time_total for event in events)
    # Self times, so nested operators count once.
    return sum(event.self_cpu_time_total for event in events if "scaled_dot_product" in event.key) / total


def measure(problem: Problem, length: int, mode: str, args: argparse.Namespace) -> dict:
    torch.compiler.reset()
    step = step_of(problem, length, args.layers, mode)
    losses = step(), ours(step)()
    tolerance = LOSS_TOLERANCE["bf16" if "bf16" in mode else "fp32"]
    if not abs(losses[0] - losses[1]) <= tolerance * abs(losses[0]):
        raise RuntimeError(f"{problem.name}, {mode}: the losses differ, {losses[0]} with torch, {losses[1]} with ours")
    activation_report(reset=True)
    watch = Watch(step)
    active, plain = time_in_turn([ours(step), step], seconds=args.seconds, rounds=(args.rounds, 100), between=watch)
    report = activation_report()
    if not report.taken:
        raise RuntimeError(f"{problem.name}, {mode}: no call ran on our kernels: {report}")
    low, middle, high = quartiles(Paired(active, plain).ratios)
    return {
        "model": problem.name, "length": length, "mode": mode, "layers": args.layers,
        "ms": statistics.median(active) * 1e3, "torch_ms": statistics.median(plain) * 1e3,
        "ratio": middle, "ratio_quartiles": [low, high], "pairs": len(active),
        # torch's fused inference path has no attention operator, only matrix products.
        "share": None if "_native_multi_head_attention" in report.taken else attention_share(step),
        "MiB": peak_bytes(ours(step)) / 2**20, "torch_MiB": peak_bytes(step) / 2**20,
        "loss": losses[1], "torch_loss": losses[0], "taken": report.taken,
        "left": {f"{operator}: {reason}": count for (operator, reason), count in report.left.items()},
        **watch.row(),
    }  # fmt: skip


def table(record: dict) -> list:
    on = record["machine"]
    columns = (
        "model, length", "mode", "torch ms", "ours ms", "ratio [quartiles]", "attention's share", "torch MiB",
        "ours MiB", "losses differ by",
    )  # fmt: skip
    rows = [
        (
            f"{row['model']}, {row['length']}", row["mode"] + (" ?" if row["busy"] else ""), f"{row['torch_ms']:.0f}",
            f"{row['ms']:.0f}", "{:.2f} [{:.2f}, {:.2f}]".format(row["ratio"], *row["ratio_quartiles"]),
            "-" if row["share"] is None else f"{row['share']:.0%}", f"{row['torch_MiB']:.0f}", f"{row['MiB']:.0f}",
            f"{abs(row['loss'] - row['torch_loss']) / abs(row['torch_loss']):.0e}",
        )
        for row in record["rows"]
    ]  # fmt: skip
    head = "{cpu}, {threads} threads, torch {torch} ({torch_isa}), ours {isa}".format(**on)
    return [
        f"{head}; {record['settings']['layers']} layers of each model\n",
        output.table(columns, rows),
        note(record["rows"]),
    ]


def plot(record: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = record["rows"]
    names = list(dict.fromkeys(f"{row['model']}, {row['length']}" for row in rows))
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    figure, axes = plt.subplots(figsize=(9, 1.5 + 0.2 * len(names) * len(modes)), layout="constrained")
    for n, mode in enumerate(modes):
        for row in (row for row in rows if row["mode"] == mode):
            y = names.index(f"{row['model']}, {row['length']}") + 0.8 * (n / len(modes) - 0.5) + 0.1
            low, high = row["ratio_quartiles"]
            axes.barh(y, row["ratio"], 0.7 / len(modes), color=f"C{n}")
            axes.plot([low, high], [y, y], color="black", linewidth=1)
    for n, mode in enumerate(modes):
        axes.barh(0, 0, color=f"C{n}", label=mode)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("time of a step: torch / flash_attn_ext (above 1: ours is faster), with quartiles")
    figure.legend(loc="outside upper center", ncols=len(modes), frameon=False)  # outside: bars fill the axes
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--layers", type=int, default=2, help="of each model (default: 2)")
    parser.add_argument("--lengths", type=int, nargs="+", help="sequence lengths; default: two for each model")
    parser.add_argument("--seconds", type=float, default=10, help="for each row (default: 10)")
    parser.add_argument("--rounds", type=int, default=5, help="at least, for each row (default: 5)")
    parser.add_argument("--repeats", type=int, default=1, help="repeats of rows from a busy machine (default: 1)")
    output.add_arguments(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    problems = [
        (MODELS[name], length, mode)
        for name in args.models
        for length in args.lengths or MODELS[name].lengths
        for mode in args.modes
    ]
    rows = measure_all(problems, lambda problem: measure(*problem, args), args.repeats)
    record = {
        "machine": {**machine(), "environment": environment()}, "settings": output.settings(args), "rows": rows,
    }  # fmt: skip
    output.write_json(record, args.json)
    output.write_text(table(record), args.text)
    if args.plot:
        plot(record, args.plot)


if __name__ == "__main__":
    main()
