"""The counts of one call of flash_attn: any two lengths, of which a band may hide a part.

Counting walks every tile. But a further block of rows or keys costs what the one before it did, so that a few tiles
give the counts of any length exactly; and a tile that the band hides costs nothing but the visit that is left out.
"""

from dataclasses import dataclass, replace

from .counts import Problem, count


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
    """Blocks of a sequence, the last one perhaps not full."""
    return -(-length // block)


def pass_cost(which: str, problem: Problem, blocks: tuple[int, int], visible_tiles: int | None = None) -> Cost:
    """FlashAttention-2's "forward" or "backward" of all heads in tiles of `blocks`; all tiles are visible if None."""
    S_k = problem.S_k or problem.S
    head = replace(problem, B=1, H=1)

    def along_keys(S: int) -> Cost:
        return _extrapolate(lambda n: _counted(which, replace(head, S=S, S_k=n), blocks), S_k, blocks[1])

    cost = _extrapolate(along_keys, problem.S, blocks[0])
    if visible_tiles is not None:
        hidden = tiles(problem.S, blocks[0]) * tiles(S_k, blocks[1]) - visible_tiles
        cost -= _of_one_tile(which, head, (min(blocks[0], problem.S), min(blocks[1], S_k))) * hidden
    return cost * problem.heads


def _counted(which: str, problem: Problem, blocks: tuple[int, int]) -> Cost:
    forward = count("flash2", replace(problem, backward=False), 0, blocks)
    if which == "forward":
        return Cost(forward.flops, forward.bytes)
    both = count("flash2", replace(problem, backward=True), 0, blocks)
    return Cost(both.flops - forward.flops, both.bytes - forward.bytes)


def _extrapolate(cost_of, length: int, block: int) -> Cost:
    """cost_of(length), from two lengths of at most two blocks and the same rest."""
    steps = length // block - 1
    if steps < 2:
        return cost_of(length)
    first = cost_of(length - steps * block)
    return first + (cost_of(length - (steps - 1) * block) - first) * steps


def _of_one_tile(which: str, head: Problem, blocks: tuple[int, int]) -> Cost:
    """What one tile costs beyond its row block and its key block."""

    def of(rows: int, columns: int) -> Cost:
        return _counted(which, replace(head, S=rows * blocks[0], S_k=columns * blocks[1]), blocks)

    return of(2, 2) - of(2, 1) - of(1, 2) + of(1, 1)
