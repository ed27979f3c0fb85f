"""append_to_cache on CUDA, composed of torch's operators, because no kernel exists yet.

csrc/ops declares the operator.
"""

import torch
from torch import Tensor

from .int4 import quantize_int4
from .layers.rotary import rotate


def append_to_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k_new: Tensor,
    cache_seqlens: Tensor,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
    key_group_scale: Tensor | None = None,
    value_group_scale: Tensor | None = None,
    key_group_zero: Tensor | None = None,
    value_group_zero: Tensor | None = None,
    *,
    interleaved: bool = True,
    advance_query_positions: bool = True,
) -> tuple[Tensor, Tensor]:
    """Returns the rotated query (or an empty tensor) and the new cache_seqlens. Indexing checks positions and pages."""
    lengths, (sequence, index) = cache_seqlens.long(), _rows(cu_seqlens_k_new, len(key))
    rotated = query[:0]
    if rotary_cos is not None:
        first = lengths if rotary_seqlens is None else rotary_seqlens.long()
        of_query, row = _rows(cu_seqlens_q, len(query))
        tables = rotary_cos, rotary_sin
        rotated = _rotated(query, tables, first[of_query] + (row if advance_query_positions else 0), interleaved)
        key = _rotated(key, tables, first[sequence] + index, interleaved)
    positions = lengths[sequence] + index
    if block_table is not None:
        page_size = key_cache.shape[1]
        where = block_table.long()[sequence, positions // page_size], positions % page_size
    else:
        where = (sequence if cache_batch_idx is None else cache_batch_idx.long()[sequence]), positions
    for cache, new, scale, group_scale, group_zero in (
        (key_cache, key, key_scale, key_group_scale, key_group_zero),
        (value_cache, value, value_scale, value_group_scale, value_group_zero),
    ):
        if group_scale is not None:
            group = new.shape[-1] // group_scale.shape[-1]
            new, scales, zeros = quantize_int4(new, group, with_zeros=group_zero is not None, dtype=group_scale.dtype)
            group_scale.index_put_(where, scales)
            if group_zero is not None and zeros is not None:
                group_zero.index_put_(where, zeros)
        elif cache.dtype != new.dtype:
            new = coded(new, cache.dtype, 1.0 if scale is None else scale[where][..., None])
        cache.index_put_(where, new)
    return rotated.clone(), (lengths + cu_seqlens_k_new.long().diff()).to(cache_seqlens.dtype)


def coded(x: Tensor, dtype: torch.dtype, scale: Tensor | float) -> Tensor:
    """Returns ``x / scale`` in 8 bits, rounded to the nearest number and limited to the largest one."""
    x = x.float() / scale
    limits = torch.iinfo(dtype) if dtype == torch.int8 else torch.finfo(dtype)
    x = x.round() if dtype == torch.int8 else x
    return x.clamp(limits.min, limits.max).to(dtype)


def _rows(cu_seqlens: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Returns, for each packed row, the index of its sequence and its index in the sequence."""
    cu_seqlens, rows = cu_seqlens.long(), torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:], rows, right=True).clamp(max=max(len(cu_seqlens) - 2, 0))
    return sequence, rows - cu_seqlens[sequence]


def _rotated(x: Tensor, tables, positions: Tensor, interleaved: bool) -> Tensor:
    cos, sin = (table[positions][:, None] for table in tables)
    return rotate(x, cos, sin, interleaved)


torch.library.impl("flash_attn_ext::append_to_cache", "CUDA", append_to_cache)
