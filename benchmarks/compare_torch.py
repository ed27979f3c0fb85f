"""Compares flash_attn with torch's scaled_dot_product_attention on CPU: time by shape, dtype and option, peak memory.

Both alternate in one process. A ratio is torch's time divided by ours, pair by pair: above 1, ours is faster. The
table has the median and [quartiles] of the ratio, and our GFLOP/s as a fraction of this machine's peak. The peak is of
multiply-adds in registers, measured before and after each cell. For decode it has our bytes/s as a fraction of a plain
read of K and V in the same rounds. A cell from a busy machine is repeated, and marked if the machine is still busy
(watch.py).

`--isa` sets our instruction set. Environment variables set torch's before it is loaded; the JSON records them:

    ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 \\
        python -m benchmarks.compare_torch --isa avx2
"""

import argparse
import math
import statistics
from collections.abc import Callable

import torch
from tqdm import tqdm

import flash_attn_ext
from benchmarks import comparison_report, output, peak_memory, peaks
from benchmarks.attention_methods import METHODS
from benchmarks.attention_methods import Case as TrainingStep
from benchmarks.cells import DTYPES, KINDS, Cell, Inputs, cells
from benchmarks.harness import Paired, environment, machine, quartiles, time_in_turn
from benchmarks.watch import Watch, measure_all
from flash_attn_ext import flash_attn

BACKENDS = {"default": METHODS["torch default"], "math": METHODS["torch math"]}
MEMORY_LENGTHS, QUICK_MEMORY_LENGTHS = (1024, 4096, 8192), (1024,)
MEMORY_DTYPES = ("float32", "bfloat16")  # other dtypes need as much as one of these, or twice
QUICK_FLOPS = 5e9  # a cell of --quick has at most this number of FLOPs


def measure(cell: Cell, peer: Callable, seconds: float, rounds: tuple[int, int]) -> dict:
    """Measures one row: alternating times of ours and the peer, and the rates that the machine reached meanwhile."""
    isa, threads, inputs = flash_attn_ext.active_kernel(), torch.get_num_threads(), Inputs(cell)
    functions = [inputs.ours(flash_attn), inputs.torchs(peer)]
    streams: list[float] = []
    watch = Watch(functions[0])

    def between() -> None:
        watch()
        if cell.kind == "decode":
            streams.append(peaks.stream_read(inputs.kv, isa, threads))

    fma_rates = [peaks.flops(isa, DTYPES[cell.dtype], threads) for _ in range(2)]
    ours, theirs = time_in_turn(functions, seconds=seconds, rounds=rounds, between=between)
    fma_rates += [peaks.flops(isa, DTYPES[cell.dtype], threads) for _ in range(2)]
    row = describe(cell, isa) | times(Paired(ours, theirs)) | arithmetic(cell, ours, statistics.median(fma_rates))
    return row | watch.row() | (reading(inputs.kv, ours, streams) if streams else {})


def describe(cell: Cell, isa: str) -> dict:
    return {
        "kind": cell.kind, "case": cell.name, "B,H,S_q,D": cell.query, "H_kv,S_k": cell.key[1:3], "dtype": cell.dtype,
        "pass": "fwd+bwd" if cell.backward else "fwd", "isa": isa,
    }  # fmt: skip


def times(pairs: Paired) -> dict:
    (low, middle, high), ours, theirs = quartiles(pairs.ratios), quartiles(pairs.ours), quartiles(pairs.peer)
    return {
        "ms": ours[1] * 1e3, "ms_quartiles": [ours[0] * 1e3, ours[2] * 1e3],
        "torch_ms": theirs[1] * 1e3, "torch_ms_quartiles": [theirs[0] * 1e3, theirs[2] * 1e3],
        "ratio": middle, "ratio_quartiles": [low, high], "pairs": len(pairs.ours),
    }  # fmt: skip


def arithmetic(cell: Cell, ours: list[float], fma_rate: float) -> dict:
    rate = cell.flops() / statistics.median(ours)
    return {"GFLOP/s": rate / 1e9, "fma_peak_GFLOP/s": fma_rate / 1e9, "of_fma_peak": rate / fma_rate}


def reading(kv: torch.Tensor, ours: list[float], streams: list[float]) -> dict:
    """Returns the bytes of K and V per second, and their fraction of the plain read in the same round."""
    size = kv.numel() * kv.element_size()
    rates = [size / seconds for seconds in ours]
    low, middle, high = quartiles([rate / stream for rate, stream in zip(rates, streams, strict=True)])
    slow, usual, fast = quartiles(streams)
    return {
        "GB/s": size / statistics.median(ours) / 1e9,
        "stream_GB/s": usual / 1e9, "stream_GB/s_quartiles": [slow / 1e9, fast / 1e9],
        "of_stream": middle, "of_stream_quartiles": [low, high],
    }  # fmt: skip


def measure_memory(lengths: tuple[int, ...], dtypes: list[str], threads: int) -> list[dict]:
    """Measures the peak memory of forward and backward in separate processes, with this process's kernels and
    threads."""
    environ = {"OMP_NUM_THREADS": str(threads), "FLASH_ATTN_EXT_ISA": flash_attn_ext.active_kernel()}
    methods = ("ours", "torch default", "torch math")
    problems = [(s, dtype, p) for dtype in dtypes if dtype in MEMORY_DTYPES for p in (0.0, 0.1) for s in lengths]
    rows = []
    for length, dtype, dropout_p in tqdm(problems, leave=False, desc="memory"):
        steps = {method: TrainingStep(method, 1, 2, length, 64, dtype, False, dropout_p) for method in methods}
        row = {"B,H,S,D": (1, 2, length, 64), "dtype": dtype, "dropout": dropout_p}
        rows.append(row | {method: peak_memory.measure(step, environ) for method, step in steps.items()})
    return rows


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = [*KINDS, "memory"]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="default: all; with --quick float32 and bfloat16")
    parser.add_argument("--isa", choices=flash_attn_ext.available_kernels(), help="of our kernels; default: the best")
    parser.add_argument("--backend", choices=BACKENDS, default="default", help="torch's default or its math kernel")
    parser.add_argument("--seconds", type=float, help="per cell; default 1, with --quick 0.1")
    parser.add_argument(
        "--quick", action="store_true", help="cheap cells only, few rounds: for a first look, not to publish"
    )
    parser.add_argument("--repeats", type=int, help="repeats of cells from a busy machine; default 2, with --quick 0")
    output.add_arguments(parser)
    args = parser.parse_args(argv)
    if args.repeats is None:
        args.repeats = 0 if args.quick else 2
    args.dtypes = args.dtypes or (["float32", "bfloat16"] if args.quick else list(DTYPES))
    args.seconds = args.seconds or (0.1 if args.quick else 1.0)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    flash_attn_ext.force_kernel(args.isa)
    most_flops, rounds = (QUICK_FLOPS, (3, 50)) if args.quick else (math.inf, (5, 200))
    timed = [kind for kind in args.kinds if kind in KINDS]
    rows = measure_all(
        list(cells(args.dtypes, timed, most_flops)),
        lambda cell: measure(cell, BACKENDS[args.backend], args.seconds, rounds),
        args.repeats,
    )
    lengths = QUICK_MEMORY_LENGTHS if args.quick else MEMORY_LENGTHS
    memory = measure_memory(lengths, args.dtypes, args.threads) if "memory" in args.kinds else []
    context = {**machine(), "backend": args.backend, "environment": environment()}
    record = {"machine": context, "settings": output.settings(args), "rows": rows, "memory": memory}
    output.write_json(record, args.json)
    output.write_text(comparison_report.text(record), args.text)
    if args.plot and rows:
        comparison_report.plot(record, args.plot)


if __name__ == "__main__":
    main()
