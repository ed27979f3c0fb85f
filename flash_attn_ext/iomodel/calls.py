"""Formulas for the FLOPs, traffic and tiles of one call of flash_attn, for any lengths and any band.

flash_attn_ext.explain uses this file, so it runs no algorithm and does not import flash_attn_ext.reference. It adds up
the steps of FlashAttention-2 (Dao 2023, algorithms 1 and 2; flash_attn_ext/reference/flash2.py). A test runs the
algorithms and compares every FLOP and element.
"""

from dataclasses import dataclass

from .problem import DTYPES, Problem

# (block_q, block_k). FlashAttention-2 chooses from {64, 128} x {64, 128} (section 3.3). Smaller tiles are for smaller
# chips.
CANDIDATES = [
    (128, 128),
    (128, 64),
    (64, 128),
    (64, 64),
    (64, 32),
    (32, 32),
    (32, 16),
    (16, 16),
    (8, 8),
    (4, 4),
    (1, 1),
]


@dataclass(frozen=True)
class Cost:
    flops: float = 0
    bytes: float = 0  # to and from slow memory

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.bytes + other.bytes)

    def __mul__(self, factor: float) -> "Cost":
        return Cost(self.flops * factor, self.bytes * factor)

    def __sub__(self, other: "Cost") -> "Cost":
        return self + other * -1


def tiles(length: int, block: int) -> int:
    """The number of blocks of a sequence. The last block may be shorter."""
    return -(-length // block)


def kernel_tiles() -> dict[str, tuple[int, int]]:
    """(block_q, block_k) of the CPU kernels. A test compares them with csrc/cpu/kernels/tiling-inl.h.

    With AVX-512 a forward without a mask has twice the keys. It reads as many rows.
    """
    return {"forward": (48, 64), "backward": (64, 64)}


def pass_cost(which: str, problem: Problem, blocks: tuple[int, int], visible_tiles: int | None = None) -> Cost:
    """The cost of FlashAttention-2's "forward" or "backward" for all heads, in tiles of `blocks`.

    visible_tiles: the number of tiles that are computed for each head. None: all tiles.

    A mask is not counted: its reads depend on how it is broadcast.
    """
    S_k = problem.S_k or problem.S
    grid = tiles(problem.S, blocks[0]), tiles(S_k, blocks[1])
    head = _outside_of_tiles(which, problem) + _of_tiles(which, problem, grid, problem.S, S_k)
    if visible_tiles is not None:
        one = _of_tiles(which, problem, (1, 1), min(blocks[0], problem.S), min(blocks[1], S_k))
        head -= one * (grid[0] * grid[1] - visible_tiles)
    return head * problem.heads


def _of_tiles(which: str, problem: Problem, grid: tuple[int, int], rows: int, columns: int) -> Cost:
    """The inner loops of one head: grid[0] x grid[1] tiles, which together are rows x columns scores."""
    D, D_v = problem.D, problem.D_v or problem.D
    item, statistic, drops = *_sizes(problem), int(problem.dropout > 0)
    scores = rows * columns
    # rows times the tiles of each row; keys times the tiles of each key
    per_row, per_column = rows * grid[1], columns * grid[0]
    if which == "forward":
        # scale, row_max, exp(S - m) as two, row_sum; the products Q K^T and P V; m, rescale, l; O *= rescale.
        flops = scores * (5 + drops + 2 * D + 2 * D_v) + per_row * (5 + D_v)
        return Cost(flops, int(per_column * (D + D_v) * (problem.key_itemsize or item)))
    # scale, exp(S - lse) as two, dP - delta, * P, * scale; with dropout P o Z and dP o Z; five products. Each tile
    # loads Q, dO, lse, delta, and dQ, which it stores again.
    flops = scores * (6 + 2 * drops + 6 * D + 4 * D_v)
    return Cost(flops, per_row * ((3 * D + D_v) * item + 2 * statistic))


def _outside_of_tiles(which: str, problem: Problem) -> Cost:
    """The part of one head's cost that occurs once for each row or key."""
    S_k, D, D_v = problem.S_k or problem.S, problem.D, problem.D_v or problem.D
    item, statistic = _sizes(problem)
    if which == "forward":  # loads Q; O / l and m + log l, stored
        return Cost(problem.S * (D_v + 2), problem.S * ((D + D_v) * item + statistic))
    # delta from O and dO, stored; dQ filled with zeros; K and V loaded, dK and dV stored
    rows = Cost(2 * problem.S * D_v, problem.S * ((D + 2 * D_v) * item + statistic))
    return rows + Cost(0, 2 * S_k * (D + D_v) * item)


def _sizes(problem: Problem) -> tuple[int, int]:
    """Bytes of an element of q, and of an element of lse or delta."""
    return DTYPES[problem.dtype].itemsize, 8 if problem.dtype == "float64" else 4


def largest_blocks(which: str, D: int, M: int) -> tuple[int, int]:
    """Returns the first of CANDIDATES with tiles that fit a chip of M elements."""
    for blocks in CANDIDATES:
        if chip_peak(which, D, blocks) <= M:
            return blocks
    raise ValueError(f"M: got {M} elements; allowed: enough for one row of each tile at D = {D}")


def chip_peak(which: str, D: int, blocks: tuple[int, int]) -> int:
    """The largest number of elements on the chip during a pass in tiles of `blocks`, without dropout."""
    rows, columns = blocks
    if which == "forward":  # Q, O, S, K; l, m, row_max, and rescale and m of the tile before, as row_max begins
        return 2 * rows * D + rows * columns + columns * D + 5 * rows
    # K, V, dK, dV; Q, dO, dQ; P and dS, as dS^T Q begins
    return 4 * columns * D + 3 * rows * D + 2 * rows * columns
