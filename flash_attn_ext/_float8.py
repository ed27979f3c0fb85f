"""FlashAttention-3's fp8 calls: query, key and value in float8_e4m3fn with factors. Forward only.

Sequence b and key head h have three factors, float32 (B, H_kv):

    score = scale * q_descale[b, h] * k_descale[b, h] * <q, k>        out = v_descale[b, h] * (P v)

The operator on caches, attention_cache, computes these calls, because its kernels read 8-bit keys and values. They
widen one tile at a time, and P stays in fp32 or in 16 bits. Only query is copied, to the dtype of out: bfloat16 or
float16, which both represent every float8 number.

    dense    cache b has the keys of batch element b
    packed   one cache of T_k rows: sequence b has the rows [cu_seqlens_k[b], cu_seqlens_k[b + 1])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from . import _dense, _ops, _packed
from ._call import DESCALES, FUNCTIONS, INDICES, OF_FLOAT8, Call
from ._tensor_checks import check_are_dense, check_is_dense, check_not_differentiated, some_dtensor

DTYPE, OUT_DTYPE = torch.float8_e4m3fn, torch.bfloat16  # OUT_DTYPE: if the caller names none
_OUT_DTYPES = (None, torch.bfloat16, torch.float16)
_ROWS = ("query", "key", "value")
# Arguments that attention_cache does not have.
_REFUSED = ("attn_mask", "key_mask", "rng_state", "seqused_q", "qv", *FUNCTIONS, *INDICES)


def is_float8(query: object, *given: object) -> bool:
    """Whether this module computes the call: it has a float8 query, or one of ``given``, arguments of float8 calls."""
    for argument in given:  # every call comes here, and any() takes twice the time
        if argument is not None:
            return True
    return getattr(query, "dtype", None) is DTYPE


def out_dtype_of(query: Tensor, out_dtype: object, name: str) -> torch.dtype:
    """Checks the argument ``out_dtype``, and returns the dtype of out. ``name``: of the query."""
    if out_dtype is not None and query.dtype is not DTYPE:
        raise ValueError(f"out_dtype: got {out_dtype!r} with {name} of dtype {query.dtype}; allowed with float8_e4m3fn")
    if out_dtype not in _OUT_DTYPES:
        raise TypeError(f"out_dtype: got {out_dtype!r}; allowed: None, torch.bfloat16, torch.float16")
    return OUT_DTYPE if out_dtype is None else out_dtype  # type: ignore[return-value]


def attend_dense(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of :func:`flash_attn`. ``arguments``: by name."""
    call = dense_call(arguments)
    dtype = _out_dtype(arguments)
    return _with_errors_of_16_bit(call, dtype, lambda: _dense.attend(call, lambda form: _run_dense(form, arguments)))


def attend_packed(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of :func:`flash_attn_varlen`. ``arguments``: by name."""
    call = packed_call(arguments)
    return _with_errors_of_16_bit(call, _out_dtype(arguments), lambda: packed_on_cache(call, arguments).run())


def dense_call(arguments: dict[str, Any]) -> Call:
    """The checked call, with float8 tensors."""
    return _checked_call(_ops.DENSE, "flash_attn", arguments)


def packed_call(arguments: dict[str, Any]) -> Call:
    """The checked packed call, with float8 tensors."""
    call = _checked_call(_ops.VARLEN, "flash_attn_varlen", arguments)
    return _packed.to_operator_form(call)


def _checked_call(operator: _ops.Operator, function: str, arguments: dict[str, Any]) -> Call:
    tensors = {name: arguments[name] for name in (*_ROWS, *DESCALES)}
    check_are_dense({name: t for name, t in tensors.items() if not some_dtensor(t)}, _ROWS)
    _out_dtype(arguments)  # checks it
    for name in DESCALES:
        if tensors[name] is not None and arguments["query"].dtype is not DTYPE:
            raise ValueError(
                f"{name}: got one with a query of dtype {arguments['query'].dtype}; allowed with float8_e4m3fn"
            )
    for name in _ROWS:
        if tensors[name].dtype is not DTYPE:
            raise TypeError(f"{name}: got dtype {tensors[name].dtype}; allowed: query's, {DTYPE}")
        if some_dtensor(tensors[name]):
            raise NotImplementedError(f"{name}: got a DTensor of {DTYPE}; allowed: a process's own part, to_local()")
    check_not_differentiated(
        f"{function} of {DTYPE}",
        tensors | {name: arguments[name] for name in ("alibi_slopes", "sink")},
        way_out="16-bit and 32-bit floats have gradients",
    )
    for name in _REFUSED:
        if arguments.get(name) is not None:
            raise NotImplementedError(f"{name}: got one with a query of {DTYPE}; allowed: None")
    if arguments["dropout_p"] != 0.0:
        raise NotImplementedError(f"dropout_p: got {arguments['dropout_p']} with a query of {DTYPE}; allowed: 0.0")
    kept = {name: value for name, value in arguments.items() if name not in (*OF_FLOAT8, "qv")}
    return Call.from_arguments(operator, **kept)


def _out_dtype(arguments: dict[str, Any]) -> torch.dtype:
    return out_dtype_of(arguments["query"], arguments["out_dtype"], "a query")


def checked_factor(name: str, factor: Tensor | None, sizes: tuple[int, int], device: torch.device) -> Tensor | None:
    """Returns a factor as (B, H_kv). ``sizes``: B and H_kv."""
    if factor is None:
        return None
    check_is_dense(name, factor)
    if factor.dtype != torch.float32:
        raise TypeError(f"{name}: got dtype {factor.dtype}; allowed: float32")
    if factor.device != device:
        raise ValueError(f"{name}: got device {factor.device}; allowed: query's, {device}")
    if factor.dim() != 2 or any(size not in (1, full) for size, full in zip(factor.shape, sizes, strict=True)):
        raise ValueError(
            f"{name}: got shape {list(factor.shape)}; allowed: (batch, heads_kv) = {list(sizes)}, each also 1"
        )
    return factor.expand(sizes)


def product_of(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The product of two factors; None means 1."""
    if first is None or second is None:
        return second if first is None else first
    return first * second


def _factors(arguments: dict[str, Any], batch: int, heads_kv: int) -> tuple[Tensor | None, Tensor | None]:
    """Returns the factors of the scores and of out, each (B, H_kv)."""
    device = arguments["query"].device
    q, k, v = (checked_factor(name, arguments[name], (batch, heads_kv), device) for name in DESCALES)
    return product_of(q, k), v


def dense_on_cache(form: Call, arguments: dict[str, Any]) -> Call:
    """Returns the call of attention_cache. ``form``: a call with tensors (B, H, S, D)."""
    query, key, value = (form.tensors[name].transpose(1, 2) for name in _ROWS)  # type: ignore[union-attr]
    batch, rows = query.shape[:2]
    factors = _factors(arguments, batch, key.shape[2])
    of_rows = [None if f is None else f[:, None].expand(-1, key.shape[1], -1) for f in factors]
    return _call_on_cache(
        form, of_rows, rows,
        query=query.to(_out_dtype(arguments), memory_format=torch.contiguous_format).flatten(0, 1),
        key=key, value=value, cu_seqlens_q=torch.arange(batch + 1, device=query.device) * rows,
        seqused_k=torch.full((batch,), key.shape[1], device=query.device),
    )  # fmt: skip


def packed_on_cache(call: Call, arguments: dict[str, Any]) -> Call:
    """Returns the call of attention_cache for packed sequences."""
    query, key, value, used = (call.tensors[name] for name in (*_ROWS, "seqused_k"))
    offsets: Tensor = call.tensors["cu_seqlens_k"]  # type: ignore[assignment]
    _check_offsets(offsets, key.shape[0], used)
    batch, first, end = max(offsets.shape[0] - 1, 0), offsets[:-1], offsets[1:]
    factors: Any = _factors(arguments, batch, key.shape[1])
    if any(f is not None for f in factors):
        sequence = _sequence_of_rows(offsets, key.shape[0])
        factors = [None if f is None or batch == 0 else f[sequence][None] for f in factors]
    return _call_on_cache(
        call, factors, call.options.get("max_seqlen_q"),
        query=query.to(_out_dtype(arguments)), key=key[None], value=value[None],
        cu_seqlens_q=call.tensors["cu_seqlens_q"],
        seqused_k=end if used is None else torch.minimum(first + used, end), leftpad=first,
        batch_idx=torch.zeros_like(first),
    )  # fmt: skip


def _sequence_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """Returns the sequence of each packed row.

    Offsets on CUDA may be wrong: a row of no sequence gets the last sequence.
    """
    numbers = torch.arange(rows, device=offsets.device)
    return torch.bucketize(numbers, offsets[1:].to(numbers.dtype), right=True).clamp(max=max(len(offsets) - 2, 0))


def _call_on_cache(call: Call, factors: Any, max_seqlen_q: object, **tensors: Tensor | None) -> Call:
    given = dict.fromkeys(_ops.CACHE.tensor_names) | tensors
    given |= {name: call.tensors[name] for name in ("alibi_slopes", "sink")}
    given["key_scale"], given["value_scale"] = factors
    options = {name: value for name, value in call.options.items() if name in _ops.CACHE.option_types}
    return Call(_ops.CACHE, given, options | {"max_seqlen_q": max_seqlen_q, "float8_products": True})


def _run_dense(form: Call, arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns out (B, H, S_q, D_v) in the memory order (B, S_q, H, D_v), and lse."""
    batch, _, rows, _ = form.tensors["query"].shape  # type: ignore[union-attr]
    out, lse = dense_on_cache(form, arguments).run()
    return out.unflatten(0, (batch, rows)).transpose(1, 2), lse.unflatten(1, (batch, rows)).transpose(0, 1)


def _check_offsets(offsets: Tensor, total: int, used: Tensor | None) -> None:
    """Checks cu_seqlens_k and seqused_k. csrc/ops/checks receives a call on a cache, so it cannot check them."""
    if used is not None and (offsets.dim() != 1 or used.shape != (max(len(offsets) - 1, 0),)):
        raise ValueError(f"seqused_k: got shape {list(used.shape)}; allowed: (sequences,), as cu_seqlens_k has them")
    if torch.compiler.is_compiling() or offsets.device.type != "cpu" or offsets.dim() != 1 or len(offsets) == 0:
        return
    numbers = offsets.tolist()
    if numbers[0] != 0 or numbers[-1] != total:
        raise ValueError(
            f"cu_seqlens_k: got offsets from {numbers[0]} to {numbers[-1]}; allowed: from 0 to {total}, the rows of key"
        )
    lengths = [end - begin for begin, end in pairwise(numbers)]
    for b, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"cu_seqlens_k: got {numbers[b + 1]} after {numbers[b]} at {b + 1}; allowed: ascending")
    for b, (count, length) in enumerate(zip([] if used is None else used.tolist(), lengths, strict=False)):
        if not 0 <= count <= length:
            raise ValueError(f"seqused_k: got {count} at {b}; allowed: 0 to the sequence's {length} rows")


def _with_errors_of_16_bit(
    call: Call, dtype: torch.dtype, run: Callable[[], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Runs a call. If its tensors are wrong, raises the error of the same call in ``dtype``, with its own shapes."""
    if torch.compiler.is_compiling():
        return run()
    try:
        return run()
    except (TypeError, ValueError):
        _raise_as_16_bit(call, dtype)
        raise


def _raise_as_16_bit(call: Call, dtype: torch.dtype) -> None:
    """Raises the error of the 16-bit operator for the shapes and options of the call. It computes nothing."""

    def on_meta(t: Tensor) -> Tensor:
        return torch.empty_like(t, dtype=dtype if t.dtype is DTYPE else t.dtype, device="meta")

    wide = call.with_tensors(**{name: on_meta(t) for name, t in call.tensors.items() if t is not None})
    (_dense.attend if call.operator is _ops.DENSE else _packed.attend)(wide)


def refuse_second_query(q: Tensor) -> None:
    if isinstance(q, Tensor) and q.dtype is DTYPE:
        raise NotImplementedError(f"qv: got one with a query of {DTYPE}; allowed: None")


def widened_for_cache(
    given: Mapping[str, Tensor | None], cache_format: str | None, out_dtype: object
) -> tuple[dict[str, Tensor | None], Tensor | None]:
    """Returns the tensors of flash_attn_with_kvcache with ``q``, ``k`` and ``v`` in the dtype of out, and the factor of
    the keys, (B, H_k).

    If each cache belongs to one sequence, or all sequences have one q_descale, it multiplies the factors of the keys.
    Otherwise q_descale multiplies the queries. Then the queries are float32, because bfloat16 would round the products.
    """
    q, factor, rows = given["q"], given["q_descale"], ("k_cache", "v_cache", "k", "v")
    assert q is not None
    dtype = out_dtype_of(q, out_dtype, "q")
    if q.dtype is not DTYPE:
        raise ValueError(f"q_descale: got one with q of dtype {q.dtype}; allowed with float8_e4m3fn")
    for name in rows:
        t = given[name]
        if isinstance(t, Tensor) and t.dtype is not DTYPE:
            raise TypeError(f"{name}: got dtype {t.dtype}; allowed: q's, {DTYPE}")
    refused = [name for name in ("rotary_cos", "qv") if given[name] is not None]
    if cache_format is not None:
        refused.append("cache_format")
    if refused:
        raise NotImplementedError(f"{refused[0]}: got one with q of {DTYPE}; allowed: None")
    offsets, k_cache = given["cu_seqlens_q"], given["k_cache"]
    assert k_cache is not None
    # otherwise the caller raises an error
    has_right_dims = k_cache.dim() == 4 and q.dim() == (4 if offsets is None else 3)
    if factor is not None and has_right_dims:
        batch = q.shape[0] if offsets is None else len(offsets) - 1
        factor = checked_factor("q_descale", factor, (batch, k_cache.shape[2]), q.device)
        is_own_cache = given["block_table"] is given["cache_batch_idx"] is None and k_cache.shape[0] == batch
        is_common = batch == 1 or factor.stride(0) == 0
        if not is_own_cache and not is_common and batch != 0:
            return {**given, **_cast(given, torch.float32), "q": q.float() * _of_queries(factor, q, offsets)}, None
        if not is_own_cache:
            factor = None if batch == 0 else factor[:1]
    return {**given, **_cast(given, dtype)}, factor if has_right_dims else None


def allows_products(query: Tensor, k_descale: Tensor | None, v_descale: Tensor | None) -> bool:
    """Whether the option float8_products describes a call of caches. ``query``: of :func:`widened_for_cache`."""
    return query.dtype is not torch.float32 and all(t is None or t.dim() <= 2 for t in (k_descale, v_descale))


def _cast(given: Mapping[str, Tensor | None], dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Returns ``q``, ``k`` and ``v`` in another dtype."""
    return {name: None if (t := given[name]) is None else t.to(dtype) for name in ("q", "k", "v")}


def _of_queries(factor: Tensor, q: Tensor, offsets: Tensor | None) -> Tensor:
    """Expands a factor (B, H_k) for the rows of ``q``: (B, 1, H, 1), or packed (T_q, H, 1)."""
    heads, heads_kv = q.shape[-2], factor.shape[1]
    of_heads = factor[:, torch.arange(heads, device=q.device) * heads_kv // max(heads, 1)][..., None]
    return of_heads[:, None] if offsets is None else of_heads[_sequence_of_rows(offsets, q.shape[0])]


def with_query_factor(k_descale: Tensor | None, factor: Tensor) -> Tensor:
    """Returns the factors of the keys, in a form of k_descale, times the factor (B, H_k) of the queries."""
    if k_descale is None:
        return factor
    return k_descale * (factor[:, None] if k_descale.dim() == 3 else factor)
