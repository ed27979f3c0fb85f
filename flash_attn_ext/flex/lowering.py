"""Translates each operator of torch to nodes of a program.

lowering_operators.py and lowering_activations.py have the rules for single operators.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .operations import OPERATIONS
from .tracing import READERS, Symbol, Tracer, type_of_dtype

aten = torch.ops.aten
Lowering = Callable[..., Any]
_LOWERINGS: dict[Any, Lowering] = {}  # by overload packet; returns a node


def lower(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs one operator on symbols."""
    packet = func.overloadpacket
    if func._schema.name.endswith("_") and func._schema.is_mutable:
        return _in_place(tracer, func, args, kwargs)
    if packet in READERS:
        raise tracer.refuse(
            "a decision or a number that depends on score, b, h, q_idx or kv_idx", "torch.where in place of if"
        )
    if packet is aten.index:
        return tracer.index(args[0], args[1])
    if packet is aten.select:
        return _select(tracer, *args)
    if (packet in _SAME and torch.is_grad_enabled()) or (
        packet in {aten.detach, *_COPIES} and args[0].base is not None
    ):
        return args[0]
    if packet is aten.detach:
        return tracer.symbol(tracer.builder.without_gradient(args[0].value), args[0].dtype)
    if packet in _COPIES or packet in _SAME:  # another symbol, which may change in place
        return tracer.symbol(args[0].value, args[0].dtype)
    lowering = _LOWERINGS.get(packet)
    if lowering is None:
        raise tracer.refuse(f"the operator {func}")
    if any(isinstance(a, Tensor) and a.dim() > 0 and a.numel() != 1 for a in args):
        shape = next(list(a.shape) for a in args if isinstance(a, Tensor) and a.dim() > 0)
        raise tracer.refuse(f"{func} on a captured tensor of shape {shape}", "single elements of it")
    dtype = _result_dtype(func, args, kwargs)
    node = lowering(Formula(tracer, dtype), *args, **kwargs)
    result = tracer.symbol(tracer.builder.as_type(node, type_of_dtype(dtype)), dtype)
    return (result, result) if packet is aten.log_sigmoid_forward else result


_SAME = {aten.alias, aten.lift_fresh, aten.view, aten.reshape, aten.contiguous, aten.squeeze, aten.positive}
_COPIES = {aten.clone, aten.lift_fresh_copy}


def _in_place(tracer: Tracer, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Symbol:
    """Runs ``x += y`` as ``x = x + y``: the symbol gets another value."""
    target, name = args[0], func._schema.name.partition("::")[2]
    functional = getattr(getattr(aten, name[:-1], None), func._overloadname, None)
    if functional is None or not isinstance(target, Symbol) or target.base is not None:
        raise tracer.refuse(f"the operator {func}")
    if not torch.is_grad_enabled() and not tracer.is_in_custom_function:
        raise tracer.refuse(f"the operator {func} under torch.no_grad()", "operators that return new tensors")
    result = lower(tracer, functional, args, kwargs)
    if not torch.can_cast(result.dtype, target.dtype):
        raise tracer.refuse(f"{func} of {result.dtype} into {target.dtype}", f"a value that {target.dtype} holds")
    target.value = tracer.builder.as_type(result.value, type_of_dtype(target.dtype))
    return target


def _result_dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
    """Returns the dtype of the operator's result. Runs the operator on tensors without data to find it."""

    def without_data(x: object) -> object:
        if isinstance(x, Tensor):
            return torch.empty((), dtype=x.dtype, device="meta")
        return torch.device("meta") if isinstance(x, torch.device) else _example_of(x)

    with torch._C._DisableTorchDispatch(), torch.no_grad():
        result = func(*tree_map(without_data, args), **tree_map(without_data, kwargs))
    return (result[0] if isinstance(result, tuple) else result).dtype


def _example_of(x: object) -> object:
    """Returns a number of the same type in place of a symbolic number of torch.compile."""
    return 1 if isinstance(x, torch.SymInt) else 1.0 if isinstance(x, torch.SymFloat) else x


def _select(tracer: Tracer, base: Tensor, dim: int, index: int) -> Symbol:
    if dim != 0:
        raise tracer.refuse(f"select along dimension {dim}", "the first dimension that is left")
    return tracer.index(base, index)


class Formula:
    """Writes nodes for one operator: ``f.add(x, 1.0)``. Operands are converted to the types of the node's arguments."""

    def __init__(self, tracer: Tracer, dtype: torch.dtype) -> None:
        self.tracer, self.dtype = tracer, dtype
        self.kind = type_of_dtype(dtype)

    def of(self, x: object, kind: str) -> "_Node":
        return x if isinstance(x, _Node) else _Node(self.tracer.value(x, kind))

    def promoted(self, *operands: object) -> str:
        """Returns the type to which torch converts the operands of a comparison."""
        dtype = _promoted_dtype(operands)
        return type_of_dtype(dtype)

    def __getattr__(self, operation: str) -> Callable[..., "_Node"]:
        kinds = OPERATIONS[operation].arguments
        b = self.tracer.builder

        def emit(*operands: object) -> _Node:
            nodes = [b.as_type(self.of(x, kind), kind) for x, kind in zip(operands, kinds, strict=True)]
            return _Node(b.emit(operation, *nodes))

        return emit


class _Node(int):
    """The number of a node. A separate type, to distinguish it from a user's number."""


def _promoted_dtype(operands: tuple[object, ...]) -> torch.dtype:
    first, second = (
        torch.empty((), dtype=x.dtype, device="meta") if isinstance(x, Tensor) else _example_of(x) for x in operands
    )
    with torch._C._DisableTorchDispatch():
        return torch.result_type(first, second)  # type: ignore[call-overload]


def takes(*names: str) -> Callable[[Lowering], Lowering]:
    """Registers the translation of torch's operators with these names, if the installed torch has them."""

    def register(lowering: Lowering) -> Lowering:
        for name in names:
            packet = getattr(aten, name, None)
            if packet is not None:
                _LOWERINGS[packet] = lowering
        return lowering

    return register
