"""Measures the rate of attention against the rows of a key head, 1 to 128, and draws the curves.

A row is one query of one head. So a key head that `group` query heads share has group x S_q rows. The forms of a call:

    dense   flash_attn: one sequence, 4 key heads of 8192 keys
    paged   flash_attn_with_kvcache: the same keys in pages of 16
    packed  flash_attn_with_kvcache: packed queries of five sequences, in pages of 128. Four sequences have 8192, 4096,
            2048 and 1024 keys, and the same S_q. The fifth one is a prefill of 64 tokens, which the rate counts

A curve's calls alternate in one process, in a random order of each round. Only undisturbed calls count
(undisturbed.py). A dip: a rate that is more than a tenth below the rate of the next smaller number of rows. "fast" is
the rate of the fastest tenth of these calls.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.table import Table

import flash_attn_ext
from benchmarks import output, peaks
from benchmarks.harness import environment, machine, quartiles, time_in_turn
from benchmarks.undisturbed import Undisturbed, fastest_tenth
from flash_attn_ext import flash_attn, flash_attn_with_kvcache

ROWS = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 72, 80, 96, 112, 128]
HEADS_KV, KEYS, D, PREFILL = 4, 8192, 128, 64
BAR = 50  # characters of the longest bar


def rows_of_group(group: int) -> list[int]:
    return [rows for rows in ROWS if rows % group == 0]


class Pages:
    """A cache in pages that are in random order in memory."""

    def __init__(self, lengths: list[int], page_size: int, dtype: torch.dtype) -> None:
        counts = [-(-length // page_size) for length in lengths]
        numbers = iter(torch.randperm(sum(counts)).split(counts))
        self.table = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
        for row, count in zip(self.table, counts, strict=True):
            row[:count] = next(numbers)
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.keys, self.values = torch.randn(2, sum(counts), page_size, HEADS_KV, D).to(dtype)


def flops(heads: int, lengths: list[tuple[int, int]]) -> int:
    """Floating point operations of (queries, keys) with a causal mask from the lower right corner."""
    return sum(4 * heads * D * (q * k - q * (q - 1) // 2) for q, k in lengths)


def dense(group: int, dtype: torch.dtype) -> Iterator[tuple[Callable[[], object], int]]:
    k, v = torch.randn(2, 1, HEADS_KV, KEYS, D).to(dtype)
    heads = group * HEADS_KV
    for rows in rows_of_group(group):
        q = torch.randn(1, heads, rows // group, D).to(dtype)
        yield (
            lambda q=q: flash_attn(q, k, v, enable_gqa=True, causal="lower_right"),
            flops(heads, [(rows // group, KEYS)]),
        )


def paged(group: int, dtype: torch.dtype) -> Iterator[tuple[Callable[[], object], int]]:
    cache, heads = Pages([KEYS], 16, dtype), group * HEADS_KV
    for rows in rows_of_group(group):
        q = torch.randn(1, rows // group, heads, D).to(dtype)
        yield (
            lambda q=q: flash_attn_with_kvcache(
                q, cache.keys, cache.values, cache_seqlens=cache.lengths, block_table=cache.table, causal=True
            ),
            flops(heads, [(rows // group, KEYS)]),
        )


def packed(group: int, dtype: torch.dtype) -> Iterator[tuple[Callable[[], object], int]]:
    lengths = [KEYS, KEYS // 2, KEYS // 4, KEYS // 8, PREFILL]
    cache, heads = Pages(lengths, 128, dtype), group * HEADS_KV
    for rows in rows_of_group(group):
        queries = [rows // group] * (len(lengths) - 1) + [PREFILL]
        longest = max(queries)
        offsets = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
        q = torch.randn(sum(queries), heads, D).to(dtype)
        yield (
            lambda q=q, offsets=offsets, longest=longest: flash_attn_with_kvcache(
                q, cache.keys, cache.values, cache_seqlens=cache.lengths, block_table=cache.table, causal=True,
                cu_seqlens_q=offsets, max_seqlen_q=longest,
            ),
            flops(heads, list(zip(queries, lengths, strict=True))),
        )  # fmt: skip


FORMS = {"dense": dense, "paged": paged, "packed": packed}


def peak_of(dtype: str) -> float:
    return peaks.flops(flash_attn_ext.active_kernel(), getattr(torch, dtype), torch.get_num_threads())


def curve(form: str, group: int, dtype: str, seconds: float, undisturbed: Undisturbed) -> dict:
    """The rates of one curve, and the dips."""
    torch.manual_seed(0)
    peak_before = peak_of(dtype)
    calls, counts = zip(*FORMS[form](group, getattr(torch, dtype)), strict=True)
    with torch.no_grad():
        all_times = time_in_turn(
            list(calls), seconds=seconds, rounds=(5, 200),
            before=undisturbed.before, after=undisturbed.after, shuffle=True,
        )  # fmt: skip
    peak = max(peak_before, peak_of(dtype))  # other users of the host may slow one of them
    times = [undisturbed.times_of(*each) for each in zip(calls, all_times, strict=True)]
    rows, rates = rows_of_group(group), [n / statistics.median(t) / 1e9 for n, t in zip(counts, times, strict=True)]
    steps = zip(rows, rates, rows[1:], rates[1:], strict=False)
    return {
        "form": form, "group": group, "dtype": dtype, "rows": rows, "GFLOP/s": rates, "peak_GFLOP/s": peak / 1e9,
        "fast_GFLOP/s": [n / fastest_tenth(ts) / 1e9 for n, ts in zip(counts, times, strict=True)],
        "quartiles": [[n / t / 1e9 for t in quartiles(ts)[::-2]] for n, ts in zip(counts, times, strict=True)],
        "dips": [[left, right, to / fro] for left, fro, right, to in steps if to < 0.9 * fro],
    }  # fmt: skip


def text(record: dict) -> Iterator[str | Table]:
    yield "The rate against rows: " + ", ".join(f"{key} {value}" for key, value in record["machine"].items())
    for row in record["curves"]:
        highest = max(row["GFLOP/s"])
        dips = ", ".join(f"{left} to {right} rows: {ratio:.2f}" for left, right, ratio in row["dips"]) or "none"
        yield f"\n{row['form']}, {row['dtype']}, {row['group']} heads a key head. Dips: {dips}\n"
        yield output.table(
            ["rows", "GFLOP/s", "of peak", "fast: of peak", ""],
            [
                [
                    str(n),
                    f"{rate:.0f}",
                    f"{rate / row['peak_GFLOP/s']:.2f}",
                    f"{fast / row['peak_GFLOP/s']:.2f}",
                    ("#" * round(BAR * rate / highest)).ljust(BAR, "."),
                ]
                for n, rate, fast in zip(row["rows"], row["GFLOP/s"], row["fast_GFLOP/s"], strict=True)
            ],
        )


def draw(curves: list[dict], path: Path) -> None:
    from flash_attn_ext.reference.report import COLORS, pyplot, save

    dtypes = list(dict.fromkeys(row["dtype"] for row in curves))
    forms = list(dict.fromkeys(row["form"] for row in curves))
    figure, axes = pyplot().subplots(
        1, len(forms), figsize=(4 * len(forms), 3.8), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, form in zip(axes[0], forms, strict=True):
        for row in curves:
            if row["form"] != form:
                continue
            style = ("o-", "s--", "^:")[dtypes.index(row["dtype"]) % 3]
            color = COLORS[(1, 4, 8).index(row["group"])]
            label = f"{row['dtype']}, {row['group']} heads a key head"
            axis.plot(row["rows"], row["GFLOP/s"], style, color=color, label=label, ms=3, lw=1)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_title(form, loc="left", fontsize=11)
        axis.set_xlabel("rows of a key head")
    axes[0][0].set_ylabel("GFLOP/s")
    axes[0][0].legend(frameon=False, fontsize=7)
    save(figure, path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--groups", nargs="+", type=int, choices=[1, 4, 8], default=[1, 4, 8])
    parser.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16", "float16"], default=["float32", "bfloat16"]
    )
    parser.add_argument("--isa", choices=flash_attn_ext.available_kernels(), help="default: the best")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each curve")
    output.add_arguments(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    flash_attn_ext.force_kernel(args.isa)
    undisturbed = Undisturbed()
    record = {
        "machine": {**machine(), **environment()},
        "settings": output.settings(args),
        "curves": [
            curve(form, group, dtype, args.seconds, undisturbed)
            for form in args.forms
            for dtype in args.dtypes
            for group in args.groups
        ],
    }  # fmt: skip
    output.write_json(record, args.json)
    output.write_text(text(record), args.text)
    if args.plot:
        draw(record["curves"], args.plot)


if __name__ == "__main__":
    main()
