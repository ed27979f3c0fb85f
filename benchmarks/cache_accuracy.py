"""Measures the accuracy of 8-bit caches: the error of out compared with the same call on the bfloat16 cache.

    python -m benchmarks.cache_accuracy

One new token attends to 4096 keys, 8 heads, D 128. "outliers" multiplies a few columns of keys and values by 20, as in
trained models. The scale of a head, page (16 rows) or token is its largest value divided by the
largest 8-bit value. A number is rms(error) / rms(out) in percent. The reference of bfloat16 is float64.
"""

import math

import torch

from flash_attn_ext import flash_attn_with_kvcache

HEADS, KEYS, HEAD_DIM, PAGE = 8, 4096, 128, 16
FORMATS = {"int8": torch.int8, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
SCALES = {"none": None, "head": (0, 1, 3), "page": (1, 3), "token": (3,)}  # the dimensions of the maximum


def data(kind: str) -> tuple[torch.Tensor, ...]:
    """q (1, 1, H, D); k and v (pages, PAGE, H, D), in bfloat16."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, PAGE, HEADS, HEAD_DIM) for n in (1, KEYS // PAGE, KEYS // PAGE))
    if kind == "outliers":
        columns = torch.rand(HEADS, HEAD_DIM) < 0.02
        k, v = k * (1 + 19 * columns), v * (1 + 19 * columns)
        q = q / math.sqrt(1 + 0.02 * 399)  # scores as large as before
    return q[:, :1].bfloat16(), k.bfloat16(), v.bfloat16()


def coded(
    x: torch.Tensor, dtype: torch.dtype, over: tuple[int, ...] | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns 8-bit values and their scale, broadcastable to (pages, PAGE, H)."""
    x, largest = x.float(), 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    scale = None if over is None else x.abs().amax(over, keepdim=True) / largest
    x = x if scale is None else x / scale
    bits = x.round().clamp(-128, 127).to(dtype) if dtype == torch.int8 else x.clamp(-largest, largest).to(dtype)
    return bits, None if scale is None else scale[..., 0]


def relative(error: torch.Tensor, exact: torch.Tensor) -> float:
    return 100 * (error.double().square().mean() / exact.double().square().mean()).sqrt().item()


def errors(kind: str) -> dict[tuple[str, str], float]:
    q, k, v = data(kind)
    table = torch.arange(KEYS // PAGE)[None]
    exact = flash_attn_with_kvcache(q.double(), k.double(), v.double(), block_table=table)
    of_cache = flash_attn_with_kvcache(q, k, v, block_table=table).double()
    found = {("bfloat16", "none"): relative(of_cache - exact, exact)}
    for name, dtype in FORMATS.items():
        for scale, over in SCALES.items():
            if dtype == torch.int8 and over is None:
                continue  # would round normal data to a few whole numbers
            (k8, k_scale), (v8, v_scale) = (coded(t, dtype, over) for t in (k, v))
            out = flash_attn_with_kvcache(q, k8, v8, block_table=table, k_descale=k_scale, v_descale=v_scale)
            found[name, scale] = relative(out.double() - of_cache, of_cache)
    return found


def main() -> None:
    tables = {kind: errors(kind) for kind in ("normal", "outliers")}
    print(f"{'cache':10}{'scale':8}" + "".join(f"{kind:>12}" for kind in tables))
    for name, scale in tables["normal"]:
        print(f"{name:10}{scale:8}" + "".join(f"{table[name, scale]:11.2f}%" for table in tables.values()))


if __name__ == "__main__":
    main()
