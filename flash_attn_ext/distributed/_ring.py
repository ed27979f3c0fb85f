"""Ring attention (Liu et al. 2023, arXiv 2310.01889): keys and values travel, queries stay.

Each process sends the keys and values that it has to the next one that needs them and computes with them meanwhile.
Backward they travel once more, and with them, one step behind, the sums of their gradients, which end at their owner.
"""

import torch
from torch import Tensor

from ._exchange import Exchange
from ._plan import BackwardState, ForwardState, Inputs, Plan, accumulator_dtype
from ._tiles import visiting_tiles, visits


class _Visitor:
    """Keys and values of one process as one message, and the two views of it."""

    def __init__(self, plan: Plan, rank: int, key: Tensor, value: Tensor, dtype: torch.dtype | None = None):
        """Without contents; of the shapes of ``key`` and ``value``, but with the rows of process ``rank``."""
        rows = plan.geometry.keys.rows(rank)
        shapes = [(*t.shape[:2], rows, t.shape[3]) for t in (key, value)]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        self.message = key.new_empty(sum(sizes), dtype=dtype or key.dtype)
        self.key, self.value = (part.view(shape) for part, shape in zip(self.message.split(sizes), shapes, strict=True))


def _visitors(plan: Plan, key: Tensor, value: Tensor):
    """(rank, its keys and values) of each visit, from the own ones on; the next are on their way meanwhile."""
    group = plan.group
    distances = visits(plan.geometry)
    current = _Visitor(plan, group.rank, key, value)
    current.key.copy_(key)
    current.value.copy_(value)
    for number, distance in enumerate(distances):
        exchange = following = None
        if number + 1 < len(distances):
            step = distances[number + 1] - distance
            following = _Visitor(plan, (group.rank - distances[number + 1]) % group.size, key, value)
            to, source = (group.rank + step) % group.size, (group.rank - step) % group.size
            exchange = Exchange(group, current.message, to, following.message, source)
        yield (group.rank - distance) % group.size, current
        if exchange is not None and following is not None:
            exchange.wait()
            current = following


class RingAttention(torch.autograd.Function):
    """(out, lse) of this process's queries."""

    @staticmethod
    def forward(ctx, plan: Plan, query, key, value, mask, slopes, sink, rng_state):
        inputs = Inputs(query, mask, slopes, sink, rng_state)
        state = ForwardState(plan, inputs, value.shape[3])
        for rank, visitor in _visitors(plan, key, value):
            for tile in visiting_tiles(plan.geometry, plan.group.rank, rank):
                state.add(tile, visitor.key, visitor.value)
        out, lse = state.out.to(query.dtype), state.lse
        ctx.plan = plan
        ctx.save_for_backward(query, key, value, mask, slopes, sink, rng_state, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        query, key, value, mask, slopes, sink, rng_state, out, lse = ctx.saved_tensors
        plan, group = ctx.plan, ctx.plan.group
        if grad_out is None and grad_lse is None:
            return (None,) * 8
        refuse_second_derivative()
        wanted = wanted_gradients(ctx)
        inputs = Inputs(query, mask, slopes, sink, rng_state)
        state = BackwardState(plan, inputs, out, lse, grad_out, grad_lse, wanted)
        distances = visits(plan.geometry)
        travelling = None  # the gradients of the last visitor, on their way to who has it next
        grads = None
        for number, (rank, visitor) in enumerate(_visitors(plan, key, value)):
            grads = _Visitor(plan, rank, key, value, accumulator_dtype(query))
            grads.message.zero_()
            for tile in visiting_tiles(plan.geometry, group.rank, rank):
                state.add(tile, visitor.key, visitor.value, grads.key, grads.value)
            if travelling is not None:
                grads.message += travelling.wait()
            last = number + 1 == len(distances)
            # On with the visitor; the last ones that have it send its gradients home.
            step = group.size - distances[number] if last else distances[number + 1] - distances[number]
            if step % group.size:
                source = (group.rank - step) % group.size
                owner = (source - distances[number]) % group.size
                coming = _Visitor(plan, owner, key, value, accumulator_dtype(query))
                to = (group.rank + step) % group.size
                travelling = Exchange(group, grads.message, to, coming.message, source)
                if last:
                    travelling.wait()
                    grads = coming
        grad_query, grad_mask, grad_slopes = state.results()
        grad_key = grads.key.to(key.dtype) if wanted["key"] else None
        grad_value = grads.value.to(value.dtype) if wanted["value"] else None
        return None, grad_query, grad_key, grad_value, grad_mask, grad_slopes, state.of_sink(), None


def refuse_second_derivative() -> None:
    """Raises where torch would record the backward (create_graph=True): its graph would miss this part in silence."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "context_parallel_attn: got create_graph=True, for a second derivative; allowed: method='ulysses', "
            "or first derivatives"
        )


def wanted_gradients(ctx) -> dict[str, bool]:
    """By name; from the inputs of a function whose first argument is a Plan.

    Whether keys need gradients is asked of the own process only, yet all have to take part in the exchange: so
    processes have to agree on it, as they agree on the call.
    """
    names = ("query", "key", "value", "attn_mask", "alibi_slopes", "sink")
    return dict(zip(names, ctx.needs_input_grad[1:7], strict=True))
