"""Measures the balance of the forward's persistent blocks: the rate of causal calls divided by the rate of full calls.

bfloat16, forward. If a block has more work than the other blocks, the GPU waits for it, and the ratio falls. Tiles on
the diagonal are computed whole: `most` is the ratio with perfect balance.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict

import torch

from benchmarks import output
from benchmarks.gpu import needs
from benchmarks.gpu.problem import Problem, problems
from benchmarks.gpu.timing import time_in_turn
from benchmarks.gpu.worker import Worker, add_child_argument, child_command, serve

LENGTHS, HEAD_DIMS = [16384, 1024, 4096], [128, 64]
TILES = {64: (192, 128), 128: (128, 128)}  # query rows and keys of a tile, by head dimension
LEAST = 0.85  # of the possible ratio; the host computes a balance of at least 0.95
PATIENCE, AT_THE_END = 10.0, 2.0  # seconds for one task, and for the table


def measure(task: dict) -> list[float]:
    """In the child: the median seconds of the full and of the causal call."""
    from flash_attn_ext import flash_attn

    q, k, v = (torch.randn(task["shape"], device="cuda", dtype=torch.bfloat16) for _ in range(3))
    with torch.no_grad():
        calls = [lambda causal=causal: flash_attn(q, k, v, is_causal=causal) for causal in (False, True)]
        taken = time_in_turn(calls, seconds=task["seconds"], rounds=(3, 30))
    return [statistics.median(seconds) for seconds in taken]


def most(length: int, head_dim: int) -> float:
    """The ratio with perfect balance. Tiles on the diagonal are computed whole, and a causal call has more of them."""
    rows, keys = TILES[head_dim]
    row_tiles, key_tiles = -(-length // rows), -(-length // keys)
    causal = sum(-(-min((n + 1) * rows, length) // keys) for n in range(row_tiles))
    return (length + 1) / (2 * length) * row_tiles * key_tiles / causal


def row_of(problem: Problem, full: float, causal: float) -> dict:
    """The rates count the visible elements."""
    ratio = full * (problem.S + 1) / (2 * problem.S) / causal
    return {**asdict(problem), "us": [full * 1e6, causal * 1e6], "ratio": ratio, "most": most(problem.S, problem.D)}


def text(record: dict) -> Iterator:
    yield f"{record['machine']}; the rate of causal calls divided by the rate of full calls\n"
    lines = [
        [
            f"D {row['D']}",
            str(row["S"]),
            *(f"{us:.1f}" for us in row["us"]),
            f"{row['ratio']:.3f}",
            f"{row['most']:.3f}",
        ]
        for row in record["rows"]
    ]
    yield output.table(["", "S", "full us", "causal us", "ratio", "most"], lines)
    yield from record["failed"]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_child_argument(parser)
    parser.add_argument("--seconds", type=float, default=0.3, help="per problem")
    output.add_arguments(parser)
    args = parser.parse_args(argv)
    needs.a_gpu_and_our_build()
    if args.child:
        serve(measure)
        return 0
    record = {"machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}", "rows": [], "failed": []}
    with Worker(child_command(__spec__.name), needs.seconds_left() - AT_THE_END) as worker:
        for problem in problems(LENGTHS, HEAD_DIMS):
            if not problem.causal:
                continue
            task = {"shape": [problem.B, problem.H, problem.S, problem.D], "seconds": args.seconds}
            reply = worker.ask(task, args.seconds + PATIENCE)
            if "error" in reply:
                record["failed"].append(f"{problem}: {reply['error']}")
            else:
                record["rows"].append(row_of(problem, *reply["result"]))
            output.write_json(record, args.json)
    output.write_text(text(record), args.text)
    uneven = [row for row in record["rows"] if row["ratio"] < LEAST * row["most"]]
    print(f"{len(record['rows'])} problems, {len(uneven)} below {LEAST:.0%} of the possible ratio")
    return 1 if record["failed"] or uneven else 0


if __name__ == "__main__":
    sys.exit(main())
