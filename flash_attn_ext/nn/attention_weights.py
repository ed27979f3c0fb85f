"""The attention weights that MultiheadAttention returns beside its output.

The weights of each head are B x H x S_q x S_k numbers. Their average over the heads is an operator of ours, with its
gradient: it adds the heads up tile by tile, from the lse that attention has left. What that operator does not take, the
weights of each head, DTensors and torch.func's transforms, is made of torch's operators: for a block of queries at
a time where only the largest weights are kept or the heads are averaged, and once more for each block in the backward
(torch.utils.checkpoint).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import _functorch, _ops
from ..functional import dropout_mask, some_dtensor

# Weights held at once, of what is not returned as a whole: 32 MiB of float32. torch's operators hold twice as much.
BLOCK_ELEMENTS = 1 << 23


def attention_weights(
    q: Tensor,
    k: Tensor,
    mask: Tensor | None,
    key_mask: Tensor | None,
    lse: Tensor,
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
        lse: (B, H, S_q), what `flash_attn` returned beside its output. The gradient does not go through it.
        rng_state: what `flash_attn` was given with `dropout_p`; None without dropout.
        average: over the heads.
        top_k: the `top_k` largest weights of each query, by torch.topk; None for all.

    Returns:
        (B, S_q, S_k) or (B, H, S_q, S_k); with `top_k` (values, indices) of that shape, `top_k` in the place of S_k.
    """
    mask = None if mask is None else mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    given = (q, k, mask, key_mask, lse.detach(), rng_state, dropout_p)
    by_kernel = average and not some_dtensor(q, k) and not _functorch.active()
    if by_kernel and top_k is None:
        return _averaged(*given, 0)
    # Under torch.compile the loop would be unrolled, and torch.func's transforms refuse checkpoint's hooks.
    whole = torch.compiler.is_compiling() or _functorch.active() or (not average and top_k is None)
    weights = _averaged if by_kernel else _averaged_by_torch if average else _of_heads

    def of_rows(*block) -> tuple[Tensor, ...]:
        result = weights(*block)
        return (result,) if top_k is None else tuple(result.topk(top_k, dim=-1))

    parts = of_rows(*given, 0) if whole else _in_blocks(of_rows, given, again=not by_kernel)
    return parts[0] if top_k is None else parts


def _in_blocks(of_rows: Callable[..., tuple[Tensor, ...]], given: tuple, again: bool) -> tuple[Tensor, ...]:
    """What `of_rows` gives for all queries, block by block. `again`: its backward needs more than its arguments, and
    is to compute it once more."""
    q, k, mask, key_mask, lse, *dropout = given
    rows = max(1, BLOCK_ELEMENTS // max(1, q.size(0) * k.size(2) * (q.size(1) if again else 1)))
    if rows >= q.size(2):
        return of_rows(*given, 0)
    blocks = []
    for first in range(0, q.size(2), rows):
        cut = slice(first, first + rows)
        block_mask = mask if mask is None or mask.size(2) == 1 else mask[:, :, cut]
        block = (q[:, :, cut], k, block_mask, key_mask, lse[:, :, cut], *dropout, first)
        once_more = {"use_reentrant": False, "preserve_rng_state": False}
        blocks.append(checkpoint(of_rows, *block, **once_more) if again else of_rows(*block))
    return tuple(torch.cat(parts, dim=-2) for parts in zip(*blocks, strict=True))


def _averaged(q, k, mask, key_mask, lse, rng_state, dropout_p, first_row) -> Tensor:
    if rng_state is not None and first_row:
        place = rng_state[2:] if len(rng_state) > 2 else rng_state.new_tensor([0, 0, 0, q.size(1)])
        rng_state = torch.cat([rng_state[:2], place + place.new_tensor([first_row, 0, 0, 0])])
    return _ops.attention_weights(q, k, mask, None, None, rng_state, key_mask, lse, dropout_p=dropout_p)


def _averaged_by_torch(*given) -> Tensor:
    return _of_heads(*given).mean(dim=1)


def _of_heads(q, k, mask, key_mask, _lse, rng_state, dropout_p, first_row) -> Tensor:
    scores = torch.matmul(q * (1.0 / math.sqrt(q.size(-1))), k.transpose(-2, -1))
    weights = _softmax(scores, merged(mask, key_mask))
    if rng_state is None:
        return weights
    keep = dropout_mask(rng_state, *weights.shape, dropout_p, first_row)
    # One finite factor: with 1 / 0 at dropout_p 1 the gradient of what is dropped would be 0 * inf.
    return weights * keep * (1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0)


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
