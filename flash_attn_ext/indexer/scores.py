"""indexer_scores: the indexer's scores at chosen keys, with gradients."""

from torch import Tensor

from .. import _ops
from ._arguments import checked_scale, checked_tensors


def indexer_scores(q: Tensor, k: Tensor, weights: Tensor, indices: Tensor, *, scale: float | None = None) -> Tensor:
    """The scores of the chosen keys, ``sum_h weights[i, h] * relu(scale * <q[h, i], k[j]>)`` for each j in row i.

    Args:
        q: (B, H_I, S_q, D_I), float32, float64, bfloat16 or float16.
        k: (B, S_k, D_I), dtype of ``q``.
        weights: (B, S_q, H_I), dtype of ``q`` or float32 (float64 for float64).
        indices: (B, 1, S_q, topk) int32 or int64, from 0 to S_k - 1, in any order; -1 means no key.
            :func:`indexer_topk` returns them. Other numbers are an error on CPU, and mean no key on CUDA.
        scale: factor of ``<q, k>``; ``1 / sqrt(D_I)`` if None.

    Returns:
        scores (B, 1, S_q, topk) in float32 (float64 for float64 inputs); -inf for -1.

    ``q``, ``k`` and ``weights`` have gradients, of first order and in reverse mode. The gradients are bitwise equal in
    every run and for any number of threads. The derivative of relu at 0 is 0. Memory: O(S_q topk). The backward on CPU
    also allocates 8 copies of ``k`` in the accumulator's dtype.

    Raises:
        TypeError, ValueError: an argument that is not allowed; the message names it.
        NotImplementedError: a device other than the CPU and CUDA; a second derivative.
    """
    tensors = {"q": q, "k": k, "weights": weights, "indices": indices}
    rows = checked_tensors(tensors, tuple(tensors), detached=())
    return _ops.indexer_scores(*rows, scale=checked_scale("scale", scale, q))
