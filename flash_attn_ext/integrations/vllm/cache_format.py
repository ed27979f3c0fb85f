"""The formats of vLLM's key/value caches, and views of them that the operators read and write in place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# In caches with a scale for each token and head, two float32 scales follow the row of the key and of the value.
SCALE_BYTES = 4


@dataclass(frozen=True)
class CacheFormat:
    """How the elements of a cache are stored."""

    coded: torch.dtype | None = None  # the 8-bit dtype; None: the model's dtype
    largest: float | None = None  # the largest coded number, if each token and head has a scale

    @property
    def scale_per_token(self) -> bool:
        return self.largest is not None


# vLLM's names (--kv-cache-dtype).
FORMATS = {
    "auto": CacheFormat(),
    "float16": CacheFormat(),
    "bfloat16": CacheFormat(),
    "fp8": CacheFormat(torch.float8_e4m3fn),
    "fp8_e4m3": CacheFormat(torch.float8_e4m3fn),
    "fp8_e5m2": CacheFormat(torch.float8_e5m2),
    "int8_per_token_head": CacheFormat(torch.int8, largest=127.0),
    "fp8_per_token_head": CacheFormat(torch.float8_e4m3fn, largest=448.0),
}


class CacheViews(NamedTuple):
    """Views of one layer's cache. Nothing is copied."""

    keys: Tensor  # (pages, page size, H_k, D)
    values: Tensor  # (pages, page size, H_k, D_v)
    key_scales: Tensor | None = None  # (pages, page size, H_k), float32: one for each token and head
    value_scales: Tensor | None = None


def cache_views(cache: Tensor, head_dim: int, head_dim_v: int, cache_format: CacheFormat) -> CacheViews:
    """Returns views of vLLM's ``cache``, (pages, H_k, page size, content). Only the last dimension must be contiguous.

    The content of a token and head is the key, the value, and, with a scale for each token, two scales. But if the rows
    of a head are adjacent in a page, and keys and values have one size, the page has all keys, then all values.
    """
    if cache_format.coded is not None:
        cache = cache.view(cache_format.coded)  # vLLM stores float8 as uint8
    columns = head_dim + head_dim_v
    expected = columns + (2 * SCALE_BYTES if cache_format.scale_per_token else 0)
    if cache.dim() != 4 or cache.shape[-1] != expected:
        raise ValueError(
            f"kv_cache: got shape {list(cache.shape)}; allowed: (pages, heads_k, page size, {expected}), a key of "
            f"{head_dim} and a value of {head_dim_v} elements"
        )
    if not cache_format.scale_per_token and head_dim == head_dim_v and cache.stride(2) == columns:
        # Adjacent rows of keys are read faster than rows with a value between them.
        pages, heads, size, _ = cache.shape
        shape, strides = (pages, size, heads, head_dim), (cache.stride(0), head_dim, cache.stride(1), 1)
        first = cache.storage_offset()
        return CacheViews(*(cache.as_strided(shape, strides, first + n * size * head_dim) for n in (0, 1)))
    rows = cache.transpose(1, 2)
    keys, values = rows[..., :head_dim], rows[..., head_dim:columns]
    if not cache_format.scale_per_token:
        return CacheViews(keys, values)
    scales = rows[..., columns:].view(torch.float32)
    return CacheViews(keys, values, scales[..., 0], scales[..., 1])


def content_bytes(head_dim: int, head_dim_v: int) -> int:
    """Returns the number of bytes of a token and head in a cache with a scale for each token."""
    return head_dim + head_dim_v + 2 * SCALE_BYTES
