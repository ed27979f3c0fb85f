"""explain_varlen, explain_kvcache: what a call on packed sequences or on a cache would do, without doing it."""

import inspect
from dataclasses import replace

import torch
from torch import Tensor

from . import _ops, kvcache, varlen
from ._explain import (
    Explanation,
    HeadShape,
    arguments_of,
    autocast,
    describe,
    drawn_rng_state,
    explained,
    explanation,
    refuse_dtensors,
)


def explain_varlen(*args, **kwargs) -> Explanation:
    """What :func:`flash_attn_varlen` would do with these arguments: its kernels, memory and traffic. It runs nothing.

    Arguments: those of :func:`flash_attn_varlen`. What is said of :func:`explain` holds here too. FLOPs and traffic are
    the sums over the sequences, each of its own lengths. A sequence of few queries takes the CPU's decode kernel:
    :attr:`Pass.decoded` says how many of them do, and :attr:`Pass.splits` into how many pieces, at most, its keys are
    cut. On CUDA the offsets are copied to the CPU, which waits for the GPU as the call itself does not.

    Raises:
        TypeError, ValueError: as :func:`flash_attn_varlen`; and for offsets on the Meta device, which have no numbers.
        NotImplementedError: no kernels for the tensors' device.
    """
    arguments = arguments_of(_VARLEN, args, kwargs)
    arguments.pop("return_lse")
    refuse_dtensors(**{name: arguments[name] for name in ("query", "key", "value")})
    drawn = drawn_rng_state(*(arguments[name] for name in ("query", "dropout_p", "rng_state")))
    if drawn is not None:
        arguments["rng_state"] = drawn
    given, options = varlen.operator_arguments(**arguments)
    _check_has_numbers(cu_seqlens_q=arguments["cu_seqlens_q"], cu_seqlens_k=arguments["cu_seqlens_k"])
    tensors, cast = autocast(given, _ops.VARLEN_TENSORS)
    described = describe("flash_attn_varlen", query=tensors[0], key=tensors[1], value=tensors[2])
    plans = _ops.plan_varlen, _ops.plan_varlen_backward
    return explanation(_count_sequences(described, given[6]), plans, tensors, options, given, [drawn, *cast])


def explain_kvcache(*args, **kwargs) -> Explanation:
    """What :func:`flash_attn_with_kvcache` would do with these arguments. It runs nothing, and appends nothing.

    Arguments: those of :func:`flash_attn_with_kvcache`. The forward is that of the attention, over the lengths that the
    caches have after ``k`` and ``v`` were appended; ``allocates["rotated query"]`` and ``["lengths"]`` are what
    appending allocates. There is no backward. Otherwise as :func:`explain_varlen`. The scales of 8-bit caches and the
    rows that are appended are not counted in the traffic.

    Raises:
        TypeError, ValueError: as :func:`flash_attn_with_kvcache`; and for lengths on the Meta device.
        NotImplementedError: no kernels for the tensors' device.
    """
    arguments = arguments_of(_KVCACHE, args, kwargs)
    arguments.pop("return_softmax_lse")
    refuse_dtensors(**{name: arguments[name] for name in ("q", "k_cache", "v_cache", "k", "v")})
    names = {name: arguments.pop(name) for name in ("qv", "page_table", "learnable_sink")}
    block_table, sink = kvcache.with_one_name(**names, **{name: arguments[name] for name in ("block_table", "sink")})
    arguments |= {"block_table": block_table, "sink": sink}
    append, attend = kvcache.operator_arguments(**arguments)
    _check_has_numbers(cu_seqlens_q=attend["cu_seqlens_q"], cache_seqlens=attend["seqused_k"])
    of_append = {}
    if append is not None:
        *tensors, interleaved, advance_query_positions = append.values()
        _ops.check_append(tuple(tensors), (interleaved, advance_query_positions))
        lengths = attend["seqused_k"]
        attend["seqused_k"] = lengths + append["cu_seqlens_k_new"].diff().to(lengths.dtype)
        of_append["lengths"] = lengths.nbytes
        if append["rotary_cos"] is not None:
            attend["query"] = torch.empty_like(attend["query"], memory_format=torch.contiguous_format)
            of_append["rotated query"] = attend["query"].nbytes
    values = list(attend.values())
    count = len(_ops.CACHE_TENSORS)
    plan = _ops.plan_cache(tuple(values[:count]), tuple(values[count:]))
    q, k, v = (attend[name] for name in ("query", "key", "value"))
    shape = HeadShape(q.shape[1], k.shape[2], q.shape[2], v.shape[3], q.dtype, k.dtype, q.device.type)
    forward = explained("forward", plan, shape, attend["tree_mask"])
    described = describe("flash_attn_with_kvcache", q=q, k_cache=k, v_cache=v)
    if k.dtype != q.dtype:
        described += f", {str(k.dtype).removeprefix('torch.')} caches"
    return Explanation(
        call=_count_sequences(described, attend["cu_seqlens_q"]),
        forward=replace(forward, allocates={**forward.allocates, **of_append}),
        backward=None,
        gradients=(),
        deterministic=True,
    )


_VARLEN = inspect.signature(varlen.flash_attn_varlen)
_KVCACHE = inspect.signature(kvcache.flash_attn_with_kvcache)
explain_varlen.__signature__ = _VARLEN.replace(return_annotation=Explanation)
explain_kvcache.__signature__ = _KVCACHE.replace(return_annotation=Explanation)


def _check_has_numbers(**tensors: Tensor) -> None:
    for name, t in tensors.items():
        if t.is_meta:
            raise ValueError(
                f"{name}: got a tensor on the Meta device, which has no numbers; allowed: any other device"
            )


def _count_sequences(described: str, cu_seqlens: Tensor) -> str:
    count = max(cu_seqlens.shape[0] - 1, 0) if cu_seqlens.dim() else 0
    return f"{described}, {count} sequence{'s' * (count != 1)}"
