"""Keywords of transformers with a value for each query: a sink, or the keys that the query may attend to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ChosenKeys", "check_sinks", "with_sinks"]


class ChosenKeys(NamedTuple):
    """The keys, or blocks of keys, that each query may attend to. A mask may hide some of them."""

    keyword: str
    numbers: Tensor  # (B, heads, S_q, n); -1 means no key
    block_size: int

    @classmethod
    def from_keywords(
        cls, module: torch.nn.Module, indices: Tensor | None, block_indices: Tensor | None
    ) -> ChosenKeys | None:
        """``indices`` (B, S_q, n) are keys, ``block_indices`` (B, heads, S_q, n) are blocks."""
        if indices is not None and block_indices is not None:
            raise ValueError("block_indices: got a tensor with indices; allowed: one of them")
        if indices is not None:
            if indices.dim() != 3:
                raise ValueError(f"indices: got shape {tuple(indices.shape)}; allowed: (B, S_q, number of keys)")
            return cls("indices", indices.unsqueeze(1), 1)
        if block_indices is None:
            return None
        if block_indices.dim() != 4:
            raise ValueError(
                f"block_indices: got shape {tuple(block_indices.shape)}; allowed: (B, heads, S_q, number of blocks)"
            )
        # the block size of MiniMax M3's indexer
        block_size = getattr(getattr(module, "indexer", None), "block_size", 128)
        return cls("block_indices", block_indices, block_size)

    def options(self, key: Tensor) -> dict[str, Tensor | int]:
        """Returns the options of ``flash_attn`` for these numbers. ``key``: (B, H_kv, S_k, D).

        ``key`` has no unused end of a static cache. A number in the unused end becomes -1, because the mask hides these
        keys.
        """
        heads, seqlen_k = key.shape[1:3]
        blocks = -(-seqlen_k // self.block_size)
        numbers = self.numbers.masked_fill(self.numbers >= blocks, -1)
        if 1 < numbers.shape[1] < heads and heads % numbers.shape[1] == 0:  # several key heads share their numbers
            numbers = numbers.repeat_interleave(heads // numbers.shape[1], 1)
        if self.keyword == "indices":
            return {"key_indices": numbers}
        return {"key_block_indices": numbers, "key_block_size": self.block_size}


def check_sinks(sinks: Tensor | None, query: Tensor) -> None:
    wanted = (*query.shape[:3], 1)
    if sinks is not None and sinks.shape != wanted:
        raise ValueError(f"sinks: got shape {tuple(sinks.shape)}; allowed: (B, H, S_q, 1), {wanted}")


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Applies a sink for each query to out. ``sinks``: (B, H, S_q, 1), or (T, H, 1) for packed rows.

    A row of out is multiplied by exp(lse) / (exp(lse) + exp(sink)). All three tensors receive gradients.
    """
    seen = lse.masked_fill(lse == -torch.inf, 0.0)  # if no key is visible, out is 0
    return out * torch.sigmoid(seen.unsqueeze(-1) - sinks).to(out.dtype)
