"""1. The softmax of rows that do not fit the chip: read three times, then twice.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018 (arXiv 1805.02867), algorithms 1 to 3.
d is the denominator, as in the paper.

    naive    y = e^x / sum e^x                     overflows where x > 88 (fp32) or 709 (fp64)
    safe     y = e^(x - max x) / sum e^(x - max x)   three reads and one write an element
    online   the maximum and the denominator at once    two reads and one write

The arguments are matrices: each row has its own softmax, read in blocks of `block` elements. A row in which all
elements are -inf results in zeros, in every module of this folder.
"""

import math

from torch import Tensor

from .memory import SlowMemory, SlowTensor, blocks
from .tile import Tile, exp_minus, maximum, row_max, row_sum


def naive_softmax(x: Tensor, *, block: int = 1024, memory: SlowMemory | None = None) -> Tensor:
    """Algorithm 1: reads the row twice. If an exp overflows, the result is inf / inf = NaN."""
    X, Y = _in_slow_memory(x, memory)
    for row in blocks(x.shape[0], 1):
        d = X.on_chip(1, 1, 0.0)
        for cols in blocks(x.shape[1], block):
            d += row_sum(X.load(row, cols).exp_())
        for cols in blocks(x.shape[1], block):
            Y.store(X.load(row, cols).exp_().divide_rows_(d), row, cols)
    return Y.tensor


def safe_softmax(x: Tensor, *, block: int = 1024, memory: SlowMemory | None = None) -> Tensor:
    """Algorithm 2: reads the row for the maximum, for the denominator, and for the result."""
    X, Y = _in_slow_memory(x, memory)
    for row in blocks(x.shape[0], 1):
        m = X.on_chip(1, 1, -math.inf)
        for cols in blocks(x.shape[1], block):
            m = maximum(m, row_max(X.load(row, cols)))
        d = X.on_chip(1, 1, 0.0)
        for cols in blocks(x.shape[1], block):
            d += row_sum(X.load(row, cols).exp_minus_(m))
        _write_result(X, Y, row, m, d, block)
    return Y.tensor


def online_softmax(x: Tensor, *, block: int = 1024, memory: SlowMemory | None = None) -> Tensor:
    """Algorithm 3: computes the maximum and the denominator in one loop.

    The sum d is relative to the running maximum m. When the maximum grows to m', one factor corrects the sum:

        d' = d e^(m - m') + sum of the block's e^(x - m')
    """
    X, Y = _in_slow_memory(x, memory)
    for row in blocks(x.shape[0], 1):
        m, d = X.on_chip(1, 1, -math.inf), X.on_chip(1, 1, 0.0)
        for cols in blocks(x.shape[1], block):
            tile = X.load(row, cols)
            m_new = maximum(m, row_max(tile))
            d *= exp_minus(m, m_new)
            d += row_sum(tile.exp_minus_(m_new))
            m = m_new
            del tile  # frees the chip for the next block
        _write_result(X, Y, row, m, d, block)
    return Y.tensor


def _write_result(X: SlowTensor, Y: SlowTensor, row: slice, m: Tile, d: Tile, block: int) -> None:
    """The last loop of algorithms 2 and 3."""
    for cols in blocks(X.shape[1], block):
        Y.store(X.load(row, cols).exp_minus_(m).divide_rows_(d), row, cols)


def _in_slow_memory(x: Tensor, memory: SlowMemory | None) -> tuple[SlowTensor, SlowTensor]:
    memory = memory or SlowMemory()
    X = memory.put("x", x)
    return X, memory.new("y", X, *x.shape, result=True)
