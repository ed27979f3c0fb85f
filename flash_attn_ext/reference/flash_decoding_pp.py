"""7. FlashDecoding++: one maximum known in advance, and GEMMs padded to 8 rows instead of 64.

Source: Hong et al., "FlashDecoding++: Faster Large Language Model Inference on GPUs", 2023 (arXiv 2311.01282),
sections 3 and 4.

**Unified maximum.** A softmax does not change if any number is subtracted from all its scores. phi is one number for
all splits, chosen from statistics of the model. So no split waits for a maximum, and the merge does not rescale:

    num = sum_s sum_(j in s) e^(x_j - phi) v_j      den = sum_s sum_(j in s) e^(x_j - phi)      O = num / den

This is exact while a < x_j - phi < b, so that e^(x_j - phi) neither overflows nor underflows. A comparison finds the
rows that leave the range, and the online softmax computes them again. A masked score, -inf, gives an exact 0 and never
leaves the range.

**Flat GEMM.** Decoding multiplies a few rows (the batch) by a large matrix. Tensor core GEMMs pad the rows to 64.
Padding to 8, the smallest side of an mma instruction, wastes less. The tiles of the matrix are double buffered.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from . import flash_decoding
from .flash1 import scores
from .memory import SlowMemory, SlowTensor, blocks, statistics_dtype
from .standard import default_scale
from .tile import Tile, log, row_any_outside, row_sum


class Decoded(NamedTuple):
    out: Tensor
    lse: Tensor
    recomputed: Tensor  # bool (N_q, 1): True for rows that left the range


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    phi: float = 0.0,
    limits: tuple[float, float] | None = None,
    num_splits: int,
    block_k: int = 64,
    scale: float | None = None,
    mask: Tensor | None = None,
    memory: SlowMemory | None = None,
) -> Decoded:
    """Decodes as :func:`flash_decoding.decode`, with a unified maximum phi.

    On the meta device no row leaves the range.
    """
    memory = memory or SlowMemory()
    Q, K, V = memory.put("q", q), memory.put("k", k), memory.put("v", v)
    MASK = None if mask is None else memory.put("mask", mask)
    tau, dtype = default_scale(scale, q), statistics_dtype(q.dtype)
    limits = limits or default_limits(dtype)

    partials = []
    for split in flash_decoding.splits(k.shape[0], num_splits):
        keys = blocks(split.stop, block_k, split.start)
        tiles = _one_split(Q, K, V, keys, phi, limits, tau, MASK)
        names, types = ("partial num", "partial den", "partial flag"), (dtype, dtype, torch.bool)
        places = [memory.new(n, Q, *tile.shape, dtype=t) for n, t, tile in zip(names, types, tiles, strict=True)]
        for place, tile in zip(places, tiles, strict=True):
            place.store(tile)
        partials.append(places)
    out, lse, outside = _merge(Q, v.shape[1], phi, partials)

    if Q.real and outside.any():
        rows = outside[:, 0]
        again = flash_decoding.decode(
            q[rows], k, v, num_splits=num_splits, block_k=block_k, scale=scale,
            mask=None if mask is None else mask[rows], memory=memory,
        )  # fmt: skip
        out[rows], lse[rows] = again
    return Decoded(out, lse, outside)


def default_limits(dtype: torch.dtype) -> tuple[float, float]:
    """(a, b): logarithms of the square roots of the dtype's range, so that sums and products with v do not overflow."""
    info = torch.finfo(dtype)
    return math.log(info.tiny) / 2, math.log(info.max) / 2


def _one_split(Q, K, V, keys, phi, limits, scale, MASK) -> tuple[Tile, Tile, Tile]:
    """Computes one split: num (N_q, d_v), den (N_q, 1), and 1 for rows that left the range.

    No maximum, no rescaling.
    """
    everything = slice(0, Q.shape[0])
    Q_i = Q.load()
    num, den = Q.on_chip(Q.shape[0], V.shape[1], 0.0), Q.on_chip(Q.shape[0], 1, 0.0)
    outside = Q.on_chip(Q.shape[0], 1, 0.0)
    for j in keys:
        x = scores(Q_i, K.load(j), scale, MASK, everything, j)
        x -= phi
        outside += row_any_outside(x, *limits)
        x.exp_()
        den += row_sum(x)
        num.add_product_(x, V.load(j))
        del x  # frees the chip for the next block
    return num, den, outside


def _merge(Q: SlowTensor, d_v: int, phi: float, partials: list) -> tuple[Tensor, Tensor, Tensor]:
    """The second kernel only adds, because all splits are relative to the same phi."""
    rows, memory = Q.shape[0], Q.memory
    O = memory.new("out", Q, rows, d_v, result=True)
    L = memory.new("lse", Q, rows, 1, dtype=statistics_dtype(Q.tensor.dtype))
    flag = memory.new("flag", Q, rows, 1, dtype=torch.bool)
    num, den, outside = Q.on_chip(rows, d_v, 0.0), Q.on_chip(rows, 1, 0.0), Q.on_chip(rows, 1, 0.0)
    for num_s, den_s, outside_s in partials:
        num += num_s.load()
        den += den_s.load()
        outside += outside_s.load()
    lse = log(den)
    lse += phi
    O.store(num.divide_rows_(den))
    L.store(lse)
    flag.store(outside)
    return O.tensor, L.tensor, flag.tensor


def flat_gemm(
    x: Tensor,
    weight: Tensor,
    *,
    pad_to: int = 8,
    block_n: int = 64,
    block_k: int = 64,
    memory: SlowMemory | None = None,
) -> Tensor:
    """x (m, k) @ weight (k, n) with m padded to a multiple of `pad_to` on the chip; m is small.

    The matrix is read once. The FLOPs of the padding are counted.
    """
    memory = memory or SlowMemory()
    X, W = memory.put("x", x), memory.put("weight", weight)
    Y = memory.new("y", X, x.shape[0], weight.shape[1], result=True)
    padded = math.ceil(x.shape[0] / pad_to) * pad_to
    for cols in blocks(weight.shape[1], block_n):
        y = X.on_chip(padded, cols.stop - cols.start, 0.0)
        inner = list(blocks(weight.shape[0], block_k))
        following = W.load(inner[0], cols)
        for n, middle in enumerate(inner):  # double buffering: loads the next tile before the product
            w, following = following, W.load(inner[n + 1], cols) if n + 1 < len(inner) else None
            y.add_product_(X.load(cols=middle).pad_rows(padded), w)
        Y.store(y.top(x.shape[0]), cols=cols)
    return Y.tensor
