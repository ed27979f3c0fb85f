"""Block masks without an S x S tensor.

This module imports torch's flex_attention, which takes seconds. The package does not import it.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import BlockMask


def create_block_mask(
    mask_mod: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str = "cpu",
    BLOCK_SIZE: int | tuple[int, int] = 128,
) -> BlockMask:
    """torch's ``create_block_mask`` in less memory: the mask of one row of blocks at a time, never Q_LEN x KV_LEN.

    The arguments and the result are those of ``torch.nn.attention.flex_attention.create_block_mask``. Eager only.
    """
    block_q, block_k = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    for name, size in (("Q_LEN", Q_LEN), ("KV_LEN", KV_LEN), ("BLOCK_SIZE", block_q), ("BLOCK_SIZE", block_k)):
        if size < 1:
            raise ValueError(f"{name}: got {size}; allowed: 1 or more")
    mask_of = mask_mod
    for position in (3, 2, 1, 0):  # the last dimension of the result is the key
        mask_of = torch.vmap(mask_of, in_dims=tuple(0 if n == position else None for n in range(4)))
    columns = -(-KV_LEN // block_k)
    b, h, keys = (torch.arange(size, device=device) for size in (B or 1, H or 1, KV_LEN))
    counts = []
    for first in range(0, Q_LEN, block_q):
        queries = torch.arange(first, min(first + block_q, Q_LEN), device=device)
        with TransformGetItemToIndex():
            mask = mask_of(b, h, queries, keys)
        of_keys = torch.nn.functional.pad(mask.sum(-2), (0, columns * block_k - KV_LEN))
        counts.append(of_keys.unflatten(-1, (columns, block_k)).sum(-1))
    visible = torch.stack(counts, -2)
    full = visible == block_q * block_k
    return BlockMask.from_kv_blocks(
        *_lists_of((visible > 0) & ~full),
        *_lists_of(full),
        BLOCK_SIZE=(block_q, block_k),
        mask_mod=mask_mod,
        seq_lengths=(Q_LEN, KV_LEN),
    )


def _lists_of(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(count, indices) of the blocks that are True in each row; the other indices follow."""
    indices = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int(), indices.int()
