"""Decoding with one query for each sequence: the rate at which K and V are read, as a fraction of a copy's rate.

bfloat16, or float16 on GPUs without bfloat16; D 128. The bytes of attention are K and V, each once. The bytes of the
copy are read and written. With --child the program answers tasks on stdin, so that a call that hangs loses only its own
row.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from benchmarks import output
from benchmarks.gpu import needs
from benchmarks.gpu.figures import plot_decoding
from benchmarks.gpu.kernels import kernels_of
from benchmarks.gpu.timing import copy_bandwidth, dtype_16, time_in_turn
from benchmarks.gpu.worker import Worker, add_child_argument, child_command, serve

HEAD_DIM, ELEMENT_BYTES = 128, 2
BATCHES, LENGTHS = [1, 4, 16, 64], [8192, 32768, 131072]
HEADS = [(32, 8), (32, 32), (32, 1)]  # H, H_kv
MOST_GIB = 24.0
AT_THE_END = 5.0  # seconds of the stage for the last problem, table and figure
PATIENCE = 10.0  # seconds that a problem may take beyond its measuring time


@dataclass(frozen=True)
class Problem:
    B: int
    H: int
    H_kv: int
    S_k: int

    def bytes(self) -> int:
        return 2 * self.B * self.H_kv * self.S_k * HEAD_DIM * ELEMENT_BYTES


def answer(task: dict) -> dict | float:
    """In the child: the rate of a copy, or the times and kernels of one problem."""
    return copy_bandwidth() if task["do"] == "copy" else measure(Problem(**task["problem"]), task["seconds"])


def measure(problem: Problem, seconds: float) -> dict:
    from flash_attn_ext import flash_attn

    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": dtype_16()}
    q = torch.randn(problem.B, problem.H, 1, HEAD_DIM, **options)
    k, v = (torch.randn(problem.B, problem.H_kv, problem.S_k, HEAD_DIM, **options) for _ in range(2))

    def decode():
        return flash_attn(q, k, v, enable_gqa=True)

    with torch.no_grad():
        (taken,) = time_in_turn([decode], seconds=seconds, rounds=(5, 100), flush_l2=True)
        kernels = kernels_of(decode)
    return {"kernels": kernels, "seconds": taken}


def row_of(problem: Problem, measured: dict, copy: float) -> dict:
    return {**asdict(problem), **rates(statistics.median(measured["seconds"]), problem.bytes(), copy), **measured}


def rates(seconds: float, size: int, copy: float) -> dict:
    return {"us": seconds * 1e6, "GB/s": size / seconds / 1e9, "of_copy": size / seconds / copy}


def text(record: dict) -> Iterator:
    yield f"{record['machine']}; a copy moves {record['copy_GB/s']:.0f} GB/s\n"
    lines = [
        [f"H {row['H']}, H_kv {row['H_kv']}", str(row["B"]), str(row["S_k"]), f"{row['us']:.1f}", f"{row['GB/s']:.0f}",
         f"{row['of_copy']:.0%}", ", ".join(row["kernels"])]
        for row in record["rows"]
    ]  # fmt: skip
    yield output.table(["", "B", "S_k", "us", "GB/s", "of a copy", "kernels"], lines)
    if record["left_out"]:
        yield f"Left out, K and V above {MOST_GIB:g} GiB or the time used up: {', '.join(record['left_out'])}"
    yield from record["failed"]


def problems(args: argparse.Namespace) -> Iterator[Problem]:
    for heads, heads_kv in HEADS:
        for batch in args.batches:
            for length in args.lengths:
                yield Problem(batch, heads, heads_kv, length)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", help=f"default {BATCHES}, with --quick 1 16")
    parser.add_argument("--lengths", type=int, nargs="+", help=f"default {LENGTHS}, with --quick 8192")
    parser.add_argument("--seconds", type=float, help="per problem; default 0.3, with --quick 0.1")
    parser.add_argument("--quick", action="store_true", help="fewer problems, fewer rounds")
    add_child_argument(parser)
    output.add_arguments(parser)
    args = parser.parse_args(argv)
    args.batches = args.batches or ([1, 16] if args.quick else BATCHES)
    args.lengths = args.lengths or ([8192] if args.quick else LENGTHS)
    args.seconds = args.seconds or (0.1 if args.quick else 0.3)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    needs.a_gpu_and_our_build()
    if args.child:
        serve(answer)
        return 0
    with Worker(child_command(__spec__.name), needs.seconds_left() - AT_THE_END) as worker:
        record = measure_all(args, worker)
    output.write_text(text(record), args.text)
    plot_decoding(record, args.plot)
    return 1 if record["failed"] else 0


def measure_all(args: argparse.Namespace, worker: Worker) -> dict:
    reply = worker.ask({"do": "copy"}, PATIENCE)
    if "error" in reply:
        sys.exit(f"the copy that all is compared with: {reply['error']}")
    copy = reply["result"]
    record = {
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        "settings": output.settings(args),
        "copy_GB/s": copy / 1e9,
        "left_out": [],
        "failed": [],
        "rows": [],
    }
    for problem in problems(args):
        if problem.bytes() > MOST_GIB * 2**30 or time.monotonic() > worker.end:
            record["left_out"].append(str(problem))
            continue
        task = {"do": "time", "problem": asdict(problem), "seconds": args.seconds}
        reply = worker.ask(task, args.seconds + PATIENCE)
        if "error" in reply:
            record["failed"].append(f"{problem}: {reply['error']}")
        else:
            record["rows"].append(row_of(problem, reply["result"], copy))
        output.write_json(record, args.json)
    return record


if __name__ == "__main__":
    sys.exit(main())
