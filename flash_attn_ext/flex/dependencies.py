"""Makes a key of all values that a function reads in addition to its arguments.

Only functions with a new key are traced.
"""

import builtins
import dis
import functools
import itertools
import types
from typing import Any, NamedTuple

import torch
from torch import Tensor

_DEEPEST = 8
_LONGEST = 64  # the largest size of a list, tuple or dict
_CONSTANTS = (int, float, str, bytes, bool, complex, type(None), torch.dtype, torch.device)
_TRUSTED = frozenset({"torch", "math", "operator", "functools", "builtins", "numpy"})


class Dependencies:
    """Collects the key and the tensors of some functions. ``is_complete`` is False if a value cannot be compared."""

    def __init__(self) -> None:
        self.parts: list[Any] = []  # hashable
        self.tensors: list[Tensor] = []
        self.is_complete = True
        self._numbers: dict[int, int] = {}  # id of a tensor -> its number
        self._visited: dict[int, int] = {}  # id of another object -> its number

    def number_of(self, tensor: Tensor) -> int | None:
        return self._numbers.get(id(tensor))

    def add(self, value: Any, names: frozenset[str] = frozenset(), depth: int = 0) -> None:
        """Adds a value, and everything that a function reads from it.

        ``names``: the attributes in the function's code.
        """
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, _CONSTANTS):
            self.parts.append((type(value), repr(value) if isinstance(value, (float, complex)) else value))
        elif id(value) in self._visited:
            self.parts.append(("seen", self._visited[id(value)]))
        elif depth > _DEEPEST:
            self.is_complete = False
        else:
            self._visited[id(value)] = len(self._visited)
            self._add_object(value, names, depth + 1)

    def _add_tensor(self, tensor: Tensor) -> None:
        number = self._numbers.setdefault(id(tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        self.parts.append((number, tensor.dtype, tensor.shape, tensor.device, tensor.requires_grad))

    def _add_object(self, value: Any, names: frozenset[str], depth: int) -> None:
        if isinstance(value, types.FunctionType):
            self._add_function(value, depth)
        elif isinstance(value, types.MethodType):
            self._add_function(value.__func__, depth)
            self.add(value.__self__, _names_of(value.__func__.__code__)[1], depth)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self.add(part, names, depth)
        elif isinstance(value, (tuple, list)) and len(value) <= _LONGEST:
            self.parts.append((type(value), len(value)))
            for item in value:
                self.add(item, names, depth)
        elif isinstance(value, dict) and len(value) <= _LONGEST:
            self.parts.append((type(value), len(value)))
            for key, item in value.items():
                self.add(key, names, depth)
                self.add(item, names, depth)
        elif isinstance(value, (type, types.BuiltinFunctionType)) or _is_trusted(
            getattr(value, "__name__", None), value
        ):
            self.parts.append(("object", _Identity(value)))
        else:
            self._add_attributes(value, names, depth)

    def _add_function(self, function: types.FunctionType, depth: int) -> None:
        if function.__closure__ is None and _is_trusted(function.__module__, function):
            self.parts.append(("object", _Identity(function)))
            return
        code = function.__code__
        self.parts.append(code)
        globals_read, attributes = _names_of(code)
        for value in (function.__defaults__, function.__kwdefaults__):
            self.add(value, attributes, depth)
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents, attributes, depth)
            except ValueError:  # an empty cell
                self.parts.append("empty")
        for name in globals_read:
            if name in function.__globals__:
                self.parts.append(name)
                self.add(function.__globals__[name], attributes, depth)
            elif not hasattr(builtins, name):
                self.is_complete = False

    def _add_attributes(self, value: Any, names: frozenset[str], depth: int) -> None:
        held = getattr(value, "__dict__", None)
        if held is None:
            self.is_complete = False
            return
        self.parts.append(type(value))
        held = {
            **held,
            **(held.get("_parameters") or {}),
            **(held.get("_buffers") or {}),
            **(held.get("_modules") or {}),
        }
        for name in sorted(names):
            if name in held:
                self.parts.append(name)
                self.add(held[name], names, depth)
            elif isinstance(value, types.ModuleType):
                continue
            elif (attribute := _static_attribute(type(value), name)) is not None:
                if isinstance(attribute, (types.FunctionType, _CONSTANTS)):
                    self.add(attribute, names, depth)
                else:
                    self.is_complete = False  # a property may compute anything


class QuickKey:
    """A key of functions that read only tensors, numbers and modules. It takes a tenth of the time of Dependencies.

    The parts of the key and the tensors have a fixed order.
    """

    def __init__(self, *functions: Any) -> None:
        self.parts: list[Any] = []  # hashable
        self.tensors: list[Tensor] = []
        self.is_complete = all(map(self._add_function, functions))

    def _add_function(self, function: Any) -> bool:
        if function is None:
            self.parts.append(None)
            return True
        if type(function) is not types.FunctionType or function.__defaults__ or function.__kwdefaults__:
            return False
        code = function.__code__
        quick_code = _quick_codes.get(id(code))
        if quick_code is None:
            if len(_quick_codes) >= _MOST_CODES:
                _quick_codes.clear()
            quick_code = _quick_codes[id(code)] = _QuickCode(code, _names_of(code)[0], next(_counter))
        self.parts.append(quick_code.number)
        for cell in function.__closure__ or ():
            try:
                if not self._add(cell.cell_contents):
                    return False
            except ValueError:  # an empty cell
                return False
        held = function.__globals__
        for name in quick_code.globals_read:
            if name in held:
                if not self._add(held[name]):
                    return False
            elif not hasattr(builtins, name):
                return False
        return True

    def _add(self, value: Any) -> bool:
        kind = type(value)
        if kind is Tensor or kind is torch.nn.Parameter:
            self.tensors.append(value)
            self.parts += (value.dtype, value.shape, value.requires_grad)
        elif kind is float:
            self.parts += (kind, repr(value))
        elif kind in _QUICK_CONSTANTS:
            self.parts += (kind, value)
        elif kind is types.ModuleType and _is_trusted(value.__name__, value):
            self.parts.append(value)
        else:
            return False
        return True


_QUICK_CONSTANTS = frozenset({int, bool, str, type(None), types.BuiltinFunctionType})
_MOST_CODES = 1024


class _QuickCode(NamedTuple):
    code: types.CodeType  # kept alive, so that no other code object gets the same id
    globals_read: tuple[str, ...]
    number: int  # unique


_quick_codes: dict[int, _QuickCode] = {}  # by id
_counter = itertools.count()


class _Identity:
    """An object as a part of a key. It is equal only to itself, and the key keeps it alive."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value


def _is_trusted(module: str | None, value: object) -> bool:
    """Whether a module, or a function of a module, is the same in each call."""
    return isinstance(value, (types.ModuleType, types.FunctionType)) and (module or "").partition(".")[0] in _TRUSTED


def _static_attribute(cls: type, name: str) -> object:
    for base in cls.__mro__:
        if name in base.__dict__:
            return base.__dict__[name]
    return None


@functools.lru_cache(maxsize=1024)
def _names_of(code: types.CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """Returns the names of globals and attributes that a function reads, also in its inner functions."""
    globals_read: dict[str, None] = {}
    attributes: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            globals_read[instruction.argval] = None
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_globals, inner_attributes = _names_of(constant)
            globals_read.update(dict.fromkeys(inner_globals))
            attributes |= inner_attributes
    return tuple(globals_read), frozenset(attributes)
