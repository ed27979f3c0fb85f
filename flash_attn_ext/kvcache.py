"""flash_attn_with_kvcache: appends new tokens to a cache of keys and values, then attends to the cache."""

import inspect
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from . import _cache, _ops
from ._attend import handler_of_dtensors
from ._indexed import refuse_dtensors
from ._signature import with_arguments_of

if TYPE_CHECKING:
    from torch import dtype
    from torch.nn.attention.flex_attention import BlockMask

    from .flex.attention import MaskMod, ScoreMod


def _flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    page_table: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    k_zeros: Tensor | None = None,
    v_zeros: Tensor | None = None,
    tree_mask: Tensor | None = None,
    sink: Tensor | None = None,
    attention_chunk: int = 0,
    learnable_sink: Tensor | None = None,
    score_mod: "ScoreMod | None" = None,
    mask_mod: "MaskMod | None" = None,
    block_mask: "BlockMask | None" = None,
    key_indices: Tensor | None = None,
    key_block_indices: Tensor | None = None,
    key_block_size: int = 128,
    cache_format: str | None = None,
    q_descale: Tensor | None = None,
    out_dtype: "dtype | None" = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """As :func:`flash_attn_with_kvcache`, for calls with keyword arguments and calls that are not ordinary."""
    result = None
    if (
        qv is score_mod is mask_mod is block_mask is key_indices is key_block_indices is cache_format is None
        and q_descale is out_dtype is None
        and cu_seqlens_k_new is rotary_seqlens is page_table is tree_mask is learnable_sink is None
        and not is_compiling()
    ):
        # An error here has the operator's argument names. The code below raises it again with the caller's names.
        try:
            result = _ops.kvcache_if_ordinary(
                q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table,
                alibi_slopes, sink, k_descale, v_descale, cu_seqlens_q, k_scales, v_scales, k_zeros, v_zeros,
                cache_seqlens, softmax_scale, causal, window_size, softcap, rotary_interleaved, num_splits,
                return_softmax_lse, max_seqlen_q, attention_chunk,
            )  # fmt: skip
        except (TypeError, ValueError):
            result = None
    if result is not None:
        return result
    return _of_other_arguments(locals())


@with_arguments_of(_flash_attn_with_kvcache)
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Appends ``k`` and ``v`` to the caches in place, then attends: flash-attention's function of this name.

    B is the number of sequences, S_q the number of new queries and S_new the number of new keys of each sequence. There
    are no derivatives. ``q``, the caches, ``k``, ``v`` and ``qv`` may require a gradient only if gradients are
    disabled. If another tensor requires a gradient, such as ``sink``, the backward raises an error; only with
    ``key_indices`` do ``sink`` and the descales have gradients. All checks run before the first row is written. Causal
    masks, windows, chunks and ALiBi are aligned to the lower right corner: the last query has the position of the last
    key.

    Args:
        q: (B, S_q, H, D); or packed (T_q, H, D) with ``cu_seqlens_q``.
        k_cache: (caches, rows, H_k, D), with H a multiple of H_k; or, with ``block_table``, pages
            (num_pages, page_size, H_k, D) of any size. ``q``'s dtype; or int8, float8_e4m3fn or float8_e5m2 with
            ``k_descale``; or int4: uint8, (..., D / 2), with ``k_scales``. Its last dimension is contiguous. If rows
            are appended, no two elements of ``k_cache`` may share memory, and ``v_cache``, ``q``, ``k`` and ``v`` may
            not share memory with ``k_cache``. Some overlaps of strided views are not found.
        v_cache: (caches, rows, H_k, D_v), or pages, as ``k_cache``.
        k: (B, S_new, H_k, D), written after the ``cache_seqlens`` rows of each sequence; or packed (T_new, H_k, D)
            with ``cu_seqlens_k_new``. ``block_table`` must contain the pages of the new rows.
        v: (B, S_new, H_k, D_v), as ``k``.
        rotary_cos: (positions, rotary_dim / 2). ``k`` is rotated by its position before it is written. ``q`` is
            rotated by its own position if ``causal`` or a window is given, otherwise by the first new key's position.
        rotary_sin: (positions, rotary_dim / 2).
        cache_seqlens: the number of rows in each sequence's cache: (B), int32 or int64, or one number. None: all rows.
        cache_batch_idx: (B): the index of each sequence's cache. None: sequence b has cache b. With ``block_table``:
            the index of each sequence's row in the table, which may have any number of rows.
        cache_leftpad: (B): the number of rows to ignore at the start of each cache. Rotary positions still count from
            the start of the cache, as in flash-attention; ``rotary_seqlens`` sets other positions.
        block_table: (B, pages of a sequence), int32 or int64: the indices of each sequence's pages.
        window_size: (left, right); -1 means no limit.
        rotary_interleaved: True: pairs of columns are (0, 1), (2, 3), .... False: (c, c + rotary_dim / 2).
        alibi_slopes: (H) or (B, H).
        num_splits: the number of splits of the keys, as in :func:`flash_attn`.
        return_softmax_lse: also returns the logsumexp of the scores, (B, H, S_q) or (H, T_q).
        cu_seqlens_q, cu_seqlens_k_new: (B + 1) offsets of packed ``q`` and ``k``.
        max_seqlen_q: the length of the longest packed sequence of ``q``. None is always correct.
        rotary_seqlens: (B): positions of the first new keys for the rotation, instead of ``cache_seqlens``.
        page_table: FlashAttention-3's name for ``block_table``.
        k_descale: factors of 8-bit keys: (H_k), (caches or pages, H_k), or broadcastable to
            (caches or pages, rows, H_k), one for each token.
        v_descale: factors of 8-bit values, as ``k_descale``.
        k_scales: scales of int4 keys, (caches or pages, rows, H_k, D / group), float16 or float32. A group is a
            multiple of 32 columns, or the whole row. :func:`quantize_int4` defines the format. New rows of ``k`` are
            rounded to this format: the call writes their scales and zero points, too.
        v_scales: scales of int4 values, as ``k_scales``. Either both caches are int4 or neither.
        k_zeros: zero points of int4 keys, with the shape and the dtype of ``k_scales``. None: 8.
        v_zeros: zero points of int4 values, as ``k_zeros``.
        tree_mask: for a tree of new tokens (speculative decoding): which new token attends to which new token. Element
            (i, j) is for query i and key j of the sequence's last S_q keys. All earlier keys are visible. bool: True is
            visible. Float: added to the scores. (S_q, S_q), (B, S_q, S_q) or broadcastable to (B, H, S_q, S_q); packed:
            (T_q, max_seqlen_q) or (H, T_q, max_seqlen_q). ``causal`` and a window apply, too. Do not pass ``causal``
            for a tree, because its branches are stored one after another.
        sink: (H) or (B, H): one more score in each row, without a value, as in :func:`flash_attn`.
        attention_chunk: above 0, a query sees only keys in the chunk of its position, as in :func:`flash_attn`. Chunks
            count from the first row after ``cache_leftpad``.
        learnable_sink: FlashAttention-4's name for ``sink``.
        qv: q's shape with the head dimension D_v: a second query, for multi-head latent attention. Scores are
            q k^T + qv v^T, and ``softmax_scale`` is 1/sqrt(D + D_v) by default. The caches must have q's dtype.
            Neighbouring columns of one tensor, for example ``kv_cache.split([64, 512], -1)``, are read in place. If the
            caches are separate, each tile is joined in a copy (CPU only), or, with ``key_indices``, each chosen row.
        score_mod: a function of the scores, as in :func:`flash_attn`. ``b`` counts sequences. ``kv_idx`` counts the
            rows of the sequence's cache after ``cache_leftpad``. ``q_idx`` is the position of the query's token: the
            last query has the index of the last key. So training and decoding use the same function. On CUDA: in the
            tier `simt`, for caches without pages.
        mask_mod: a function that returns True if a query sees a key, with the arguments of ``score_mod``.
        block_mask: a BlockMask for the longest sequence or a longer one. Its batch is 1 or B.
        key_indices: (B or 1, H_k or 1, S_q, n), or packed (H_k or 1, T_q, n), int32 or int64: the rows of the
            sequence's cache that each query may attend to. -1 means no row. Rows count from the start of the cache,
            also with ``cache_leftpad``, and include the rows of ``k``. ``tree_mask`` and ``alibi_slopes`` are not
            allowed. Caches or pages must be contiguous, one after another. Chosen rows of int8 and float8 caches, and
            of separate caches with ``qv``, are copied first, in q's dtype.
        key_block_indices: blocks of ``key_block_size`` rows of the sequence's cache, as ``key_indices``.
        cache_format: "flashmla_fp8": ``k_cache`` has FlashMLA's rows of 656 bytes for multi-head latent attention. Its
            shape is (caches or pages, rows, H_k, 656), float8_e4m3fn or uint8. ``v_cache`` is the same tensor. A row is
            512 columns of float8_e4m3, four float32 factors of 128 columns each, and 64 columns of bfloat16. ``q`` has
            576 columns, ``out`` 512. With ``key_indices`` only the chosen rows are widened. The caller writes the rows:
            ``k``, ``v`` and ``qv`` are errors. CPU only. None: rows of D and D_v elements.
        q_descale: (B, H_k), float32; each size may be 1. The factor of ``q`` in float8_e4m3fn: scores are
            ``softmax_scale * q_descale * k_descale * <q, k>``. The caches, and ``k`` and ``v``, must be float8_e4m3fn,
            too. ``k`` and ``v`` are copied into the caches unchanged, and use the factors of the caches. Rotary
            embedding, ``qv`` and ``cache_format`` are not allowed.
        out_dtype: the dtype of ``out`` for ``q`` in float8_e4m3fn: bfloat16 or float16. None: bfloat16; ``q``'s dtype
            for other queries.

    Returns:
        out (B, S_q, H, D_v) or (T_q, H, D_v).

    Raises:
        TypeError, ValueError: an argument is not allowed. On CPU also: a length, position or page number is outside of
            the cache.

    Source: Dao et al., "Flash-Decoding", 2023; Kwon et al., "PagedAttention", 2023 (arXiv 2309.06180).
    """
    if not options and not is_dynamo_compiling():
        try:
            result = _ops.kvcache_if_ordinary(
                q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, block_table,
                alibi_slopes, None, None, None, None, None, None, None, None,
                cache_seqlens, softmax_scale, causal, window_size, softcap, rotary_interleaved, num_splits,
                return_softmax_lse, None, 0,
            )  # fmt: skip
        except (TypeError, ValueError):  # the function below raises it again
            result = None
        if result is not None:
            return result
    return _flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes, num_splits, return_softmax_lse,
        **options,
    )  # fmt: skip


_PARAMETERS = tuple(inspect.signature(flash_attn_with_kvcache).parameters)


def _of_other_arguments(given: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    """Runs a call of flash_attn_with_kvcache that is not ordinary. ``given``: its local variables."""
    call = _cache.CacheCall.from_arguments(**{name: given[name] for name in _PARAMETERS})
    q, k_cache, v_cache, k, v = (given[name] for name in ("q", "k_cache", "v_cache", "k", "v"))
    if call.numbers is not None:
        refuse_dtensors(call.numbers, q, k_cache, v_cache, k, v)
    on_dtensors = handler_of_dtensors("flash_attn_with_kvcache", q, k_cache, v_cache, k, v)
    out, lse = _cache.attend(call) if on_dtensors is None else on_dtensors(call)
    return (out, lse) if call.return_lse else out
