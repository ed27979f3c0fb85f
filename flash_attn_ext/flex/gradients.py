"""Differentiates programs in reverse mode."""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from .operations import FLOAT
from .program import WITHOUT_GRADIENT, Builder, CustomDerivative, Program


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
