"""Copies the chosen rows of a cache, for attention by index. Only for caches that the kernels cannot read in place.

These are int8 and float8 caches, and separate caches with ``qv``. Each chosen row is widened or joined once, even if
several queries choose it. Memory: O(chosen rows), at most a copy of the cache in the dtype of the queries.
"""

from typing import NamedTuple

import torch
from torch import Tensor

EIGHT_BIT = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)


class CacheRows(NamedTuple):
    """The rows of one cache."""

    rows: Tensor  # (caches or pages * size, H_kv, D)
    scale: Tensor | None  # (caches or pages, size, H_kv) float32: factors of 8-bit rows

    def copy(self, chosen: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns (len(chosen), H_kv, D) in ``dtype``. 8-bit rows are multiplied by their factors and rounded once."""
        if self.rows.dtype not in EIGHT_BIT:
            return self.rows.index_select(0, chosen)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        codes = self.rows.view(torch.uint8).index_select(0, chosen)
        copied = _widened(codes, self.rows.dtype, wide)
        if self.scale is not None:
            size = self.scale.shape[1]
            copied *= self.scale[chosen.div(size, rounding_mode="floor"), chosen % size][..., None]
        return copied.to(dtype)


def _widened(codes: Tensor, coded_as: torch.dtype, dtype: torch.dtype) -> Tensor:
    if coded_as == torch.int8:
        return codes.view(coded_as).to(dtype)
    # By a table of all 256 bytes: 1.1 ms for 2048 rows of 128 columns. torch's conversion takes 5.0 ms (one thread).
    table = torch.arange(256, dtype=torch.uint8, device=codes.device).view(coded_as).to(dtype)
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def number_chosen(indices: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Returns the chosen rows, ascending, and ``indices`` renumbered to positions among the chosen rows. -1 stays -1.

    On CUDA and in a compiled graph the length of the first result must not depend on values. There it has min(total,
    indices.numel()) elements, padded with row 0.
    """
    can_read_values = indices.is_cpu and not torch.compiler.is_compiling()
    if can_read_values and ((indices < -1) | (indices >= total)).any():
        raise ValueError(
            f"block_table, cache_batch_idx: got a number beyond the caches; allowed: rows 0 to {total - 1}"
        )
    seen = indices >= 0
    used = torch.zeros(total + 1, dtype=torch.bool, device=indices.device)  # the last element is for -1
    used.index_fill_(0, torch.where(seen, indices, total).flatten(), True)
    if can_read_values:
        chosen = used[:total].nonzero()[:, 0]
    else:
        chosen = torch.nonzero_static(used[:total], size=min(total, indices.numel()), fill_value=0)[:, 0]
    number = used.cumsum(0) - 1
    return chosen, torch.where(seen, number[indices.clamp(min=0)], -1)


def copy_chosen(
    query: Tensor, indices: Tensor, key: CacheRows, value: CacheRows, joins: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns query, indices, key and value of the call on the copied rows.

    ``joins``: query is [q, qv], and the keys become [v, k]. So the values are the first columns of the keys, and the
    kernels read a row once.
    """
    chosen, indices = number_chosen(indices, key.rows.shape[0])
    copied_key, copied_value = key.copy(chosen, query.dtype), value.copy(chosen, query.dtype)
    if not joins:
        return query, indices, copied_key, copied_value
    q, qv = query.split([copied_key.shape[-1], copied_value.shape[-1]], -1)
    joined = torch.cat([copied_value, copied_key], -1)
    return torch.cat([qv, q], -1), indices, joined, joined[..., : copied_value.shape[-1]]
