"""Block masks without an S x S tensor.

This module imports torch's flex_attention, which takes seconds. So the package does not import this module.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import BlockMask

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def create_block_mask(
    mask_mod: MaskMod,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = "cpu",
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """torch's ``create_block_mask`` with less memory: it stores one row of blocks of the mask at a time.

    Arguments and result are as in ``torch.nn.attention.flex_attention.create_block_mask``. It runs in eager mode only.
    Other defaults or meanings:

    Args:
        device: None: the accelerator if there is one, as in torch.
        _compile: has no effect: nothing is compiled.
        separate_full_blocks: False: no lists of full blocks. ``mask_mod`` is evaluated in all visible blocks.
        compute_dq_write_order, dq_kv_order: torch computes these attributes of the mask for its FLASH backend. The
            kernels of this package do not read them.
    """
    if not isinstance(dq_kv_order, bool):
        raise ValueError(f"dq_kv_order: got {dq_kv_order!r}; allowed: True, False")
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    sizes = _block_sizes(BLOCK_SIZE, Q_LEN, KV_LEN)
    mask_of = mask_mod
    for position in (3, 2, 1, 0):  # the last dimension of the result is the key
        mask_of = torch.vmap(mask_of, in_dims=tuple(0 if n == position else None for n in range(4)))
    b, h, keys = (torch.arange(size, device=device) for size in (B or 1, H or 1, KV_LEN))

    def rows(begin: int, end: int) -> Tensor:
        with TransformGetItemToIndex():
            mask = mask_of(b, h, torch.arange(begin, end, device=device), keys)
        if mask.dtype != torch.bool:
            raise TypeError(f"mask_mod: got a result of {mask.dtype}; allowed: torch.bool")
        return mask

    block_mask = _from_rows(rows, mask_mod, (Q_LEN, KV_LEN), sizes, separate_full_blocks=separate_full_blocks)
    if compute_dq_write_order:
        _set_write_order(block_mask, descends=dq_kv_order)
    return block_mask


def _set_write_order(block_mask: BlockMask, *, descends: bool) -> None:
    compute = getattr(torch.nn.attention.flex_attention, "_compute_dq_write_order_from_block_mask", None)
    if compute is None:
        raise NotImplementedError(f"compute_dq_write_order: got True; allowed: False with torch {torch.__version__}")
    block_mask.dq_write_order, block_mask.dq_write_order_full = compute(block_mask, dq_kv_order=descends)
    block_mask.dq_kv_order, block_mask.dq_kv_order_spt = None, descends


def dense_block_mask(mask: Tensor, BLOCK_SIZE: int | tuple[int, int] = 128) -> BlockMask:
    """The block mask of a bool mask (S_q, S_k), (H, S_q, S_k) or (B, H, S_q, S_k); True is visible.

    A size of 1 means all batches or heads. Partial blocks read the mask, so the mask stays in memory.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() not in (2, 3, 4):
        got = f"{mask.dtype}, {mask.dim()} dimensions" if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"mask: got {got}; allowed: a bool tensor of 2 to 4 dimensions")
    sizes = _block_sizes(BLOCK_SIZE, *mask.shape[-2:])
    whole = mask[(None,) * (4 - mask.dim())]
    kept = whole[0] if whole.shape[0] == 1 else whole
    kept = kept.select(-3, 0) if kept.shape[-3] == 1 else kept

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        batch = (b,) if whole.shape[0] > 1 else ()
        head = (h,) if whole.shape[1] > 1 else ()
        return kept[(*batch, *head, q_idx, kv_idx)]

    return _from_rows(lambda begin, end: whole[..., begin:end, :], mask_mod, whole.shape[-2:], sizes)


def documents_block_mask(
    cu_seqlens: Tensor, *, causal: bool = False, BLOCK_SIZE: int | tuple[int, int] = 128
) -> BlockMask:
    """The block mask of packed documents: a query sees the keys of its own document.

    Args:
        cu_seqlens: (documents + 1), integers: the first row of each document, and the total number of rows.
        causal: True: a query sees no later keys.
        BLOCK_SIZE: of the blocks of queries and keys.
    """
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise ValueError("cu_seqlens: allowed: a tensor of one dimension, with 2 elements or more")
    if cu_seqlens[0] != 0 or (cu_seqlens.diff() < 0).any():
        raise ValueError(f"cu_seqlens: got {cu_seqlens.tolist()}; allowed: numbers from 0 on that do not fall")
    length = int(cu_seqlens[-1])
    block_q, block_k = _block_sizes(BLOCK_SIZE, length, length)
    positions = torch.arange(length, device=cu_seqlens.device)
    document = torch.bucketize(positions, cu_seqlens[1:].long(), right=True).int()

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        same = document[q_idx] == document[kv_idx]
        return same & (q_idx >= kv_idx) if causal else same

    i, last_i, j, last_j, is_whole = _edges((length, length), (block_q, block_k), cu_seqlens.device)
    visible = (document[i] <= document[last_j]) & (document[j] <= document[last_i])
    full = is_whole & (document[i] == document[last_j]) & (document[j] == document[last_i])
    if causal:
        visible, full = visible & (last_i >= j), full & (i >= last_j)
    return _from_blocks(visible, full, mask_mod, (length, length), (block_q, block_k))


def window_block_mask(
    Q_LEN: int,
    KV_LEN: int,
    left: int | None = None,
    right: int | None = None,
    *,
    diagonal: int = 0,
    device: torch.device | str = "cpu",
    BLOCK_SIZE: int | tuple[int, int] = 128,
) -> BlockMask:
    """The block mask of a band: query i sees the keys from ``i + diagonal - left`` to ``i + diagonal + right``.

    None means no limit, and ``right=0`` is causal. With ``diagonal = KV_LEN - Q_LEN`` the last query has the position
    of the last key.
    """
    block_q, block_k = _block_sizes(BLOCK_SIZE, Q_LEN, KV_LEN)
    for name, size in (("left", left), ("right", right)):
        if size is not None and size < 0:
            raise ValueError(f"{name}: got {size}; allowed: None, 0 or more")
    before, behind = (Q_LEN + KV_LEN + abs(diagonal) if size is None else size for size in (left, right))

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = kv_idx - (q_idx + diagonal)
        return (distance >= -before) & (distance <= behind)

    i, last_i, j, last_j, is_whole = _edges((Q_LEN, KV_LEN), (block_q, block_k), device)
    i, last_i = i + diagonal, last_i + diagonal
    visible = (last_j >= i - before) & (j <= last_i + behind)
    full = is_whole & (j >= last_i - before) & (last_j <= i + behind)
    return _from_blocks(visible, full, mask_mod, (Q_LEN, KV_LEN), (block_q, block_k))


def listed_block_mask(
    mask_block_cnt: Tensor,
    mask_block_idx: Tensor,
    full_block_cnt: Tensor | None = None,
    full_block_idx: Tensor | None = None,
    *,
    Q_LEN: int,
    KV_LEN: int,
    mask_mod: MaskMod | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
) -> BlockMask:
    """Makes a block mask from flash-attention 4's lists (``BlockSparseTensorsTorch``).

    Args:
        mask_block_cnt: (B or 1, H or 1, query blocks), int32: the number of blocks in which ``mask_mod`` is evaluated.
        mask_block_idx: (B or 1, H or 1, query blocks, columns), int32: the indices of these blocks. Indices beyond the
            count are not read.
        full_block_cnt: as ``mask_block_cnt``, for blocks that are fully visible.
        full_block_idx: as ``mask_block_idx``, for blocks that are fully visible.
        Q_LEN, KV_LEN: the lengths of query and key.
        mask_mod: a function as in torch's BlockMask. None: the blocks of the first two lists are fully visible, too.
        BLOCK_SIZE: of the blocks of queries and keys.
    """
    block_q, block_k = _block_sizes(BLOCK_SIZE, Q_LEN, KV_LEN)
    rows, columns = -(-Q_LEN // block_q), -(-KV_LEN // block_k)
    states = []
    for prefix, counts, indices in (("mask", mask_block_cnt, mask_block_idx), ("full", full_block_cnt, full_block_idx)):
        if (counts is None) != (indices is None):
            raise ValueError(f"{prefix}_block_cnt, {prefix}_block_idx: got one of them; allowed: both or none")
        if counts is None or indices is None:
            continue
        if counts.dim() != 3 or indices.shape[:-1] != counts.shape or counts.shape[-1] != rows:
            raise ValueError(
                f"{prefix}_block_cnt, {prefix}_block_idx: got {tuple(counts.shape)} and {tuple(indices.shape)}; "
                f"allowed: (B, H, {rows}) and (B, H, {rows}, blocks)"
            )
        is_listed = torch.arange(indices.shape[-1], device=indices.device) < counts.unsqueeze(-1)
        if (is_listed & ((indices < 0) | (indices >= columns))).any():
            raise ValueError(f"{prefix}_block_idx: allowed: 0 to {columns - 1}, the blocks of KV_LEN keys")
        column = torch.where(is_listed, indices, columns).long()  # the last column is removed
        listed = torch.zeros((*counts.shape, columns + 1), dtype=torch.bool, device=counts.device)
        states.append(listed.scatter_(-1, column, True)[..., :columns])
    full = states[-1] if len(states) == 2 else torch.zeros_like(states[0])
    return _from_blocks(states[0] | full, full, mask_mod, (Q_LEN, KV_LEN), (block_q, block_k))


def _block_sizes(BLOCK_SIZE: int | tuple[int, int], q_len: int, kv_len: int) -> tuple[int, int]:
    block_q, block_k = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
    for name, size in (("Q_LEN", q_len), ("KV_LEN", kv_len), ("BLOCK_SIZE", block_q), ("BLOCK_SIZE", block_k)):
        if size < 1:
            raise ValueError(f"{name}: got {size}; allowed: 1 or more")
    return block_q, block_k


def _edges(lengths: tuple[int, int], sizes: tuple[int, int], device: torch.device | str) -> tuple[Tensor, ...]:
    """Returns the first and the last query of each row of blocks, (rows, 1), and the first and last key of each column.

    The last result, (rows, columns), is True for a block that ends before the lengths. In torch only these blocks can
    be full.
    """
    first = [torch.arange(0, length, size, device=device) for length, size in zip(lengths, sizes, strict=True)]
    last = [f + size - 1 for f, size in zip(first, sizes, strict=True)]
    end = [t.clamp(max=length - 1) for t, length in zip(last, lengths, strict=True)]
    is_whole = (last[0] == end[0])[:, None] & (last[1] == end[1])
    return first[0][:, None], end[0][:, None], first[1], end[1], is_whole


def _from_rows(
    rows: Callable[[int, int], Tensor],
    mask_mod: MaskMod,
    lengths: tuple[int, ...],
    sizes: tuple[int, int],
    *,
    separate_full_blocks: bool = True,
) -> BlockMask:
    """Makes a block mask. ``rows(begin, end)`` returns the bool mask (B, H, end - begin, KV_LEN) of these queries."""
    (q_len, kv_len), (block_q, block_k) = lengths, sizes
    columns = -(-kv_len // block_k)
    counts = []
    for first in range(0, q_len, block_q):
        of_keys = rows(first, min(first + block_q, q_len)).sum(-2)
        of_keys = torch.nn.functional.pad(of_keys, (0, columns * block_k - kv_len))
        counts.append(of_keys.unflatten(-1, (columns, block_k)).sum(-1))
    visible = torch.stack(counts, -2)
    full = visible == block_q * block_k if separate_full_blocks else None
    return _from_blocks(visible > 0, full, mask_mod, lengths, sizes)


def _from_blocks(
    visible: Tensor, full: Tensor | None, mask_mod: MaskMod | None, lengths: tuple[int, ...], sizes: tuple[int, int]
) -> BlockMask:
    """Makes a block mask.

    ``visible``, ``full``: bool (B, H, query blocks, key blocks), or only the last two dimensions. ``full`` None: the
    mask has no lists of full blocks.
    """
    partial = visible
    lists: tuple[Tensor | None, Tensor | None] = (None, None)
    if full is not None:
        visible, full = torch.broadcast_tensors(*(t[(None,) * (4 - t.dim())] for t in (visible, full)))
        partial, lists = visible & ~full, _lists_of(full)
    return BlockMask.from_kv_blocks(
        *_lists_of(partial), *lists, BLOCK_SIZE=sizes, mask_mod=mask_mod, seq_lengths=tuple(lengths)
    )


def _lists_of(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (count, indices) of each row: first the blocks that are True, then the other indices."""
    indices = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int(), indices.int()
