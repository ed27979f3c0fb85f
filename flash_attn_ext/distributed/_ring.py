"""Ring attention (Liu et al. 2023, arXiv 2310.01889): keys and values travel, queries stay.

Each process sends the keys and values that it has to the next one that needs them and computes with them meanwhile.
Backward they travel once more, and with them, one step behind, the sums of their gradients, which end at their owner.
"""

import torch
from torch import Tensor

from ._exchange import Exchange
from ._sharded_call import Inputs, ShardedCall, accumulator_dtype
from ._sums import BackwardSums, ForwardSums
from ._tiles import visiting_tiles, visits


class _Visitor:
    """Keys and values of one process as one message, and the two views of it."""

    def __init__(self, call: ShardedCall, rank: int, key: Tensor, value: Tensor, dtype: torch.dtype | None = None):
        """Without contents; of the shapes of ``key`` and ``value``, but with the rows of process ``rank``."""
        rows = call.geometry.keys.rows(rank)
        shapes = [(*t.shape[:2], rows, t.shape[3]) for t in (key, value)]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        self.message = key.new_empty(sum(sizes), dtype=dtype or key.dtype)
        self.key, self.value = (part.view(shape) for part, shape in zip(self.message.split(sizes), shapes, strict=True))


def _visitors(call: ShardedCall, key: Tensor, value: Tensor):
    """(rank, its keys and values) of each visit, from the own ones on; the next are on their way meanwhile."""
    group = call.group
    distances = visits(call.geometry)
    current = _Visitor(call, group.rank, key, value)
    current.key.copy_(key)
    current.value.copy_(value)
    for number, distance in enumerate(distances):
        exchange = following = None
        if number + 1 < len(distances):
            step = distances[number + 1] - distance
            following = _Visitor(call, (group.rank - distances[number + 1]) % group.size, key, value)
            to, source = (group.rank + step) % group.size, (group.rank - step) % group.size
            exchange = Exchange(group, current.message, to, following.message, source)
        yield (group.rank - distance) % group.size, current
        if exchange is not None and following is not None:
            exchange.wait()
            current = following


def forward(call: ShardedCall, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(out, lse) of this process's queries."""
    sums = ForwardSums(call, inputs)
    for rank, visitor in _visitors(call, inputs.key, inputs.value):
        for tile in visiting_tiles(call.geometry, call.group.rank, rank):
            sums.add(tile, visitor.key, visitor.value)
    return sums.results()


def backward(call: ShardedCall, inputs: Inputs, sums: BackwardSums) -> list[Tensor]:
    """The gradients that are wanted, of this process's tensors."""
    group, dtype = call.group, accumulator_dtype(inputs.query)
    distances = visits(call.geometry)
    travelling = None  # the gradients of the last visitor, on their way to who has it next
    for number, (rank, visitor) in enumerate(_visitors(call, inputs.key, inputs.value)):
        grads = _Visitor(call, rank, inputs.key, inputs.value, dtype)
        grads.message.zero_()
        for tile in visiting_tiles(call.geometry, group.rank, rank):
            sums.add(tile, visitor.key, visitor.value, grads.key, grads.value)
        if travelling is not None:
            grads.message += travelling.wait()
        last = number + 1 == len(distances)
        # On with the visitor; the last ones that have it send its gradients home.
        step = group.size - distances[number] if last else distances[number + 1] - distances[number]
        if step % group.size:
            source = (group.rank - step) % group.size
            owner = (source - distances[number]) % group.size
            coming = _Visitor(call, owner, inputs.key, inputs.value, dtype)
            travelling = Exchange(group, grads.message, (group.rank + step) % group.size, coming.message, source)
            if last:
                travelling.wait()
                grads = coming
    return sums.results(grads.key, grads.value)
