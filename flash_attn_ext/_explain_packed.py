"""explain_varlen and explain_kvcache: the kernels, memory and traffic of calls on packed sequences and on caches."""

import inspect
from dataclasses import replace

import torch

from . import _cache, _float8, _ops, _packed
from ._call import FUNCTIONS, OF_FLOAT8, Call, take
from ._explain import (
    Explanation,
    after_autocast,
    arguments_of,
    describe,
    explanation,
    of_cache,
    of_float8,
    refuse_dtensors,
    with_undrawn_rng_state,
)
from ._second_query import without_second_query
from .flex.attention import with_functions
from .kvcache import flash_attn_with_kvcache
from .varlen import flash_attn_varlen


def explain_varlen(*args, **kwargs) -> Explanation:
    """Reports the kernels, the memory and the traffic of a call of :func:`flash_attn_varlen`. It computes nothing.

    The arguments are the same as in :func:`flash_attn_varlen`. The model is the same as in :func:`explain`. FLOPs and
    traffic are sums over the sequences with their own lengths. On CPU the decode kernel computes sequences of few
    queries: :attr:`Pass.decoded` counts them, and :attr:`Pass.splits` is the largest number of splits of their keys. On
    CUDA this function waits for the GPU to copy the offsets; the call itself does not wait.

    Raises:
        TypeError, ValueError: as :func:`flash_attn_varlen`; also for offsets on the Meta device, which have no values.
        NotImplementedError: no kernels for the tensors' device.
    """
    arguments = arguments_of("flash_attn_varlen", _VARLEN, args, kwargs)
    if _float8.is_float8(arguments["query"], *(arguments[name] for name in OF_FLOAT8)):
        call = _float8.packed_call(arguments)
        _check_has_numbers(call, cu_seqlens_q="cu_seqlens_q", cu_seqlens_k="cu_seqlens_k")
        found = of_float8("flash_attn_varlen", call, _float8.packed_on_cache(call, arguments))
        return replace(found, call=_count_sequences(found.call, call))
    functions = take(arguments, FUNCTIONS)
    given = Call.from_arguments(_ops.VARLEN, **without_second_query(arguments))
    refuse_dtensors(given.tensors)
    given, drawn = with_undrawn_rng_state(given)
    call = _packed.to_operator_form(given)
    _check_has_numbers(call, cu_seqlens_q="cu_seqlens_q", cu_seqlens_k="cu_seqlens_k")
    call, cast = after_autocast(call)
    described = _count_sequences(describe("flash_attn_varlen", call, query="query", key="key", value="value"), call)
    plans = _ops.plan_varlen, _ops.plan_varlen_backward
    if any(function is not None for function in functions.values()):
        call = with_functions(call, **functions)
        plans = _ops.plan_varlen_flex, _ops.plan_varlen_flex_backward
    return explanation(described, plans, call, given, [drawn, *cast])


def explain_kvcache(*args, **kwargs) -> Explanation:
    """Reports the kernels, the memory and the traffic of a call of :func:`flash_attn_with_kvcache`. It appends nothing.

    The arguments are the same as in :func:`flash_attn_with_kvcache`. The forward is the attention over the lengths of
    the caches after appending. Appending allocates ``allocates["rotated query"]`` and ``["lengths"]``. There is no
    backward. Everything else is as in :func:`explain_varlen`. The traffic does not include the factors of 8-bit caches,
    the scales of int4 caches and the appended rows.

    Raises:
        TypeError, ValueError: as :func:`flash_attn_with_kvcache`; and for lengths on the Meta device.
        NotImplementedError: no kernels for the tensors' device.
    """
    given = _cache.CacheCall.from_arguments(**arguments_of("flash_attn_with_kvcache", _KVCACHE, args, kwargs))
    if given.numbers is not None:
        raise NotImplementedError(f"{given.numbers.name}: got one; allowed here: None")
    refuse_dtensors(given.tensors)
    append, call, second = _cache.operator_calls(given)
    _check_has_numbers(call, cu_seqlens_q="cu_seqlens_q", seqused_k="cache_seqlens")
    of_append = {}
    if append is not None:
        _ops.check_append(append.tensors, append.options)
        lengths = call.tensors["seqused_k"]
        new_lengths = append.tensors["cu_seqlens_k_new"].diff().to(lengths.dtype)
        call = call.with_tensors(seqused_k=lengths + new_lengths)
        of_append["lengths"] = lengths.nbytes
        if append.tensors["rotary_cos"] is not None:
            rotated = torch.empty_like(append.tensors["query"], memory_format=torch.contiguous_format)
            if second is None:
                call = call.with_tensors(query=rotated)
            of_append["rotated query"] = rotated.nbytes
    if given.tensors["q"].dtype is _float8.DTYPE:
        of_append["widened query"] = call.tensors["query"].nbytes
    if second is not None:
        of_append["joined query"] = call.tensors["query"].nbytes
    if given.functions:
        call = with_functions(call, **given.functions)
    q, k = (call.tensors[name] for name in ("query", "key"))
    described = describe("flash_attn_with_kvcache", call, q="query", k_cache="key", v_cache="value")
    if k.dtype != q.dtype:
        stored = "int4" if k.dtype == torch.uint8 else str(k.dtype).removeprefix("torch.")
        described += f", {stored} caches"
    plan_of = _ops.plan_cache_flex if given.functions else _ops.plan_cache
    return of_cache(_count_sequences(described, call), plan_of, call, of_append)


_VARLEN = inspect.signature(flash_attn_varlen)
_KVCACHE = inspect.signature(flash_attn_with_kvcache)
explain_varlen.__signature__ = _VARLEN.replace(return_annotation=Explanation)
explain_kvcache.__signature__ = _KVCACHE.replace(return_annotation=Explanation)


def _check_has_numbers(call: Call, **names: str) -> None:
    """Checks the tensors that determine the amount of work. ``names``: schema's name = caller's name."""
    for name, public_name in names.items():
        if call.tensors[name].is_meta:
            raise ValueError(
                f"{public_name}: got a tensor on the Meta device, which has no numbers; allowed: any other device"
            )


def _count_sequences(described: str, call: Call) -> str:
    offsets = call.tensors["cu_seqlens_q"]
    count = max(offsets.shape[0] - 1, 0) if offsets.dim() else 0
    return f"{described}, {count} sequence{'s' * (count != 1)}"
