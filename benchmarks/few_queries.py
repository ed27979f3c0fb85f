"""Measures few queries against many keys: the memory rate, the multiply-adds, and small calls next to torch.

    groups  1 to 16 rows (heads of a key head x queries), next to a plain read of the same K and V
    rows    the rate against the rows of a key head, 1 to 128: across the switch from the decode kernel to the forward
    small   1 to 256 keys, 1 to 16 heads, 1 to 16 queries, forward and backward, next to torch's SDPA

A plain read and the multiply-adds in registers are measured before each call. "of read" and "of peak" are medians of
our rate divided by theirs in the same round. "of bound" is the larger one. Only undisturbed calls count
(undisturbed.py): "calls" has their number and the number of all calls. "fast" is the same for the time of the fastest
tenth of these calls, next to the median peak and read.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

import flash_attn_ext
from benchmarks import output, peaks
from benchmarks.harness import Paired, environment, machine, quartiles, time_in_turn
from benchmarks.undisturbed import Undisturbed, fastest_tenth
from flash_attn_ext import flash_attn

DTYPES = ["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Problem:
    B: int
    H: int
    H_kv: int
    S_q: int
    S_k: int
    D: int
    dtype: str

    @property
    def rows(self) -> int:
        return self.H // self.H_kv * self.S_q

    def bytes(self) -> int:
        return 2 * self.B * self.H_kv * self.S_k * self.D * getattr(torch, self.dtype).itemsize

    def flops(self) -> int:
        return 4 * self.B * self.H * self.S_q * self.S_k * self.D

    def kv(self) -> torch.Tensor:
        return torch.randn(2, self.B, self.H_kv, self.S_k, self.D).to(getattr(torch, self.dtype))

    def q(self) -> torch.Tensor:
        return torch.randn(self.B, self.H, self.S_q, self.D).to(getattr(torch, self.dtype))


# The shapes of issue 27, groups of 2 and 16, and several tokens.
GROUPS = [
    (1, 32, 32, 1, 4096, 128), (8, 32, 8, 1, 4096, 128), (1, 32, 8, 1, 32768, 128), (1, 32, 8, 1, 4096, 128),
    (1, 16, 8, 1, 16384, 128), (4, 16, 2, 1, 8192, 128), (1, 64, 8, 1, 16384, 64), (1, 64, 4, 1, 16384, 128),
    (1, 8, 8, 7, 8192, 128), (1, 32, 8, 3, 8192, 128), (1, 32, 8, 4, 8192, 64),
]  # fmt: skip
ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 15, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128]
SMALL = [
    (1, heads, heads, queries, keys, 64)
    for heads in (1, 4, 8, 16)
    for queries in (1, 4, 16)
    for keys in (1, 8, 33, 100, 256)
]


def next_to_a_read(problem: Problem, seconds: float, undisturbed: Undisturbed) -> dict:
    """Measures our time, and before each call the peak and a plain read of the same K and V."""
    torch.manual_seed(0)
    isa, threads, streams, tops = flash_attn_ext.active_kernel(), torch.get_num_threads(), [], []
    q, kv = problem.q(), problem.kv()

    def ours() -> object:
        return flash_attn(q, kv[0], kv[1], enable_gqa=True)

    def between() -> None:
        tops.append(peaks.flops(isa, kv.dtype, threads))
        streams.append(peaks.stream_read(kv, isa, threads))

    with torch.no_grad():
        (times,) = time_in_turn(
            [ours], seconds=seconds, rounds=(7, 2000), between=between,
            before=undisturbed.before, after=undisturbed.after,
        )  # fmt: skip
    calls = undisturbed.calls(ours)
    own = [times[n] for n in calls]
    fast, (low, middle, high) = fastest_tenth(own), quartiles(own)
    read, peak = statistics.median(streams), statistics.median(tops)
    of_read = statistics.median(problem.bytes() / times[n] / streams[n] for n in calls)
    of_peak = statistics.median(problem.flops() / times[n] / tops[n] for n in calls)
    return {
        **asdict(problem), "rows": problem.rows, "isa": isa, "calls": [len(calls), len(times)],
        "ms": middle * 1e3, "ms_quartiles": [low * 1e3, high * 1e3],
        "GB/s": problem.bytes() / middle / 1e9, "read_GB/s": read / 1e9, "of_read": of_read,
        "GFLOP/s": problem.flops() / middle / 1e9, "peak_GFLOP/s": peak / 1e9, "of_peak": of_peak,
        "of_bound": max(of_read, of_peak),
        "fast": {
            "ms": fast * 1e3, "of_read": problem.bytes() / fast / read, "of_peak": problem.flops() / fast / peak,
        },
    }  # fmt: skip


def next_to_torch(problem: Problem, seconds: float) -> dict:
    """Measures torch's time divided by ours, alternating, without and with a backward."""
    torch.manual_seed(0)
    q, kv = problem.q(), problem.kv()
    row = {**asdict(problem), "isa": flash_attn_ext.active_kernel()}

    def forward(call: Callable) -> Callable:
        return lambda: call(q, kv[0], kv[1])

    def both(call: Callable) -> Callable:
        inputs = [x.clone().requires_grad_() for x in (q, kv[0], kv[1])]
        grad = torch.randn_like(q)
        return lambda: torch.autograd.grad(call(*inputs), inputs, grad)

    for name, of, grad in (("forward", forward, False), ("forward_backward", both, True)):
        with torch.set_grad_enabled(grad):
            pair = Paired(
                *time_in_turn([of(flash_attn), of(scaled_dot_product_attention)], seconds=seconds, rounds=(50, 5000))
            )
        row[name] = {"us": statistics.median(pair.ours) * 1e6, "ratio": quartiles(pair.ratios)}
    return row


def text(record: dict) -> Iterator[str | Table]:
    yield "Few queries: " + ", ".join(f"{key} {value}" for key, value in record["machine"].items())
    for name in ("groups", "rows"):
        if not record[name]:
            continue
        yield f"\n{name}: ours next to a plain read of the same K and V, and to the multiply-adds in registers\n"
        columns = ["B,H,H_kv,S_q,S_k,D", "rows", "dtype", "ms", "GB/s", "read", "of read", "GFLOP/s", "peak", "of peak"]
        columns += ["fast: of read", "fast: of peak", "calls"]
        lines = []
        for row in record[name]:
            shape = ",".join(str(row[key]) for key in ("B", "H", "H_kv", "S_q", "S_k", "D"))
            line = [shape, str(row["rows"]), row["dtype"], f"{row['ms']:.4g}", f"{row['GB/s']:.1f}"]
            line += [f"{row['read_GB/s']:.1f}", f"{row['of_read']:.2f}", f"{row['GFLOP/s']:.0f}"]
            line += [f"{row['peak_GFLOP/s']:.0f}", f"{row['of_peak']:.2f}"]
            line += [f"{row['fast'][key]:.2f}" for key in ("of_read", "of_peak")] + ["{} of {}".format(*row["calls"])]
            lines.append(line)
        yield output.table(columns, lines)
    if record["small"]:
        yield "\nsmall: torch's time divided by ours, median of pairs\n"
        columns = ["H", "S_q", "S_k", "dtype", "forward us", "forward", "forward + backward us", "forward + backward"]
        lines = []
        for row in record["small"]:
            line = [str(row[key]) for key in ("H", "S_q", "S_k", "dtype")]
            for key in ("forward", "forward_backward"):
                line += [f"{row[key]['us']:.1f}", f"{row[key]['ratio'][1]:.2f}"]
            lines.append(line)
        yield output.table(columns, lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["groups", "rows", "small"], choices=["groups", "rows", "small"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--isa", choices=flash_attn_ext.available_kernels(), help="default: the best")
    parser.add_argument("--seconds", type=float, default=1.0, help="per problem")
    parser.add_argument("--group", type=int, default=8, help="heads of a key head in the part `rows`: 1, 4 or 8")
    output.add_arguments(parser)
    return parser.parse_args(argv)


def rows_problem(rows: int, group: int, dtype: str) -> Problem:
    """Four key heads of 8192 keys and `rows` rows: `group` heads if `group` divides `rows`, otherwise one head."""
    heads = group if rows % group == 0 else 1
    return Problem(1, 4 * heads, 4, rows // heads, 8192, 128, dtype)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    flash_attn_ext.force_kernel(args.isa)
    wide = {
        "groups": [Problem(*shape, dtype) for dtype in args.dtypes for shape in GROUPS],
        "rows": [rows_problem(rows, args.group, dtype) for dtype in args.dtypes for rows in ROWS],
    }
    small = [Problem(*shape, dtype) for dtype in args.dtypes for shape in SMALL]
    undisturbed = Undisturbed()
    record = {
        "machine": {**machine(), **environment()},
        "settings": output.settings(args),
        **{
            name: [next_to_a_read(problem, args.seconds, undisturbed) for problem in problems]
            if name in args.parts
            else []
            for name, problems in wide.items()
        },
        "small": [next_to_torch(problem, args.seconds) for problem in small] if "small" in args.parts else [],
    }
    output.write_json(record, args.json)
    output.write_text(text(record), args.text)


if __name__ == "__main__":
    main()
