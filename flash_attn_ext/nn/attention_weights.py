"""The attention weights that MultiheadAttention returns in addition to its output.

The weights of all heads are B x H x S_q x S_k numbers. Our operator `attention_weights` computes their average over the
heads, and its gradient. It sums the heads tile by tile, from the lse of the attention. In three cases torch's operators
compute the weights: the weights of each head, DTensors, and torch.func's transforms. If only averages or the largest
weights are returned, torch's operators run for one block of queries at a time. The backward computes each block again
(torch.utils.checkpoint).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .. import _functorch, _ops
from .._dropout import dropout_mask
from .._tensor_checks import some_dtensor

# Number of weights in a block of queries: 32 MiB of float32. torch's operators allocate twice as much.
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
    """Returns softmax(q k^T / sqrt(D) + masks), after dropout. Rows without a visible key are 0.

    Args:
        q, k: (B, H, S_q, D), (B, H, S_k, D).
        mask: `attn_mask` of `flash_attn`, at most 4-D; or None.
        key_mask: `key_mask` of `flash_attn`, (B, S_k); or None.
        lse: (B, H, S_q), the logsumexp that `flash_attn` returned. It gets no gradient.
        rng_state: the `rng_state` of `flash_attn`; None without dropout.
        average: True: averages over the heads.
        top_k: returns the `top_k` largest weights of each query, by torch.topk. None: all weights.

    Returns:
        (B, S_q, S_k) if averaged, else (B, H, S_q, S_k). With `top_k` a pair (values, indices), with last dimension
        `top_k`.
    """
    mask = None if mask is None else mask.reshape((1,) * (4 - mask.dim()) + mask.shape)
    arguments = (q, k, mask, key_mask, lse.detach(), rng_state, dropout_p)
    by_kernel = average and not some_dtensor(q, k) and not _functorch.active()
    if by_kernel and top_k is None:
        return _average_by_kernel(*arguments, 0)
    # torch.compile would unroll the loop over blocks, and torch.func's transforms refuse checkpoint's hooks.
    in_one_block = torch.compiler.is_compiling() or _functorch.active() or (not average and top_k is None)
    compute = _average_by_kernel if by_kernel else _average_by_torch if average else _weights_by_head

    def compute_block(*block) -> tuple[Tensor, ...]:
        weights = compute(*block)
        return (weights,) if top_k is None else tuple(weights.topk(top_k, dim=-1))

    if in_one_block:
        results = compute_block(*arguments, 0)
    else:
        results = _run_in_blocks(compute_block, arguments, recompute=not by_kernel)
    return results[0] if top_k is None else results


def _run_in_blocks(
    compute_block: Callable[..., tuple[Tensor, ...]], arguments: tuple, recompute: bool
) -> tuple[Tensor, ...]:
    """Runs `compute_block` for one block of queries after another. `recompute`: the backward computes blocks again."""
    q, k, mask, key_mask, lse, *dropout = arguments
    rows = max(1, BLOCK_ELEMENTS // max(1, q.size(0) * k.size(2) * (q.size(1) if recompute else 1)))
    if rows >= q.size(2):
        return compute_block(*arguments, 0)
    blocks = []
    for first in range(0, q.size(2), rows):
        queries = slice(first, first + rows)
        block_mask = mask if mask is None or mask.size(2) == 1 else mask[:, :, queries]
        block = (q[:, :, queries], k, block_mask, key_mask, lse[:, :, queries], *dropout, first)
        if recompute:
            blocks.append(checkpoint(compute_block, *block, use_reentrant=False, preserve_rng_state=False))
        else:
            blocks.append(compute_block(*block))
    return tuple(torch.cat(parts, dim=-2) for parts in zip(*blocks, strict=True))


def _average_by_kernel(q, k, mask, key_mask, lse, rng_state, dropout_p, first_row) -> Tensor:
    if rng_state is not None and first_row:
        offsets = rng_state[2:] if len(rng_state) > 2 else rng_state.new_tensor([0, 0, 0, q.size(1)])
        rng_state = torch.cat([rng_state[:2], offsets + offsets.new_tensor([first_row, 0, 0, 0])])
    return _ops.attention_weights(q, k, mask, None, None, rng_state, key_mask, lse, dropout_p=dropout_p)


def _average_by_torch(*arguments) -> Tensor:
    return _weights_by_head(*arguments).mean(dim=1)


def _weights_by_head(q, k, mask, key_mask, _lse, rng_state, dropout_p, first_row) -> Tensor:
    scores = torch.matmul(q * (1.0 / math.sqrt(q.size(-1))), k.transpose(-2, -1))
    weights = _softmax(scores, merge_masks(mask, key_mask))
    if rng_state is None:
        return weights
    keep = dropout_mask(rng_state, *weights.shape, dropout_p, first_row)
    # The factor is finite even for dropout_p 1: with 1 / 0 the gradient of dropped elements would be 0 * inf.
    return weights * keep * (1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0)


def merge_masks(mask: Tensor | None, key_mask: Tensor | None) -> Tensor | None:
    """Merges two masks of `flash_attn` into one, (B, 1 or H, S_q, S_k). A view if one of them is None."""
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
        no_keys = ~mask.any(dim=-1, keepdim=True)
    else:
        mask = mask.to(scores.dtype)
        scores = scores + mask
        no_keys = (mask == -math.inf).all(dim=-1, keepdim=True)
    # Replaces the scores of rows without keys before the softmax. After the softmax, the gradient would still be NaN.
    return torch.softmax(scores.masked_fill(no_keys, 0.0), dim=-1).masked_fill(no_keys, 0.0)
