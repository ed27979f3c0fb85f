"""The instrumented machine: a slow memory that counts reads and writes, and its chip (tile.py).

The algorithms of this folder store their tensors in a :class:`SlowMemory` (HBM in the FlashAttention papers).
:meth:`SlowTensor.load` copies a tile to the chip and :meth:`SlowTensor.store` copies it back. Both count elements and
bytes for each tensor name; no count comes from a formula.

With tensors on torch's ``meta`` device nothing is computed: the same code runs on shapes alone and counts the same
numbers. ``python -m flash_attn_ext.iomodel`` counts large problems in this way.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .tile import Chip, Tile

ALL = slice(None)


@dataclass
class Traffic:
    """Counts the elements of one tensor that moved between slow memory and chip. `itemsize`: bytes of an element."""

    itemsize: int
    size: int = 0  # elements of the tensor
    reads: int = 0
    writes: int = 0

    @property
    def elements(self) -> int:
        return self.reads + self.writes

    @property
    def bytes(self) -> int:
        return self.elements * self.itemsize

    @property
    def bytes_once(self) -> int:
        """Bytes with a cache that serves all but the first read and the last write of an element."""
        return (min(self.reads, self.size) + min(self.writes, self.size)) * self.itemsize


@dataclass
class SlowMemory:
    """Counts the traffic between a large slow memory and a small chip, and the FLOPs on the chip.

    Args:
        capacity: M, the elements that the chip holds. Tiles that exceed it raise MemoryError. None: only measured.
    """

    capacity: int | None = None
    traffic: dict[str, Traffic] = field(default_factory=dict)
    extra_elements: int = 0  # allocated by the algorithm beyond its inputs and its results
    extra_bytes: int = 0

    def __post_init__(self):
        self.chip = Chip(self.capacity)

    def put(self, name: str, tensor: Tensor) -> "SlowTensor":
        """Declares an input that is already in slow memory. Only loads of it are counted."""
        return SlowTensor(self, name, tensor)

    def new(self, name: str, like: "SlowTensor", rows: int, cols: int, *, dtype=None, result=False):
        """Allocates `rows` x `cols` without writing. Tensors other than results count as extra memory."""
        tensor = torch.empty(rows, cols, dtype=dtype or like.tensor.dtype, device=like.tensor.device)
        if not result:
            self.extra_elements += tensor.numel()
            self.extra_bytes += tensor.nbytes
        return SlowTensor(self, name, tensor)

    @property
    def reads(self) -> int:
        return sum(t.reads for t in self.traffic.values())

    @property
    def writes(self) -> int:
        return sum(t.writes for t in self.traffic.values())

    @property
    def accesses(self) -> int:
        """Elements read plus elements written, as in the papers' theorems."""
        return self.reads + self.writes

    @property
    def bytes(self) -> int:
        return sum(t.bytes for t in self.traffic.values())

    @property
    def flops(self) -> int:
        return self.chip.matmul_flops + self.chip.other_flops


class SlowTensor:
    """A matrix in slow memory. Vectors over the rows (m, l, lse, delta) are matrices of one column."""

    def __init__(self, memory: SlowMemory, name: str, tensor: Tensor):
        if tensor.dim() != 2:
            raise ValueError(f"{name}: got {tensor.dim()} dimensions; allowed: 2, the matrix of one head")
        self.memory, self.tensor, self.shape = memory, tensor, tuple(tensor.shape)
        self.counted = memory.traffic.setdefault(name, Traffic(tensor.element_size(), tensor.numel()))
        # The chip computes in fp32, or in fp64 on fp64 data, as the kernels do.
        self.on_chip_dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        self.real = tensor.device.type != "meta"

    def load(self, rows: slice = ALL, cols: slice = ALL) -> Tile:
        """Copies these rows and columns to the chip."""
        shape = length(rows, self.shape[0]), length(cols, self.shape[1])
        self.counted.reads += shape[0] * shape[1]
        data = self.tensor[rows, cols] if self.real else None
        if data is not None:
            data = data.to(torch.bool if data.dtype == torch.bool else self.on_chip_dtype, copy=True)
        return Tile(self.memory.chip, shape, data)

    def on_chip(self, rows: int, cols: int, value: float) -> Tile:
        """Makes a tile of one value on the chip, without traffic."""
        options = {"dtype": self.on_chip_dtype, "device": self.tensor.device}
        data = torch.full((rows, cols), value, **options) if self.real else None
        return Tile(self.memory.chip, (rows, cols), data)

    def store(self, tile: Tile, rows: slice = ALL, cols: slice = ALL) -> None:
        shape = length(rows, self.shape[0]), length(cols, self.shape[1])
        if tile.shape != shape:
            raise ValueError(f"tile: got shape {tile.shape}; allowed: {shape}, the shape of its block")
        self.counted.writes += shape[0] * shape[1]
        if self.real:
            self.tensor[rows, cols] = tile.data.to(self.tensor.dtype)

    @property
    def T(self) -> "TransposedView":
        return TransposedView(self)

    def fill(self, value: float) -> None:
        """Writes `value` everywhere."""
        self.counted.writes += self.shape[0] * self.shape[1]
        if self.real:
            self.tensor.fill_(value)


class TransposedView:
    """The transpose of a slow tensor, as a view without a copy."""

    def __init__(self, base: SlowTensor):
        self.base, self.shape = base, base.shape[::-1]

    def load(self, rows: slice = ALL, cols: slice = ALL) -> Tile:
        return self.base.load(cols, rows).T


def length(part: slice, size: int) -> int:
    return len(range(*part.indices(size)))


def blocks(stop: int, block: int, start: int = 0) -> Iterator[slice]:
    """Cuts [start, stop) into pieces of `block`; the last one may be shorter."""
    if block < 1:
        raise ValueError(f"block: got {block}; allowed: at least 1")
    for begin in range(start, stop, block):
        yield slice(begin, min(begin + block, stop))


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of m, l, lse and delta in slow memory: as on the chip."""
    return torch.float64 if dtype == torch.float64 else torch.float32
