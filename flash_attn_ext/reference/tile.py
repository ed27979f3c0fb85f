"""The chip: tiles, the arithmetic between tiles, and the count of its FLOPs.

A :class:`Tile` allocates its elements on the chip when it is made, and frees them with its last reference. So the peak
equals the peak of the algorithm as written. Methods that end in ``_`` and ``+=``, ``*=`` ... work in place, as kernels
do. One addition, multiplication, division, comparison, exp or log is one FLOP; an (m, k) x (k, n) product is 2mnk
FLOPs.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor


class Chip:
    """The small fast memory: elements in use now and at the peak, and the FLOPs computed on it."""

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity
        self.in_use = self.peak = 0
        self.matmul_flops = self.other_flops = 0
        self.exponentials = 0  # part of other_flops; GPUs compute them in a separate, slow unit

    def take(self, elements: int) -> None:
        self.in_use += elements
        self.peak = max(self.peak, self.in_use)
        if self.capacity is not None and self.in_use > self.capacity:
            raise MemoryError(f"tiles: got {self.in_use} elements; allowed: {self.capacity}, the on-chip size M")


class Tile:
    """A matrix on the chip. ``data`` is None if only shapes are counted."""

    __slots__ = ("base", "chip", "data", "owned", "shape")

    def __init__(self, chip: Chip, shape: tuple[int, int], data: Tensor | None, *, view_of: "Tile | None" = None):
        self.chip, self.shape, self.data = chip, shape, data
        self.base = view_of  # a view owns no elements, and holds a reference to its base
        self.owned = 0 if view_of else shape[0] * shape[1]
        chip.take(self.owned)

    def __del__(self):
        self.chip.in_use -= self.owned

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def T(self) -> "Tile":
        """The same memory, read with rows and columns exchanged."""
        return Tile(self.chip, self.shape[::-1], None if self.data is None else self.data.T, view_of=self)

    # Products

    def __matmul__(self, other: "Tile") -> "Tile":
        self._count_product(other)
        data = None if self.data is None else self.data @ other.data
        return Tile(self.chip, (self.shape[0], other.shape[1]), data)

    def add_product_(self, a: "Tile", b: "Tile") -> None:
        """self += a @ b, accumulated in place as a GEMM does."""
        a._count_product(b)
        if self.shape != (a.shape[0], b.shape[1]):
            raise ValueError(f"product: got {a.shape} @ {b.shape} for a tile of {self.shape}")
        if self.data is not None:
            self.data.addmm_(a.data, b.data)

    def _count_product(self, other: "Tile") -> None:
        if self.shape[1] != other.shape[0]:
            raise ValueError(f"product: got {self.shape} @ {other.shape}; allowed: the same inner size")
        self.chip.matmul_flops += 2 * self.size * other.shape[1]

    # Element by element. A column (one element for each row) is broadcast

    def _new(self, operation: Callable, other: "Tile | float") -> "Tile":
        shape = self.shape
        if isinstance(other, Tile):
            shape = max(shape[0], other.shape[0]), max(shape[1], other.shape[1])
        self.chip.other_flops += shape[0] * shape[1]
        return Tile(self.chip, shape, None if self.data is None else operation(self.data, _data(other)))

    def _in_place(self, operation: Callable, other: "Tile | float") -> "Tile":
        self.chip.other_flops += self.size
        if self.data is not None:
            operation(self.data, _data(other))
        return self

    def __add__(self, other):
        return self._new(torch.add, other)

    def __sub__(self, other):
        return self._new(torch.sub, other)

    def __mul__(self, other):
        return self._new(torch.mul, other)

    def __iadd__(self, other):
        return self._in_place(Tensor.add_, other)

    def __isub__(self, other):
        return self._in_place(Tensor.sub_, other)

    def __imul__(self, other):
        return self._in_place(Tensor.mul_, other)

    def divide_rows_(self, row_sum: "Tile") -> "Tile":
        """diag(row_sum)^-1 self. A row with sum 0 (everything masked) stays 0."""
        return self._in_place(lambda x, s: x.div_(torch.where(s == 0, 1, s)), row_sum)

    def exp_(self) -> "Tile":
        self.chip.exponentials += self.size
        return self._in_place(lambda x, _: x.exp_(), 0.0)

    def exp_minus_(self, shift: "Tile") -> "Tile":
        """exp(self - shift), one shift for each row, in place: two FLOPs for each element.

        A row without a visible key so far has the maximum -inf. It is shifted by 0, because -inf - (-inf) would be NaN;
        exp(-inf) is 0.
        """
        self.chip.other_flops += self.size
        self.chip.exponentials += self.size
        return self._in_place(lambda x, s: x.sub_(torch.where(s == -math.inf, 0, s)).exp_(), shift)

    def pad_rows(self, rows: int) -> "Tile":
        """Copies this tile and appends rows of zeros, up to `rows` rows."""
        padding = (0, 0, 0, rows - self.shape[0])
        data = None if self.data is None else torch.nn.functional.pad(self.data, padding)
        return Tile(self.chip, (rows, self.shape[1]), data)

    def top(self, rows: int) -> "Tile":
        """A view of the first rows."""
        return Tile(self.chip, (rows, self.shape[1]), None if self.data is None else self.data[:rows], view_of=self)

    def copy(self) -> "Tile":
        return Tile(self.chip, self.shape, None if self.data is None else self.data.clone())


def exp_minus(x: Tile, shift: Tile) -> Tile:
    """:meth:`Tile.exp_minus_` on a copy, for small vectors such as m."""
    return x.copy().exp_minus_(shift)


def maximum(a: Tile, b: Tile) -> Tile:
    return a._new(torch.maximum, b)


def log(x: Tile) -> Tile:
    x.chip.other_flops += x.size
    return Tile(x.chip, x.shape, None if x.data is None else x.data.log())


def row_max(x: Tile) -> Tile:
    """The maximum of each row; -inf for a row without elements."""
    return _reduce(
        x, lambda data: data.amax(1, keepdim=True) if data.numel() else data.new_full(x.shape[:1], -math.inf)[:, None]
    )


def row_sum(x: Tile) -> Tile:
    return _reduce(x, lambda data: data.sum(1, keepdim=True))


def row_dot(a: Tile, b: Tile) -> Tile:
    """rowsum(a o b): two FLOPs for each element, no third tile."""
    a.chip.other_flops += a.size
    return _reduce(a, lambda data: (data * b.data).sum(1, keepdim=True))


def row_any_outside(x: Tile, low: float, high: float) -> Tile:
    """1 for a row with an element outside (low, high), else 0. NaN is outside; -inf, a masked score, is not.

    Three FLOPs for each element: two comparisons, and one to reduce the row.
    """
    x.chip.other_flops += 2 * x.size
    return _reduce(x, lambda data: (~((data > low) & (data < high)) & (data != -math.inf)).any(1, keepdim=True))


def mask_(scores: Tile, mask: Tile) -> Tile:
    """MASK of the papers: sets -inf where a bool mask is False, or adds a float mask."""
    if mask.data is not None and mask.data.dtype == torch.bool:
        return scores._in_place(lambda x, keep: x.masked_fill_(~keep, -math.inf), mask)
    return scores._in_place(Tensor.add_, mask)


def _reduce(x: Tile, operation: Callable) -> Tile:
    x.chip.other_flops += x.size
    return Tile(x.chip, (x.shape[0], 1), None if x.data is None else operation(x.data))


def _data(value: "Tile | float") -> "Tensor | float":
    return value.data if isinstance(value, Tile) else value
