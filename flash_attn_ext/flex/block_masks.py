"""Converts torch's BlockMask to the operator's block states: 0 hidden, 1 partial, 2 full."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_PARTIAL, _FULL = 1, 2
WHOLE = 1 << 30  # the block size of torch's empty mask, for all lengths
_KEPT_AS = "_flash_attn_ext_states"


def states_of(block_mask: "BlockMask") -> Tensor:
    """Returns the states (B, H, query blocks, key blocks), uint8. The mask caches them until its lists change."""
    lists = (
        (block_mask.kv_num_blocks, block_mask.kv_indices, _PARTIAL),
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, _FULL),
    )
    tensors = [t for counts, indices, _ in lists for t in (counts, indices) if t is not None]
    # Tensors of inference mode have no version, so a change of their elements would not be seen.
    version = None if any(t.is_inference() for t in tensors) else [(id(t), t._version) for t in tensors]
    kept = getattr(block_mask, _KEPT_AS, None)
    if kept is not None and kept[0] == version:
        return kept[1]
    states = states_of_lists(block_mask.seq_lengths, block_mask.BLOCK_SIZE, lists[0][:2], lists[1][:2])
    if version is not None:
        setattr(block_mask, _KEPT_AS, (version, states))
    return states


def states_of_lists(
    lengths: Sequence[int],
    block_size: Sequence[int],
    partial: Sequence[Tensor | None],
    full: Sequence[Tensor | None],
) -> Tensor:
    """Returns the states from two lists, of partial and of full blocks. A list is (count, indices), or Nones."""
    rows, columns = (-(-length // size) for length, size in zip(lengths, block_size, strict=True))
    indices = partial[1]
    assert indices is not None
    states = torch.zeros((*indices.shape[:-2], rows, columns), dtype=torch.uint8, device=indices.device)
    for (counts, blocks), state in ((partial, _PARTIAL), (full, _FULL)):
        if counts is None or blocks is None:
            continue
        listed = torch.arange(blocks.shape[-1], device=blocks.device) < counts.unsqueeze(-1)
        is_inside = listed & (blocks >= 0) & (blocks < columns)
        row_count = min(rows, blocks.shape[-2])
        # One more column for indices beyond the count.
        column = torch.where(is_inside, blocks, columns).long()[..., :row_count, :]
        marked = torch.zeros((*states.shape[:-2], row_count, columns + 1), dtype=torch.uint8, device=states.device)
        marked.scatter_(-1, column, state)
        states[..., :row_count, :] = torch.maximum(states[..., :row_count, :], marked[..., :columns])
    return states


def check_block_mask(block_mask: "BlockMask", query: Tensor, lengths: tuple[int, int] | None) -> None:
    """Raises if torch's flex_attention would raise. ``lengths``: S_q and S_k, or None for packed sequences."""
    if type(block_mask).__name__ != "BlockMask":  # an import of torch's module would take seconds
        raise TypeError(
            f"block_mask: got {type(block_mask).__name__}; allowed: None, a torch.nn.attention.flex_attention.BlockMask"
        )
    if getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise RuntimeError("block_mask: got a sliced BlockMask, whose mask_mod cannot be used; allowed: a whole one")
    if block_mask.kv_num_blocks.device != query.device:
        raise RuntimeError(f"block_mask: got a mask on {block_mask.kv_num_blocks.device}; allowed: {query.device}")
    if lengths is None or tuple(block_mask.BLOCK_SIZE) == (WHOLE,) * 2:
        return  # the operator checks the lengths, or one block is for all lengths
    got, wanted = tuple(block_mask.seq_lengths), lengths
    if got != wanted:
        raise ValueError(
            f"block_mask: got a mask for (q_len, kv_len) = {got}; allowed: {wanted}, the lengths of query and key"
        )
    for name, size, full in zip(("batch", "heads"), block_mask.kv_num_blocks.shape, query.shape, strict=False):
        if size not in (1, full):
            raise ValueError(f"block_mask: got {name} {size}; allowed: 1 or query's {full}")
