"""Compares flex_attention with torch's flex_attention, with our own options, and with calls without functions.

Calls alternate in one process. The columns are medians of the ratios within a round:

  torch / ours   torch's flex_attention in units of ours. Forward: compiled by inductor. Forward and backward: eager, as
                 torch has no other backward on a CPU
  ours / option  the function as a program, in units of the same option of flash_attn
  ours / none    in units of flash_attn without a function or a mask
  blocks         the same for a block mask, in units of its share of the score matrix: 1 is no loss

"compile s" is the time of torch's first call, which no ratio includes.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.attention.flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from benchmarks.harness import environment, machine, time_in_turn
from flash_attn_ext import flash_attn, flex_attention
from flash_attn_ext.flex.create import create_block_mask

BATCH, HEADS, WINDOW = 1, 8, 512
DEFAULT = ("softcap", "alibi", "table", "causal", "window", "documents", "prefix")


def case_of(name: str, length: int) -> tuple[Callable | None, Callable | None, dict[str, Any] | None]:
    """(score_mod, mask_mod, the same as options of flash_attn or None)."""
    slopes = torch.exp2(-8.0 * torch.arange(1, HEADS + 1) / HEADS)
    table = torch.randn(HEADS, 2 * length)
    documents = torch.arange(length) * 4 // length

    def causal(b, h, i, j):
        return i >= j

    cases: dict[str, tuple] = {
        "softcap": (lambda s, b, h, i, j: 20 * torch.tanh(s / 20), None, {"softcap": 20.0}),
        "alibi": (lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), None, {"alibi_slopes": slopes}),
        "table": (lambda s, b, h, i, j: s + table[h, i - j + length], None, None),
        "causal": (None, causal, {"is_causal": True}),
        "window": (None, lambda b, h, i, j: (i >= j) & (i - j <= WINDOW), {"is_causal": True, "window": (WINDOW, 0)}),
        "documents": (None, lambda b, h, i, j: (documents[i] == documents[j]) & (i >= j), None),
        "prefix": (None, lambda b, h, i, j: (j < length // 4) | (i >= j), None),
        "log": (lambda s, b, h, i, j: s * torch.log1p(s * s), None, None),
        "erf": (lambda s, b, h, i, j: s * torch.erf(s), None, None),
        "sine": (lambda s, b, h, i, j: s + torch.sin(s), None, None),
    }
    return cases[name]


def measure(name: str, length: int, head_dim: int, dtype: str, *, backward: bool, with_torch: bool) -> dict:
    score_mod, mask_mod, option = case_of(name, length)
    q, k, v = (
        torch.randn(BATCH, HEADS, length, head_dim, dtype=getattr(torch, dtype), requires_grad=backward)
        for _ in range(3)
    )
    mask: BlockMask | None = None
    share = 1.0
    if mask_mod is not None:
        mask = create_block_mask(mask_mod, None, None, length, length)
        share = 1.0 - mask.sparsity() / 100
    runs: dict[str, Callable] = {
        "ours": partial(flex_attention, q, k, v, score_mod, mask),
        "none": partial(flash_attn, q, k, v),
    }
    if option is not None:
        runs["option"] = partial(flash_attn, q, k, v, **option)
    compile_seconds = None
    if with_torch:
        runs["torch"] = partial(_torch_attention(backward=backward), q, k, v, score_mod, mask)
        start = time.perf_counter()
        runs["torch"]()
        compile_seconds = None if backward else round(time.perf_counter() - start, 1)
    if backward:
        dout = torch.randn_like(q)
        runs = {which: partial(_and_backward, run, (q, k, v), dout) for which, run in runs.items()}
    times = dict(zip(runs, time_in_turn(list(runs.values()), seconds=1.0, rounds=(5, 40)), strict=True))

    def ratio(a: str, b: str, share: float = 1.0) -> float | None:
        if a not in times or b not in times:
            return None
        return round(median(x / y for x, y in zip(times[a], times[b], strict=True)) / share, 2)

    return {
        "function": name, "S": length, "D": head_dim, "dtype": dtype, "pass": "both" if backward else "forward",
        "ours ms": round(1e3 * median(times["ours"]), 2), "torch / ours": ratio("torch", "ours"),
        "compile s": compile_seconds, "ours / option": ratio("ours", "option"), "ours / none": ratio("ours", "none"),
        "blocks": None if mask is None else ratio("ours", "none", share),
    }  # fmt: skip


def _torch_attention(*, backward: bool) -> Callable:
    torch._dynamo.reset()
    if not backward:
        return torch.compile(torch_flex.flex_attention, dynamic=False)
    # torch refuses gradients on a CPU, but the kernel of its eager calls has gradients.
    torch_flex._validate_device = lambda *_: None  # type: ignore[assignment]
    torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    return torch_flex.flex_attention


def _and_backward(run: Callable, inputs: tuple, dout: torch.Tensor) -> None:
    torch.autograd.grad(run(), inputs, dout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", nargs="+", default=DEFAULT)
    parser.add_argument("--lengths", nargs="+", type=int, default=[1024, 2048, 4096, 8192])
    parser.add_argument("--head-dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--backward", action="store_true", help="forward and backward, against torch's eager kernel")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--append", help="a file of JSON lines")
    arguments = parser.parse_args()
    print(machine())
    print(environment())
    rows: list[dict] = []
    for name in arguments.functions:
        for length in arguments.lengths:
            for head_dim in arguments.head_dims:
                for dtype in arguments.dtypes:
                    row = measure(
                        name, length, head_dim, dtype, backward=arguments.backward, with_torch=not arguments.no_torch
                    )
                    if not rows:
                        print(*(f"{title:>{_width(title)}}" for title in row))
                    print(*(f"{_shown(cell):>{_width(title)}}" for title, cell in row.items()), flush=True)
                    rows.append(row)
                    if arguments.append:
                        with open(arguments.append, "a") as file:
                            file.write(json.dumps(row) + "\n")


def _width(title: str) -> int:
    return max(len(title), 8)


def _shown(cell: object) -> str:
    return "-" if cell is None else str(cell)


if __name__ == "__main__":
    main()
