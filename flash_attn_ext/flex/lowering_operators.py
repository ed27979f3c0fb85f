"""Translates arithmetic, comparisons and other operators of torch. lowering_activations.py has the activations."""

import math

import torch

from .lowering import Formula, Lowering, takes
from .operations import BOOL, FLOAT, INT

# Operators of one argument that are equal in torch and in a program.
_UNARY = {
    "neg": "negate", "sqrt": "square_root", "rsqrt": "reciprocal_root", "exp": "exp", "exp2": "exp2",
    "expm1": "expm1", "log": "log", "log2": "log2", "log1p": "log1p", "tanh": "tanh", "sigmoid": "sigmoid",
    "erf": "erf", "sin": "sine", "cos": "cosine",
}  # fmt: skip
_ROUNDINGS = {"floor": "floor", "ceil": "ceil", "trunc": "truncate"}


def _unary(operation: str, *, keeps_int: bool) -> Lowering:
    def lowering(f: Formula, x: object) -> int:
        if f.kind != FLOAT:
            if keeps_int:
                return f.of(x, f.kind)
            return f.int_subtract(0, x)
        return getattr(f, operation)(x)

    return lowering


for _name, _operation in _UNARY.items():
    takes(_name)(_unary(_operation, keeps_int=False))
for _name, _operation in _ROUNDINGS.items():
    takes(_name)(_unary(_operation, keeps_int=True))


@takes("round")
def _round(f: Formula, x: object, *, decimals: int = 0) -> int:
    if f.kind != FLOAT:
        return f.of(x, f.kind)
    factor = 10.0**decimals
    return f.divide(f.round(f.multiply(x, factor)), factor)


@takes("add")
def _add(f: Formula, a: object, b: object, *, alpha: float = 1) -> int:
    if f.kind == BOOL:
        return f.bool_or(a, b)
    if f.kind == INT:
        return f.int_add(a, f.int_multiply(b, alpha))
    return f.add(a, f.multiply(b, alpha))


@takes("sub")
def _sub(f: Formula, a: object, b: object, *, alpha: float = 1) -> int:
    if f.kind == INT:
        return f.int_subtract(a, f.int_multiply(b, alpha))
    return f.subtract(a, f.multiply(b, alpha))


@takes("rsub")
def _rsub(f: Formula, a: object, b: object, alpha: float = 1) -> int:
    return _sub(f, b, a, alpha=alpha)


@takes("mul")
def _mul(f: Formula, a: object, b: object) -> int:
    if f.kind == BOOL:
        return f.bool_and(a, b)
    return f.int_multiply(a, b) if f.kind == INT else f.multiply(a, b)


@takes("div", "true_divide")
def _div(f: Formula, a: object, b: object, *, rounding_mode: str | None = None) -> int:
    if f.kind == INT:
        return f.int_divide(a, b) if rounding_mode == "floor" else f.int_truncated_divide(a, b)
    quotient = f.divide(a, b)
    return (
        quotient if rounding_mode is None else f.floor(quotient) if rounding_mode == "floor" else f.truncate(quotient)
    )


@takes("floor_divide")
def _floor_divide(f: Formula, a: object, b: object) -> int:
    return _div(f, a, b, rounding_mode="floor")


@takes("remainder")
def _remainder(f: Formula, a: object, b: object) -> int:
    if f.kind == INT:
        return f.int_modulo(a, b)
    return f.subtract(a, f.multiply(f.floor(f.divide(a, b)), b))


@takes("fmod")
def _fmod(f: Formula, a: object, b: object) -> int:
    if f.kind == INT:
        return f.int_subtract(a, f.int_multiply(f.int_truncated_divide(a, b), b))
    return f.subtract(a, f.multiply(f.truncate(f.divide(a, b)), b))


@takes("reciprocal")
def _reciprocal(f: Formula, x: object) -> int:
    return f.divide(1.0, x)


@takes("abs")
def _abs(f: Formula, x: object) -> int:
    return f.int_absolute(x) if f.kind == INT else f.absolute(x)


@takes("sign", "sgn")
def _sign(f: Formula, x: object) -> int:
    if f.kind == FLOAT:
        return f.sign(x)
    positive, negative = f.bool_to_int(f.int_less(0, x)), f.bool_to_int(f.int_less(x, 0))
    return f.int_subtract(positive, negative)


@takes("minimum", "fmin")
def _minimum(f: Formula, a: object, b: object) -> int:
    return f.minimum(a, b) if f.kind == FLOAT else f.int_minimum(a, b)


@takes("maximum", "fmax")
def _maximum(f: Formula, a: object, b: object) -> int:
    return f.maximum(a, b) if f.kind == FLOAT else f.int_maximum(a, b)


@takes("clamp", "clip")
def _clamp(f: Formula, x: object, min: object = None, max: object = None) -> int:
    """Composed of selections, so that the gradient at a limit is 1, as in torch."""
    y: object = x
    for limit, is_lower in ((min, True), (max, False)):
        if limit is None:
            continue
        if f.kind == FLOAT:
            y = f.of(y, FLOAT)
            outside = f.less(y, limit) if is_lower else f.less(limit, y)
            y = f.select(outside, limit, y)
        else:
            y = f.int_maximum(y, limit) if is_lower else f.int_minimum(y, limit)
    return f.of(y, f.kind)


@takes("clamp_min")
def _clamp_min(f: Formula, x: object, min: object) -> int:
    return _clamp(f, x, min)


@takes("clamp_max")
def _clamp_max(f: Formula, x: object, max: object) -> int:
    return _clamp(f, x, None, max)


@takes("pow")
def _pow(f: Formula, a: object, b: object) -> int:
    if isinstance(b, (int, float)) and not isinstance(b, bool) and b in (1, 2, 3):
        multiply = f.multiply if f.kind == FLOAT else f.int_multiply
        y = f.of(a, f.kind)
        x = y
        for _ in range(int(b) - 1):
            y = multiply(y, x)
        return y
    if f.kind != FLOAT:
        return _int_power(f, a, b)
    if isinstance(b, float) and b == 0.5:
        return f.square_root(a)
    return f.power(a, b)


def _int_power(f: Formula, a: object, b: object) -> int:
    if isinstance(a, int) and a == 2:
        return f.shift_left(1, b)  # 0 for negative exponents, as in torch
    if not isinstance(b, int) or b < 0:
        raise f.tracer.refuse("a power of integers", "exponents that are numbers from 0 on, base 2, or floats")
    power, square = f.of(1, INT), f.of(a, INT)
    while b:
        if b & 1:
            power = f.int_multiply(power, square)
        b >>= 1
        square = f.int_multiply(square, square) if b else square
    return power


@takes("log10")
def _log10(f: Formula, x: object) -> int:
    return f.multiply(f.log(x), 1 / math.log(10))


@takes("tan")
def _tan(f: Formula, x: object) -> int:
    return f.divide(f.sine(x), f.cosine(x))


@takes("square")
def _square(f: Formula, x: object) -> int:
    return f.multiply(x, x) if f.kind == FLOAT else f.int_multiply(x, x)


# Comparisons: (operation, swapped, negated). With a NaN every comparison except ne is false.
_COMPARISONS = {
    "lt": ("less", False, False), "gt": ("less", True, False), "le": ("less_equal", False, False),
    "ge": ("less_equal", True, False), "eq": ("equal", False, False), "ne": ("equal", False, True),
}  # fmt: skip


def _comparison(operation: str, swapped: bool, negated: bool) -> Lowering:
    def lowering(f: Formula, a: object, b: object) -> int:
        name = operation if f.promoted(a, b) == FLOAT else f"int_{operation}"
        result = getattr(f, name)(*((b, a) if swapped else (a, b)))
        return f.bool_not(result) if negated else result

    return lowering


for _name, _how in _COMPARISONS.items():
    takes(_name)(_comparison(*_how))
for _word in ("and", "or", "xor"):

    def _bits(f: Formula, a: object, b: object, *, _word: str = _word) -> int:
        return getattr(f, f"bool_{_word}" if f.kind == BOOL else f"int_{_word}")(a, b)

    takes(f"logical_{_word}", f"bitwise_{_word}", f"__{_word}__")(_bits)


@takes("logical_not", "bitwise_not")
def _not(f: Formula, x: object) -> int:
    return f.bool_not(x) if f.kind == BOOL else f.int_not(x)


@takes("bitwise_left_shift", "__lshift__")
def _shift_left(f: Formula, a: object, b: object) -> int:
    return f.shift_left(a, b)


@takes("bitwise_right_shift", "__rshift__")
def _shift_right(f: Formula, a: object, b: object) -> int:
    return f.shift_right(a, b)


@takes("isnan")
def _isnan(f: Formula, x: object) -> int:
    x = f.of(x, FLOAT)
    return f.bool_not(f.equal(x, x))


@takes("isinf")
def _isinf(f: Formula, x: object) -> int:
    return f.equal(f.absolute(x), math.inf)


@takes("where")
def _where(f: Formula, condition: object, a: object, b: object) -> int:
    c = f.of(condition, BOOL)
    if f.kind == FLOAT:
        return f.select(c, a, b)
    if f.kind == INT:
        return f.int_select(c, a, b)
    return f.bool_or(f.bool_and(c, a), f.bool_and(f.bool_not(c), b))


@takes("masked_fill")
def _masked_fill(f: Formula, x: object, mask: object, value: object) -> int:
    return _where(f, mask, value, x)


@takes("nan_to_num")
def _nan_to_num(
    f: Formula, x: object, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> int:
    if f.kind != FLOAT:
        return f.of(x, f.kind)
    limits = torch.finfo(f.dtype)
    y = f.of(x, FLOAT)
    finite = f.select(f.equal(y, math.inf), limits.max if posinf is None else float(posinf), y)
    finite = f.select(f.equal(y, -math.inf), limits.min if neginf is None else float(neginf), finite)
    return f.select(f.equal(y, y), finite, 0.0 if nan is None else float(nan))


@takes("lerp")
def _lerp(f: Formula, start: object, end: object, weight: object) -> int:
    """With torch's two formulas, so that the result is ``end`` for weight 1."""
    difference = f.subtract(end, start)
    small = f.add(start, f.multiply(weight, difference))
    large = f.subtract(end, f.multiply(difference, f.subtract(1.0, weight)))
    if isinstance(weight, (int, float)):
        return small if abs(weight) < 0.5 else large
    return f.select(f.less(f.absolute(weight), 0.5), small, large)


@takes("addcmul")
def _addcmul(f: Formula, x: object, a: object, b: object, *, value: float = 1) -> int:
    multiply, add = (f.multiply, f.add) if f.kind == FLOAT else (f.int_multiply, f.int_add)
    return add(x, multiply(multiply(a, b), value))


@takes("addcdiv")
def _addcdiv(f: Formula, x: object, a: object, b: object, *, value: float = 1) -> int:
    return f.add(x, f.multiply(f.divide(a, b), value))


@takes("_to_copy", "to")
def _to_copy(f: Formula, x: object, *_: object, **__: object) -> int:
    return f.of(x, f.kind)


@takes("full_like", "new_full")
def _full_like(f: Formula, _: object, *rest: object, **__: object) -> int:
    return f.of(rest[-1], f.kind)


@takes("zeros_like", "new_zeros")
def _zeros_like(f: Formula, *_: object, **__: object) -> int:
    return f.of(0, f.kind)


@takes("ones_like", "new_ones")
def _ones_like(f: Formula, *_: object, **__: object) -> int:
    return f.of(1, f.kind)
