"""flash_attn_varlen: attention on packed sequences of different lengths, without padding."""

import torch
from torch import Tensor

from ._varlen_rules import attention_varlen
from .functional import _as_type, _rng_state_for, check_is_dense, checked_options, operator_options, some_dtensor

_TENSORS = ("query", "key", "value", "attn_mask", "alibi_slopes", "sink", "cu_seqlens_q", "cu_seqlens_k",
            "seqused_q", "seqused_k", "rng_state")  # fmt: skip
_OPTIONAL = ("attn_mask", "alibi_slopes", "sink", "seqused_q", "seqused_k", "rng_state")


def flash_attn_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal: str | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    return_lse: bool = False,
    rng_state: Tensor | None = None,
    num_splits: int = 0,
    unified_max: float | None = None,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of each sequence to itself, for sequences that lie behind each other in memory.

    Every option is that of :func:`flash_attn` and holds for each sequence by itself: diagonals, windows, ALiBi and
    masks count rows and keys from the sequence's start, and dropout drops what it would drop in a padded batch.
    Nothing is padded inside. B counts sequences, T_q and T_k the rows of ``query`` and ``key``.

    Args:
        query: (T_q, H, D), float32, float64, bfloat16 or float16. Read in place if its last dimension is contiguous.
        key: (T_k, H_kv, D), dtype and device of ``query``.
        value: (T_k, H_kv, D_v), likewise.
        cu_seqlens_q: (B + 1), int32 or int64, on ``query``'s device: rows ``[cu_seqlens_q[b], cu_seqlens_q[b + 1])`` of
            ``query`` are sequence b. Ascending from 0 to T_q; a sequence may be empty.
        cu_seqlens_k: (B + 1), the same for ``key`` and ``value``.
        max_seqlen_q: at least the length of the longest sequence. None stands for T_q, which is always right; on CUDA
            a tight number saves empty blocks. On CPU it changes nothing.
        max_seqlen_k: likewise.
        attn_mask: bool (True attends) or float (added; receives a gradient), in one of two forms. 4-D, broadcastable to
            (B, H, max_seqlen_q, max_seqlen_k): key padding is (B, 1, 1, max_seqlen_k), a table shared by all sequences
            (1, H, max_seqlen_q, max_seqlen_k). Or (T_q, max_seqlen_k) or (H, T_q, max_seqlen_k): its rows are those of
            ``query``, its columns the keys of the row's own sequence.
        enable_gqa: allow H_kv < H; query head h uses key/value head ``h // (H // H_kv)``.
        causal: "upper_left" or "lower_right", the corner of each sequence's own score matrix. flash-attention's
            ``causal=True`` is "lower_right".
        alibi_slopes: (H) or (B, H).
        sink: (H) or (B, H).
        seqused_q: (B), int32 or int64: only so many rows of each sequence are in use. Others get out 0, lse -inf and
            gradients 0.
        seqused_k: (B), likewise: later keys are as if they were not there.

    For the other arguments see :func:`flash_attn`.

    Returns:
        out (T_q, H, D_v); or (out, lse) with lse (H, T_q) in float32 (float64 for float64 inputs), natural logarithm.

    Raises:
        TypeError, ValueError: as :func:`flash_attn`. On CPU offsets that do not ascend from 0 to the number of rows
            raise a ValueError; on CUDA, where reading them would wait for the GPU, they give wrong results but never
            touch memory outside the tensors.

    On CPU a sequence gives the same bits alone as in any pack, for any number of threads.

    Source: Dao, "FlashAttention-2", 2023 (arXiv 2307.08691); packing as in flash-attention's varlen functions.
    """
    if some_dtensor(query, key, value):
        from .distributed import _dtensor_packed  # which imports torch.distributed.tensor

        return _dtensor_packed.varlen(
            query, key, value, attn_mask, alibi_slopes, sink, rng_state, dropout_p=dropout_p, return_lse=return_lse,
            tensors={"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q,
                     "seqused_k": seqused_k},
            max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, is_causal=is_causal, scale=scale,
            enable_gqa=enable_gqa, causal=causal, window=window, softcap=softcap, num_splits=num_splits,
            unified_max=unified_max, deterministic=deterministic,
        )  # fmt: skip
    tensors, options = operator_arguments(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, attn_mask, dropout_p, is_causal,
        scale, enable_gqa, causal=causal, window=window, softcap=softcap, alibi_slopes=alibi_slopes, sink=sink,
        seqused_q=seqused_q, seqused_k=seqused_k, rng_state=rng_state, num_splits=num_splits, unified_max=unified_max,
        deterministic=deterministic,
    )  # fmt: skip
    out, lse = attention_varlen(*tensors, **options)
    return (out, lse) if return_lse else out


def operator_arguments(
    query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, attn_mask, dropout_p, is_causal, scale,
    enable_gqa, *, causal, window, softcap, alibi_slopes, sink, seqused_q, seqused_k, rng_state, num_splits,
    unified_max, deterministic,
) -> tuple[tuple[Tensor | None, ...], dict]:  # fmt: skip
    """The operator's tensors, in the order of its schema, and its options, from those of :func:`flash_attn_varlen`."""
    options = operator_options(
        dropout_p, is_causal, scale, causal, window, softcap, alibi_slopes, num_splits, unified_max, deterministic
    )
    if dropout_p != 0.0 and rng_state is None:
        rng_state = _rng_state_for(query, dropout_p)
    tensors = (
        query, key, value, attn_mask, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, rng_state,
    )  # fmt: skip
    for name, t in zip(_TENSORS, tensors, strict=True):
        if t is not None or name not in _OPTIONAL:
            check_is_dense(name, t)
    if not enable_gqa and key.dim() == 3 == query.dim() and key.shape[1] != query.shape[1]:
        raise ValueError(
            f"key: got {key.shape[1]} heads for {query.shape[1]} query heads; allowed: the same number, or a divisor "
            "with enable_gqa=True"
        )
    if attn_mask is not None and attn_mask.dim() == 2:
        attn_mask = attn_mask[None]
        tensors = (*tensors[:3], attn_mask, *tensors[4:])
    return tensors, checked_options(options) | {
        "max_seqlen_q": _as_type("int?", "max_seqlen_q", max_seqlen_q),
        "max_seqlen_k": _as_type("int?", "max_seqlen_k", max_seqlen_k),
    }


def flash_attn_jagged(
    query: Tensor, key: Tensor, value: Tensor, *, key_mask: None = None, return_lse: bool = False, **options
):
    """:func:`flash_attn` of nested tensors (B, H, j, D), jagged: :func:`flash_attn_varlen` of their rows."""
    if key_mask is not None:
        raise ValueError(
            "key_mask: got a tensor with nested query, key, value; allowed: None. Leave keys out of the sequences"
        )
    rows, offsets = [], []
    for name, t in (("query", query), ("key", key), ("value", value)):
        if getattr(t, "layout", None) is not torch.jagged or t.dim() != 4 or t._ragged_idx not in (1, 2):
            kind = f"a tensor of shape {list(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
            raise ValueError(
                f"{name}: got {kind}; allowed beside nested tensors: jagged ones, (batch, heads, j, head_dim)"
            )
        t = t.transpose(1, 2)  # (B, j, H, D): rows first
        if t._ragged_idx != 1 or t.lengths() is not None:
            raise ValueError(
                f"{name}: got a jagged tensor with holes, or ragged heads; allowed: rows behind each other"
            )
        rows.append(t.values())
        offsets.append(t.offsets())
    longest = [int(t.diff().max()) if len(t) > 1 and t.is_cpu else None for t in offsets[:2]]
    out, lse = flash_attn_varlen(*rows, *offsets[:2], *longest, return_lse=True, **options)
    out = torch.nested.nested_tensor_from_jagged(out, offsets[0]).transpose(1, 2)
    if not return_lse:
        return out
    return out, torch.nested.nested_tensor_from_jagged(lse.T.contiguous(), offsets[0]).transpose(1, 2)
