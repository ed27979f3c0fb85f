"""Traces calls of a user's torch.autograd.Function: its forward, and its backward as the derivative.

torch calls the forward of such a function without recording a graph, so the tracer would not see the backward. During a
trace, this module intercepts ``torch.autograd.Function.apply``. Calls without symbols run as usual.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .operations import FLOAT
from .program import CustomDerivative
from .tracing import Symbol, Tracer, type_of_dtype

_Function = torch.autograd.Function
_Base = torch.autograd.function._SingleLevelFunction  # Function.apply calls super().apply, which is not in this class
_module = torch.autograd.function
_call_of_torch = _module.custom_function_call
_lock = threading.Lock()
_traces = 0  # in progress, in all threads


@contextlib.contextmanager
def functions_are_traced() -> Iterator[None]:
    """Replaces what ``torch.autograd.Function.apply`` calls while at least one trace runs.

    ``apply`` itself stays, because users may have kept it: ``round = Rounded.apply``.
    """
    global _traces
    with _lock:
        _traces += 1
        if _traces == 1:
            _Base.apply = classmethod(_apply)  # type: ignore[assignment, method-assign]
            _module.custom_function_call = _call  # type: ignore[assignment]
    try:
        yield
    finally:
        with _lock:
            _traces -= 1
            if _traces == 0:
                del _Base.apply
                _module.custom_function_call = _call_of_torch


def _tracer_of(args: tuple[Any, ...]) -> Tracer | None:
    return next((a.tracer for a in args if isinstance(a, Symbol)), None)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    tracer = _tracer_of(args)
    return super(_Base, cls).apply(*args, **kwargs) if tracer is None else _run(tracer, cls, args, kwargs)


def _call(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a call under torch.func."""
    tracer = _tracer_of(args)
    return _call_of_torch(cls, *args, **kwargs) if tracer is None else _run(tracer, cls, args, kwargs)


class _Context:
    """``ctx`` of a user's function. It also holds the attributes that the function sets."""

    def __init__(self, tracer: Tracer, needs_input_grad: tuple[bool, ...]) -> None:
        self._tracer = tracer
        self._saved: tuple[Any, ...] = ()
        self._constant_outputs: set[int] = set()
        self._fills_missing_gradients = True
        self.needs_input_grad = needs_input_grad

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self._saved

    def save_for_backward(self, *tensors: Any) -> None:
        self._saved = tuple(_copy_of(self._tracer, t) for t in tensors)  # a later operator in place must not change it

    def save_for_forward(self, *tensors: Any) -> None:
        """Forward mode is refused (evaluate.py)."""

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self._constant_outputs = set(map(id, tensors))

    def mark_dirty(self, *tensors: Any) -> None:
        raise self._tracer.refuse("ctx.mark_dirty of an autograd.Function", "functions that return new tensors")

    def set_materialize_grads(self, value: bool) -> None:
        self._fills_missing_gradients = value


def _copy_of(tracer: Tracer, t: Any) -> Any:
    return Symbol(tracer, t.dtype, t.value) if isinstance(t, Symbol) and t.base is None else t


def _run(tracer: Tracer, cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs the forward on symbols, and keeps the backward as the derivative of its results."""
    records = torch.is_grad_enabled() and not tracer.is_in_custom_function
    inputs = tuple(_as_symbol(tracer, a) for a in args) if records else args
    is_differentiable = tuple(isinstance(a, Symbol) and a.dtype.is_floating_point for a in inputs)
    ctx = _Context(tracer, is_differentiable if records else (False,) * len(args))
    numbers = tuple(a.value if d else None for a, d in zip(inputs, is_differentiable, strict=True))
    with tracer.in_custom_function(), torch.no_grad():
        if cls.setup_context is _Function.setup_context:
            output = cls.forward(ctx, *inputs, **kwargs)
        else:
            output = cls.forward(*inputs, **kwargs)
            cls.setup_context(ctx, inputs, output)
    if not records:
        detached = [_copy_of(tracer, o) for o in _as_tuple(output)]
        if not tracer.is_in_custom_function:
            detached = [tracer.symbol(o.value, o.dtype) if isinstance(o, Symbol) else o for o in detached]
        return tuple(detached) if isinstance(output, tuple) else detached[0]
    marked = [_marked(tracer, ctx, o) for o in _as_tuple(output)]
    outputs = tuple(m.value if isinstance(m, Symbol) and m.dtype.is_floating_point else None for m in marked)
    dtypes = [m.dtype if isinstance(m, Tensor) else None for m in marked]
    where = tracer.line_of_user()

    def derivative(gradients: Sequence[int | None]) -> list[int | None]:
        return _backward(tracer, cls, ctx, gradients, dtypes, numbers, where)

    tracer.builder.add_custom(CustomDerivative(outputs, numbers, derivative))
    return tuple(marked) if isinstance(output, tuple) else marked[0]


def _as_tuple(x: Any) -> tuple:
    return x if isinstance(x, tuple) else (x,)


def _as_symbol(tracer: Tracer, x: Any) -> Any:
    """Returns a symbol in place of a captured tensor that needs a gradient."""
    if not isinstance(x, Tensor) or isinstance(x, Symbol) or not x.requires_grad:
        return x
    return Symbol(tracer, x.dtype, tracer.value(x, FLOAT))


def _marked(tracer: Tracer, ctx: _Context, output: Any) -> Any:
    """Returns the output as a new node, for which the derivatives are the function's backward."""
    if not isinstance(output, Tensor) or (isinstance(output, Symbol) and output.base is not None):
        return output
    node = tracer.value(output, type_of_dtype(output.dtype))
    if id(output) in ctx._constant_outputs:
        node = tracer.builder.without_gradient(node)
    elif output.dtype.is_floating_point:
        node = tracer.builder.with_custom_gradient(node)
    return Symbol(tracer, output.dtype, node)


def _backward(
    tracer: Tracer, cls: Any, ctx: _Context, gradients: Sequence[int | None], dtypes: Sequence[torch.dtype | None],
    inputs: Sequence[int | None], where: str,
) -> list[int | None]:  # fmt: skip
    """Runs the user's backward on symbols. Returns a node for each input, or None without a gradient."""

    def gradient(number: int | None, dtype: torch.dtype | None) -> Symbol | None:
        if number is None and not ctx._fills_missing_gradients:
            return None
        dtype = tracer.dtype if dtype is None else dtype
        node = tracer.builder.constant(0, type_of_dtype(dtype)) if number is None else number
        return Symbol(tracer, dtype, node)

    run: Callable[..., Any] = cls.backward if cls.backward is not _Function.backward else cls.vjp
    symbols = [gradient(n, dtype) for n, dtype in zip(gradients, dtypes, strict=True)]
    with tracer.intercepts(), tracer.in_custom_function(), torch.no_grad():
        results = run(ctx, *symbols)
        results = tuple(results) if isinstance(results, (tuple, list)) else (results,)
        if len(results) < len(inputs) or any(r is not None for r in results[len(inputs) :]):
            raise RuntimeError(
                f"{tracer.name}: {cls.__name__}.backward: got {len(results)} gradients for {len(inputs)} inputs{where}"
            )
        return [
            None if number is None or r is None else tracer.value(r, FLOAT)
            for number, r in zip(inputs, results, strict=False)
        ]
