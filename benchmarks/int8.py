"""Measures ``flash_attn(..., quantize="int8")``: its time against bfloat16 and float32, and its errors.

    python -m benchmarks.int8            times, in turns in one process
    python -m benchmarks.int8 --errors   errors of out and lse against float64
    python -m benchmarks.int8 --threads 1 --seqlens 2048

The second table has three kinds of inputs. normal: normally distributed. mean: each column of key has another mean,
with a standard deviation of 3. outlier: four columns of query and four columns of key are eight times larger.
"""

import argparse

import torch

from benchmarks.harness import environment, machine, quartiles, time_in_turn
from flash_attn_ext import explain, flash_attn


def inputs(kind: str, seqlen: int, head_dim: int, heads: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, heads, seqlen, head_dim).unbind(0)
    if kind == "mean":
        key = key + 3 * torch.randn(heads, 1, head_dim)
    if kind == "outlier":
        query[..., :4] *= 8
        key[..., 4:8] *= 8
    return [t.bfloat16() for t in (query, key, value)]


def print_times(seqlens: list[int], seconds: float) -> None:
    print("| D, S | mask | bfloat16, ms | int8, ms | int8, GFLOP/s | bfloat16 / int8 | float32 / int8 |")
    print("|---|---|---|---|---|---|---|")
    for head_dim in (64, 128):
        for seqlen in seqlens:
            for causal in (False, True):
                tensors = inputs("normal", seqlen, head_dim)
                wide = [t.float() for t in tensors]
                functions = [
                    lambda t=tensors, c=causal: flash_attn(*t, is_causal=c),
                    lambda t=wide, c=causal: flash_attn(*t, is_causal=c),
                    lambda t=tensors, c=causal: flash_attn(*t, is_causal=c, quantize="int8"),
                ]
                times = time_in_turn(functions, seconds=seconds, rounds=(7, 60), shuffle=True)
                ratios = [quartiles([a / b for a, b in zip(t, times[2], strict=True)]) for t in times[:2]]
                bfloat16, _, int8 = (quartiles(t)[1] for t in times)
                rate = 4 * 2 * seqlen**2 * head_dim / (2 if causal else 1) / int8 / 1e9
                spread = " | ".join(f"{middle:.2f} ({low:.2f} to {high:.2f})" for low, middle, high in ratios)
                mask = "causal" if causal else "full"
                cells = f"{bfloat16 * 1e3:.1f} | {int8 * 1e3:.1f} | {rate:.0f} | {spread}"
                print(f"| {head_dim}, {seqlen} | {mask} | {cells} |", flush=True)


def exact(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = [t.double() for t in (query, key, value)]
    return flash_attn(*wide, is_causal=causal, return_lse=True)


def print_errors(seqlen: int) -> None:
    print("| inputs | D | mask | out, bfloat16 | out, int8 | largest, int8 | lse, int8 |")
    print("|---|---|---|---|---|---|---|")
    for kind in ("normal", "mean", "outlier"):
        for head_dim in (64, 128):
            for causal in (False, True):
                tensors = inputs(kind, seqlen, head_dim)
                out, lse = exact(*tensors, causal)
                errors = []
                for options in ({}, {"quantize": "int8"}):
                    ours, ours_lse = flash_attn(*tensors, is_causal=causal, return_lse=True, **options)
                    difference = ours.double() - out
                    errors.append((difference.norm() / out.norm()).item())
                largest = (difference.abs().max() / out.abs().max()).item()
                mask = "causal" if causal else "full"
                print(
                    f"| {kind} | {head_dim} | {mask} | {errors[0]:.2%} | {errors[1]:.2%} | {largest:.2%} | "
                    f"{(ours_lse - lse).abs().max():.3f} |"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--errors", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seqlens", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--seconds", type=float, default=1.0, help="of each row")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    kernel = explain(*inputs("normal", 64, 64), quantize="int8").forward.kernel
    print(machine() | {"int8": kernel}, environment())
    print_errors(given.seqlens[0]) if given.errors else print_times(given.seqlens, given.seconds)


if __name__ == "__main__":
    main()
