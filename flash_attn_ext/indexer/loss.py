"""indexer_loss: the loss that trains the indexer, without an S_q x S_k tensor."""

from torch import Tensor

from .. import _ops
from ._arguments import band_options, checked_scale, checked_tensors

_REDUCTIONS = ("mean", "sum", "none")


def indexer_loss(
    q_index: Tensor,
    k_index: Tensor,
    weights: Tensor,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    *,
    indices: Tensor | None = None,
    index_scale: float | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    causal: str | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    diagonal: int = 0,
    key_mask: Tensor | None = None,
    reduction: str = "mean",
) -> Tensor:
    """``sum_i KL(target_i || softmax_j score[i, j])``: the distance of the indexer from the main attention.

    ``score`` is as in :func:`indexer_topk`. ``target_i`` is the main attention's probabilities of row i, summed over
    the heads and divided by their sum over the row. Without ``indices``, j runs over all visible keys (the dense
    warm-up of DeepSeek V3.2). With ``indices``, j runs over the chosen keys (its sparse stage). No S_q x S_k tensor is
    stored.

    Args:
        q_index: (B, H_I, S_q, D_I), float32, float64, bfloat16 or float16.
        k_index: (B, S_k, D_I), dtype of ``q_index``.
        weights: (B, S_q, H_I), dtype of ``q_index`` or float32 (float64 for float64).
        query: (B, H, S_q, D), dtype of ``q_index``: queries of the main attention.
        key: (B, H_kv, S_k, D), dtype of ``q_index``: keys of the main attention. H_kv divides H.
        lse: (B, H, S_q), float32 (float64 for float64): the logsumexp of the main attention, from
            ``flash_attn(..., return_lse=True)`` with the same ``scale`` and masks. Softcap and ALiBi are not supported.
        indices: (B, 1, S_q, topk) int32 or int64, the chosen keys, each at most once; -1 means no key. A hidden key
            does not count. A number outside of the keys is an error on CPU, and means no key on CUDA.
        index_scale: factor of ``<q_index, k_index>``; ``1 / sqrt(D_I)`` if None.
        scale: factor of ``<query, key>``; ``1 / sqrt(D)`` if None.
        is_causal, causal, window, diagonal: as in :func:`flash_attn`.
        key_mask: (B, S_k) bool, True for a visible key.
        reduction: "mean" over all B S_q rows, "sum", or "none".

    Returns:
        the loss in float32 (float64 for float64 inputs): a number, or (B, S_q) with ``reduction="none"``. A row without
        keys, or without a target, has loss 0.

    ``q_index``, ``k_index`` and ``weights`` have gradients, of first order and in reverse mode. ``query``, ``key`` and
    ``lse`` have no gradient, because the target is detached, as in the report. Gradients are bitwise equal in every run
    and for any number of threads.

    Raises:
        TypeError, ValueError: an argument that is not allowed; the message names it.
        NotImplementedError: a device other than the CPU and CUDA; a second derivative.

    Source: DeepSeek-AI, "DeepSeek-V3.2", 2025 (arXiv 2512.02556), equations 3 and 4.
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction: got {reduction!r}; allowed: {', '.join(map(repr, _REDUCTIONS))}")
    tensors = {
        "q_index": q_index, "k_index": k_index, "weights": weights, "query": query, "key": key, "lse": lse,
        "indices": indices, "key_mask": key_mask,
    }  # fmt: skip
    main = ("query", "key", "lse")
    loss, _, _ = _ops.indexer_loss(
        *checked_tensors(tensors, ("q_index", "k_index", "weights", *main), detached=main),
        scale=checked_scale("index_scale", index_scale, q_index),
        main_scale=checked_scale("scale", scale, query),
        **band_options(is_causal, causal, window, diagonal),
    )
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.mean()
