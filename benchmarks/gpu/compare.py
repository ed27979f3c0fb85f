"""flash_attn against the attention kernels that torch brings, and flash-attn where it is installed, in bfloat16.

16384 tokens a batch and 2048 columns of heads, as the papers' sweeps have them. Times are medians by CUDA events, all
methods in turn; a method that refuses a problem is left out with its reason. FLOPs are 4 B H S S D forward, 2.5 times
that backward, half if causal. The matmul peak is torch.mm of two 8192 x 8192 bf16 matrices in the same run.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial

import needs  # first: it adds the path to the modules below
import output
import torch
from attention_methods import METHODS, QUADRATIC
from figures import plot_comparison
from timing import matmul_peak, time_in_turn

TOKENS, COLUMNS = 16384, 2048
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384]
HEAD_DIMS = [64, 128, 256]
TORCHS = ["torch flash", "torch cudnn", "torch efficient"]


@dataclass(frozen=True)
class Problem:
    B: int
    H: int
    S: int
    D: int
    causal: bool

    def flops(self, backward: bool) -> float:
        forward = 4 * self.B * self.H * self.S**2 * self.D / (2 if self.causal else 1)
        return 2.5 * forward if backward else forward


def problems(lengths: list[int], head_dims: list[int]) -> Iterator[Problem]:
    """The cheap ones first: what a time-out cuts off is the end."""
    for length in lengths:
        for head_dim in head_dims:
            for causal in (False, True):
                yield Problem(max(1, TOKENS // length), COLUMNS // head_dim, length, head_dim, causal)


def flash_attn_2() -> Callable | None:
    """flash-attn's function on (B, H, S, D) tensors, or None if it is not installed."""
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return None

    def attention(q, k, v, *, is_causal):
        # It wants (B, S, H, D) and takes any strides but the last: a transposed view costs nothing.
        return flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=is_causal).transpose(1, 2)

    return attention


def methods() -> dict[str, Callable]:
    peers = {name: METHODS[name] for name in TORCHS if name not in QUADRATIC}
    installed = flash_attn_2()
    return {"ours": METHODS["ours"], **peers, **({"flash-attn": installed} if installed else {})}


def calls(problem: Problem, backward: bool, device: str = "cuda") -> tuple[dict[str, Callable], dict[str, str]]:
    """One function of no arguments for each method; and why the others refuse."""
    torch.manual_seed(0)
    shape = (problem.B, problem.H, problem.S, problem.D)
    draw = partial(torch.randn, shape, device=device, dtype=torch.bfloat16)
    inputs = [draw().requires_grad_(backward) for _ in range(3)]
    grad = draw() if backward else None
    possible, refused = {}, {}
    for name, attention in methods().items():
        try:
            with nullcontext() if backward else torch.no_grad():
                out = attention(*inputs, is_causal=problem.causal)
                if backward:
                    # One forward, then the backward alone again and again.
                    possible[name] = partial(torch.autograd.grad, out, inputs, grad, retain_graph=True)
                    possible[name]()
        except (RuntimeError, NotImplementedError) as error:
            possible.pop(name, None)
            refused[name] = str(error).strip().splitlines()[0]
            continue
        if not backward:
            possible[name] = torch.no_grad()(partial(attention, *inputs, is_causal=problem.causal))
    return possible, refused


def measure(problem: Problem, backward: bool, args: argparse.Namespace, peak: float) -> dict:
    functions, refused = calls(problem, backward)
    calls_of_each = list(functions.values())
    rounds = (3, 100)
    taken = time_in_turn(calls_of_each, seconds=args.seconds, rounds=rounds, flush_l2=args.flush_l2)
    medians = {name: statistics.median(times) for name, times in zip(functions, taken, strict=True)}
    return {
        **asdict(problem),
        "pass": "bwd" if backward else "fwd",
        **rates(medians, problem.flops(backward), peak),
    } | {
        "refused": refused,
        "seconds": dict(zip(functions, taken, strict=True)),
    }


def rates(medians: dict[str, float], flops: float, peak: float) -> dict:
    """From median seconds. "ratio" is the best peer's time over ours: above 1, ours is faster."""
    peers = {name: seconds for name, seconds in medians.items() if name != "ours"}
    best = min(peers, key=peers.get) if peers else None
    ours = medians.get("ours")
    return {
        "TFLOP/s": {name: flops / seconds / 1e12 for name, seconds in medians.items()},
        "best_peer": best,
        "ratio": peers[best] / ours if best and ours else None,
        "of_matmul_peak": flops / ours / peak if ours else None,
    }


def text(record: dict) -> Iterator:
    yield f"{record['machine']}; bf16 matmul {record['matmul_peak_TFLOP/s']:.0f} TFLOP/s"
    yield "TFLOP/s; ratio: time of the best peer / ours, above 1 ours is faster; -: refused\n"
    names = list(dict.fromkeys(name for row in record["rows"] for name in (*row["TFLOP/s"], *row["refused"])))
    lines = []
    for row in sorted(record["rows"], key=lambda row: (row["D"], row["causal"], row["pass"] == "bwd", row["S"])):
        line = [f"D {row['D']} {'causal' if row['causal'] else 'full'} {row['pass']}", str(row["S"])]
        line += [f"{row['TFLOP/s'][name]:.0f}" if name in row["TFLOP/s"] else "-" for name in names]
        line += [row["best_peer"] or "-", number(row["ratio"], ".2f"), number(row["of_matmul_peak"], ".0%")]
        lines.append(line)
    yield output.table(["", "S", *names, "best peer", "ratio", "ours of matmul"], lines)
    reasons = {f"{name}: {why}" for row in record["rows"] for name, why in row["refused"].items()}
    yield from sorted(reasons)
    if record["left_out"]:
        yield f"Left out, the time was used up: {', '.join(record['left_out'])}"


def number(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", help=f"default {LENGTHS}, with --quick 1024 and 8192")
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--seconds", type=float, help="per problem; default 0.5, with --quick 0.1")
    parser.add_argument("--budget", type=float, default=80, help="seconds, after which no problem is begun")
    parser.add_argument("--flush-l2", action="store_true", help="empty the GPU's cache before every call")
    parser.add_argument("--quick", action="store_true", help="fewer problems, fewer rounds")
    output.add_arguments(parser)
    args = parser.parse_args(argv)
    args.lengths = args.lengths or ([1024, 8192] if args.quick else LENGTHS)
    args.seconds = args.seconds or (0.1 if args.quick else 0.5)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    needs.a_gpu_and_our_build()
    start, peak = time.monotonic(), matmul_peak()
    record = {
        "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        "settings": output.settings(args),
        "matmul_peak_TFLOP/s": peak / 1e12,
        "rows": [],
        "left_out": [],
    }
    for problem in problems(args.lengths, args.head_dims):
        if time.monotonic() - start > args.budget:
            record["left_out"].append(str(problem))
            continue
        for backward in (False, True):
            record["rows"].append(measure(problem, backward, args, peak))
            output.write_json(record, args.json)  # after each: a time-out leaves what there is
    output.write_text(text(record), args.text)
    plot_comparison(record, args.plot)


if __name__ == "__main__":
    main()
