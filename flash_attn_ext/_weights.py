"""The attention weights that MultiheadAttention returns beside its output.

The weights of each head are B x H x S_q x S_k numbers. Where their average over the heads is asked for, or the largest
few of each query, they are computed for a block of queries at a time, and once more for each block in the backward
(torch.utils.checkpoint), so that no more than a block of them is there at any moment.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Scores of all heads and batch elements held at once: 32 MiB of float32, and as much again for the softmax.
BLOCK_ELEMENTS = 1 << 23


def attention_weights(
    q: Tensor, k: Tensor, mask: Tensor | None, keep: Tensor | None, dropout_p: float, average: bool, top_k: int | None
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(D) + mask), after dropout; rows without any key are 0.

    Args:
        q, k: (B, H, S_q, D), (B, H, S_k, D).
        mask: as `flash_attn` takes it, at most 4-D; or None.
        keep: bool (B, H, S_q, S_k), from `dropout_mask` with `dropout_p`; None without dropout.
        average: over the heads.
        top_k: the `top_k` largest weights of each query, by torch.topk; None for all.

    Returns:
        (B, S_q, S_k) or (B, H, S_q, S_k); with `top_k` (values, indices) of that shape, `top_k` in the place of S_k.
    """
    batch, heads, seqlen_q, _ = q.shape
    mask = None if mask is None else mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    rows = max(1, BLOCK_ELEMENTS // max(1, batch * heads * k.size(2)))
    # One finite factor: with 1 / 0 at dropout_p 1 the gradient of what is dropped would be 0 * inf.
    scale = 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0
    # Under torch.compile the loop would be unrolled, and torch.func's transforms refuse checkpoint's hooks.
    whole = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if rows >= seqlen_q or whole or (not average and top_k is None):
        return _of_rows(q, k, mask, keep, scale, average, top_k)
    blocks = []
    for start in range(0, seqlen_q, rows):
        cut = slice(start, start + rows)
        block_mask = mask if mask is None or mask.size(2) == 1 else mask[:, :, cut]
        block_keep = None if keep is None else keep[:, :, cut]
        arguments = (q[:, :, cut], k, block_mask, block_keep, scale, average, top_k)
        blocks.append(checkpoint(_of_rows, *arguments, use_reentrant=False, preserve_rng_state=False))
    if top_k is None:
        return torch.cat(blocks, dim=-2)
    return tuple(torch.cat(parts, dim=-2) for parts in zip(*blocks, strict=True))


def _of_rows(q, k, mask, keep, scale, average, top_k) -> Tensor | tuple[Tensor, Tensor]:
    weights = _softmax(torch.matmul(q * (1.0 / math.sqrt(q.size(-1))), k.transpose(-2, -1)), mask)
    weights = weights if keep is None else weights * keep * scale
    weights = weights.mean(dim=1) if average else weights
    return weights if top_k is None else tuple(weights.topk(top_k, dim=-1))


def _softmax(scores: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.softmax(scores, dim=-1)
    if mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
        dead = ~mask.any(dim=-1, keepdim=True)
    else:
        mask = mask.to(scores.dtype)
        scores = scores + mask
        dead = (mask == -math.inf).all(dim=-1, keepdim=True)
    # Replace the scores of such rows before the softmax, not its NaN afterwards: NaN would stay in the gradient.
    return torch.softmax(scores.masked_fill(dead, 0.0), dim=-1).masked_fill(dead, 0.0)
