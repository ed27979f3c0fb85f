"""indexer_topk: the keys that the indexer of DeepSeek sparse attention chooses for each query."""

from torch import Tensor

from .. import _ops
from .._options import as_type
from ._arguments import band_options, checked_scale, checked_tensors


def indexer_topk(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    topk: int,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal: str | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    diagonal: int = 0,
    key_mask: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    return_scores: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The ``topk`` visible keys with the largest scores of each query, without storing the scores.

    ``score[i, j] = sum_h weights[i, h] * relu(scale * <q[h, i], k[j]>)``: the lightning indexer of DeepSeek V3.2. All
    heads share the rows of ``k``. Memory: O(S_q topk). On CUDA torch's operators compute it, block by block.

    Args:
        q: (B, H_I, S_q, D_I), float32, float64, bfloat16 or float16.
        k: (B, S_k, D_I), dtype of ``q``: one row for each key. With ``cache_seqlens``: a cache. With ``block_table``:
            pages, (pages, page size, D_I).
        weights: (B, S_q, H_I), dtype of ``q`` or float32 (float64 for float64): the weight of each head. Include a
            factor such as ``H_I ** -0.5`` in ``weights``.
        topk: the number of slots for each query. More slots than visible keys are allowed.
        scale: factor of ``<q, k>``; ``1 / sqrt(D_I)`` if None.
        is_causal, causal, window, diagonal: as in :func:`flash_attn`. With ``cache_seqlens``, the lower right corner is
            at each sequence's last key.
        key_mask: (B, S_k) bool, True for a visible key. With ``block_table``, S_k is pages times page size.
        cache_seqlens: (B) int32 or int64: the number of keys of each sequence in the cache. The queries are the last
            keys if ``causal="lower_right"``.
        block_table: (B, pages of a sequence) int32 or int64: the indices of each sequence's pages.
        return_scores: also returns the scores of the chosen keys.

    Returns:
        indices (B, 1, S_q, topk) int32: ascending keys, then -1 where a row has fewer than ``topk`` visible keys. With
        ``return_scores``: (indices, scores), scores (B, 1, S_q, topk) in float32 (float64 for float64 inputs), -inf for
        -1. Neither has a gradient; :func:`indexer_scores` does.

    If scores are equal, the lower index is chosen. NaN counts as the largest score, as in :func:`torch.topk`. A NaN in
    a hidden key changes nothing. The result does not depend on the number of threads.

    Raises:
        TypeError, ValueError: an argument that is not allowed; the message names it.
        NotImplementedError: a device other than the CPU and CUDA.

    Source: DeepSeek-AI, "DeepSeek-V3.2", 2025 (arXiv 2512.02556), equation 1.
    """
    tensors = {
        "q": q, "k": k, "weights": weights, "key_mask": key_mask, "cache_seqlens": cache_seqlens,
        "block_table": block_table,
    }  # fmt: skip
    rows = ("q", "k", "weights")
    indices, scores = _ops.indexer_topk(
        *checked_tensors(tensors, rows, detached=rows),
        as_type("int", "topk", topk),
        scale=checked_scale("scale", scale, q),
        return_scores=as_type("bool", "return_scores", return_scores),
        **band_options(is_causal, causal, window, diagonal),
    )
    return (indices, scores) if return_scores else indices
