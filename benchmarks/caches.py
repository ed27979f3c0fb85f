"""Measures a decode step with caches of 8 and 4 bits and in pages, as a part of the bfloat16 cache's time.

bfloat16 queries, one token for each sequence, head dimension 128. "int8" and float8 have a scale for each head, "int8
token" for each token and head. int4 has a float16 scale for each token and head, for groups of 32 columns, or for
groups of 32 with zero points. Pages of 16 rows are in a random order.

The calls alternate in a random order. A number is the mean of the medians of several placements. A placement has new
tensors, because the time of a cache depends on its place in memory. Before each call, "memory" reads 256 MB of other
memory, as the other layers of a model do. "repeated" runs the same call once, so a cache that fits is in L3. Only
undisturbed calls count (undisturbed.py).
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import output
from benchmarks.harness import machine, time_in_turn
from benchmarks.undisturbed import Undisturbed
from flash_attn_ext import flash_attn_with_kvcache, quantize_int4

D, PAGE, GROUP = 128, 16, 32
SHAPES = ("4,32,32,2048", "8,32,8,4096", "4,64,8,4096", "1,32,8,4096", "1,64,8,4096")
FITS = 32 << 20  # bytes of a bfloat16 cache that may fit into L3
Caches = dict[str, torch.Tensor]


def coded(k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> Caches:
    """``scale``: for each head, or for each token and head."""
    if dtype == torch.int8:
        k, v = ((t.float() / scale[..., None]).clamp(-127, 127).round() for t in (k, v))
    return {"k_cache": k.to(dtype), "v_cache": v.to(dtype), "k_descale": scale, "v_descale": scale}


def int4(k: torch.Tensor, v: torch.Tensor, group: int | None, zeros: bool) -> Caches:
    caches = {}
    for name, t in (("k", k), ("v", v)):
        parts = zip(("cache", "scales", "zeros"), quantize_int4(t, group, with_zeros=zeros), strict=False)
        caches |= {f"{name}_{part}": value for part, value in parts if value is not None}
    return caches


def in_pages(k: torch.Tensor, v: torch.Tensor) -> Caches:
    batch, keys, heads, _ = k.shape
    pages = batch * keys // PAGE
    return {
        "k_cache": k.clone().view(pages, PAGE, heads, D),  # a cache of its own, so no other call has just read it
        "v_cache": v.clone().view(pages, PAGE, heads, D),
        "block_table": torch.randperm(pages, dtype=torch.int32).view(batch, -1),
        "cache_seqlens": torch.full((batch,), keys, dtype=torch.int32),
    }


FORMATS: dict[str, Callable[[torch.Tensor, torch.Tensor], Caches]] = {
    "bfloat16, ms": lambda k, v: {"k_cache": k, "v_cache": v},
    "int8": lambda k, v: coded(k, v, torch.int8, torch.full((k.shape[2],), 0.03)),
    "int8 token": lambda k, v: coded(k, v, torch.int8, torch.full(k.shape[:3], 0.03)),
    "e4m3": lambda k, v: coded(k, v, torch.float8_e4m3fn, torch.ones(k.shape[2])),
    "e5m2": lambda k, v: coded(k, v, torch.float8_e5m2, torch.ones(k.shape[2])),
    "int4 token": lambda k, v: int4(k, v, None, False),
    "int4 32": lambda k, v: int4(k, v, GROUP, False),
    "int4 32, zeros": lambda k, v: int4(k, v, GROUP, True),
    "pages of 16": in_pages,
}


def measure(shape: str, seconds: float, placements: int, undisturbed: Undisturbed) -> list[list[str]]:
    """Returns a row of the table for each state of the caches. ``shape``: B, H, H_kv and S_k."""
    batch, heads, heads_kv, keys = map(int, shape.split(","))
    others = torch.ones(64 << 20)
    states = {"memory": lambda _: others.sum()}
    if 4 * batch * keys * heads_kv * D <= FITS:
        states["repeated"] = lambda call: call()
    rows = []
    for state, prepare in states.items():
        medians = []

        def before(call: Callable, prepare: Callable = prepare) -> None:
            prepare(call)
            undisturbed.before(call)

        for _ in range(placements):
            q = torch.randn(batch, 1, heads, D).bfloat16()
            k, v = torch.randn(2, batch, keys, heads_kv, D).bfloat16()
            caches = [make(k, v) for make in FORMATS.values()]
            calls = [lambda q=q, own=own: flash_attn_with_kvcache(q, **own) for own in caches]
            times = time_in_turn(
                calls, seconds=seconds / placements, rounds=(5, 2000),
                before=before, after=undisturbed.after, shuffle=True,
            )  # fmt: skip
            medians.append([statistics.median(undisturbed.times_of(*each)) for each in zip(calls, times, strict=True)])
        base, *times_of_others = (statistics.mean(each) for each in zip(*medians, strict=True))
        rows.append([shape, state, f"{base * 1e3:.2f}", *(f"{time / base:.2f}" for time in times_of_others)])
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="B,H,H_kv,S_k")
    parser.add_argument("--seconds", type=float, default=7, help="for each shape")
    parser.add_argument("--placements", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--text", type=Path, default=None)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    undisturbed = Undisturbed()
    with torch.no_grad():
        rows = [row for shape in args.shapes for row in measure(shape, args.seconds, args.placements, undisturbed)]
    about = ", ".join(f"{name} {value}" for name, value in machine().items())
    title = f"A decode step: time divided by the time of the bfloat16 cache: {about}"
    output.write_text([title, output.table(["B,H,H_kv,S_k", "caches", *FORMATS], rows)], args.text)


if __name__ == "__main__":
    main()
