"""All-gather attention, as Llama 3 was trained (arXiv 2407.21783, 3.3.2): every process gathers all keys and values.

Backward they are gathered once more, so that between the passes nothing of the whole sequence's size is kept.
"""

import torch
from torch import Tensor

from ._exchange import all_gather, sum_of_shares
from ._plan import BackwardState, ForwardState, Inputs, Plan, accumulator_dtype
from ._ring import refuse_second_derivative, wanted_gradients
from ._tiles import all_tiles


def _gathered(plan: Plan, *tensors: Tensor) -> list[Tensor]:
    """(B, heads, S_k, D) of each tensor (B, heads, rows of this process, D): the whole sequence. One message."""
    layout = plan.geometry.keys
    rows = layout.most_rows()
    padded = [torch.nn.functional.pad(t, (0, 0, 0, rows - t.shape[2])) for t in tensors]
    shards = all_gather(plan.group, torch.cat([t.reshape(-1) for t in padded]))
    wholes = []
    for shard, t in zip(shards.split([t.numel() for t in padded], dim=1), padded, strict=True):
        of_rank = shard.reshape(plan.group.size, *t.shape)
        wholes.append(torch.cat([of_rank[rank, :, :, begin:end] for rank, begin, end in layout.in_order()], dim=2))
    return wholes


def _own_sums(plan: Plan, *gradients: Tensor) -> list[Tensor]:
    """Of each (B, heads, S_k, D) this process's rows, summed over the processes. One message to each."""
    layout = plan.geometry.keys
    rows = layout.most_rows()
    shares = []
    for rank in range(plan.group.size):
        for gradient in gradients:
            part = torch.cat([gradient[:, :, begin:end] for begin, end, _ in layout.pieces(rank)], dim=2)
            shares.append(torch.nn.functional.pad(part, (0, 0, 0, rows - part.shape[2])).reshape(-1))
    own = sum_of_shares(plan.group, torch.cat(shares).view(plan.group.size, -1))
    shapes = [torch.Size((*g.shape[:2], rows, g.shape[3])) for g in gradients]
    parts = own.split([shape.numel() for shape in shapes])
    own_rows = layout.rows(plan.group.rank)
    return [part.view(shape)[:, :, :own_rows] for part, shape in zip(parts, shapes, strict=True)]


class AllGatherAttention(torch.autograd.Function):
    """(out, lse) of this process's queries."""

    @staticmethod
    def forward(ctx, plan: Plan, query, key, value, mask, slopes, sink, rng_state):
        all_keys, all_values = _gathered(plan, key, value)
        state = ForwardState(plan, Inputs(query, mask, slopes, sink, rng_state), value.shape[3])
        for tile in all_tiles(plan.geometry, plan.group.rank):
            state.add(tile, all_keys, all_values)
        out, lse = state.out.to(query.dtype), state.lse
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, mask, slopes, sink, rng_state, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        query, key, value, mask, slopes, sink, rng_state, out, lse = ctx.saved_tensors
        plan = ctx.plan
        if grad_out is None and grad_lse is None:
            return (None,) * 8
        refuse_second_derivative()
        wanted = wanted_gradients(ctx)
        inputs = Inputs(query, mask, slopes, sink, rng_state)
        state = BackwardState(plan, inputs, out, lse, grad_out, grad_lse, wanted)
        all_keys, all_values = _gathered(plan, key, value)
        accumulator = accumulator_dtype(query)
        grads = [torch.zeros_like(t, dtype=accumulator) for t in (all_keys, all_values)]
        for tile in all_tiles(plan.geometry, plan.group.rank):
            state.add(tile, all_keys, all_values, *grads)
        grad_key = grad_value = None
        if wanted["key"] or wanted["value"]:
            own_key, own_value = _own_sums(plan, *grads)
            grad_key = own_key.to(key.dtype) if wanted["key"] else None
            grad_value = own_value.to(value.dtype) if wanted["value"] else None
        grad_query, grad_mask, grad_slopes = state.results()
        return None, grad_query, grad_key, grad_value, grad_mask, grad_slopes, state.of_sink(), None
