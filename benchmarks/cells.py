"""The problems of compare_torch.py's table, called cells, and their inputs."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
KINDS = ("shapes", "options", "windows", "small", "decode")
SHAPES = [  # B, H, S, D
    (1, 8, 512, 64), (1, 8, 2048, 64), (1, 4, 4096, 64), (1, 4, 2048, 128),
    (8, 12, 1024, 64), (2, 8, 1024, 32), (1, 4, 1024, 256), (32, 8, 128, 64),
]  # fmt: skip
WITH_OPTIONS = (2, 8, 1024, 64)
WITH_WINDOW = (1, 4, 4096, 64)
WINDOWS = [(128, 0), (256, 0), (512, 0), (1024, 0), (2048, 0), (128, 128), (512, 512)]  # keys left and right
SMALL = [(1, 1, length, 64) for length in (1, 2, 7, 16, 33, 64, 100)]
ODD = [(1, 1, 33, 40), (3, 5, 77, 20), (1, 3, 129, 80), (1, 7, 257, 33)]
DECODE = [  # H, H_kv, S_k; D 128
    (32, 32, 8192), (32, 8, 8192), (1, 1, 65536),
]  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One problem, forward or forward and backward. `query` and `key` are B, H, S, D; `value` has key's shape."""

    kind: str
    name: str
    query: tuple[int, int, int, int]
    key: tuple[int, int, int, int]
    dtype: str
    backward: bool
    options: dict = field(default_factory=dict)  # arguments of both functions
    mask: Callable[[], Tensor] | None = None
    window: tuple[int, int] | None = None  # torch receives the band as a bool mask

    def flops(self) -> float:
        """4 B H D for each visible score, times 3.5 with the backward. Half of the causal scores count."""
        batch, heads, _, head_dim = self.query
        return 4 * batch * heads * head_dim * self.visible() * (3.5 if self.backward else 1)

    def visible(self) -> float:
        """The number of visible scores of one head."""
        if self.window:
            return int(band(self.query[2], self.key[2], self.window).sum())
        return self.query[2] * self.key[2] / (2 if self.options.get("is_causal") else 1)


def band(seqlen_q: int, seqlen_k: int, window: tuple[int, int]) -> Tensor:
    """Returns the window as a bool mask. The diagonal ends in the lower right corner."""
    ones = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    diagonal = seqlen_k - seqlen_q
    return ones.tril(diagonal + window[1]).triu(diagonal - window[0])


class Inputs:
    """The inputs of a cell, drawn with a fixed seed. K and V share one tensor, so one loop can read both."""

    def __init__(self, cell: Cell) -> None:
        torch.manual_seed(0)
        dtype = DTYPES[cell.dtype]
        self.backward, self.options, self.window = cell.backward, cell.options, cell.window
        self.q = torch.randn(cell.query, dtype=dtype).requires_grad_(cell.backward)
        self.kv = torch.randn(2, *cell.key, dtype=dtype)
        self.k, self.v = (t.detach().requires_grad_(cell.backward) for t in self.kv)
        self.grad = torch.randn(cell.query, dtype=dtype) if cell.backward else None
        self.mask = cell.mask() if cell.mask else None
        self.band = band(cell.query[2], cell.key[2], cell.window) if cell.window else None

    def ours(self, attention: Callable) -> Callable[[], tuple[Tensor, ...]]:
        window = {"window": self.window} if self.window else {}
        return partial(self._run, attention, self.mask, self.options | window)

    def torchs(self, attention: Callable) -> Callable[[], tuple[Tensor, ...]]:
        return partial(self._run, attention, self.mask if self.band is None else self.band, self.options)

    def _run(self, attention: Callable, mask: Tensor | None, options: dict) -> tuple[Tensor, ...]:
        with nullcontext() if self.backward else torch.no_grad():
            out = attention(self.q, self.k, self.v, mask, **options)
        return torch.autograd.grad(out, (self.q, self.k, self.v), self.grad) if self.backward else (out,)


def cells(dtypes: list[str], kinds: list[str], most_flops: float = math.inf) -> Iterator[Cell]:
    """Returns the sweep without cells of more than `most_flops`."""
    by_kind = {"shapes": shapes, "options": options, "windows": windows, "small": small, "decode": decode}
    for kind in kinds:
        for dtype in dtypes:
            yield from (cell for cell in by_kind[kind](dtype) if cell.flops() <= most_flops)


def shapes(dtype: str) -> Iterator[Cell]:
    for shape in SHAPES:
        for causal in (False, True):
            for backward in (False, True):
                name = "causal" if causal else "full"
                yield Cell("shapes", name, shape, shape, dtype, backward, {"is_causal": causal})


def options(dtype: str) -> Iterator[Cell]:
    batch, heads, length, head_dim = shape = WITH_OPTIONS
    lengths = torch.linspace(length, 0.7 * length, batch)[:, None, None, None]
    for backward in (False, True):
        cell = partial(Cell, "options", query=shape, key=shape, dtype=dtype, backward=backward)
        yield cell("dropout 0.1", options={"dropout_p": 0.1})
        yield cell("bool mask", mask=lambda: torch.rand(length, length) > 0.1)
        yield cell("float mask", mask=lambda: torch.randn(length, length, dtype=DTYPES[dtype]))
        yield cell("key padding", mask=lambda: torch.arange(length) < lengths)
        yield cell(f"GQA {heads}:1", key=(batch, 1, length, head_dim), options={"enable_gqa": True})


def windows(dtype: str) -> Iterator[Cell]:
    """The last window is as wide as the sequence, so it equals causal. The other windows are compared with it."""
    shape = WITH_WINDOW
    for backward in (False, True):
        for window in [*WINDOWS, (shape[2], 0)]:
            name = "window {}, {}".format(*window)
            yield Cell("windows", name, shape, shape, dtype, backward, window=window)


def small(dtype: str) -> Iterator[Cell]:
    for name, sizes in (("small", SMALL), ("odd", ODD)):
        for shape in sizes:
            for backward in (False, True):
                yield Cell("small", name, shape, shape, dtype, backward)


def decode(dtype: str) -> Iterator[Cell]:
    for heads, heads_kv, seqlen_k in DECODE:
        name = "decode" if heads == heads_kv else f"decode GQA {heads}:{heads_kv}"
        gqa = {"enable_gqa": True} if heads != heads_kv else {}
        yield Cell("decode", name, (1, heads, 1, 128), (1, heads_kv, seqlen_k, 128), dtype, False, gqa)
