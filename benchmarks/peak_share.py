"""Measures forwards as a share of the peak of the multiply-adds, which is measured again before each round of calls.

python -m benchmarks.peak_share --threads 1 2 --text results.txt
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch

import flash_attn_ext
from benchmarks import output, peaks
from benchmarks.harness import machine, time_in_turn
from flash_attn_ext import flash_attn

SEQLENS = (1024, 2048, 4096, 8192)
HEADS, ROUNDS = 8, (5, 200)
COLUMNS = ("threads", "D", "S", "full, GFLOP/s", "of peak", "causal, GFLOP/s", "of peak")


def flops(seqlen: int, head_dim: int, causal: bool) -> float:
    """Counts visible scores only."""
    return 4 * HEADS * head_dim * (seqlen * (seqlen + 1) / 2 if causal else seqlen**2)


def measure(dtype: torch.dtype, threads: int, seqlen: int, head_dim: int, seconds: float) -> Iterator[str]:
    """Yields the rate and the median share of the peak, without and with a causal mask."""
    torch.manual_seed(0)
    inputs = torch.randn(3, 1, HEADS, seqlen, head_dim).to(dtype).unbind(0)
    tops: list[float] = []
    calls = [lambda causal=causal: flash_attn(*inputs, is_causal=causal) for causal in (False, True)]
    isa = flash_attn_ext.active_kernel()
    times = time_in_turn(
        calls, seconds=seconds, rounds=ROUNDS, between=lambda: tops.append(peaks.flops(isa, dtype, threads))
    )
    for causal, seconds_of_calls in zip((False, True), times, strict=True):
        rates = [flops(seqlen, head_dim, causal) / t for t in seconds_of_calls]
        shares = [rate / top for rate, top in zip(rates, tops, strict=True)]
        yield f"{statistics.median(rates) / 1e9:.0f}"
        yield f"{statistics.median(shares):.2f}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--seqlens", type=int, nargs="+", default=SEQLENS)
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--text", type=Path, default=None)
    args = parser.parse_args(arguments)
    rows = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for head_dim in args.head_dims:
            for seqlen in args.seqlens:
                found = measure(getattr(torch, args.dtype), threads, seqlen, head_dim, args.seconds)
                rows.append([str(threads), str(head_dim), str(seqlen), *found])
    about = ", ".join(f"{name} {value}" for name, value in machine().items() if name != "threads")
    title = f"Forward of {args.dtype}, {HEADS} heads, as a share of the multiply-adds' peak: {about}"
    output.write_text([title, output.table(COLUMNS, rows)], args.text)


if __name__ == "__main__":
    main()
