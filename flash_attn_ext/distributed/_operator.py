"""Ring and all-gather attention as operators of torch. torch.compile records each call as one node.

The operators get the name of a process group, as in torch's own functional collectives.
"""

import re

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from .. import _ops
from . import _all_gather, _ring
from ._default_group import forget_default_group
from ._group import named_group
from ._sharded_call import Inputs, ShardedCall, Sharding, make_sharded_call, meta_inputs
from ._sums import BackwardSums

forget_default_group()

_METHODS = {"ring": _ring, "all_gather": _all_gather}

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? alibi_slopes, Tensor? sink, "
    "Tensor? rng_state, Tensor? key_mask"
)
_SHARDING = "str group, bool balanced, SymInt? seqlen_q, SymInt? seqlen_k, SymInt[]? documents"
# The options of the operator on one process, without defaults, because torch does not pass options that have the
# default value.
_OPTIONS = re.sub("=[^,]*", "", str(_ops.attention._schema).partition("*, ")[2].partition(") -> ")[0])


@torch.library.custom_op(
    "flash_attn_ext::context_parallel",
    mutates_args=(),
    schema=f"({_INPUTS}, str method, {_SHARDING}, *, {_OPTIONS}) -> (Tensor, Tensor)",
)
def context_parallel(
    query, key, value, attn_mask, alibi_slopes, sink, rng_state, key_mask, method, *sharding, **options
):
    """Computes (out, lse) of this process's queries."""
    inputs = Inputs(query, key, value, attn_mask, alibi_slopes, sink, rng_state, key_mask)
    return _METHODS[method].forward(_call(inputs, Sharding(*sharding), options), inputs)


@context_parallel.register_fake
def _(query, key, value, attn_mask, alibi_slopes, sink, rng_state, key_mask, method, *sharding, **options):
    inputs = Inputs(query, key, value, attn_mask, alibi_slopes, sink, rng_state, key_mask)
    call = Sharding(*sharding)
    results = _ops.attention(*meta_inputs(named_group(call.group), inputs, call, options), **options)
    return tuple(query.new_empty(t.shape, dtype=t.dtype) for t in results)


@torch.library.custom_op(
    "flash_attn_ext::context_parallel_backward",
    mutates_args=(),
    schema=(
        f"(Tensor? grad_out, Tensor? grad_lse, {_INPUTS}, Tensor out, Tensor lse, str method, {_SHARDING}, *, "
        f"{_OPTIONS}, bool[] wanted) -> Tensor[]"
    ),
)
def context_parallel_backward(grad_out, grad_lse, *arguments, wanted, **options):
    """Computes the wanted gradients of ``_ops.DIFFERENTIABLE``. All processes must want the same gradients."""
    inputs, (out, lse, method, *sharding) = Inputs(*arguments[:8]), arguments[8:]
    call = _call(inputs, Sharding(*sharding), options)
    sums = BackwardSums(call, inputs, out, lse, grad_out, grad_lse, wanted)
    return _METHODS[method].backward(call, inputs, sums)


@context_parallel_backward.register_fake
def _(grad_out, grad_lse, *arguments, wanted, **options):
    # BackwardSums makes the gradients of query, mask and slopes in the memory order of these tensors.
    given = zip(_ops.DIFFERENTIABLE, arguments, wanted, strict=False)
    dense = ("key", "value", "sink")
    return [t.new_empty(t.shape) if name in dense else torch.empty_like(t) for name, t, some in given if some]


def _call(inputs: Inputs, sharding: Sharding, options: dict) -> ShardedCall:
    return make_sharded_call(named_group(sharding.group), inputs, sharding, options)


def _save(ctx, inputs: tuple, keyword_only_inputs: dict, output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.sharding, ctx.options = inputs[:8], inputs[8:], keyword_only_inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    arguments = len(ctx.needs_input_grad)
    if grad_out is None and grad_lse is None:
        return (None,) * arguments
    if torch.is_grad_enabled():  # without this error, second derivatives would be wrong without a message
        raise NotImplementedError(
            "context_parallel_attn: got create_graph=True, for a second derivative; allowed: method='ulysses', "
            "or first derivatives"
        )
    wanted = list(ctx.needs_input_grad[: len(_ops.DIFFERENTIABLE)])
    found = iter(
        context_parallel_backward(grad_out, grad_lse, *ctx.saved_tensors, *ctx.sharding, wanted=wanted, **ctx.options)
    )
    return *(next(found) if some else None for some in wanted), *(None,) * (arguments - len(wanted))


context_parallel.register_autograd(_backward, setup_context=_save)


def _pairs(query: torch.Size, key: torch.Size, group: str, seqlen_k: int | None) -> int:
    """Returns B * H * s_q * S_k, this process's share of the pairs that flash_attn_ext/_flops.py counts."""
    return query[:3].numel() * (key[2] * named_group(group).size if seqlen_k is None else seqlen_k)


@register_flop_formula(torch.ops.flash_attn_ext.context_parallel)
def _forward_flops(query, key, value, *arguments, out_shape=None, **options) -> int:
    _, group, _, _, seqlen_k, _ = arguments[5:]
    return 2 * _pairs(query, key, group, seqlen_k) * (query[3] + value[3])


@register_flop_formula(torch.ops.flash_attn_ext.context_parallel_backward)
def _backward_flops(_, __, query, key, value, *arguments, out_shape=None, **options) -> int:
    _, group, _, _, seqlen_k, _ = arguments[7:]
    return 2 * _pairs(query, key, group, seqlen_k) * (3 * query[3] + 2 * value[3])
