"""Counts as a function of the block size, and of N, d, M and s."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .counts import Counts, Problem, count
from .devices import Device
from .roofline import Prediction, predict

BLOCKS = (16, 32, 64, 128, 256, 512)
# One head, forward and backward. Each sweep varies one of N, d, M and s, starting from these sizes and s = 1.
CENTRE = Problem(1, 1, 2048, 64)
CENTRE_M = 32768
LENGTHS, HEAD_SIZES, CHIP_SIZES = (512, 1024, 2048, 4096, 8192), (16, 32, 64, 128), (8192, 16384, 32768, 65536)
FRACTIONS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)

VALUES: dict[str, Callable[[Counts], int]] = {
    "FLOPs": lambda c: c.flops,
    "accesses": lambda c: c.accesses,
    "extra memory": lambda c: c.extra_bytes,
}


@dataclass(frozen=True)
class BlockPoint:
    algorithm: str
    block: int
    counts: Counts
    time: Prediction


def over_blocks(problem: Problem, device: Device) -> list[BlockPoint]:
    """Counts FlashAttention-1 with B_c = block (M = 4 d B_c), and FlashAttention-2 with square blocks.

    With hidden blocks, counts block-sparse FlashAttention, too.
    """
    points = []
    for algorithm in ("flash1", *(("block_sparse",) if problem.visible < 1 else ()), "flash2"):
        for block in BLOCKS:
            counts = count(algorithm, problem, 4 * problem.D * block, (block, block))
            points.append(BlockPoint(algorithm, block, counts, predict(counts, device, problem.dtype)))
    return points


@dataclass(frozen=True)
class Sweep:
    variable: str
    values: Sequence[float]
    counts: dict[str, list[Counts]]  # by algorithm


def scaling() -> list[Sweep]:
    """Counts standard attention and FlashAttention-1 along N, along d and along M.

    Along s, the share of visible blocks, counts FlashAttention-1 and block-sparse FlashAttention.
    """
    dense, sparse = ("standard", "flash1"), ("flash1", "block_sparse")
    runs = {
        "N": (LENGTHS, dense, lambda n: (replace(CENTRE, S=n), CENTRE_M)),
        "d": (HEAD_SIZES, dense, lambda d: (replace(CENTRE, D=d), CENTRE_M)),
        "M": (CHIP_SIZES, dense, lambda m: (CENTRE, m)),
        "s": (FRACTIONS, sparse, lambda s: (replace(CENTRE, visible=s), CENTRE_M)),
    }
    return [
        Sweep(name, values, {a: [count(a, *at(value)) for value in values] for a in algorithms})
        for name, (values, algorithms, at) in runs.items()
    ]


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """e of y ~ x^e between the last two points, to two digits; 0 where y does not change."""
    return round(math.log(ys[-1] / ys[-2]) / math.log(xs[-1] / xs[-2]), 2) + 0.0  # no -0.0
