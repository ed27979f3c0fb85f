"""indexer_topk composed of torch's operators, for devices without a kernel. It computes blocks, never S x S scores."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

BLOCK_Q, BLOCK_K = 64, 2048


def topk(
    q: Tensor, k: Tensor, weights: Tensor, key_mask: Tensor | None, cache_seqlens: Tensor | None,
    block_table: Tensor | None, count: int, *, scale: float, causal: bool = False, lower_right: bool = False,
    window_left: int | None = None, window_right: int | None = None, diagonal: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns (indices, scores) of the operator indexer_topk, (B, 1, S_q, count).

    Memory: O(S_q count), and one tile of scores for each index head.
    """
    accumulator = torch.float64 if q.dtype == torch.float64 else torch.float32
    batch, _, seqlen_q, _ = q.shape
    seqlen_k = k.shape[1] if block_table is None else k.shape[1] * block_table.shape[1]
    indices = torch.full((batch, 1, seqlen_q, count), -1, dtype=torch.int32, device=q.device)
    scores = torch.full(indices.shape, -torch.inf, dtype=accumulator, device=q.device)
    if causal:
        window_right = 0 if window_right is None else min(window_right, 0)
    for b in range(batch):
        length = seqlen_k if cache_seqlens is None else cache_seqlens[b]
        shift = diagonal + (length - seqlen_q if lower_right else 0)
        for i0 in range(0, seqlen_q, BLOCK_Q):
            i = torch.arange(i0, min(i0 + BLOCK_Q, seqlen_q), device=q.device)[:, None]
            best = torch.full((len(i), 0), -torch.inf, dtype=accumulator, device=q.device)
            numbers = torch.empty((len(i), 0), dtype=torch.int64, device=q.device)
            rows, own_weights = q[b, :, i[:, 0]].to(accumulator), weights[b, i[:, 0]].to(accumulator)
            for j0 in range(0, seqlen_k, BLOCK_K):
                if cache_seqlens is None and window_right is not None and j0 > i0 + len(i) - 1 + shift + window_right:
                    break
                j = torch.arange(j0, min(j0 + BLOCK_K, seqlen_k), device=q.device)
                products = torch.relu(rows @ _keys(k, block_table, b, j).to(accumulator).mT * scale)
                tile = torch.einsum("ih,hij->ij", own_weights, products)
                visible = (j < length).expand(tile.shape)
                if window_right is not None:
                    visible = visible & (j <= i + shift + window_right)
                if window_left is not None:
                    visible = visible & (j >= i + shift - window_left)
                if key_mask is not None:
                    visible = visible & key_mask[b, j]
                best = torch.cat([best, tile.masked_fill(~visible, -torch.inf)], 1)
                numbers = torch.cat([numbers, torch.where(visible, j, -1)], 1)
                best, numbers = _largest(best, numbers, count)
            ascending = torch.where(numbers < 0, seqlen_k, numbers).argsort(1)
            indices[b, 0, i[:, 0], : numbers.shape[1]] = numbers.gather(1, ascending).int()
            scores[b, 0, i[:, 0], : numbers.shape[1]] = best.gather(1, ascending)
    return indices, scores


def _topk_on_cuda(
    q: Tensor, k: Tensor, weights: Tensor, key_mask: Tensor | None, cache_seqlens: Tensor | None,
    block_table: Tensor | None, count: int, *, return_scores: bool = False, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The operator's kernel for CUDA. Checks shapes and dtypes as on CPU, but not the values in the tensors."""
    tensors = (q, k, weights, key_mask, cache_seqlens, block_table)
    on_meta = (None if t is None else t.to("meta") for t in tensors)
    torch.ops.flash_attn_ext.indexer_topk(*on_meta, count, return_scores=return_scores, **options)
    indices, scores = topk(*tensors, count, **options)
    return indices, scores if return_scores else scores.new_empty(0)


torch.library.impl("flash_attn_ext::indexer_topk", "CUDA", _topk_on_cuda)


def _keys(k: Tensor, block_table: Tensor | None, b: int, j: Tensor) -> Tensor:
    """Returns the rows of k for the keys j of sequence b."""
    if block_table is None:
        return k[b, j]
    page = block_table[b].long()[j.div(k.shape[1], rounding_mode="floor")]
    page = page.clamp(0, max(len(k) - 1, 0))  # on a GPU the values were not checked
    return k[page, j % k.shape[1]]


def _largest(scores: Tensor, numbers: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the ``count`` largest scores of each row. Ties: the first key.

    Hidden keys (-1) are last; NaN is the largest.
    """
    order = scores.argsort(dim=1, descending=True, stable=True)
    hidden_last = (numbers.gather(1, order) < 0).int().argsort(dim=1, stable=True)
    order = order.gather(1, hidden_last)[:, :count]
    return scores.gather(1, order), numbers.gather(1, order)
