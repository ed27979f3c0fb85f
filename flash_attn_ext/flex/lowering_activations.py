"""Translates torch's activation functions to nodes of a program. lowering_operators.py has the other operators."""

import math

from .lowering import Formula, takes
from .operations import INT


@takes("relu")
def _relu(f: Formula, x: object) -> int:
    if f.kind == INT:
        return f.int_maximum(x, 0)
    return f.select(f.less_equal(x, 0.0), 0.0, x)


@takes("leaky_relu")
def _leaky_relu(f: Formula, x: object, negative_slope: float = 0.01) -> int:
    return f.select(f.less_equal(x, 0.0), f.multiply(x, float(negative_slope)), x)


@takes("silu")
def _silu(f: Formula, x: object) -> int:
    return f.multiply(x, f.sigmoid(x))


@takes("gelu")
def _gelu(f: Formula, x: object, *, approximate: str = "none") -> int:
    if approximate == "tanh":
        cubic = f.multiply(f.multiply(f.multiply(x, x), x), 0.044715)
        inner = f.tanh(f.multiply(f.add(x, cubic), math.sqrt(2 / math.pi)))
    else:
        inner = f.erf(f.multiply(x, math.sqrt(0.5)))
    return f.multiply(f.multiply(x, 0.5), f.add(inner, 1.0))


@takes("softplus")
def _softplus(f: Formula, x: object, beta: float = 1, threshold: float = 20) -> int:
    scaled = f.multiply(x, float(beta))
    # Where exp overflows, it is not selected, and its gradient must not be NaN.
    small = f.select(f.less(float(threshold), scaled), 0.0, scaled)
    return f.select(f.less(float(threshold), scaled), x, f.divide(f.log1p(f.exp(small)), float(beta)))


@takes("hardtanh", "relu6")
def _hardtanh(f: Formula, x: object, min_val: float = -1.0, max_val: float = 1.0) -> int:
    """Composed of selections, so that the gradient at a limit is 0, as in torch."""
    below = f.select(f.less_equal(x, float(min_val)), float(min_val), x)
    return f.select(f.less_equal(float(max_val), x), float(max_val), below)


@takes("elu")
def _elu(f: Formula, x: object, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> int:
    is_positive = f.less(0.0, x)
    # Where exp overflows, it is not selected, and its gradient must not be NaN.
    negative = f.select(is_positive, 0.0, x)
    curve = f.multiply(f.expm1(f.multiply(negative, float(input_scale))), float(alpha) * float(scale))
    return f.select(is_positive, f.multiply(x, float(scale)), curve)


@takes("celu")
def _celu(f: Formula, x: object, alpha: float = 1.0) -> int:
    return _elu(f, x, alpha, 1.0, 1.0 / alpha)


@takes("selu")
def _selu(f: Formula, x: object) -> int:
    return _elu(f, x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


@takes("log_sigmoid", "log_sigmoid_forward")
def _log_sigmoid(f: Formula, x: object) -> int:
    """log_sigmoid_forward also returns a buffer, which only torch's backward reads. lowering.py returns both."""
    return f.subtract(f.minimum(x, 0.0), f.log1p(f.exp(f.negate(f.absolute(x)))))
