"""Measures the papers' table and figure: GPT-2 medium, and time and memory against the sequence length.

One command writes tables (gpt2.md, lengths.md), a figure (lengths.png) and all numbers (results.json) to --out. Times
are medians of alternating calls in one process. Peak memory is measured for each call in a separate process.
flash_attn_ext.iomodel counts FLOPs and traffic: a model, not a measurement. On a GPU the traffic is also measured by
the GPU's counters (dram_traffic.py).
"""

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks import dram_traffic, peak_memory
from benchmarks.attention_methods import METHODS, ON_CPU, ON_CUDA, QUADRATIC, Case, training_step
from benchmarks.harness import machine, time_in_turn
from flash_attn_ext.iomodel import counts, gpt2
from flash_attn_ext.reference.report import METHOD_COLORS, pyplot, save

LENGTHS = [128, 256, 512, 1024, 2048, 4096, 8192, 16384]
MATRICES = 6  # the most matrices of all scores that a step holds at once: measured up to 4.3, with a margin


@dataclass(frozen=True)
class Measured:
    """seconds and peak_bytes are None if the scores would not fit into memory."""

    case: Case
    seconds: float | None
    quartiles: tuple[float, float] | None
    calls: int
    peak_bytes: int | None


def measure(cases: list[Case], seconds: float) -> list[Measured]:
    """Measures all methods of one problem; their calls alternate."""
    possible = [c for c in cases if c.method not in QUADRATIC or MATRICES * c.score_bytes() < memory_of(c.device)]
    times = time_in_turn([training_step(c) for c in possible], seconds=seconds, rounds=(3, 100))
    by_method = dict(zip((c.method for c in possible), times, strict=True))
    results = []
    for case in cases:
        taken = by_method.get(case.method)
        if taken is None:
            results.append(Measured(case, None, None, 0, None))
            continue
        low, middle, high = statistics.quantiles(taken, n=4, method="inclusive")
        results.append(Measured(case, middle, (low, high), len(taken), peak_memory.measure(case)))
    return results


def memory_of(device: str) -> int:
    return peak_memory.available() if device == "cpu" else torch.cuda.mem_get_info()[0]


def gpt2_table(args: argparse.Namespace) -> tuple[list[dict], str]:
    """Compares standard attention with ours at the shape of the published table, without and with GPT-2's options."""
    shape = gpt2.PROBLEM
    batch = args.batch or largest_batch(shape, args)
    rows = []
    for causal, dropout_p in ((False, 0.0), (True, 0.1)):
        options = (args.dtype, causal, dropout_p, args.device)
        cases = [Case(method, batch, shape.H, shape.S, shape.D, *options) for method in ("standard", "ours")]
        rows += [
            asdict(result) | counted(result.case) | hardware(result.case)
            for result in tqdm(measure(cases, args.seconds), leave=False, desc="gpt2")
        ]
    columns = ["", "GFLOP (counted)", "GB (counted)", "GB (counters)", "ms", "peak MiB"]
    lines = [
        [
            f"{row['case']['method']}, {'causal, dropout 0.1' if row['case']['causal'] else 'plain'}",
            f"{row['GFLOP']:.1f}", f"{row['GB']:.2f}", row["GB (counters)"],
            milliseconds(row["seconds"]), mebibytes(row["peak_bytes"]),
        ]
        for row in rows
    ]  # fmt: skip
    title = f"GPT-2 medium: B {batch}, H {shape.H}, S {shape.S}, D {shape.D}, {args.dtype}, forward + backward"
    note = (
        "The published table has B 64. flash_attn_ext.iomodel counts GFLOP and GB, also for causal calls with the full "
        "matrix. GB is the traffic between the chip and all memory beyond it. Caches serve a part of this traffic."
    )
    return rows, f"## {title}\n\n{markdown(columns, lines)}\n\n{note}\n"


def counted(case: Case) -> dict:
    """Counts FLOPs and traffic by the model. The standard algorithm reads a mask; ours computes the diagonal."""
    mask = case.causal and case.method == "standard"
    problem = counts.Problem(case.B, case.H, case.S, case.D, case.dtype, mask=mask, dropout=case.dropout_p)
    model = counts.count(case.method, problem, gpt2.ON_CHIP)
    return {"GFLOP": model.flops / 1e9, "GB": model.bytes / 1e9}


def hardware(case: Case) -> dict:
    """Returns the traffic by a GPU's counters, or the reason why there is none."""
    if case.device == "cpu":
        return {"GB (counters)": "none on CPU"}
    try:
        return {"GB (counters)": f"{dram_traffic.measure(case) / 1e9:.2f}"}
    except dram_traffic.Unavailable as reason:
        return {"GB (counters)": str(reason)}


def largest_batch(problem: counts.Problem, args: argparse.Namespace) -> int:
    """Returns the batch size: the published 64, halved until the standard algorithm fits into memory."""
    batch = 1 if args.quick else problem.B
    while batch > 1:
        case = Case("standard", batch, problem.H, problem.S, problem.D, args.dtype)
        if MATRICES * case.score_bytes() < memory_of(args.device):
            break
        batch //= 2
    return batch


def length_table(args: argparse.Namespace) -> tuple[list[Measured], str]:
    """Measures every method at every length, always with the same number of tokens, as in the papers."""
    results, lines = [], []
    for length in tqdm(args.lengths, leave=False, desc="lengths"):
        batch = max(1, args.tokens // length)
        shape = (batch, args.heads, length, 64, args.dtype, args.causal, 0.0, args.device)
        results += measure([Case(method, *shape) for method in args.methods], args.seconds)
        here = results[-len(args.methods) :]
        lines.append(
            [str(length), str(batch), *(f"{milliseconds(r.seconds)} / {mebibytes(r.peak_bytes)}" for r in here)]
        )
    kind = "causal" if args.causal else "full"
    title = f"Milliseconds / peak MiB against S: {args.tokens} tokens, H {args.heads}, D 64, {args.dtype}, {kind}"
    table = markdown(["S", "B", *args.methods], lines)
    return results, f"## {title}, forward + backward\n\n{table}\n\n-: the scores would not fit this machine's memory\n"


def markdown(columns: list[str], lines: list[list[str]]) -> str:
    rows = [columns, ["---", *["---:"] * (len(columns) - 1)], *lines]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.4g}"


def mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.4g}"


def plot(path: Path, results: list[Measured], title: str) -> None:
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for method in dict.fromkeys(r.case.method for r in results):
        color = METHOD_COLORS[method]
        line = [r for r in results if r.case.method == method]
        times = [(r.case.S, r.seconds * 1e3) for r in line if r.seconds is not None]
        peaks = [(r.case.S, r.peak_bytes / 2**20) for r in line if r.peak_bytes]
        left.plot(*zip(*times, strict=True), "o-", color=color, ms=4, label=method)
        right.plot(*zip(*peaks, strict=True), "o-", color=color, ms=4, label=method)
    for axis, label in ((left, "time of forward + backward (ms)"), (right, "peak memory beyond the inputs (MiB)")):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("sequence length")
        axis.set_title(label, loc="left", fontsize=10)
        axis.grid(alpha=0.25)
    left.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9)
    save(figure, path)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/paper", help="folder to write")
    parser.add_argument("--quick", action="store_true", help="B 1 for GPT-2, lengths to 1024: at most a minute")
    parser.add_argument("--batch", type=int, help="of the GPT-2 table; default: 64, or the most that fit the memory")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--tokens", type=int, default=16384, help="B * S of the sweep, default 16384")
    parser.add_argument("--heads", type=int, default=2, help="of the sweep, default 2")
    parser.add_argument("--causal", action="store_true", help="the sweep's")
    parser.add_argument("--methods", nargs="+", choices=METHODS, help="of the sweep; default: all that the device has")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16", "float16"], help="default: float32 on cpu, float16 on cuda"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seconds", type=float, default=3.0, help="per problem, all methods together, default 3")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "float16")
    args.methods = args.methods or list(ON_CPU if args.device == "cpu" else ON_CUDA)
    if args.quick:
        args.lengths, args.seconds, args.tokens = [n for n in args.lengths if n <= 1024], 0.3, 1024
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    here = machine()
    where = ", ".join(f"{key} {value}" for key, value in here.items()) + (", --quick" if args.quick else "")
    args.out.mkdir(parents=True, exist_ok=True)

    gpt2_rows, gpt2_text = gpt2_table(args)
    results, lengths_text = length_table(args)
    for name, text in (("gpt2", gpt2_text), ("lengths", lengths_text)):
        (args.out / f"{name}.md").write_text(f"{text}\nMeasured on: {where}\n")
        print(text)
    plot(args.out / "lengths.png", results, f"{args.tokens} tokens, H {args.heads}, D 64, {args.dtype}; {where}")
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    record = {"machine": here, "settings": settings, "gpt2": gpt2_rows, "lengths": [asdict(r) for r in results]}
    (args.out / "results.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
