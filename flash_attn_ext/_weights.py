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

from .functional import dropout_mask

# Scores of all heads and batch elements held at once: 32 MiB of float32, and as much again for the softmax.
BLOCK_ELEMENTS = 1 << 23


def attention_weights(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    key_mask: Tensor | None,
    rng_state: Tensor | None,
    dropout_p: float,
    average: bool,
    top_k: int | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q k^T / sqrt(D) + masks), after dropout; rows without any key are 0.

    Args:
        q, k: (B, H, S_q, D), (B, H, S_k, D).
        mask: as `flash_attn` takes it, at most 4-D; or None.
        key_mask: as `flash_attn` takes it, (B, S_k); or None.
        rng_state: what `flash_attn` was given with `dropout_p`; None without dropout.
        average: over the heads.
        top_k: the `top_k` largest weights of each query, by torch.topk; None for all.

    Returns:
        (B, S_q, S_k) or (B, H, S_q, S_k); with `top_k` (values, indices) of that shape, `top_k` in the place of S_k.
    """
    batch, heads, seqlen_q, _ = q.shape
    mask = None if mask is None else mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    rows = max(1, BLOCK_ELEMENTS // max(1, batch * heads * k.size(2)))
    # Under torch.compile the loop would be unrolled, and torch.func's transforms refuse checkpoint's hooks.
    whole = torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    if rows >= seqlen_q or whole or (not average and top_k is None):
        return _of_rows(q, k, mask, key_mask, rng_state, 0, dropout_p, average, top_k)
    blocks = []
    for start in range(0, seqlen_q, rows):
        cut = slice(start, start + rows)
        block_mask = mask if mask is None or mask.size(2) == 1 else mask[:, :, cut]
        arguments = (q[:, :, cut], k, block_mask, key_mask, rng_state, start, dropout_p, average, top_k)
        blocks.append(checkpoint(_of_rows, *arguments, use_reentrant=False, preserve_rng_state=False))
    if top_k is None:
        return torch.cat(blocks, dim=-2)
    return tuple(torch.cat(parts, dim=-2) for parts in zip(*blocks, strict=True))


def merged(mask: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
    """One mask that says what `flash_attn` understands by the two: (B, 1 or H, S_q, S_k); of one of them, its view."""
    if key_mask is None:
        return mask
    keys = key_mask[:, None, None]
    if mask is None:
        return keys
    if mask.dtype == torch.bool:
        return mask & keys if keys.dtype == torch.bool else torch.where(mask, keys, -math.inf)
    return torch.where(keys, mask, -math.inf) if keys.dtype == torch.bool else mask + keys


def _of_rows(q, k, mask, key_mask, rng_state, first_row, dropout_p, average, top_k) -> Tensor | tuple[Tensor, Tensor]:
    scores = torch.matmul(q * (1.0 / math.sqrt(q.size(-1))), k.transpose(-2, -1))
    weights = _softmax(scores, merged(mask, key_mask))
    if rng_state is not None:
        keep = dropout_mask(rng_state, *weights.shape, dropout_p, first_row)
        # One finite factor: with 1 / 0 at dropout_p 1 the gradient of what is dropped would be 0 * inf.
        weights = weights * keep * (1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0)
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
