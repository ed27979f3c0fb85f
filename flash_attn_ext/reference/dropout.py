"""Dropout that is replayed, not stored: computes the factors Z of a tile from the saved state of the generator.

Algorithm 2 of FlashAttention-1 saves the generator's state R, so that algorithm 4 (the backward) makes the same Z. The
generator is counter-based: the random word of element (i, j) depends only on the state, i and j. So tiles can be made
in any order. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011: Philox4x32-10. Elements use
the words as csrc/core/philox.h defines, so a mask of this file equals :func:`flash_attn_ext.dropout_mask`, bit by bit.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .memory import SlowTensor
from .tile import Tile

WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Dropout:
    """Z_ij = 0 with probability p, else 1 / (1 - p)."""

    p: float
    rng_state: Tensor  # R: int64 (seed, offset), from flash_attn_ext.new_rng_state()
    head_index: int = 0  # b * H + h

    @property
    def scale(self) -> float:
        """The factor of the elements that dropout keeps: 1 / (1 - p)."""
        return 1 / (1 - self.p) if self.p < 1 else 0.0

    def factors(self, rows: slice, cols: slice, like: SlowTensor) -> Tile:
        """Z of one tile, made on the chip: no traffic. Integer work, so no FLOPs either."""
        shape = rows.stop - rows.start, cols.stop - cols.start
        if not like.real:
            return Tile(like.memory.chip, shape, None)
        row, col = (torch.arange(part.start, part.stop, device=like.tensor.device) for part in (rows, cols))
        kept = self.kept(row[:, None], col[None, :])
        return Tile(like.memory.chip, shape, kept.to(like.on_chip_dtype) * self.scale)

    def kept(self, row: Tensor, col: Tensor) -> Tensor:
        """bool: True where dropout keeps element (row, col). `row` (n, 1) and `col` (1, m) are indices."""
        seed, offset = (int(n) for n in self.rng_state)
        key = philox4x32([offset & WORD, 0, 0, offset >> 32 & WORD], [seed & WORD, seed >> 32 & WORD])
        counter = [col >> 1, (row >> 4) * 8 + (row & 7), self.head_index, key[2]]
        words = philox4x32(counter, key[:2])
        upper, odd = row >> 3 & 1, col & 1
        word = torch.where(
            upper == 1, torch.where(odd == 1, words[3], words[2]), torch.where(odd == 1, words[1], words[0])
        )
        return word >= math.floor(self.p * 2**32 + 0.5)


def philox4x32(counter: list, key: list[int]) -> list:
    """Ten rounds on four 32-bit words in int64.

    A product may overflow to a negative int64; its 64 bits are still right.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32 & WORD) ^ c1 ^ k0, p1 & WORD, (p0 >> 32 & WORD) ^ c3 ^ k1, p0 & WORD
        k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
    return [c0, c1, c2, c3]
