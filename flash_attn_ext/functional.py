"""flash_attn: scaled dot product attention with torch's meaning, and more by keyword.

This module turns what a caller may write into the one form that the operator takes: 4-D tensors, a mask of 4
dimensions, numbers. What tensors are allowed is checked in csrc/ops/checks.cpp, for every device at once.
"""

import math
import numbers

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias, CausalVariant
from torch.overrides import handle_torch_function, has_torch_function_variadic

from . import _functorch, _ops


def flash_attn(
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
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, ``softmax(scale * query @ key^T + bias) @ value``, without storing the score matrix.

    The positional arguments are those of :func:`torch.nn.functional.scaled_dot_product_attention` and mean the same.
    B is the batch, H the query heads, H_kv the key/value heads, S_q and S_k the sequence lengths, D the head
    dimension, D_v that of ``value``. The scores are computed in this order: ``scale * <q, k>``, softcap, ALiBi, mask.

    Args:
        query: (B, H, S_q, D). float32, float64, bfloat16 or float16; D from 0 to 512. (H, S, D) and (S, D) are
            taken too, and more than one leading batch dimension. Read in place if the last dimension is contiguous.
            Or nested tensors in the jagged layout, (B, H, j, D): their sequences are not padded, see
            :func:`flash_attn_varlen`.
        key: (B, H_kv, S_k, D), dtype and device of ``query``. Leading dimensions broadcast.
        value: (B, H_kv, S_k, D_v), likewise; D_v may differ from D.
        attn_mask: broadcastable to (B, H, S_q, S_k) and never expanded. bool: True attends. Float (``query``'s
            dtype or float32): added to the scores; -inf masks; receives a gradient in its own shape. Unlike in
            torch it may be combined with ``is_causal``: both apply. A ``CausalBias`` of torch is taken too.
        dropout_p: probability of dropping an element of the softmax, 0 to 1. Applied whenever it is above 0.
        is_causal: key j is visible to query i only if j <= i (the diagonal starts in the upper left corner).
        scale: factor of ``query @ key^T``; ``1 / sqrt(D)`` if None.
        enable_gqa: allow H_kv < H: query head h uses key/value head ``h // (H // H_kv)``.
        causal: "upper_left" (as ``is_causal``) or "lower_right" (the last query sees all keys); they differ where
            S_q != S_k. If given, it decides over ``is_causal``.
        window: (left, right), or one number for both: only keys up to ``left`` before and ``right`` after the
            diagonal are visible. -1 and None are no limit. Numbers below -1 move a side past the diagonal: (-2, 5)
            shows query i the keys i + 2 to i + 5. Sliding window attention of Beltagy et al. 2020.
        softcap: above 0, scores become ``softcap * tanh(score / softcap)`` (Gemma 2, 2024).
        alibi_slopes: (H) or (B, H), float32 or ``query``'s dtype: ``-slope * |i + diagonal - j|`` is added to the
            scores (Press et al. 2022). Receives a gradient.
        sink: (H) or (B, H), float32 or ``query``'s dtype: an attention sink, one more score in each row, without a
            value: ``lse = log(exp(sink) + sum_j exp(score_j))``, and a row's weights sum to less than 1. A row to which
            everything is masked has out 0 and lse = sink then; -inf is no sink. Receives a gradient: with
            ``delta = rowsum(grad_out * out)``, that of the sink's score, whose value is 0, is
            ``-sum over rows of exp(sink - lse) * (delta - grad_lse)``. (gpt-oss, OpenAI 2025; Xiao et al. 2024.)
        key_mask: (B, S_k): a second mask, the same for all heads and queries of a batch element, such as padding; bool
            or float as ``attn_mask``. Both apply, and nobody has to merge them into (B, 1, S_q, S_k). No gradient.
        return_lse: also return the logsumexp of the scores. Its gradient is not dropped.
        rng_state: int64 (seed, offset) from :func:`new_rng_state`, to replay a dropout mask; drawn from torch's
            generator if None, so that ``torch.manual_seed`` governs it.
        num_splits: into how many pieces the forward cuts the keys where there are few queries (Flash-Decoding, Dao et
            al. 2023), at most one per tile of keys and, so that memory stays linear, 4 or S_k / S_q, whichever is more.
            0 lets the shape decide; above 1 asks for that kernel whatever S_q is.
        unified_max: a guess of the largest score, used in place of the running maximum (FlashDecoding++, Hong et al.
            2023); asks for the same kernel. Pieces whose scores are too far from it are computed again without it.
        deterministic: True makes the gradients the same bits at every run; False lets a CUDA kernel add to dq in any
            order. None follows ``torch.use_deterministic_algorithms``, as it is set when flash_attn is called. On CPU
            results are always the same bits, for any number of threads and whatever else is in the batch.

    With ``window`` or ``alibi_slopes`` but neither ``is_causal`` nor ``causal``, the diagonal is aligned to the
    lower right corner, as in flash-attention.

    Returns:
        out (B, H, S_q, D_v), dtype of ``query``; or (out, lse) with lse (B, H, S_q) in float32 (float64 for float64
        inputs), natural logarithm. A row to which everything is masked has out 0, lse -inf and gradients 0.

    Raises:
        TypeError: a dtype, device or layout that is not allowed.
        ValueError: a shape or number that is not allowed. Messages name the argument, what was got and what is allowed.
        NotImplementedError: no kernel for the tensors' device; a third derivative.

    Differentiable twice: in reverse mode, in forward mode (:func:`torch.func.jvp`, :mod:`torch.autograd.forward_ad`),
    and in either through the other. None of it stores the score matrix; docs/derivative_formulas.md has the formulas.

    Source: Dao, "FlashAttention-2", 2023 (arXiv 2307.08691), algorithms 1 and 2.
    """
    if getattr(query, "layout", None) is torch.jagged:
        return _of_jagged(**locals())
    # Subclasses and modes that want to see the call, torch.fx's proxies among them.
    if has_torch_function_variadic(query, key, value, attn_mask, alibi_slopes, sink, key_mask):
        return _through_torch_function(**locals())
    options = operator_options(
        dropout_p, is_causal, scale, causal, window, softcap, alibi_slopes, num_splits, unified_max, deterministic
    )
    if dropout_p != 0.0 and rng_state is None:
        rng_state = _rng_state_for(query, dropout_p)
    compiling = torch.compiler.is_compiling()  # torch.compile traces through the operator itself
    if not compiling:
        result = _ops.attention_if_plain(
            enable_gqa, query, key, value, attn_mask, alibi_slopes, sink, rng_state, key_mask, *options
        )
        if result is not None:
            return result if return_lse else result[0]
    if some_dtensor(query, key, value):
        from .distributed import _dtensor  # which imports torch.distributed.tensor

        return _dtensor.attention(
            query, key, value, attn_mask, alibi_slopes, sink, rng_state, key_mask, dropout_p=dropout_p,
            is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, causal=causal, window=window, softcap=softcap,
            return_lse=return_lse, num_splits=num_splits, unified_max=unified_max, deterministic=deterministic,
        )  # fmt: skip
    options = checked_options(options)
    tensors, batch_shape = operator_tensors(
        query, key, value, attn_mask, alibi_slopes, sink, rng_state, key_mask, enable_gqa
    )
    attention = _functorch.attention if not compiling and _functorch.active() else _ops.attention
    out, lse = attention(*tensors, **options)
    if out.shape[3] != value.shape[-1]:  # head_dim_v 0 was padded
        out = out[..., : value.shape[-1]]
    ndim = max(query.dim(), key.dim(), value.dim())
    if ndim != 4:
        out, lse = _restore_shape(out, ndim, batch_shape), _restore_shape(lse, ndim, batch_shape)
    return (out, lse) if return_lse else out


def new_rng_state(device: torch.device | str | None = None) -> Tensor:
    """A fresh dropout state, int64 (seed, offset) on ``device``, drawn from torch's generator of that device.

    ``device``: torch's default device if None.
    """
    return torch.randint(torch.iinfo(torch.int64).max, (2,), dtype=torch.int64, device=device)


def dropout_mask(
    rng_state: Tensor, batch: int, heads: int, seqlen_q: int, seqlen_k: int, dropout_p: float, first_row: int = 0
) -> Tensor:
    """What :func:`flash_attn` keeps with ``rng_state``: bool (batch, heads, seqlen_q, seqlen_k), False is dropped.

    For tests and dense references. With ``seqlen_q`` of all queries it is as large as the score matrix; it can be had
    in parts, of ``seqlen_q`` queries from ``first_row`` on. Kept elements are scaled by ``1 / (1 - dropout_p)``.
    Philox4x32-10 (Salmon et al. 2011) of seed, offset, batch, head, row and column.
    """
    return _ops.dropout_mask(rng_state, batch, heads, seqlen_q, seqlen_k, dropout_p, first_row)


def operator_tensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    rng_state: Tensor | None,
    key_mask: Tensor | None,
    enable_gqa: bool,
) -> tuple[tuple[Tensor | None, ...], torch.Size]:
    """The operator's tensors, in the order of its schema; and the shape of the leading dimensions that B stands for."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        check_is_dense(name, t)
    if not isinstance(enable_gqa, (bool, int)):
        raise TypeError(f"enable_gqa: got {enable_gqa!r}; allowed: True, False")
    ndim = max(query.dim(), key.dim(), value.dim())
    q, k, v, batch_shape = _as_4d(query, key, value, enable_gqa)
    if q.shape[3] == 0 and k.shape[3] == 0:  # all scores are 0, as with a column of zeros
        q, k = (torch.nn.functional.pad(t, (0, 1)) for t in (q, k))
    if v.shape[3] == 0:
        v = torch.nn.functional.pad(v, (0, 1))
    for name, t in (
        ("alibi_slopes", alibi_slopes), ("sink", sink), ("rng_state", rng_state), ("key_mask", key_mask)
    ):  # fmt: skip
        if t is not None:
            check_is_dense(name, t)
    mask = None if attn_mask is None else _mask_as_4d(attn_mask, ndim, batch_shape)
    if key_mask is not None and ndim != 4 and key_mask.shape == (*batch_shape[: ndim - 3], k.shape[2]):
        key_mask = key_mask.reshape(-1, key_mask.shape[-1])
    return (q, k, v, mask, alibi_slopes, sink, rng_state, key_mask), batch_shape


def check_is_dense(name: str, value: object) -> None:
    """What the dispatcher would refuse before csrc/ops/checks.cpp can name the argument."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}; allowed: a torch.Tensor")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
        raise TypeError(f"{name}: got a {kind} tensor; allowed: dense tensors")


def some_dtensor(*tensors: object) -> bool:
    """Whether one is a DTensor, without importing torch.distributed.tensor."""
    return any(type(t).__name__ == "DTensor" for t in tensors)


def _as_4d(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor, torch.Size]:
    """q, k, v as (B, heads, S, D), and the shape of the leading dimensions that B stands for."""
    tensors = [query, key, value]
    if any(t.dim() != 4 for t in tensors):
        for name, t in zip(("query", "key", "value"), tensors, strict=True):
            if t.dim() < 2:
                raise ValueError(
                    f"{name}: got shape {list(t.shape)}; allowed: at least 2 dimensions, (sequence, head_dim)"
                )
        ndim = max(t.dim() for t in tensors)
        tensors = [t.reshape((1,) * (max(ndim, 4) - t.dim()) + t.shape) for t in tensors]
    q, k, v = tensors
    batch_shape = q.shape[:-3]
    if k.shape[:-3] != batch_shape or v.shape[:-3] != batch_shape:
        batch_shape = _broadcast("batch", batch_shape, k.shape[:-3], v.shape[:-3])
        q, k, v = (t.expand(batch_shape + t.shape[-3:]) for t in (q, k, v))
    heads = q.shape[-3]
    if not enable_gqa and (k.shape[-3] != heads or v.shape[-3] != heads):
        if 1 not in (heads, k.shape[-3], v.shape[-3]):
            raise ValueError(
                f"key, value: got {k.shape[-3]} and {v.shape[-3]} heads for {heads} query heads; allowed: the same "
                "number, or 1, or a divisor with enable_gqa=True"
            )
        (heads,) = _broadcast("heads", *(t.shape[-3:-2] for t in (q, k, v)))
        q, k, v = (t.expand((*t.shape[:-3], heads, *t.shape[-2:])) for t in (q, k, v))
    if len(batch_shape) != 1:
        q, k, v = (_flatten_batch(t) for t in (q, k, v))
    return q, k, v, batch_shape


def _flatten_batch(t: Tensor) -> Tensor:
    """(..., heads, S, D) as (B, heads, S, D); B is spelled out because -1 cannot be inferred without elements."""
    return t.reshape(math.prod(t.shape[:-3]), *t.shape[-3:])


def _broadcast(what: str, *shapes: torch.Size) -> torch.Size:
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError as error:
        got = ", ".join(str(list(shape)) for shape in shapes)
        raise ValueError(
            f"query, key, value: got {what} dimensions {got}; allowed: dimensions that broadcast together"
        ) from error


def _mask_as_4d(mask: Tensor, ndim: int, batch_shape: torch.Size) -> Tensor:
    """``mask`` with 4 dimensions, broadcast ones of size 1; a view unless several batch dimensions mix both kinds."""
    check_is_dense("attn_mask", mask)
    if mask.dim() > max(ndim, 2):
        raise ValueError(
            f"attn_mask: got shape {list(mask.shape)}; allowed: at most the {ndim} dimensions of the inputs"
        )
    full_dim = len(batch_shape) + 3
    mask = mask.reshape((1,) * (full_dim - mask.dim()) + mask.shape)
    if len(batch_shape) == 1:
        return mask
    leading = mask.shape[:-3]
    if any(size not in (1, full) for size, full in zip(leading, batch_shape, strict=True)):
        raise ValueError(
            f"attn_mask: got leading dimensions {list(leading)}; allowed: broadcastable to {list(batch_shape)}"
        )
    if all(size == 1 for size in leading):
        return mask.reshape(1, *mask.shape[-3:])
    return _flatten_batch(mask.expand(batch_shape + mask.shape[-3:]))


def _restore_shape(t: Tensor, ndim: int, batch_shape: torch.Size) -> Tensor:
    """Undoes :func:`_as_4d` on out (B, H, S_q, D_v) or lse (B, H, S_q)."""
    if ndim > 4:
        return t.reshape(batch_shape + t.shape[1:])
    for _ in range(4 - ndim):
        t = t.squeeze(0)
    return t


def causal_of_bias(bias: CausalBias, query: Tensor, key: Tensor, is_causal: bool, causal: str | None) -> str:
    """The ``causal`` that a CausalBias stands for. It has no elements that a mask could be read from."""
    if is_causal or causal is not None:
        raise ValueError("attn_mask: got a CausalBias with is_causal or causal; allowed: one of them")
    got, wanted = (bias.seq_len_q, bias.seq_len_kv), (query.shape[-2], key.shape[-2])
    if got != wanted:
        raise ValueError(f"attn_mask: got a CausalBias of {got}; allowed: (seqlen_q, seqlen_k) = {wanted}")
    return "upper_left" if bias.variant is CausalVariant.UPPER_LEFT else "lower_right"


def operator_options(
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    causal: str | None,
    window: int | tuple[int | None, int | None] | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    num_splits: int,
    unified_max: float | None,
    deterministic: bool | None,
) -> tuple:
    """The operator's options, in the order of its schema. Their types are not looked at yet."""
    lower_right, window_left, window_right = False, None, None
    if causal is not None or window is not None or alibi_slopes is not None:
        lower_right, is_causal = diagonal(causal, is_causal, window, alibi_slopes)
        window_left, window_right = window_sides(window)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return (
        scale, is_causal, lower_right, 0, window_left, window_right, softcap, dropout_p, num_splits, unified_max,
        deterministic,
    )  # fmt: skip


def checked_options(options: tuple) -> dict:
    """Options as keywords of the operator, each of the type in its schema; raises a TypeError that names the option."""
    return {name: _as_type(kind, name, value) for (name, kind), value in zip(_ops.OPTION_TYPES, options, strict=True)}


_PER_HEAD = ("alibi_slopes", "sink")
_PUBLIC_NAMES = {"causal": "is_causal", "window_left": "window", "window_right": "window"}
_ALLOWED = {"float": "a number", "int": "an int", "bool": "True, False"}


def _as_type(kind: str, name: str, value: object) -> object:
    optional, kind = kind.endswith("?"), kind.removesuffix("?")
    if value is None and optional:
        return None
    if isinstance(value, bool) and kind == "bool":
        return value
    if isinstance(value, numbers.Integral) and name == "causal":  # is_causal=1, as torch's functions take it
        return bool(value)
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value
    if kind == "int" and isinstance(value, numbers.Integral) and -(2**63) <= value < 2**63:
        return int(value)
    if kind == "float" and not isinstance(value, bool):
        number_tensor = isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad
        if isinstance(value, (float, int, numbers.Real)) or number_tensor:
            return float(value)
    allowed = ("None, " if optional or name == "deterministic" else "") + _ALLOWED[kind]
    raise TypeError(f"{_PUBLIC_NAMES.get(name, name)}: got {value!r}; allowed: {allowed}")


def _rng_state_for(query: Tensor, dropout_p: float) -> Tensor | None:
    check_is_dense("query", query)
    return new_rng_state(query.device) if _as_type("float", "dropout_p", dropout_p) > 0.0 else None


def _of_jagged(**arguments):
    from .varlen import flash_attn_jagged  # which is made of this module

    return flash_attn_jagged(**arguments)


def _through_torch_function(query, key, value, attn_mask, is_causal, causal, **options):
    """flash_attn for arguments with a ``__torch_function__``, which get to see it."""
    if isinstance(attn_mask, CausalBias):
        causal, attn_mask = causal_of_bias(attn_mask, query, key, is_causal, causal), None
    options |= {"attn_mask": attn_mask, "is_causal": is_causal, "causal": causal}
    relevant = (query, key, value, attn_mask, *(options[name] for name in (*_PER_HEAD, "key_mask")))
    if has_torch_function_variadic(*relevant):
        return handle_torch_function(flash_attn, relevant, query, key, value, **options)
    return flash_attn(query, key, value, **options)


def diagonal(causal: str | None, is_causal: bool, window: object, alibi_slopes: Tensor | None) -> tuple[bool, bool]:
    """(lower_right, causal) of the operator."""
    if causal is None:
        return not is_causal and (window is not None or alibi_slopes is not None), is_causal
    if causal not in ("upper_left", "lower_right"):
        raise ValueError(f"causal: got {causal!r}; allowed: None, 'upper_left', 'lower_right'")
    return causal == "lower_right", True


def window_sides(window: int | tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    """(left, right) of the operator; None is no limit."""
    left, right = window if isinstance(window, (tuple, list)) and len(window) == 2 else (window, window)
    for side in (left, right):
        if side is not None and (not isinstance(side, int) or isinstance(side, bool)):
            raise ValueError(
                f"window: got {window!r}; allowed: None, an int, or two of them (left, right); -1 and None are no limit"
            )
    return None if left == -1 else left, None if right == -1 else right
