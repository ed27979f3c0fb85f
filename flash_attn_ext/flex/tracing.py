"""Runs a function of scores once on symbols, and records it as a program.

A symbol is a 0-d tensor without data. lowering.py translates each torch operator with a symbol to nodes of a Builder.
Operators on other tensors run as usual. So a function may compute captured tensors from other tensors, with gradients.
"""

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from .operations import BOOL, FLOAT, INT
from .program import Builder, Program

_INDEX_TYPE = torch.int32  # of b, h, q_idx, kv_idx, as in a function that torch compiles
# Operators and functions that convert elements to Python's numbers.
READERS = {torch.ops.aten._local_scalar_dense, torch.ops.aten.is_nonzero, torch.ops.aten.equal}
_READING_FUNCTIONS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
_PRE_DISPATCH = torch._C.DispatchKeySet(torch._C.DispatchKey.PreDispatch)


def type_of_dtype(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return BOOL
    return FLOAT if dtype.is_floating_point else INT


class Symbol(Tensor):
    """A value of a program. With a ``prefix``: a captured tensor, indexed by the values of its first indices."""

    tracer: "Tracer"
    value: int
    base: Tensor | None
    prefix: tuple[int, ...]

    @staticmethod
    def __new__(
        cls,
        tracer: "Tracer",
        dtype: torch.dtype,
        value: int = -1,
        base: Tensor | None = None,
        prefix: tuple[int, ...] = (),
    ) -> "Symbol":
        shape = () if base is None else base.shape[len(prefix) :]
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=tracer.device)  # type: ignore[attr-defined]
        self.tracer, self.value, self.base, self.prefix = tracer, value, base, prefix
        return self

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Symbol({self.dtype})"

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        symbols = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, Symbol)]
        return symbols[0].tracer.lower(func, tuple(args), kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


class Captured(NamedTuple):
    """A captured tensor, and the start of its elements in the program's row of floats or ints."""

    tensor: Tensor
    offset: int


class _Constant(NamedTuple):
    """A tensor of the function, and a copy with elements. Tensors that torch.compile traces have no elements."""

    tensor: Tensor
    with_elements: Tensor


class Tracer:
    """The state of one trace."""

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype, lower: Callable[..., Any]) -> None:
        self._lower = lower
        self.name, self.device, self.dtype = name, device, dtype
        self.builder = Builder()
        self.floats: list[Captured] = []
        self.ints: list[Captured] = []
        self._sizes = {FLOAT: 0, INT: 0}
        self._captured: dict[int, Captured] = {}
        self.constants: dict[int, _Constant] = {}  # tensors that the function made from numbers, by id
        self.derived: dict[int, Tensor] = {}  # tensors that the function made from captured tensors
        self.reads_elements = False
        self.is_in_custom_function = False  # in the forward or backward of a user's autograd.Function

    def symbol(self, value: int, dtype: torch.dtype) -> Symbol:
        """Returns a new symbol. Under torch.no_grad() it has no derivative, as in torch."""
        if not torch.is_grad_enabled() and not self.is_in_custom_function:
            value = self.builder.without_gradient(value)
        return Symbol(self, dtype, value)

    @contextlib.contextmanager
    def in_custom_function(self) -> Iterator[None]:
        outside, self.is_in_custom_function = self.is_in_custom_function, True
        try:
            yield
        finally:
            self.is_in_custom_function = outside

    def intercepts(self) -> contextlib.ExitStack:
        """Returns a context in which operators on symbols are translated."""
        stack = contextlib.ExitStack()
        stack.enter_context(_Calls(self))
        stack.enter_context(_Watch(self))
        return stack

    def refuse(self, what: str, allowed: str = "the operators in docs/flex.md") -> NotImplementedError:
        return NotImplementedError(f"{self.name}: {what}{self.line_of_user()}; allowed: {allowed}")

    @staticmethod
    def line_of_user() -> str:
        """Returns the current line of the user's function, as text."""
        here = __file__.rpartition("/")[0]
        for frame in reversed(traceback.extract_stack()):
            if not frame.filename.startswith((here, torch.__path__[0])) and "torch/" not in frame.filename:
                return f" (line {frame.lineno} of {frame.filename}: {frame.line})"
        return ""

    def capture(self, tensor: Tensor) -> Captured:
        """Adds the elements of ``tensor`` to a row of captured elements."""
        captured = self._captured.get(id(tensor))
        if captured is None:
            if tensor.is_complex() or tensor.is_quantized or tensor.layout != torch.strided:
                raise self.refuse(f"got a captured tensor of {tensor.dtype}, {tensor.layout}", "dense real tensors")
            if tensor.device != self.device:
                raise self.refuse(f"got a captured tensor on {tensor.device}", f"tensors on {self.device}")
            kind = FLOAT if tensor.is_floating_point() else INT
            captured = self._captured[id(tensor)] = Captured(tensor, self._sizes[kind])
            # int(): the program contains the size as a number, so torch.compile specialises on it
            self._sizes[kind] += int(tensor.numel())
            (self.floats if kind == FLOAT else self.ints).append(captured)
        return captured

    def gather(self, tensor: Tensor, indices: Sequence[int]) -> int:
        """Returns ``tensor[indices]``. Negative indices count from the end.

        An index outside of the range is clamped.
        """
        b = self.builder
        if tensor.numel() == 0:
            raise self.refuse(f"reads a captured tensor of shape {list(tensor.shape)}", "tensors with elements")
        captured = self.capture(tensor)
        position = b.constant(0)
        for size, index in zip(map(int, tensor.shape), indices, strict=True):
            inside = b.emit("wrap_index", index, immediates=(size,))
            position = b.emit("int_add", b.emit("int_multiply", position, b.constant(size)), inside)
        immediates = (captured.offset, int(tensor.numel()))
        if tensor.is_floating_point():
            return b.emit("gather", position, immediates=immediates)
        value = b.emit("gather_int", position, immediates=immediates)
        return b.as_type(value, BOOL) if tensor.dtype == torch.bool else value

    def index(self, base: Tensor, indices: object) -> Symbol:
        """Returns ``base[indices]``. ``base`` is a captured tensor or a symbol with a prefix."""
        items = list(indices) if isinstance(indices, (tuple, list)) else [indices]
        source, numbers = (base.base, list(base.prefix)) if isinstance(base, Symbol) else (base, [])
        if source is None:
            raise self.refuse("an index of a single number")
        for item in items:
            kind = type_of_dtype(item.dtype) if isinstance(item, Tensor) else type(item)
            is_symbol = isinstance(item, Tensor) and item.dim() == 0 and kind == INT
            if not is_symbol and (not isinstance(item, (int, torch.SymInt)) or isinstance(item, bool)):
                shown = f"{list(item.shape)} of {item.dtype}" if isinstance(item, Tensor) else repr(item)
                raise self.refuse(f"an index {shown} into a captured tensor", "ints and 0-d int tensors")
            numbers.append(self.value(item, INT))
        if len(numbers) > source.dim():
            raise IndexError(f"{self.name}: {len(numbers)} indices for a captured tensor of {source.dim()} dimensions")
        if len(numbers) < source.dim():
            return Symbol(self, source.dtype, -1, source, tuple(numbers))
        return self.symbol(self.gather(source, numbers), source.dtype)

    def value(self, x: object, kind: str) -> int:
        """Returns the node of an operand: a symbol, a number, or a captured or constant 0-d tensor."""
        b = self.builder
        if isinstance(x, Symbol):
            if x.base is not None:
                raise self.refuse(f"arithmetic on a captured tensor of shape {list(x.shape)}", "single elements of it")
            return b.as_type(x.value, kind)
        if isinstance(x, Tensor):
            if x.numel() != 1:
                raise self.refuse(f"arithmetic on a captured tensor of shape {list(x.shape)}", "single elements of it")
            if id(x) in self.constants:
                with _disable_current_modes():
                    number = self.constants[id(x)].with_elements.item()
                return b.as_type(b.constant(number), kind)
            zeros = [b.constant(0)] * x.dim()
            return b.as_type(self.gather(x, zeros), kind)
        if isinstance(x, (bool, int, float)):
            return b.as_type(b.constant(x), kind)
        if isinstance(x, (torch.SymInt, torch.SymFloat)):
            return b.as_type(self.gather(self._tensor_of(x), ()), kind)
        raise self.refuse(f"an operand of type {type(x).__name__}", "tensors and numbers")

    def _tensor_of(self, x: torch.SymInt | torch.SymFloat) -> Tensor:
        """Converts a symbolic number of torch.compile to a captured tensor."""
        dtype = torch.int64 if isinstance(x, torch.SymInt) else self.dtype
        tensor = torch.full((), x, dtype=dtype, device=self.device)  # type: ignore[call-overload]
        self.constants.pop(id(tensor), None)
        self.derived[id(tensor)] = tensor
        return tensor

    def lower(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._lower(self, func, args, kwargs)


class _Calls(TorchFunctionMode):
    """Intercepts calls of torch's functions.

    For ``captured[symbol]`` torch would read the symbol's value, which does not exist. Under torch.func, torch would
    wrap symbols. So a call with a symbol runs outside of the transforms, and wrapped tensors are replaced by symbols.
    """

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            base, indices = args
            items = indices if isinstance(indices, tuple) else (indices,)
            if isinstance(base, Symbol) or any(isinstance(i, Symbol) for i in items):
                return self.tracer.index(base, indices)
        kwargs = kwargs or {}
        if func in _READING_FUNCTIONS and id(args[0]) not in self.tracer.constants:
            self.tracer.reads_elements = True
        is_transformed = torch._C._are_functorch_transforms_active()
        is_exported = torch._ops._len_torch_dispatch_stack_pre_dispatch() > 0
        if not is_transformed and not is_exported:
            return func(*args, **kwargs)
        if not any(isinstance(a, Symbol) for a in tree_flatten((args, kwargs))[0]):
            return func(*args, **kwargs)
        if not is_transformed:
            # torch.export's mode for this key refuses symbols
            with torch._C._ExcludeDispatchKeyGuard(_PRE_DISPATCH):
                return func(*args, **kwargs)
        args, kwargs = tree_map(self._unwrapped, (args, kwargs))
        with temporarily_clear_interpreter_stack():
            return func(*args, **kwargs)

    def _unwrapped(self, x: object) -> object:
        if not isinstance(x, Tensor) or isinstance(x, Symbol) or x.numel() != 1:
            return x
        return self.tracer.symbol(self.tracer.value(x, type_of_dtype(x.dtype)), x.dtype)


class _Watch(TorchDispatchMode):
    """Records whether the function made a tensor from numbers or from captured tensors."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [a for a in tree_flatten((args, kwargs))[0] if isinstance(a, Tensor)]
        if any(isinstance(t, Symbol) for t in tensors):
            return self.tracer.lower(func, tuple(args), kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self.tracer.refuse(f"the random operator {func}", "operators that give the same result at each call")
        constants = self.tracer.constants
        if func.overloadpacket in READERS and not all(id(t) in constants for t in tensors):
            self.tracer.reads_elements = True
        result = func(*args, **(kwargs or {}))
        made = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]
        if not all(id(t) in constants or (t.dim() == 0 and func is _LIFT) for t in tensors):
            self.tracer.derived.update((id(t), t) for t in made)
            return result
        real = made
        if torch._C._len_torch_dispatch_stack() > 0:
            args, kwargs = tree_map(self._with_elements, (args, kwargs or {}))
            with _disable_current_modes():
                real = [t for t in tree_flatten(func(*args, **kwargs))[0] if isinstance(t, Tensor)]
        constants.update((id(t), _Constant(t, r)) for t, r in zip(made, real, strict=True))
        return result

    def _with_elements(self, x: object) -> object:
        constant = self.tracer.constants.get(id(x)) if isinstance(x, Tensor) else None
        return x if constant is None else constant.with_elements


_LIFT = torch.ops.aten.lift_fresh.default


class Traced(NamedTuple):
    """A function as a program, and the tensors that it captures, in the order of their rows.

    A backward that is traced later (custom_functions.py) may capture more tensors.
    """

    program: Program
    tracer: Tracer

    @property
    def floats(self) -> tuple[Tensor, ...]:
        return tuple(c.tensor for c in self.tracer.floats)

    @property
    def ints(self) -> tuple[Tensor, ...]:
        return tuple(c.tensor for c in self.tracer.ints)

    @property
    def reads_elements(self) -> bool:
        """Whether the program contains elements of captured tensors as numbers."""
        return self.tracer.reads_elements


def trace(
    function: Callable[..., Any],
    name: str,
    lower: Callable[..., Any],
    *,
    with_score: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> Traced:
    """Returns ``function(score, b, h, q_idx, kv_idx)`` as a program. A mask has no score, and its result is a bool.

    ``lower`` is lowering.lower. ``dtype`` is the dtype of the score, which is the accumulators' dtype.
    """
    if not callable(function):
        raise TypeError(f"{name}: got {type(function).__name__}; allowed: a function")
    tracer = Tracer(name, device, dtype, lower)
    b = tracer.builder
    # The program is kept for later calls, so it has a derivative also if this call is under torch.no_grad().
    with contextlib.nullcontext() if torch.is_grad_enabled() else torch.enable_grad():
        arguments = [tracer.symbol(b.emit(index), _INDEX_TYPE) for index in ("batch", "head", "query", "key")]
        if with_score:
            arguments.insert(0, tracer.symbol(b.emit("score"), dtype))
        with tracer.intercepts():
            result = function(*arguments)
    if isinstance(result, (bool, int, float)) or (isinstance(result, Tensor) and not isinstance(result, Symbol)):
        value = tracer.value(result, FLOAT if with_score else BOOL)
    elif isinstance(result, Symbol):
        if not with_score and result.dtype != torch.bool:
            raise TypeError(f"{name}: got a result of {result.dtype}; allowed: torch.bool")
        value = tracer.value(result, FLOAT if with_score else BOOL)
    else:
        raise TypeError(f"{name}: got a result of type {type(result).__name__}; allowed: a 0-d tensor")
    return Traced(Program(b, value), tracer)
