"""Compares Flash-Decoding and FlashDecoding++, as options of our decode kernel, over S_k and the batch.

One query for each sequence, 8 heads, D 128. Flash-Decoding is `num_splits`, the number of splits of the keys. By
default the shape decides; 1 is decoding without splits. FlashDecoding++ is `unified_max`, a guess of the largest score
in place of the running maximum. One guess of this benchmark is right for its inputs. The other guess is never right, so
every split is computed twice. All variants, and a plain read of the same K and V, alternate in one process.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.table import Table

import flash_attn_ext
from benchmarks import output, peaks
from benchmarks.harness import environment, machine, quartiles, time_in_turn
from benchmarks.watch import Watch, measure_all, note
from flash_attn_ext import flash_attn
from flash_attn_ext.reference.report import COLORS, pyplot, save

HEADS, HEAD_DIM = 8, 128
LENGTHS = [512, 2048, 8192, 32768, 131072]
HOLDS, MISSES = 0.0, 1e4  # scores of normal inputs are normal, too
SPLITS = {"default": 0, "1 split": 1, "4 splits": 4, "16 splits": 16}
VARIANTS = {
    **{name: {"num_splits": n} for name, n in SPLITS.items()},
    **{f"{name}, unified": {"num_splits": n, "unified_max": HOLDS} for name, n in SPLITS.items()},
    "default, unified misses": {"unified_max": MISSES},
}


@dataclass(frozen=True)
class Problem:
    batch: int
    heads_kv: int
    seqlen_k: int
    dtype: str

    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor that holds both K and V."""
        return 2, self.batch, self.heads_kv, self.seqlen_k, HEAD_DIM

    def bytes(self) -> int:
        return torch.Size(self.shape()).numel() * getattr(torch, self.dtype).itemsize


def variants(problem: Problem, kv: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    q = torch.randn(problem.batch, HEADS, 1, HEAD_DIM, dtype=kv.dtype)
    call = partial(flash_attn, q, kv[0], kv[1], enable_gqa=True)
    return {name: partial(call, **options) for name, options in VARIANTS.items()}


def measure(problem: Problem, seconds: float, rounds: tuple[int, int]) -> dict:
    """Measures all variants. "speed" is the default's time divided by the variant's time in the same round."""
    torch.manual_seed(0)
    isa, threads, streams = flash_attn_ext.active_kernel(), torch.get_num_threads(), []
    kv = torch.randn(problem.shape(), dtype=getattr(torch, problem.dtype))
    calls = variants(problem, kv)
    with torch.no_grad():
        watch = Watch(calls["default"])

        def between() -> None:
            watch()
            streams.append(peaks.stream_read(kv, isa, threads))

        taken = time_in_turn(list(calls.values()), seconds=seconds, rounds=rounds, between=between, shuffle=True)
    times = dict(zip(calls, taken, strict=True))
    return {
        "B": problem.batch, "H": HEADS, "H_kv": problem.heads_kv, "S_k": problem.seqlen_k, "D": HEAD_DIM,
        "dtype": problem.dtype, "isa": isa, "rounds": len(streams),
        "stream_GB/s": statistics.median(streams) / 1e9, **watch.row(),
        "variants": {name: summary(times["default"], times[name], streams, problem.bytes()) for name in calls},
    }  # fmt: skip


def summary(default: list[float], taken: list[float], streams: list[float], size: int) -> dict:
    low, middle, high = quartiles(taken)
    slower, speed, faster = quartiles([d / t for d, t in zip(default, taken, strict=True)])
    of_stream = statistics.median(size / t / stream for t, stream in zip(taken, streams, strict=True))
    return {
        "ms": middle * 1e3, "ms_quartiles": [low * 1e3, high * 1e3], "speed": speed,
        "speed_quartiles": [slower, faster], "GB/s": size / middle / 1e9, "of_stream": of_stream,
    }  # fmt: skip


def text(record: dict) -> Iterator[str | Table]:
    machine = {key: value for key, value in record["machine"].items() if key != "environment"}
    quick = "; --quick" if record["settings"]["quick"] else ""
    yield "Decoding: " + ", ".join(f"{key} {value}" for key, value in machine.items()) + quick
    yield f"\nOne query, H {HEADS}, D {HEAD_DIM}. Variants: time of the default / theirs; above 1, they are faster.\n"
    variants = [name for name in VARIANTS if name != "default"]
    columns = ["H_kv", "B", "S_k", "dtype", "default ms", "GB/s", "of plain read", *variants]
    lines = []
    for row in record["rows"]:
        default = row["variants"]["default"]
        line = [str(row[key]) for key in ("H_kv", "B", "S_k", "dtype")]
        line += [f"{default['ms']:.4g}", f"{default['GB/s']:.1f}", f"{default['of_stream']:.0%}"]
        line[4] += " ?" * row["busy"]
        lines.append(line + [f"{row['variants'][name]['speed']:.2f}" for name in variants])
    yield output.table(columns, lines)
    yield note(record["rows"])
    if record["left_out"]:
        yield f"\nLeft out, K and V above --most-gib: {', '.join(record['left_out'])}"


def plot(record: dict, path: Path) -> None:
    """Draws the speed against S_k. One column for each batch size, one row for each dtype and number of key heads."""
    rows = record["rows"]
    batches = sorted({row["B"] for row in rows})
    kinds = list(dict.fromkeys((row["dtype"], row["H_kv"]) for row in rows))
    size = (1.5 + 2.8 * len(batches), 1.2 + 2.2 * len(kinds))
    figure, axes = pyplot().subplots(
        len(kinds), len(batches), figsize=size, sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for line, (dtype, heads_kv) in zip(axes, kinds, strict=True):
        for axis, batch in zip(line, batches, strict=True):
            here = [row for row in rows if (row["dtype"], row["H_kv"], row["B"]) == (dtype, heads_kv, batch)]
            draw(axis, here)
            axis.set_title(f"{dtype}, H_kv {heads_kv}, B {batch}", fontsize=9)
    for axis in axes[-1]:
        axis.set_xlabel("S_k", fontsize=9)
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )
    figure.supylabel("time of the default / time of the variant", fontsize=9)
    where = f"{record['machine']['cpu']}, {record['machine']['threads']} threads, {record['machine']['isa']}"
    quick = "; --quick" if record["settings"]["quick"] else ""
    figure.suptitle(f"Decoding, H {HEADS}, D {HEAD_DIM}; {where}{quick}", fontsize=9)
    save(figure, path)


def draw(axis, rows: list[dict]) -> None:
    splits = list(SPLITS)
    for name in VARIANTS:
        base, _, unified = name.partition(", ")
        style = {"": "o-", "unified": "s--", "unified misses": "x:"}[unified]
        points = [(row["S_k"], row["variants"][name]["speed"]) for row in rows]
        if points:
            axis.plot(*zip(*points, strict=True), style, color=COLORS[splits.index(base)], ms=3.5, lw=1, label=name)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    for direction in (axis.xaxis, axis.yaxis):
        direction.set_major_formatter(lambda value, _: f"{value:g}")
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", help=f"of K and V; default {LENGTHS}, with --quick to 8192")
    parser.add_argument("--batches", type=int, nargs="+", help="default 1 4 16, with --quick 1 4")
    parser.add_argument("--heads-kv", type=int, nargs="+", default=[8, 1])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--isa", choices=flash_attn_ext.available_kernels(), help="default: the best")
    parser.add_argument("--seconds", type=float, help="per problem; default 2, with --quick 0.2")
    parser.add_argument("--most-gib", type=float, default=2.0, help="of K and V; larger problems are skipped")
    parser.add_argument(
        "--quick", action="store_true", help="small problems, few rounds: for a first look, not to publish"
    )
    parser.add_argument(
        "--repeats", type=int, help="repeats of problems from a busy machine; default 2, with --quick 0"
    )
    output.add_arguments(parser)
    args = parser.parse_args(argv)
    if args.repeats is None:
        args.repeats = 0 if args.quick else 2
    args.lengths = args.lengths or [length for length in LENGTHS if not args.quick or length <= 8192]
    args.batches = args.batches or ([1, 4] if args.quick else [1, 4, 16])
    args.seconds = args.seconds or (0.2 if args.quick else 2.0)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    flash_attn_ext.force_kernel(args.isa)
    problems = [
        Problem(batch, heads_kv, length, dtype)
        for dtype in args.dtypes
        for heads_kv in args.heads_kv
        for batch in args.batches
        for length in args.lengths
    ]
    possible = [problem for problem in problems if problem.bytes() <= args.most_gib * 2**30]
    rounds = (3, 30) if args.quick else (7, 200)
    record = {
        "machine": {**machine(), "environment": environment()},
        "settings": output.settings(args),
        "left_out": [str(problem) for problem in problems if problem not in possible],
        "rows": measure_all(possible, lambda problem: measure(problem, args.seconds, rounds), args.repeats),
    }
    output.write_json(record, args.json)
    output.write_text(text(record), args.text)
    if args.plot:
        plot(record, args.plot)


if __name__ == "__main__":
    main()
