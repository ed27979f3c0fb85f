"""flash_attn_combine: merges the attention results of several splits of the keys."""

import torch
from torch import Tensor

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merges the partial results of several splits of the keys.

    Args:
        out_partial: (splits, B, S, H, D) or (splits, T, H, D): the attention to the keys of each split.
        lse_partial: (splits, B, S, H) or (splits, T, H): the logsumexp of each split. -inf: the split has no visible
            key for this query, and its ``out_partial`` is not read.
        out: the result is written to this tensor, if given.
        out_dtype: the dtype of the result. None: the dtype of ``out`` or ``out_partial``.

    Returns:
        out (B, S, H, D) or (T, H, D), and the logsumexp of all splits, (B, S, H) or (T, H). Both are differentiable,
        unless ``out`` is given.
    """
    if out_partial.dim() not in (4, 5):
        raise ValueError(
            f"out_partial: got shape {list(out_partial.shape)}; allowed: (splits, batch, seqlen, heads, head_dim) or "
            "(splits, total_q, heads, head_dim)"
        )
    if lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            f"lse_partial: got shape {list(lse_partial.shape)}; allowed: out_partial's without head_dim, "
            f"{list(out_partial.shape[:-1])}"
        )
    for name, t in (("out_partial", out_partial), ("lse_partial", lse_partial), ("out", out)):
        if t is not None and t.dtype not in _DTYPES:
            raise TypeError(f"{name}: got dtype {t.dtype}; allowed: float32, float64, bfloat16, float16")
    if out is not None and out.shape != out_partial.shape[1:]:
        raise ValueError(f"out: got shape {list(out.shape)}; allowed: {list(out_partial.shape[1:])}")
    dtype = out_dtype or (out_partial if out is None else out).dtype
    if out is not None and out.dtype != dtype:
        raise TypeError(f"out: got dtype {out.dtype}; allowed: out_dtype, {dtype}")
    accumulator = torch.promote_types(lse_partial.dtype, torch.float32)
    lse_partial = lse_partial.to(accumulator)
    lse = lse_partial.logsumexp(0)
    empty = lse_partial == -torch.inf
    factors = (lse_partial - lse.masked_fill(lse == -torch.inf, 0.0)).exp()
    parts = out_partial.to(accumulator).masked_fill(empty[..., None], 0.0)  # 0 times NaN would be NaN
    merged = (factors[..., None] * parts).sum(0).to(dtype)
    return (merged if out is None else out.copy_(merged)), lse
