"""flash_attn_varlen: attention on packed sequences of different lengths, without padding."""

import inspect
from typing import TYPE_CHECKING, Any

from torch import Tensor, are_deterministic_algorithms_enabled
from torch.compiler import is_compiling, is_dynamo_compiling

from . import _float8, _ops
from ._attend import attend
from ._call import FUNCTIONS, INDICES, OF_FLOAT8, Call, take
from ._indexed import KeyNumbers, refuse_dtensors
from ._indexed_packed import attend_packed
from ._options import band_of
from ._second_query import without_second_query
from ._signature import with_arguments_of
from .flex.attention import run_packed_with_functions

if TYPE_CHECKING:
    from torch import dtype
    from torch.nn.attention.flex_attention import BlockMask

    from .flex.attention import MaskMod, ScoreMod


def _flash_attn_varlen(
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
    diagonal: int = 0,
    attention_chunk: int = 0,
    first_key: int = 0,
    qv: Tensor | None = None,
    score_mod: "ScoreMod | None" = None,
    mask_mod: "MaskMod | None" = None,
    block_mask: "BlockMask | None" = None,
    key_indices: Tensor | None = None,
    key_block_indices: Tensor | None = None,
    key_block_size: int = 128,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: "dtype | None" = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """As :func:`flash_attn_varlen`, for calls with keyword arguments and calls that are not ordinary."""
    if (
        qv is score_mod is mask_mod is block_mask is key_indices is key_block_indices is None
        and q_descale is k_descale is v_descale is out_dtype is None
        and not is_compiling()  # torch.compile traces the operator itself
    ):  # fmt: skip
        band_causal, lower_right, left, right = band_of(causal, is_causal, window, alibi_slopes, attention_chunk)
        result = _ops.varlen_if_ordinary(
            enable_gqa, return_lse,
            query, key, value, attn_mask, alibi_slopes, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k,
            rng_state,
            scale, band_causal, lower_right, diagonal, left, right, attention_chunk, first_key, softcap, dropout_p,
            num_splits, unified_max,
            are_deterministic_algorithms_enabled() if deterministic is None else deterministic,
            max_seqlen_q, max_seqlen_k,
        )  # fmt: skip
        if result is not None:
            return result
    return _not_ordinary(locals())


@with_arguments_of(_flash_attn_varlen)
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
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention of each sequence to itself. The sequences are packed one after another in memory.

    Every option of :func:`flash_attn` applies to each sequence separately: diagonals, windows, chunks, ALiBi and masks
    count rows and keys from the start of the sequence. Dropout drops the same elements as in a padded batch. The
    function pads nothing. B is the number of sequences; T_q and T_k are the numbers of rows of ``query`` and ``key``.

    Args:
        query: (T_q, H, D), float32, float64, bfloat16 or float16. Not copied if its last dimension is contiguous.
        key: (T_k, H_kv, D), with the dtype and device of ``query``.
        value: (T_k, H_kv, D_v), as ``key``.
        cu_seqlens_q: (B + 1), int32 or int64, on ``query``'s device: rows ``[cu_seqlens_q[b], cu_seqlens_q[b + 1])`` of
            ``query`` are sequence b. Ascending from 0 to T_q; a sequence may be empty.
        cu_seqlens_k: (B + 1), the same for ``key`` and ``value``.
        max_seqlen_q: at least the length of the longest sequence. None: T_q, which is always correct. On CUDA a smaller
            number avoids empty blocks. On CPU it changes nothing.
        max_seqlen_k: the same for ``key``. None: T_k.
        attn_mask: bool (True is visible) or float (added; receives a gradient), in one of two forms. 4-D, broadcastable
            to (B, H, max_seqlen_q, max_seqlen_k): for example key padding (B, 1, 1, max_seqlen_k), or a mask shared by
            all sequences (1, H, max_seqlen_q, max_seqlen_k). Or (T_q, max_seqlen_k) or (H, T_q, max_seqlen_k): one row
            for each row of ``query``, one column for each key of that row's sequence.
        enable_gqa: allows H_kv < H. Query head h uses key and value head ``h // (H // H_kv)``.
        causal: "upper_left" or "lower_right", the corner of each sequence's own score matrix. flash-attention's
            ``causal=True`` is "lower_right".
        alibi_slopes: (H) or (B, H).
        sink: (H) or (B, H).
        seqused_q: (B), int32 or int64: the number of rows in use, for each sequence. The other rows get out 0, lse
            -inf and gradients 0.
        seqused_k: (B), int32 or int64: the number of keys in use, for each sequence. Later keys are ignored.
        qv: (T_q, H, D_v): a second query, as in FlashAttention-3, for multi-head latent attention. Scores are
            query key^T + qv value^T, and ``scale`` is 1/sqrt(D + D_v) by default. ``key`` and ``value`` are copied into
            one tensor, unless they need no gradient and are neighbouring columns of one tensor.
        score_mod: a function of the scores, as in :func:`flash_attn`, with gradients. ``b`` counts sequences, ``q_idx``
            and ``kv_idx`` count from the start of the sequence. On CUDA: in the tier `simt`.
        mask_mod: a function that returns True if a query sees a key, with the arguments of ``score_mod``.
        block_mask: a BlockMask for the longest sequence or a longer one. Its batch is 1 or B.
        key_indices: (H_kv or 1, T_q, n), int32 or int64: the keys that each row of ``query`` may attend to. They count
            from the start of the row's sequence. -1 means no key. As in :func:`flash_attn`, but masks and ALiBi are not
            allowed.
        key_block_indices: (H_kv or 1, T_q, n), int32 or int64: blocks of ``key_block_size`` keys of the sequence.
        q_descale, k_descale, v_descale: (B, H_kv), float32: factors of float8_e4m3fn tensors, as in
            :func:`flash_attn`. ``seqused_q`` and ``qv`` are not allowed.
        out_dtype: as in :func:`flash_attn`.

    For the other arguments see :func:`flash_attn`.

    Returns:
        out (T_q, H, D_v); or (out, lse) with lse (H, T_q) in float32 (float64 for float64 inputs), natural logarithm.

    Raises:
        TypeError, ValueError: as :func:`flash_attn`. On CPU offsets that do not ascend from 0 to the number of rows
            raise a ValueError. On CUDA the call does not check them, because reading them would wait for the GPU. Then
            results are wrong, but no kernel accesses memory outside of the tensors.

    On CPU the results of a sequence have the same bits in every pack, for any number of threads.

    Source: Dao, "FlashAttention-2", 2023 (arXiv 2307.08691); packing as in flash-attention's varlen functions.
    """
    if not options and not is_dynamo_compiling():
        result = _ops.varlen_if_ordinary(
            enable_gqa, False,
            query, key, value, attn_mask, None, None, cu_seqlens_q, cu_seqlens_k, None, None, None,
            scale, is_causal, False, 0, None, None, 0, 0, 0.0, dropout_p, 0, None,
            are_deterministic_algorithms_enabled(), max_seqlen_q, max_seqlen_k,
        )  # fmt: skip
        if result is not None:
            return result
    return _flash_attn_varlen(
        query, key, value, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, attn_mask, dropout_p, is_causal,
        scale, enable_gqa, **options,
    )  # fmt: skip


_PARAMETERS = tuple(inspect.signature(flash_attn_varlen).parameters)


def _not_ordinary(given: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    """Runs a call of flash_attn_varlen that is not ordinary. ``given``: its local variables."""
    given = {name: given[name] for name in _PARAMETERS}
    return_lse = given["return_lse"]
    if _float8.is_float8(given["query"], *(given[name] for name in OF_FLOAT8)):
        out, lse = _float8.attend_packed(given)
        return (out, lse) if return_lse else out
    given = without_second_query(given)
    numbers = KeyNumbers.from_arguments(**take(given, (*INDICES, "key_block_size")))
    functions = take(given, FUNCTIONS)
    call = Call.from_arguments(_ops.VARLEN, **given)
    if all(function is None for function in functions.values()):
        if numbers is None:
            out, lse = attend(call)
        else:
            refuse_dtensors(numbers, *(call.tensors[name] for name in ("query", "key", "value")))
            out, lse = attend_packed(call, numbers)
    elif numbers is None:
        out, lse = run_packed_with_functions(call, functions)
    else:
        raise NotImplementedError(f"{numbers.name}: got a tensor with a function; allowed: one of them")
    return (out, lse) if return_lse else out
