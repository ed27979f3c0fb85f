"""flash_attn: scaled dot product attention with torch's meaning, and more options by keyword.

flash_attn passes an ordinary call to the operator. csrc/ops/keys/flash_attn_arguments.h reads its arguments.
_flash_attn makes a Call (_call.py) of every other call, which _attend.py runs. csrc/ops/checks checks shapes and
dtypes, for every device.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, are_deterministic_algorithms_enabled
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.overrides import handle_torch_function, has_torch_function_variadic

from . import _dense, _float8, _indexed, _int8, _ops, _packed
from ._attend import attend
from ._call import FUNCTIONS, INDICES, OF_FLOAT8, Call
from ._dropout import dropout_mask, new_rng_state
from ._hints import unknown_argument, with_layout_hint
from ._options import as_type, band, checked_options
from ._signature import with_arguments_of
from ._tensor_checks import check_is_dense, is_causal_bias
from .flex.attention import refuse_dtensors_with_functions, run_if_ordinary, run_with_functions

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from .flex.attention import MaskMod, ScoreMod

__all__ = ["dropout_mask", "flash_attn", "new_rng_state"]


def _flash_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
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
    key_mask: Tensor | None = None,
    return_lse: bool = False,
    rng_state: Tensor | None = None,
    num_splits: int = 0,
    unified_max: float | None = None,
    deterministic: bool | None = None,
    diagonal: int = 0,
    attention_chunk: int = 0,
    first_key: int = 0,
    score_mod: "ScoreMod | None" = None,
    mask_mod: "MaskMod | None" = None,
    block_mask: "BlockMask | None" = None,
    key_indices: Tensor | None = None,
    key_block_indices: Tensor | None = None,
    key_block_size: int = 128,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    quantize: str | None = None,
    **unknown: NoReturn,
) -> Tensor | tuple[Tensor, Tensor]:
    """As :func:`flash_attn`. torch.compile traces this function. Eager calls that are not ordinary come here, too."""
    if unknown:
        raise unknown_argument("flash_attn", next(iter(unknown)))
    has_functions = score_mod is not None or mask_mod is not None or block_mask is not None
    of_float8 = not (q_descale is None and k_descale is None and v_descale is None and out_dtype is None)
    if of_float8 or quantize is not None or key_indices is not None or key_block_indices is not None:
        return _not_ordinary(locals())
    band_causal, lower_right, left, right = is_causal, False, None, None
    aligned = alibi_slopes is not None or type(attention_chunk) is not int or attention_chunk > 0
    if causal is not None or window is not None or aligned:
        band_causal, lower_right, left, right = band(causal, is_causal, window, aligned)
    same_bits = are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    if has_functions:
        result = run_if_ordinary(
            enable_gqa, return_lse,
            (query, key, value, attn_mask, alibi_slopes, sink, rng_state, key_mask),
            (
                scale, band_causal, lower_right, diagonal, left, right, attention_chunk, first_key, softcap, dropout_p,
                num_splits, unified_max, same_bits,
            ),
            (score_mod, mask_mod, block_mask),
        )  # fmt: skip
        return _not_ordinary(locals()) if result is None else result
    if is_compiling():  # torch.compile traces the operator itself
        return _not_ordinary(locals())
    try:
        result = _ops.attention_if_ordinary(
            enable_gqa, return_lse,
            query, key, value, attn_mask, alibi_slopes, sink, rng_state, key_mask,
            scale, band_causal, lower_right, diagonal, left, right, attention_chunk, first_key, softcap, dropout_p,
            num_splits, unified_max, same_bits,
        )  # fmt: skip
        return _not_ordinary(locals()) if result is None else result
    except ValueError as error:
        raise with_layout_hint(error, _tensors_of(locals())) from None


@with_arguments_of(_flash_attn)
def flash_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, ``softmax(scale * query @ key^T + bias) @ value``, without storing the score matrix.

    The positional arguments are the same as in :func:`torch.nn.functional.scaled_dot_product_attention`, with the same
    meaning. B is the batch size, H the number of query heads, H_kv the number of key and value heads. S_q and S_k are
    the sequence lengths, D is the head dimension of query and key, and D_v the head dimension of ``value``. The scores
    are computed in this order: ``scale * <q, k>``, softcap, ALiBi, mask.

    Args:
        query: (B, H, S_q, D). float32, float64, bfloat16 or float16; D from 0 to 1024. (H, S, D), (S, D) and several
            leading batch dimensions are also allowed. Not copied if the last dimension is contiguous. Nested tensors in
            the jagged layout, (B, H, j, D), are allowed and are not padded. float8_e4m3fn is allowed for the forward
            only: see ``q_descale``.
        key: (B, H_kv, S_k, D), with the dtype and device of ``query``. Leading dimensions broadcast.
        value: (B, H_kv, S_k, D_v), as ``key``. D_v may differ from D.
        attn_mask: broadcastable to (B, H, S_q, S_k), and never expanded in memory. bool: True is visible. Float
            (``query``'s dtype or float32): added to the scores; -inf hides a key; receives a gradient in its own shape.
            ``is_causal`` and ``attn_mask`` may be combined, and both apply. A ``CausalBias`` of torch is also allowed.
        dropout_p: probability of dropping an element of the softmax, 0 to 1. Dropout also applies in eval mode.
        is_causal: key j is visible to query i only if j <= i (the diagonal starts in the upper left corner).
        scale: factor of ``query @ key^T``; ``1 / sqrt(D)`` if None.
        enable_gqa: allows 1 < H_kv < H. Query head h uses key and value head ``h // (H // H_kv)``. One key head for
            all query heads is always allowed, as a dimension that broadcasts.
        causal: "upper_left" (as ``is_causal``) or "lower_right" (the last query sees all keys). The two are equal if
            S_q == S_k. ``causal`` overrides ``is_causal``.
        window: (left, right), or one number for both: only keys up to ``left`` before and ``right`` after the
            diagonal are visible. -1 and None mean no limit. Numbers below -1 move a side past the diagonal: with (-2,
            5) query i sees the keys i + 2 to i + 5. Source: sliding window attention, Beltagy et al. 2020.
        softcap: above 0, scores become ``softcap * tanh(score / softcap)`` (Gemma 2, 2024).
        alibi_slopes: (H) or (B, H), float32 or ``query``'s dtype: ``-slope * |i + diagonal - j|`` is added to the
            scores (Press et al. 2022). Receives a gradient.
        sink: (H) or (B, H), float32 or ``query``'s dtype: an attention sink (gpt-oss, OpenAI 2025; Xiao et al. 2024). A
            sink is one more score in each row, without a value: ``lse = log(exp(sink) + sum_j exp(score_j))``. So the
            probabilities of a row sum to less than 1. If all keys of a row are masked, out is 0 and lse is the sink.
            -inf means no sink. Its gradient is ``-sum over rows of exp(sink - lse) * (delta - grad_lse)``, with
            ``delta = rowsum(grad_out * out)``.
        key_mask: (B, S_k): a second mask, the same for all heads and queries of a batch element, such as padding. bool
            or float as ``attn_mask``. Both masks apply; no mask of (B, 1, S_q, S_k) is made. No gradient.
        return_lse: also returns the logsumexp of the scores, which is differentiable.
        rng_state: int64 (seed, offset) from :func:`new_rng_state`, to replay a dropout mask. If None, the call draws a
            state from torch's generator, so ``torch.manual_seed`` determines it.
        num_splits: the number of splits of the keys in a forward of few queries (Flash-Decoding, Dao et al. 2023). At
            most one split for each tile of keys, and at most max(4, S_k / S_q), so that memory stays linear. 0: the
            shape decides. Above 1, the decode kernel runs for any S_q.
        unified_max: a guess of the largest score, in place of the running maximum (FlashDecoding++, Hong et al. 2023),
            in the decode kernel. A split with scores too far from the guess is computed again without it. CPU only.
        deterministic: True: gradients are bitwise equal in every run. False: a CUDA kernel may add to dq in any order.
            None: as set by ``torch.use_deterministic_algorithms`` when flash_attn is called. On CPU results are always
            bitwise equal, for any number of threads and any other elements of the batch.
        diagonal: moves the diagonal, for a part of a larger score matrix. Causal masks, windows and ALiBi count from
            key ``i + diagonal`` of query i, or from ``i + diagonal + S_k - S_q`` if aligned to the lower right.
        attention_chunk: above 0, the keys are cut into chunks of ``attention_chunk`` keys, from key 0 on. A query sees
            only the keys in the chunk of its position (Llama 4, 2025; FlashAttention-3's option). The position of query
            i is key ``i + diagonal``, or ``i + diagonal + S_k - S_q`` if aligned to the lower right, as for windows.
            Causal masks and windows apply, too. Tiles outside of the chunks cost no time.
        first_key: with ``attention_chunk``, for a part of a larger score matrix: the number of key 0 in the larger
            matrix. Chunks start at multiples of ``attention_chunk`` in the larger matrix. May be negative.

        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)`` returns the new score, after softcap and ALiBi and before
            the masks. Tensors that the function reads receive gradients. On CUDA the tier `simt` runs it. docs/flex.md
            lists the operations that a function may contain.
        mask_mod: ``mask_mod(b, h, q_idx, kv_idx)`` returns True if the key is visible.
        block_mask: a BlockMask of torch (``torch.nn.attention.flex_attention.create_block_mask``), in place of
            ``mask_mod``.
        key_indices: (B or 1, H_kv or 1, S_q, n), int32 or int64: the keys that each query may attend to, in any order;
            -1 means no key. A key that is listed twice counts once, as in a mask. Causal, window and masks hide some of
            these keys. Only the listed rows of key and value are read. Time and memory are linear in S_q n. Dropout
            drops the same elements as without indices. ``attn_mask`` has no gradient. A number outside of the keys is
            an error on CPU, and means no key on CUDA. ``key_indices`` has as many dimensions as ``query``. See
            docs/sparse.md.
        key_block_indices: (B or 1, H_kv or 1, S_q, n), int32 or int64: blocks of ``key_block_size`` keys, as
            ``key_indices``. Block m is the keys ``[m * key_block_size, (m + 1) * key_block_size)``; the last block may
            be shorter.
        key_block_size: the number of keys in a block of ``key_block_indices``.
        q_descale: (B, H_kv), float32; each size may be 1. The factor of ``query`` in float8_e4m3fn, as in
            FlashAttention-3: scores are ``scale * q_descale * k_descale * <q, k>``. None means 1. ``key`` and ``value``
            must be float8_e4m3fn, too. Masks, dropout, functions, ``key_indices`` and gradients are not allowed. Keys
            and values are widened tile by tile. See docs/float8.md.
        k_descale: as ``q_descale``, the factor of ``key``.
        v_descale: as ``q_descale``, the factor of ``value``, which multiplies ``out``.
        out_dtype: the dtype of ``out`` for a ``query`` in float8_e4m3fn: bfloat16 or float16. None: bfloat16;
            ``query``'s for other dtypes. A number above 65504 becomes inf in float16.
        quantize: "int8": an approximation for inference on CPU, with ``query @ key^T`` in int8 and ``P @ value`` in
            int16 (SageAttention, Zhang et al. 2024). ``out`` differs from exact attention by about 1%, and by more if a
            few columns of ``query`` or ``key`` are far larger than the others: docs/int8.md has the errors and the
            speed. Keys that only other queries see change the rounding. For float32, bfloat16 and float16 tensors that
            require no gradient; without dropout, functions and ``key_indices``. None: exact.

    With ``window``, ``alibi_slopes`` or ``attention_chunk`` but neither ``is_causal`` nor ``causal``, the diagonal is
    aligned to the lower right corner, as in flash-attention.

    Returns:
        out (B, H, S_q, D_v) in ``query``'s dtype or ``out_dtype``; or (out, lse). lse is (B, H, S_q) in float32
        (float64 for float64 inputs), natural logarithm. A row without a visible key has out 0, lse -inf and gradients
        0.

    Raises:
        TypeError: a dtype, device or layout that is not allowed.
        ValueError: a shape or number that is not allowed. Messages name the argument, its value and the allowed values.
        NotImplementedError: no kernel for the tensors' device; a third derivative.

    Twice differentiable, in reverse mode, in forward mode (:func:`torch.func.jvp`, :mod:`torch.autograd.forward_ad`)
    and in a mixture of both. No derivative stores the score matrix. The formulas are in docs/derivative_formulas.md.

    Source: Dao, "FlashAttention-2", 2023 (arXiv 2307.08691), algorithms 1 and 2.
    """
    if not is_dynamo_compiling():
        try:
            result = _ops.flash_attn_if_ordinary(
                query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, options
            )
        except ValueError:  # _flash_attn raises it again, with a hint
            result = None
        if result is not None:
            return result
    return _flash_attn(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, **options)


_PARAMETERS = tuple(inspect.signature(flash_attn).parameters)
_RENAMED = {"causal": "band_causal", "window_left": "left", "window_right": "right", "deterministic": "same_bits"}
_VARIABLES_OF_OPTIONS = tuple((name, _RENAMED.get(name, name)) for name in _ops.DENSE.option_types)


def _tensors_of(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the operator's tensors. ``given``: the local variables of flash_attn."""
    return {name: given[name] for name in _ops.DENSE.tensor_names}


def _options_of(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the operator's options. ``given``: the local variables of flash_attn."""
    return {name: given[variable] for name, variable in _VARIABLES_OF_OPTIONS}


def _not_ordinary(given: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    """Runs a call of flash_attn that is not ordinary. ``given``: the local variables of flash_attn."""
    if _float8.is_float8(given["query"], *(given[name] for name in OF_FLOAT8)):
        return _run_by(_float8.attend_dense, given)
    if given["quantize"] is not None:
        return _run_by(_int8.attend, given)
    if given["key_indices"] is not None or given["key_block_indices"] is not None:
        if given["has_functions"]:
            raise NotImplementedError("key_indices, key_block_indices: got one with a function; allowed: neither")
        return _by_index(given)
    return _with_functions(given) if given["has_functions"] else _of_other_tensors(given)


def _of_other_tensors(given: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    """Runs flash_attn without functions and indices. ``given``: the local variables of flash_attn."""
    tensors, options = _tensors_of(given), _options_of(given)
    if has_torch_function_variadic(*(t for name, t in tensors.items() if name != "rng_state")):
        return _through_torch_function({name: given[name] for name in _PARAMETERS})
    dropout_p, enable_gqa, return_lse = given["dropout_p"], given["enable_gqa"], given["return_lse"]
    if dropout_p != 0.0 and tensors["rng_state"] is None:
        tensors["rng_state"] = _rng_state_for(given["query"], dropout_p)
        if not is_compiling():
            result = _ops.attention_if_ordinary(enable_gqa, return_lse, *tensors.values(), *options.values())
            if result is not None:
                return result
    options = checked_options(_ops.DENSE.option_types, options)
    out, lse = attend(Call(_ops.DENSE, tensors, options, enable_gqa, return_lse))
    return (out, lse) if return_lse else out


def _with_functions(given: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    """Runs flash_attn with functions. ``given``: the local variables of flash_attn."""
    arguments = {name: given[name] for name in _PARAMETERS if name not in FUNCTIONS}
    functions = {name: given[name] for name in FUNCTIONS}
    if is_causal_bias(arguments["attn_mask"]):
        arguments = without_causal_bias(arguments)
    call = Call.from_arguments(_ops.DENSE, **arguments).with_rng_state()
    refuse_dtensors_with_functions(call.tensors)
    out, lse = _dense.attend(call, lambda form: run_with_functions(form, **functions))
    return (out, lse) if call.return_lse else out


def _by_index(given: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    """Runs flash_attn with keys chosen by index. ``given``: the local variables of flash_attn."""
    arguments = {name: given[name] for name in _PARAMETERS}
    if is_causal_bias(arguments["attn_mask"]):
        arguments = without_causal_bias(arguments)
    seen = tuple(arguments[name] for name in (*_ops.DENSE.tensor_names, *INDICES) if name != "rng_state")
    numbers = _indexed.KeyNumbers.from_arguments(**{n: arguments[n] for n in (*INDICES, "key_block_size")})
    assert numbers is not None
    _indexed.refuse_dtensors(numbers, *seen)
    if has_torch_function_variadic(*seen) and arguments["query"].layout is not torch.jagged:
        q, k, v = (arguments.pop(name) for name in ("query", "key", "value"))
        return handle_torch_function(flash_attn, seen, q, k, v, **arguments)
    for name in (*INDICES, "key_block_size"):
        del arguments[name]
    call = Call.from_arguments(_ops.DENSE, **arguments).with_rng_state()
    out, lse = _indexed.attend(call, numbers)
    return (out, lse) if call.return_lse else out


def _run_by(
    run: Callable[[dict[str, Any]], tuple[Tensor, Tensor]], given: dict[str, Any]
) -> Tensor | tuple[Tensor, Tensor]:
    """Runs flash_attn by an operator of its own. ``given``: the local variables of flash_attn."""
    arguments = {name: given[name] for name in _PARAMETERS}
    if is_causal_bias(arguments["attn_mask"]):
        arguments = without_causal_bias(arguments)
    out, lse = run(arguments)
    return (out, lse) if given["return_lse"] else out


def _rng_state_for(query: Tensor, dropout_p: float) -> Tensor | None:
    check_is_dense("query", query)
    return new_rng_state(query.device) if as_type("float", "dropout_p", dropout_p) > 0.0 else None


def _through_torch_function(arguments: dict[str, Any]) -> Tensor | tuple[Tensor, Tensor]:
    """Passes the call to the ``__torch_function__`` of its tensors.

    Nested tensors and CausalBias have a ``__torch_function__``, too, but flash_attn itself runs them.
    """
    if getattr(arguments["query"], "layout", None) is torch.jagged:
        out, lse = _packed.attend_jagged(Call.from_arguments(_ops.DENSE, **arguments).with_rng_state())
        return (out, lse) if arguments["return_lse"] else out
    if is_causal_bias(arguments["attn_mask"]):
        arguments = without_causal_bias(arguments)
    seen = tuple(arguments[name] for name in _ops.DENSE.tensor_names if name != "rng_state")
    q, k, v = (arguments.pop(name) for name in ("query", "key", "value"))
    if has_torch_function_variadic(*seen):
        return handle_torch_function(flash_attn, seen, q, k, v, **arguments)
    return flash_attn(q, k, v, **arguments)


def without_causal_bias(arguments: dict) -> dict:
    """Returns the arguments with ``causal`` in place of a CausalBias, because a CausalBias has no elements."""
    bias = arguments["attn_mask"]
    if arguments["is_causal"] or arguments["causal"] is not None:
        raise ValueError("attn_mask: got a CausalBias with is_causal or causal; allowed: one of them")
    got = (bias.seq_len_q, bias.seq_len_kv)
    wanted = (arguments["query"].shape[-2], arguments["key"].shape[-2])
    if got != wanted:
        raise ValueError(f"attn_mask: got a CausalBias of {got}; allowed: (seqlen_q, seqlen_k) = {wanted}")
    causal = "upper_left" if bias.variant.name == "UPPER_LEFT" else "lower_right"
    return arguments | {"attn_mask": None, "causal": causal}
