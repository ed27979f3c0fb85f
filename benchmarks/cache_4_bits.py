"""Measures int4 caches: the error next to other formats, and the time of a decode step.

    python -m benchmarks.cache_4_bits           errors of out and lse against float64
    python -m benchmarks.cache_4_bits --time    time / time of the bfloat16 cache, on this machine

Errors: data as in benchmarks.cache_accuracy. This file implements the formats of other libraries in torch, by their
definitions. Attention is computed in float64 on the decoded numbers, so only the format causes an error. Our formats
also run through the kernels, with bfloat16 queries. The two errors agree if the kernels add no error.
"""

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.cache_accuracy import HEAD_DIM, KEYS, PAGE, data, relative
from benchmarks.harness import environment, machine, quartiles, time_in_turn
from flash_attn_ext import dequantize_int4, flash_attn_with_kvcache, quantize_int4

Decoded = Callable[[torch.Tensor], torch.Tensor]


def _scaled(x: torch.Tensor, dtype: torch.dtype, over: tuple[int, ...]) -> torch.Tensor:
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = x.abs().amax(over, keepdim=True) / largest
    return ((x / scale).round() if dtype == torch.int8 else x / scale).to(dtype).float() * scale


def q8_0(x: torch.Tensor) -> torch.Tensor:
    """llama.cpp: groups of 32, scale max |x| / 127 in float16."""
    grouped = x.unflatten(-1, (-1, 32))
    scale = grouped.abs().amax(-1, keepdim=True) / 127
    return ((grouped / scale).round() * scale.half().float()).flatten(-2)


def q4_0(x: torch.Tensor) -> torch.Tensor:
    """llama.cpp: groups of 32, scale (largest element) / -8 in float16, nibble = trunc(x / scale + 8.5)."""
    grouped = x.unflatten(-1, (-1, 32))
    scale = grouped.gather(-1, grouped.abs().argmax(-1, keepdim=True)) / -8
    nibble = (grouped / scale + 8.5).trunc().clamp(0, 15)
    return ((nibble - 8) * scale.half().float()).flatten(-2)


def onnx_int4(x: torch.Tensor, over: tuple[int, ...]) -> torch.Tensor:
    """ONNX Runtime's GroupQueryAttention: values -8 to 7, float32 scales max |x| / 7, per tensor or per channel."""
    scale = x.abs().amax(over, keepdim=True) / 7
    return (x / scale).round().clamp(-8, 7) * scale


def xformers_int4(x: torch.Tensor, groups: int) -> torch.Tensor:
    """xFormers: scale * nibble + shift, both float16, `groups` of a row."""
    grouped = x.unflatten(-1, (groups, -1))
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    scale, shift = ((high - low) / 15).half().float(), low.half().float()
    return (((grouped - shift) / scale).round().clamp(0, 15) * scale + shift).flatten(-2)


def _int4(x: torch.Tensor, group: int | None, zeros: bool) -> torch.Tensor:
    return dequantize_int4(*quantize_int4(x, group, with_zeros=zeros))


# (format, bits for each element of a row of 128 columns, function that returns the decoded numbers)
FORMATS: dict[str, tuple[float, Decoded]] = {
    "bfloat16": (16, lambda x: x),
    "int8, token and head": (8.25, partial(_scaled, dtype=torch.int8, over=(3,))),
    "float8_e4m3fn, head": (8, partial(_scaled, dtype=torch.float8_e4m3fn, over=(0, 1, 3))),
    "float8_e5m2, head": (8, partial(_scaled, dtype=torch.float8_e5m2, over=(0, 1, 3))),
    "q8_0 (llama.cpp)": (8.5, q8_0),
    "q4_0 (llama.cpp)": (4.5, q4_0),
    "int4, tensor (ONNX Runtime)": (4, partial(onnx_int4, over=(0, 1, 2, 3))),
    "int4, channel (ONNX Runtime)": (4, partial(onnx_int4, over=(0, 1))),
    "int4, 1 group (xFormers)": (4.25, partial(xformers_int4, groups=1)),
    "int4, 4 groups (xFormers)": (5, partial(xformers_int4, groups=4)),
    "int4, groups of 32": (4.5, partial(_int4, group=32, zeros=False)),
    "int4, groups of 32, zero points": (5, partial(_int4, group=32, zeros=True)),
    "int4, groups of 64, zero points": (4.5, partial(_int4, group=64, zeros=True)),
    "int4, groups of 128, zero points": (4.25, partial(_int4, group=None, zeros=True)),
    "int4, token and head": (4.125, partial(_int4, group=None, zeros=False)),
}


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out (H, D) and lse (H) of one query, in float64."""
    q, k, v = (t.double().flatten(0, 1) for t in (q, k, v))
    scores = torch.einsum("qhd,khd->hk", q, k) / HEAD_DIM**0.5
    return torch.einsum("hk,khd->hd", scores.softmax(-1), v), scores.logsumexp(-1)


def errors(kind: str) -> dict[str, tuple[float, float]]:
    """Returns rms(error of out) / rms(out) in percent, and rms(error of lse), for each format."""
    q, k, v = data(kind)
    out, lse = exact(q, k, v)
    found = {}
    for name, (_, decode) in FORMATS.items():
        own_out, own_lse = exact(q, decode(k.float()), decode(v.float()))
        found[name] = relative(own_out - out, out), (own_lse - lse).square().mean().sqrt().item()
    table = torch.arange(KEYS // PAGE)[None]
    for group, zeros in ((32, False), (32, True), (None, False)):
        coded = coded_int4(k, v, group, zeros)
        own_out, own_lse = flash_attn_with_kvcache(q, **coded, block_table=table, return_softmax_lse=True)
        name = f"kernel: groups of {group or HEAD_DIM}{', zero points' * zeros}"
        error_of_lse = (own_lse[0, :, 0].double() - lse).square().mean().sqrt().item()
        found[name] = relative(own_out[0, 0].double() - out, out), error_of_lse
    return found


def coded_int4(k: torch.Tensor, v: torch.Tensor, group: int | None, zeros: bool) -> dict[str, Any]:
    """The arguments of flash_attn_with_kvcache for int4 caches."""
    of_key, of_value = (quantize_int4(t, group, with_zeros=zeros) for t in (k, v))
    names = ("cache", "scales", "zeros")
    return {f"k_{n}": t for n, t in zip(names, of_key, strict=True)} | {
        f"v_{n}": t for n, t in zip(names, of_value, strict=True)
    }


def show_times(seconds: float, keys: int, dtype: torch.dtype, of_shape: tuple[int, int] | None) -> None:
    print(machine() | environment())
    for batch, heads_kv in ((1, 32), (1, 8), (1, 4)) if of_shape is None else (of_shape,):
        q = torch.randn(batch, 1, 32, HEAD_DIM).to(dtype)
        k, v = torch.randn(2, batch, keys, heads_kv, HEAD_DIM).to(dtype)
        calls = {"16 bits": partial(flash_attn_with_kvcache, q, k, v)}
        scale = torch.full((batch, keys, heads_kv), 0.03)
        coded = [(t.float() / 0.03).clamp(-127, 127).to(torch.int8) for t in (k, v)]
        calls["int8"] = partial(flash_attn_with_kvcache, q, *coded, k_descale=scale, v_descale=scale)
        for group, zeros in ((None, False), (64, True), (32, False), (32, True)):
            name = f"int4, groups of {group or HEAD_DIM}{', zero points' * zeros}"
            calls[name] = partial(flash_attn_with_kvcache, q, **coded_int4(k, v, group, zeros))
        with torch.no_grad():
            times = time_in_turn(list(calls.values()), seconds=seconds, rounds=(5, 200), shuffle=True)
        print(
            f"{dtype}, {batch} x {keys} keys, {32 // heads_kv} heads a key head: {quartiles(times[0])[1] * 1e3:.2f} ms"
        )
        for name, other in zip(list(calls)[1:], times[1:], strict=True):
            low, middle, high = quartiles([o / of_16 for of_16, o in zip(times[0], other, strict=True)])
            print(f"  {name:36} {middle:5.2f}  ({low:.2f} to {high:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each row")
    parser.add_argument("--keys", type=int, default=8192)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shape", type=int, nargs=2, help="batch and key heads; none: several")
    options = parser.parse_args()
    if options.time:
        torch.manual_seed(0)
        return show_times(options.seconds, options.keys, getattr(torch, options.dtype), options.shape)
    tables = {kind: errors(kind) for kind in ("normal", "outliers")}
    print(f"{'format':36}{'bits':>6}" + "".join(f"{kind + ': out':>16}{'lse':>9}" for kind in tables))
    for name in tables["normal"]:
        bits = FORMATS[name][0] if name in FORMATS else ""
        row = "".join(f"{table[name][0]:15.2f}%{table[name][1]:9.4f}" for table in tables.values())
        print(f"{name:36}{bits:>6}{row}")


if __name__ == "__main__":
    main()
