"""All-gather attention, as in the training of Llama 3 (arXiv 2407.21783, 3.3.2).

Every process gathers all keys and values. The backward gathers them again, so no tensor of the whole sequence is saved.
"""

import torch
from torch import Tensor

from ._exchange import all_gather, reduce_scatter_in_order
from ._sharded_call import Inputs, ShardedCall, accumulator_dtype
from ._sums import BackwardSums, ForwardSums
from ._tiles import all_tiles


def _gather_sequence(call: ShardedCall, *tensors: Tensor) -> list[Tensor]:
    """Gathers the whole sequence (B, heads, S_k, D) of each tensor (B, heads, own rows, D), in one message."""
    layout = call.geometry.keys
    rows = layout.max_rows()
    padded = [torch.nn.functional.pad(t, (0, 0, 0, rows - t.shape[2])) for t in tensors]
    shards = all_gather(call.group, torch.cat([t.reshape(-1) for t in padded]))
    wholes = []
    for shard, t in zip(shards.split([t.numel() for t in padded], dim=1), padded, strict=True):
        of_rank = shard.reshape(call.group.size, *t.shape)
        wholes.append(torch.cat([of_rank[rank, :, :, begin:end] for rank, begin, end in layout.in_order()], dim=2))
    return wholes


def _reduce_to_own_rows(call: ShardedCall, *gradients: Tensor) -> list[Tensor]:
    """Adds the gradients (B, heads, S_k, D) of all processes, and returns this process's rows of the sums.

    Sends one message to each process.
    """
    layout = call.geometry.keys
    rows = layout.max_rows()
    shares = []
    for rank in range(call.group.size):
        for gradient in gradients:
            part = torch.cat([gradient[:, :, begin:end] for begin, end, _ in layout.pieces(rank)], dim=2)
            shares.append(torch.nn.functional.pad(part, (0, 0, 0, rows - part.shape[2])).reshape(-1))
    own = reduce_scatter_in_order(call.group, torch.cat(shares).view(call.group.size, -1))
    shapes = [torch.Size((*g.shape[:2], rows, g.shape[3])) for g in gradients]
    parts = own.split([shape.numel() for shape in shapes])
    own_rows = layout.rows(call.group.rank)
    return [part.view(shape)[:, :, :own_rows] for part, shape in zip(parts, shapes, strict=True)]


def forward(call: ShardedCall, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Computes (out, lse) of this process's queries."""
    keys, values = _gather_sequence(call, inputs.key, inputs.value)
    sums = ForwardSums(call, inputs)
    for tile in all_tiles(call.geometry, call.group.rank):
        sums.add(tile, keys, values)
    return sums.results()


def backward(call: ShardedCall, inputs: Inputs, sums: BackwardSums) -> list[Tensor]:
    """Computes the wanted gradients of this process's tensors."""
    keys, values = _gather_sequence(call, inputs.key, inputs.value)
    grads = [torch.zeros_like(t, dtype=accumulator_dtype(inputs.query)) for t in (keys, values)]
    for tile in all_tiles(call.geometry, call.group.rank):
        sums.add(tile, keys, values, *grads)
    return sums.results(*(_reduce_to_own_rows(call, *grads) if sums.wants_keys else grads))
