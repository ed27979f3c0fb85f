"""A function of scores as a program: values in static single assignment, and their encoding as a list of ints.

A program is data. The kernels interpret it on tiles of scores (csrc/cpu/kernels/program-inl.h).
"""

import struct
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

from .operations import BOOL, FLOAT, INT, OPERATIONS

VERSION = 1
HEADER_WORDS = INSTRUCTION_WORDS = 8
MAX_INSTRUCTIONS = 4096
MAX_SLOTS = 4096
# Immediates of maximum(x, x), which stands for x with another derivative.
WITHOUT_GRADIENT = 1  # torch's detach()
CUSTOM_GRADIENT = 2  # an output of a user's autograd.Function


class Rank(IntEnum):
    """The indices that a value depends on, as bits. A value of rank QUERY is computed once for each row of scores."""

    UNIFORM = 0  # at most batch and head
    QUERY = 1
    KEY = 2
    TILE = 3


_RANKS = {"query": Rank.QUERY, "key": Rank.KEY, "score": Rank.TILE, "gradient": Rank.TILE}
_SCORE_SLOT, _GRADIENT_SLOT, _FIRST_FREE_SLOT = 0, 1, 2  # slots of tile values


class Node(NamedTuple):
    """One instruction. ``arguments`` are numbers of earlier nodes."""

    operation: str
    arguments: tuple[int, ...] = ()
    immediates: tuple[int | float, ...] = ()


class CustomDerivative(NamedTuple):
    """The backward of a user's autograd.Function.

    ``derivative(gradients of the outputs)`` returns the gradients of the inputs. None: no node, or no gradient.
    """

    outputs: tuple[int | None, ...]
    inputs: tuple[int | None, ...]
    derivative: Callable[[Sequence[int | None]], Sequence[int | None]]


def _divide_down(a: int, b: int) -> int:
    return a // b if b else 0


_FOLDED: dict[str, Callable] = {
    "int_add": lambda a, b: a + b,
    "int_subtract": lambda a, b: a - b,
    "int_multiply": lambda a, b: a * b,
    "int_divide": _divide_down,
    "int_modulo": lambda a, b: a % b if b else 0,
    "int_less": lambda a, b: a < b,
    "int_less_equal": lambda a, b: a <= b,
    "int_equal": lambda a, b: a == b,
    "int_to_float": float,
    "bool_to_int": int,
    "negate": lambda a: -a,
    "bool_not": lambda a: not a,
}
# {operation: (neutral element, whether it is neutral on both sides)}
_NEUTRAL: dict[str, tuple[int | float, bool]] = {
    "multiply": (1.0, True),
    "divide": (1.0, False),
    "int_add": (0, True),
    "int_subtract": (0, False),
    "int_multiply": (1, True),
    "int_divide": (1, False),
    "bool_and": (1, True),
    "bool_or": (0, True),
}
_CONSTANTS = {FLOAT: "float_constant", INT: "int_constant", BOOL: "bool_constant"}


class Builder:
    """Collects nodes. Equal nodes are merged, and constants are folded."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.ranks: list[Rank] = []
        self._numbers: dict[tuple, int] = {}
        self.custom: dict[int, CustomDerivative] = {}  # by output

    def emit(self, operation: str, *arguments: int, immediates: tuple[int | float, ...] = ()) -> int:
        """Returns the number of the node ``operation(*arguments)``: an equal earlier node, or a new node."""
        wanted = OPERATIONS[operation].arguments
        got = "".join(self.type_of(n) for n in arguments)
        if got != wanted:
            raise TypeError(f"{operation}: got arguments of types {got!r}; allowed: {wanted!r}")
        simpler = self._simplified(operation, arguments)
        if simpler is not None:
            return simpler
        node = Node(operation, arguments, immediates)
        key = (operation, arguments, tuple(map(_identity_of, immediates)))
        if key not in self._numbers:
            rank = _RANKS.get(operation, Rank.UNIFORM)
            for n in arguments:
                rank = Rank(rank | self.ranks[n])
            self._numbers[key] = len(self.nodes)
            self.nodes.append(node)
            self.ranks.append(rank)
        return self._numbers[key]

    def without_gradient(self, n: int) -> int:
        """Returns a node of the same value, for which derivatives are 0. The immediate distinguishes it."""
        return n if self.type_of(n) != FLOAT else self.emit("maximum", n, n, immediates=(WITHOUT_GRADIENT,))

    def with_custom_gradient(self, n: int) -> int:
        """Returns a new node of the same value. add_custom gives its derivative."""
        return self.emit("maximum", n, n, immediates=(CUSTOM_GRADIENT, len(self.nodes)))

    def add_custom(self, custom: CustomDerivative) -> None:
        self.custom.update((n, custom) for n in custom.outputs if n is not None)

    def constant(self, value: float | int | bool, kind: str | None = None) -> int:
        """Returns a constant of type ``kind``. Without ``kind`` it has the type of ``value``."""
        if kind is None:
            kind = BOOL if isinstance(value, bool) else INT if isinstance(value, int) else FLOAT
        converted: int | float = float(value) if kind == FLOAT else int(value)
        if kind == BOOL:
            converted = int(bool(value))
        return self.emit(_CONSTANTS[kind], immediates=(converted,))

    def type_of(self, n: int) -> str:
        return OPERATIONS[self.nodes[n].operation].result

    def constant_of(self, n: int) -> int | float | None:
        """Returns the value of a constant; None if the node is no constant."""
        node = self.nodes[n]
        return node.immediates[0] if node.operation in _CONSTANTS.values() else None

    def as_type(self, n: int, kind: str) -> int:
        """Converts node ``n`` to another type, as torch converts dtypes."""
        have = self.type_of(n)
        if have == kind:
            return n
        if kind == BOOL:
            zero = self.constant(0, have)
            return self.emit("bool_not", self.emit("equal" if have == FLOAT else "int_equal", n, zero))
        if have == BOOL:
            n = self.emit("bool_to_int", n)
            return n if kind == INT else self.emit("int_to_float", n)
        return self.emit("int_to_float" if kind == FLOAT else "float_to_int", n)

    def _simplified(self, operation: str, arguments: tuple[int, ...]) -> int | None:
        constants = [self.constant_of(n) for n in arguments]
        if operation in _FOLDED and None not in constants:
            folded = _FOLDED[operation](*constants)
            kind = OPERATIONS[operation].result
            if kind == FLOAT or -(2**31) <= folded < 2**31:
                return self.constant(folded, kind)
        if operation in ("select", "int_select") and constants[0] is not None:
            return arguments[1] if constants[0] else arguments[2]
        if operation in _NEUTRAL:
            neutral, on_the_left = _NEUTRAL[operation]
            if constants[1] == neutral:
                return arguments[0]
            if on_the_left and constants[0] == neutral:
                return arguments[1]
        return None


def _identity_of(immediate: float | int) -> object:
    """Returns a key that compares numbers by their bits: 0.0 differs from -0.0, and a NaN equals itself."""
    return struct.pack("<d", immediate) if isinstance(immediate, float) else immediate


class Program(NamedTuple):
    """Nodes, and the node number of the result. ``result`` None: the program only adds to gradients (scatter_add)."""

    builder: Builder
    result: int | None
    effects: tuple[int, ...] = ()

    def operation(self) -> str | None:
        """Returns the operation that computes the result."""
        return None if self.result is None else self.builder.nodes[self.result].operation

    def is_true(self) -> bool:
        return self.operation() == "bool_constant" and bool(self.builder.nodes[self.result or 0].immediates[0])

    def used(self, *, with_custom: bool = False) -> list[int]:
        """Returns the nodes that the result and the effects need, in the order of computation.

        ``with_custom``: also the inputs of a user's autograd.Function, which may receive gradients from its backward.
        """
        pending = [*self.effects, *(() if self.result is None else (self.result,))]
        found: set[int] = set()
        while pending:
            n = pending.pop()
            if n not in found:
                found.add(n)
                pending += self.builder.nodes[n].arguments
                if with_custom and n in self.builder.custom:
                    pending += (i for i in self.builder.custom[n].inputs if i is not None)
        return sorted(found)

    def encode(self, float_offset: int = 0, int_offset: int = 0) -> list[int]:
        """Returns the words that the kernels read; csrc/core/program.h has the layout.

        ``float_offset`` and ``int_offset`` are the starts of this program's captured elements in the rows of the call.
        """
        nodes, ranks = self.builder.nodes, self.builder.ranks
        order = self.used()
        slots = _Slots(self, order)
        words: list[int] = []
        for n in order:
            node = nodes[n]
            if node.operation in ("score", "gradient"):
                continue  # the kernel's memory holds this value, so no instruction computes it
            immediates = [_word_of(x) for x in node.immediates]
            if node.operation in ("gather", "scatter_add"):
                immediates[0] += float_offset
            elif node.operation == "gather_int":
                immediates[0] += int_offset
            operands = [slots.operand(a, ranks) for a in node.arguments]
            target = -1 if node.operation == "scatter_add" else slots.operand(n, ranks)
            words += [OPERATIONS[node.operation].number, target]
            words += [*operands, -1, -1, -1][:3]
            words += [*immediates, 0, 0][:2]
            words.append(0)
        count = len(words) // INSTRUCTION_WORDS
        if count > MAX_INSTRUCTIONS or max(slots.counts) > MAX_SLOTS:
            raise NotImplementedError(f"a function of {count} operations; allowed: {MAX_INSTRUCTIONS} at most")
        result = -1 if self.result is None else slots.operand(self.result, ranks)
        return [VERSION, count, *slots.counts, result, 0, *words]


class _Slots:
    """Assigns memory to each value. Tile values reuse slots that are no longer needed; other values are small."""

    def __init__(self, program: Program, order: list[int]) -> None:
        nodes, ranks = program.builder.nodes, program.builder.ranks
        last_use = {a: n for n in order for a in nodes[n].arguments}
        if program.result is not None:
            last_use[program.result] = order[-1] + 1
        self.of: dict[int, int] = {}
        self.counts = [0, 0, 0, _FIRST_FREE_SLOT]
        free: list[int] = []
        for n in order:
            operation = nodes[n].operation
            if operation == "scatter_add":
                self._release(n, nodes, ranks, last_use, free)
                continue
            if operation in ("score", "gradient"):
                self.of[n] = _SCORE_SLOT if operation == "score" else _GRADIENT_SLOT
                continue
            if ranks[n] != Rank.TILE:
                self.of[n] = self.counts[ranks[n]]
                self.counts[ranks[n]] += 1
                continue
            self._release(n, nodes, ranks, last_use, free)
            if free:
                self.of[n] = free.pop()
            else:
                self.of[n] = self.counts[Rank.TILE]
                self.counts[Rank.TILE] += 1

    def _release(self, n: int, nodes: list[Node], ranks: list[Rank], last_use: dict[int, int], free: list[int]) -> None:
        """Frees the slots that node ``n`` reads for the last time. The node's result may use the same slot."""
        for a in set(nodes[n].arguments):
            if last_use[a] == n and ranks[a] == Rank.TILE and self.of[a] >= _FIRST_FREE_SLOT:
                free.append(self.of[a])

    def operand(self, n: int, ranks: list[Rank]) -> int:
        return self.of[n] * 4 + ranks[n]


def _word_of(immediate: float | int) -> int:
    return struct.unpack("<q", struct.pack("<d", immediate))[0] if isinstance(immediate, float) else immediate
