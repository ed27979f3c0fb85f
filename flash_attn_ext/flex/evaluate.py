"""Runs an encoded program with torch's operators, which are differentiable any number of times.

The kernels define the same instructions, but faster: csrc/cpu/kernels/program_math-inl.h.
"""

import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .operations import OPERATIONS
from .program import CUSTOM_GRADIENT, HEADER_WORDS, INSTRUCTION_WORDS, WITHOUT_GRADIENT, Rank

_NAMES = list(OPERATIONS)
_SCORE = int(Rank.TILE)  # the operand for tile slot 0


class Tile(NamedTuple):
    """A part of the scores of one batch: all heads, some queries, all keys. Shapes broadcast to (H, queries, keys)."""

    score: Tensor
    batch: int
    head: Tensor  # (H, 1, 1)
    query: Tensor  # (queries, 1)
    key: Tensor  # (keys)
    captured: Tensor | None
    captured_ints: Tensor | None


def run(words: Sequence[int], tile: Tile) -> Tensor:
    """Returns the result of the program that begins at ``words[0]``."""
    values: dict[int, Tensor] = {_SCORE: tile.score}
    for n in range(words[1]):
        at = HEADER_WORDS + n * INSTRUCTION_WORDS
        operation, target, *rest = words[at : at + INSTRUCTION_WORDS]
        operands = [values[o] for o in rest[:3] if o >= 0]
        value = _OPERATIONS[_NAMES[operation]](tile, rest[3:5], *operands)
        derivative = rest[3] if _NAMES[operation] == "maximum" else None
        if derivative == CUSTOM_GRADIENT:
            raise NotImplementedError(
                "score_mod: got an autograd.Function in forward mode or a second derivative; allowed: the backward"
            )
        values[target] = value.detach() if derivative == WITHOUT_GRADIENT else value
    return values[words[6]]


def _integer(tile: Tile, value: int | Tensor) -> Tensor:
    dtype = torch.int64 if tile.score.dtype == torch.float64 else torch.int32
    return torch.as_tensor(value, device=tile.score.device).to(dtype)


def _float_constant(tile: Tile, immediates: Sequence[int]) -> Tensor:
    return tile.score.new_tensor(struct.unpack("<d", struct.pack("<q", immediates[0]))[0])


def _divide_down(a: Tensor, b: Tensor, rounding_mode: str) -> Tensor:
    zero = b == 0
    return torch.where(zero, 0, torch.div(a, torch.where(zero, 1, b), rounding_mode=rounding_mode))


def _modulo(a: Tensor, b: Tensor) -> Tensor:
    zero = b == 0
    return torch.where(zero, 0, torch.remainder(a, torch.where(zero, 1, b)))


def _shift_left(a: Tensor, b: Tensor) -> Tensor:
    bits = 8 * a.element_size()
    outside = (b < 0) | (b >= bits)
    return torch.where(outside, 0, a << torch.where(outside, 0, b))


def _shift_right(a: Tensor, b: Tensor) -> Tensor:
    bits = 8 * a.element_size()
    return a >> torch.where((b < 0) | (b >= bits), bits - 1, b)


def _wrap_index(_: Tile, immediates: Sequence[int], n: Tensor) -> Tensor:
    size = immediates[0]
    return torch.where(n < 0, n + size, n).clamp(0, size - 1)


def _gather(elements: Tensor | None, immediates: Sequence[int], n: Tensor) -> Tensor:
    assert elements is not None
    first, count = immediates
    return elements[first : first + count][n.clamp(0, count - 1).long()]


def _plain(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Makes a rule for an operation that needs only its operands."""
    return lambda tile, immediates, *operands: function(*operands)


_OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "float_constant": _float_constant,
    "int_constant": lambda tile, immediates: _integer(tile, immediates[0]),
    "bool_constant": lambda tile, immediates: torch.tensor(bool(immediates[0]), device=tile.score.device),
    "batch": lambda tile, _: _integer(tile, tile.batch),
    "head": lambda tile, _: _integer(tile, tile.head),
    "query": lambda tile, _: _integer(tile, tile.query),
    "key": lambda tile, _: _integer(tile, tile.key),
    "int_to_float": lambda tile, _, a: a.to(tile.score.dtype),
    "float_to_int": lambda tile, _, a: _integer(tile, a),
    "bool_to_int": lambda tile, _, a: _integer(tile, a),
    "wrap_index": _wrap_index,
    "gather": lambda tile, immediates, n: _gather(tile.captured, immediates, n),
    "gather_int": lambda tile, immediates, n: _gather(tile.captured_ints, immediates, n),
} | {
    name: _plain(function)
    for name, function in {
        "add": torch.add, "subtract": torch.sub, "multiply": torch.mul, "divide": torch.div,
        "minimum": torch.minimum, "maximum": torch.maximum, "power": torch.pow, "negate": torch.neg,
        "absolute": torch.abs, "sign": torch.sign, "floor": torch.floor, "ceil": torch.ceil,
        "truncate": torch.trunc, "round": torch.round, "square_root": torch.sqrt, "reciprocal_root": torch.rsqrt,
        "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "log": torch.log, "log2": torch.log2,
        "log1p": torch.log1p, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "erf": torch.erf, "sine": torch.sin,
        "cosine": torch.cos, "select": torch.where, "less": torch.lt, "less_equal": torch.le, "equal": torch.eq,
        "int_add": torch.add, "int_subtract": torch.sub, "int_multiply": torch.mul,
        "int_divide": lambda a, b: _divide_down(a, b, "floor"),
        "int_truncated_divide": lambda a, b: _divide_down(a, b, "trunc"),
        "int_modulo": _modulo, "int_minimum": torch.minimum, "int_maximum": torch.maximum,
        "int_absolute": torch.abs, "int_and": torch.bitwise_and, "int_or": torch.bitwise_or,
        "int_xor": torch.bitwise_xor, "int_not": torch.bitwise_not, "shift_left": _shift_left,
        "shift_right": _shift_right, "int_select": torch.where, "int_less": torch.lt, "int_less_equal": torch.le,
        "int_equal": torch.eq, "bool_and": torch.logical_and, "bool_or": torch.logical_or,
        "bool_xor": torch.logical_xor, "bool_not": torch.logical_not,
    }.items()
}  # fmt: skip
