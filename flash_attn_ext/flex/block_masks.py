"""Converts torch's BlockMask to the operator's block states: 0 hidden, 1 partial, 2 full."""

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_PARTIAL, _FULL = 1, 2
WHOLE = 1 << 30  # the block size of torch's empty mask, for all lengths
_KEPT_AS = "_flash_attn_ext_states"


def states_of(block_mask: "BlockMask", *, is_cache: bool = False) -> Tensor:
    """Returns the states (B, H, query blocks, key blocks), uint8. The mask caches them until its lists change.

    ``is_cache``: the states are for a cache, so :func:`with_row_before` adds a row.
    """
    tensors = (
        block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices
    )  # fmt: skip
    kept = getattr(block_mask, _KEPT_AS, None)
    # "is" first: == of tensors would compare elements
    if kept is not None and all(map(operator.is_, tensors, kept[0])) and kept[1] == _versions_of(tensors):
        states = kept[2]
    else:
        states = {}
        # Tensors of inference mode have no version, so a change of their elements would not be seen.
        if not any(t is not None and t.is_inference() for t in tensors):
            setattr(block_mask, _KEPT_AS, (tensors, _versions_of(tensors), states))
    if is_cache not in states:
        from_lists = states_of_lists(block_mask.seq_lengths, block_mask.BLOCK_SIZE, tensors[:2], tensors[2:])
        states[is_cache] = with_row_before(from_lists) if is_cache else from_lists
    return states[is_cache]


def with_row_before(states: Tensor) -> Tensor:
    """Prepends a row of partial blocks: for the queries of a cache with a negative index.

    A cache with fewer keys than queries has these queries. No block of the mask holds them, so the mask's function
    decides.
    """
    return torch.nn.functional.pad(states, (0, 0, 1, 0), value=_PARTIAL)


def _versions_of(tensors: Sequence[Tensor | None]) -> list[int]:
    return [t._version for t in tensors if t is not None]


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
    counts = block_mask.kv_num_blocks
    if counts.device != query.device:
        raise RuntimeError(f"block_mask: got a mask on {counts.device}; allowed: {query.device}")
    if lengths is None or block_mask.BLOCK_SIZE[0] == block_mask.BLOCK_SIZE[1] == WHOLE:
        return  # the operator checks the lengths, or one block is for all lengths
    if tuple(block_mask.seq_lengths) != lengths:
        raise ValueError(
            f"block_mask: got a mask for (q_len, kv_len) = {tuple(block_mask.seq_lengths)}; allowed: {lengths}, the "
            "lengths of query and key"
        )
    sizes = counts.shape[:2]
    if sizes == (1, 1):
        return
    for name, size, full in zip(("batch", "heads"), sizes, query.shape, strict=False):
        if size not in (1, full):
            raise ValueError(f"block_mask: got {name} {size}; allowed: 1 or query's {full}")
