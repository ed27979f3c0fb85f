"""Counts the FLOPs and the traffic of each algorithm by running it on shapes alone, without formulas.

One head runs. Its counts are multiplied by B * H, but the mask is counted once, because all heads share it.
"""

from dataclasses import dataclass, field

import torch

from ..reference import block_sparse, flash1, flash2, standard
from ..reference.dropout import Dropout
from ..reference.memory import SlowMemory
from .calls import kernel_tiles, largest_blocks
from .problem import DTYPES, Problem

# The algorithms, with their names in tables and figures.
LABELS = {
    "standard": "standard",
    "flash1": "FlashAttention-1",
    "block_sparse": "block-sparse",
    "flash2": "FlashAttention-2",
    "ours": "our CPU tiles",
}
ALGORITHMS = tuple(LABELS)


@dataclass
class Counts:
    """Counts of all heads. `traffic[pass, tensor]`: (bytes read, bytes written)."""

    tiles: str
    matmul_flops: int = 0
    other_flops: int = 0
    accesses: int = 0  # elements read and written
    bytes: int = 0
    bytes_once: int = 0  # with an unlimited cache: each tensor moves once in each direction
    chip_peak: int = 0  # elements, the larger of the passes
    extra_bytes: int = 0  # beyond inputs and results, the sum of the passes
    traffic: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    @property
    def flops(self) -> int:
        return self.matmul_flops + self.other_flops

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    def add(self, name: str, memory: SlowMemory, problem: Problem) -> None:
        """Adds the counts of pass `name`, from the run of one head."""
        self.matmul_flops += memory.chip.matmul_flops * problem.heads
        self.other_flops += memory.chip.other_flops * problem.heads
        self.chip_peak = max(self.chip_peak, memory.chip.peak)
        self.extra_bytes += memory.extra_bytes * problem.heads
        for tensor, accessed in memory.traffic.items():
            heads = 1 if tensor == "mask" else problem.heads
            self.traffic[name, tensor] = tuple(n * accessed.itemsize * heads for n in (accessed.reads, accessed.writes))
            self.accesses += accessed.elements * heads
            self.bytes += accessed.bytes * heads
            self.bytes_once += accessed.bytes_once * heads


def count(
    algorithm: str,
    problem: Problem,
    M: int,
    blocks: tuple[int, int] | None = None,
    block_mask: torch.Tensor | None = None,
) -> Counts:
    """Counts `algorithm` on a chip of M elements. `blocks` sets flash2's (block_q, block_k) for both passes.

    `block_mask` sets the blocks of block_sparse. None: a share of `problem.visible` of the blocks, evenly spread.
    """
    if algorithm == "standard":
        return _count_standard(problem)
    if algorithm == "flash1":
        return _count_flash1(problem, M)
    if algorithm == "block_sparse":
        shape = block_sparse.grid(problem.S, problem.S_k or problem.S, problem.D, M)
        block_mask = spread_blocks(problem.visible, shape) if block_mask is None else block_mask
        block_sparse.check_block_mask(block_mask, shape)
        return _count_flash1(problem, M, block_mask)
    if algorithm == "ours":
        return _count_flash2(problem, kernel_tiles())
    if algorithm == "flash2":
        passes = ("forward", "backward")
        return _count_flash2(problem, {p: blocks or largest_blocks(p, problem.D, M) for p in passes})
    raise ValueError(f"algorithm: got {algorithm!r}; allowed: {', '.join(ALGORITHMS)}")


def _count_standard(problem: Problem) -> Counts:
    """Each kernel reads its operands once, as with ideal caches."""
    options, counts = _options(problem), Counts("whole matrices")
    q, k, v, dout = problem.tensors(4)
    forward, backward = SlowMemory(), SlowMemory()
    _, saved = standard.forward(q, k, v, memory=forward, **options)
    counts.add("forward", forward, problem)
    if problem.backward:
        standard.backward(q, k, v, dout, saved, dropout=options["dropout"], memory=backward)
        counts.add("backward", backward, problem)
    counts.chip_peak = 0  # depends on the GEMM kernels, not on the algorithm
    return counts


def _count_flash1(problem: Problem, M: int, block_mask: torch.Tensor | None = None) -> Counts:
    B_c, B_r = flash1.block_sizes(M, problem.D)
    options, counts = _options(problem) | {"M": M, "block_mask": block_mask}, Counts(f"{B_r} x {B_c}")
    q, k, v, dout = problem.tensors(4)
    forward, backward = SlowMemory(), SlowMemory()
    out, l, m = flash1.forward(q, k, v, memory=forward, **options)
    counts.add("forward", forward, problem)
    if problem.backward:
        flash1.backward(q, k, v, out, dout, l, m, memory=backward, **options)
        counts.add("backward", backward, problem)
    return counts


def spread_blocks(visible: float, shape: tuple[int, int]) -> torch.Tensor:
    """Makes a block mask with round(visible * blocks) visible blocks, evenly spread.

    If N is a multiple of the block sizes, the counts depend on the number of visible blocks, not on their places.
    """
    blocks = shape[0] * shape[1]
    before = torch.arange(blocks + 1, device="cpu") * round(visible * blocks) // max(blocks, 1)
    return (before.diff() > 0).view(shape)


def _count_flash2(problem: Problem, tiles: dict[str, tuple[int, int]]) -> Counts:
    text = [f"{block_q} x {block_k}" for block_q, block_k in tiles.values()]
    same = tiles["forward"] == tiles["backward"] or not problem.backward
    options, counts = _options(problem), Counts(text[0] if same else ", ".join(text))
    q, k, v, dout = problem.tensors(4)
    forward, backward = SlowMemory(), SlowMemory()
    out, lse = flash2.forward(q, k, v, memory=forward, **_blocks(tiles["forward"]), **options)
    counts.add("forward", forward, problem)
    if problem.backward:
        flash2.backward(q, k, v, out, dout, lse, memory=backward, **_blocks(tiles["backward"]), **options)
        counts.add("backward", backward, problem)
    return counts


def _options(problem: Problem) -> dict:
    """Makes the mask and the dropout arguments of the algorithms, for one head."""
    S_k, dtype = problem.S_k or problem.S, DTYPES[problem.dtype]
    mask = torch.empty(problem.S, S_k, dtype=dtype, device="meta") if problem.mask else None
    dropout = Dropout(problem.dropout, torch.zeros(2, dtype=torch.int64, device="cpu")) if problem.dropout else None
    return {"mask": mask, "dropout": dropout}


def _blocks(blocks: tuple[int, int]) -> dict[str, int]:
    return {"block_q": blocks[0], "block_k": blocks[1]}
