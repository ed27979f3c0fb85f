"""Ring attention (Liu et al. 2023, arXiv 2310.01889): processes pass keys and values around.

Queries do not move. Each process computes with its current keys and values, and at the same time sends them to the next
process that needs them. The backward passes keys and values around again. The sums of their gradients follow one step
later, and at the end return to the process that owns the keys.
"""

import torch
from torch import Tensor

from ._exchange import Exchange
from ._sharded_call import Inputs, ShardedCall, accumulator_dtype
from ._sums import BackwardSums, ForwardSums
from ._tiles import needed_distances, tiles_with_keys_of


class _KeysAndValues:
    """The keys and values of one process: one message, and a view of each."""

    def __init__(self, call: ShardedCall, rank: int, key: Tensor, value: Tensor, dtype: torch.dtype | None = None):
        """Allocates memory for the rows of process ``rank``. ``key`` and ``value`` give the other sizes."""
        rows = call.geometry.keys.rows(rank)
        shapes = [(*t.shape[:2], rows, t.shape[3]) for t in (key, value)]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        self.message = key.new_empty(sum(sizes), dtype=dtype or key.dtype)
        self.key, self.value = (part.view(shape) for part, shape in zip(self.message.split(sizes), shapes, strict=True))


def _pass_keys_around(call: ShardedCall, key: Tensor, value: Tensor):
    """Yields (rank, keys and values of that rank), first its own. The next keys and values arrive in the background."""
    group = call.group
    distances = needed_distances(call.geometry)
    current = _KeysAndValues(call, group.rank, key, value)
    current.key.copy_(key)
    current.value.copy_(value)
    for number, distance in enumerate(distances):
        exchange = following = None
        if number + 1 < len(distances):
            step = distances[number + 1] - distance
            following = _KeysAndValues(call, (group.rank - distances[number + 1]) % group.size, key, value)
            to, source = (group.rank + step) % group.size, (group.rank - step) % group.size
            exchange = Exchange(group, current.message, to, following.message, source)
        yield (group.rank - distance) % group.size, current
        if exchange is not None and following is not None:
            exchange.wait()
            current = following


def forward(call: ShardedCall, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of this process's queries."""
    sums = ForwardSums(call, inputs)
    for rank, current in _pass_keys_around(call, inputs.key, inputs.value):
        for tile in tiles_with_keys_of(call.geometry, call.group.rank, rank):
            sums.add(tile, current.key, current.value)
    return sums.results()


def backward(call: ShardedCall, inputs: Inputs, sums: BackwardSums) -> list[Tensor]:
    """Computes the wanted gradients of this process's tensors."""
    group, dtype = call.group, accumulator_dtype(inputs.query)
    distances = needed_distances(call.geometry)
    travelling = None  # the gradients of the previous keys, in flight to the next process
    for number, (rank, current) in enumerate(_pass_keys_around(call, inputs.key, inputs.value)):
        grads = _KeysAndValues(call, rank, inputs.key, inputs.value, dtype)
        grads.message.zero_()
        for tile in tiles_with_keys_of(call.geometry, group.rank, rank):
            sums.add(tile, current.key, current.value, grads.key, grads.value)
        if travelling is not None:
            grads.message += travelling.wait()
        last = number + 1 == len(distances)
        # Gradients follow their keys. After the last step they go to the process that owns the keys.
        step = group.size - distances[number] if last else distances[number + 1] - distances[number]
        if step % group.size:
            source = (group.rank - step) % group.size
            owner = (source - distances[number]) % group.size
            coming = _KeysAndValues(call, owner, inputs.key, inputs.value, dtype)
            travelling = Exchange(group, grads.message, (group.rank + step) % group.size, coming.message, source)
            if last:
                travelling.wait()
                grads = coming
    return sums.results(grads.key, grads.value)
