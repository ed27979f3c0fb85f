"""A function of scores as a program: values in static single assignment, and their encoding as a list of ints.

A program is data. The kernels interpret it on tiles of scores (csrc/cpu/kernels/program-inl.h).
"""

import math
import struct
from collections.abc import Callable, Iterable, Sequence
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


class Gradients(NamedTuple):
    """Two programs: the gradient of the score, and the gradients of captured elements."""

    score: Program
    captured: Program | None


def gradients_of(program: Program, wants_element: Callable[[int], bool]) -> Gradients:
    """Differentiates ``program`` in reverse mode.

    ``wants_element(base)`` returns True if the captured elements from position ``base`` on need a gradient.
    """
    assert program.result is not None
    b, nodes = program.builder, program.builder.nodes
    order = [n for n in program.used(with_custom=True) if b.type_of(n) == FLOAT]
    needed: set[int] = set()
    for n in order:
        node = nodes[n]
        if node.operation == "maximum" and WITHOUT_GRADIENT in node.immediates[:1]:
            continue
        source = node.operation == "score" or (node.operation == "gather" and wants_element(int(node.immediates[0])))
        if source or any(a in needed for a in (b.custom[n].inputs if n in b.custom else node.arguments)):
            needed.add(n)
    adjoints: dict[int, int] = {program.result: b.emit("gradient")}
    effects: list[int] = []
    of_score = b.constant(0.0)
    for n in reversed(order):
        if n not in needed:
            continue
        if n in b.custom:
            parts = _custom_parts(b.custom[n], adjoints, needed)
        elif n in adjoints:
            parts = _parts(b, n, adjoints[n], needed)
        else:
            continue
        node = nodes[n]
        if node.operation == "score":
            of_score = adjoints[n]
        elif node.operation == "gather":
            index = node.arguments[0]
            effects.append(b.emit("scatter_add", index, adjoints[n], immediates=node.immediates))
        for a, part in parts:
            adjoints[a] = b.emit("add", adjoints[a], part) if a in adjoints else part
    captured = Program(b, None, tuple(effects)) if effects else None
    return Gradients(Program(b, of_score), captured)


def _custom_parts(custom: CustomDerivative, adjoints: dict[int, int], needed: set[int]) -> Iterable[tuple[int, int]]:
    """Takes the gradients of all outputs, so that the backward runs once."""
    gradients = [None if n is None else adjoints.pop(n, None) for n in custom.outputs]
    if all(g is None for g in gradients):
        return []
    parts = zip(custom.inputs, custom.derivative(gradients), strict=False)
    return [(n, part) for n, part in parts if n is not None and part is not None and n in needed]


def _parts(b: Builder, n: int, g: int, needed: set[int]) -> Iterable[tuple[int, int]]:
    """For gradient ``g`` of node ``n``, yields (argument, gradient of the argument) for the ``needed`` arguments."""
    node = b.nodes[n]
    rule = _DERIVATIVES.get(node.operation)
    if rule is None:
        return
    for position, derivative in enumerate(rule):
        a = node.arguments[position + (1 if node.operation == "select" else 0)]
        if a in needed:
            yield a, derivative(_Rule(b), g, n, *node.arguments)


class _Rule:
    """Writes formulas in a builder: ``r.multiply(g, 2.0)``."""

    def __init__(self, builder: Builder) -> None:
        self._builder = builder

    def __getattr__(self, operation: str) -> Callable[..., int]:
        b = self._builder

        def emit(*arguments: int | float) -> int:
            return b.emit(operation, *(b.constant(x) if isinstance(x, float) else x for x in arguments))

        return emit


def _of_extremum(less: Callable[["_Rule", int, int], int]) -> Callable[..., int]:
    """Returns the gradient of a minimum or maximum. Equal arguments share the gradient, as in torch."""

    def derivative(r: _Rule, g: int, a: int, b: int) -> int:
        shared = r.select(r.equal(a, b), r.multiply(g, 0.5), 0.0)
        return r.select(less(r, a, b), g, shared)

    return derivative


_of_minimum = _of_extremum(lambda r, a, b: r.less(a, b))
_of_maximum = _of_extremum(lambda r, a, b: r.less(b, a))


def _power_base(r: _Rule, g: int, _: int, a: int, b: int) -> int:
    slope = r.multiply(b, r.power(a, r.subtract(b, 1.0)))
    return r.select(r.equal(b, 0.0), 0.0, r.multiply(g, slope))


def _power_exponent(r: _Rule, g: int, y: int, a: int, b: int) -> int:
    return r.select(r.equal(y, 0.0), 0.0, r.multiply(g, r.multiply(y, r.log(a))))


# operation -> one derivative for each argument: derivative(rule, g, node, *arguments).
_DERIVATIVES: dict[str, tuple[Callable[..., int], ...]] = {
    "add": (lambda r, g, y, a, b: g, lambda r, g, y, a, b: g),
    "subtract": (lambda r, g, y, a, b: g, lambda r, g, y, a, b: r.negate(g)),
    "multiply": (lambda r, g, y, a, b: r.multiply(g, b), lambda r, g, y, a, b: r.multiply(g, a)),
    "divide": (
        lambda r, g, y, a, b: r.divide(g, b),
        lambda r, g, y, a, b: r.negate(r.multiply(g, r.divide(y, b))),
    ),
    "minimum": (lambda r, g, y, a, b: _of_minimum(r, g, a, b), lambda r, g, y, a, b: _of_minimum(r, g, b, a)),
    "maximum": (lambda r, g, y, a, b: _of_maximum(r, g, a, b), lambda r, g, y, a, b: _of_maximum(r, g, b, a)),
    "power": (_power_base, _power_exponent),
    "negate": (lambda r, g, y, a: r.negate(g),),
    "absolute": (lambda r, g, y, a: r.multiply(g, r.sign(a)),),
    "square_root": (lambda r, g, y, a: r.divide(r.multiply(g, 0.5), y),),
    "reciprocal_root": (lambda r, g, y, a: r.multiply(r.multiply(g, -0.5), r.multiply(y, r.multiply(y, y))),),
    "exp": (lambda r, g, y, a: r.multiply(g, y),),
    "exp2": (lambda r, g, y, a: r.multiply(g, r.multiply(y, math.log(2.0))),),
    "expm1": (lambda r, g, y, a: r.multiply(g, r.add(y, 1.0)),),
    "log": (lambda r, g, y, a: r.divide(g, a),),
    "log2": (lambda r, g, y, a: r.divide(g, r.multiply(a, math.log(2.0))),),
    "log1p": (lambda r, g, y, a: r.divide(g, r.add(a, 1.0)),),
    "tanh": (lambda r, g, y, a: r.multiply(g, r.subtract(1.0, r.multiply(y, y))),),
    "sigmoid": (lambda r, g, y, a: r.multiply(g, r.multiply(y, r.subtract(1.0, y))),),
    "erf": (lambda r, g, y, a: r.multiply(g, r.multiply(r.exp(r.negate(r.multiply(a, a))), 2.0 / math.pi**0.5)),),
    "sine": (lambda r, g, y, a: r.multiply(g, r.cosine(a)),),
    "cosine": (lambda r, g, y, a: r.negate(r.multiply(g, r.sine(a))),),
    "select": (
        lambda r, g, y, c, a, b: r.select(c, g, 0.0),
        lambda r, g, y, c, a, b: r.select(c, 0.0, g),
    ),
}
