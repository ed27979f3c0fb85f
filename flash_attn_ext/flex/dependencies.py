"""Makes a key of all values that a function reads in addition to its arguments.

Only functions with a new key are traced.
"""

import builtins
import dis
import functools
import inspect
import itertools
import types
from collections.abc import Container
from typing import Any, NamedTuple

import torch
from torch import Tensor

_DEEPEST = 8
_LONGEST = 64  # the largest size of a list, tuple or dict
_CONSTANTS = (int, float, str, bytes, bool, complex, type(None), torch.dtype, torch.device)
_TRUSTED = frozenset({"torch", "math", "operator", "functools", "builtins", "numpy"})
_DYNAMIC = frozenset({"getattr", "vars", "globals", "locals", "eval", "exec", "__import__"})  # may read any name
# Special methods that no expression of a function calls on a value.
_UNUSED_METHODS = frozenset({
    "__init__", "__new__", "__post_init__", "__init_subclass__", "__del__", "__setattr__", "__delattr__", "__repr__",
    "__str__", "__hash__", "__eq__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__",
})  # fmt: skip
_METHODS_OF_APPLY = frozenset({"forward", "backward", "setup_context", "vjp"})  # of a torch.autograd.Function
_MOST_CODES = 1024


class Dependencies:
    """The key and the tensors of some functions. ``is_complete`` is False if a value cannot be compared."""

    def __init__(self, *functions: Any) -> None:
        # Attributes that the functions may read. A helper may read an attribute of an object that an earlier value
        # holds. So the values are collected again until no new name is found.
        start = tuple(type(f) if (code := _code_of(f)) is None else code for f in functions)
        self._names: set[str] = set(_names_found.get(start, ()))
        while True:
            known = len(self._names)
            self.parts: list[Any] = []  # hashable
            self.tensors: list[Tensor] = []
            self.is_complete = True
            self._numbers: dict[int, int] = {}  # id of a tensor -> its number
            self._visited: dict[int, int] = {}  # id of another object -> its number
            for function in functions:
                self.parts.append("function")
                self.add(function)
            if len(self._names) == known:
                break
        if len(_names_found) >= _MOST_CODES:
            _names_found.clear()
        _names_found[start] = frozenset(self._names)

    def number_of(self, tensor: Tensor) -> int | None:
        return self._numbers.get(id(tensor))

    def add(self, value: Any, depth: int = 0, *, is_called: bool = True) -> None:
        """Adds a value, and everything that a function reads from it. ``is_called``: the value may be called."""
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
            self._add_object(value, depth + 1, is_called=is_called)

    def _add_tensor(self, tensor: Tensor) -> None:
        number = self._numbers.setdefault(id(tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        self.parts.append((number, tensor.dtype, tensor.shape, tensor.device, tensor.requires_grad))

    def _add_object(self, value: Any, depth: int, *, is_called: bool) -> None:
        if isinstance(value, types.FunctionType):
            self._add_function(value, depth)
        elif isinstance(value, types.MethodType):
            self._add_function(value.__func__, depth)
            self.add(value.__self__, depth, is_called=False)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self.add(part, depth)
        elif isinstance(value, (tuple, list)) and len(value) <= _LONGEST:
            self.parts.append((type(value), len(value)))
            for item in value:
                self.add(item, depth)
        elif isinstance(value, dict) and len(value) <= _LONGEST:
            self.parts.append((type(value), len(value)))
            for key, item in value.items():
                self.add(key, depth)
                self.add(item, depth)
        elif isinstance(value, type):
            self.parts.append(("object", _Identity(value)))
            if issubclass(value, torch.autograd.Function):
                self._names |= _METHODS_OF_APPLY
            self._add_class(value, depth, unused=_UNUSED_METHODS - {"__init__", "__new__", "__post_init__"})
        elif _is_function_of_module(value) or _is_trusted(getattr(value, "__name__", None), value):
            self.parts.append(("object", _Identity(value)))
        else:
            self._add_attributes(value, depth, is_called=is_called)

    def _add_function(self, function: types.FunctionType, depth: int) -> None:
        if function.__closure__ is None and _is_trusted(function.__module__, function):
            self.parts.append(("object", _Identity(function)))
            return
        code = function.__code__
        self.parts.append(code)
        names = _names_of(code)
        self._names |= names.attributes
        if names.is_dynamic:
            self.is_complete = False
        for value in (function.__defaults__, function.__kwdefaults__):
            self.add(value, depth)
        for cell in function.__closure__ or ():
            try:
                self.add(cell.cell_contents, depth)
            except ValueError:  # an empty cell
                self.parts.append("empty")
        for name in names.globals_read:
            if name in function.__globals__:
                self.parts.append(name)
                self.add(function.__globals__[name], depth)
            elif not hasattr(builtins, name):
                self.is_complete = False

    def _add_attributes(self, value: Any, depth: int, *, is_called: bool) -> None:
        held = getattr(value, "__dict__", None)
        if held is None:
            self.is_complete = False
            return
        cls = type(value)
        self.parts.append(cls)
        if isinstance(value, torch.nn.Module):
            if is_called:
                self._names |= _names_of(cls.forward.__code__).attributes
                self.add(cls.forward, depth)
                self.is_complete &= not (value._forward_hooks or value._forward_pre_hooks)
        elif is_called and callable(value):  # functools.lru_cache and other objects have no Python code
            self.is_complete &= isinstance(inspect.getattr_static(cls, "__call__", None), types.FunctionType)
        held = {
            **held,
            **(held.get("_parameters") or {}),
            **(held.get("_buffers") or {}),
            **(held.get("_modules") or {}),
        }
        for name in sorted(self._names & held.keys()):
            self.parts.append(name)
            self.add(held[name], depth)
        if not isinstance(value, types.ModuleType):
            self._add_class(cls, depth, unused=_UNUSED_METHODS, hidden=held)

    def _add_class(self, cls: type, depth: int, *, unused: frozenset[str], hidden: Container[str] = ()) -> None:
        """Adds the attributes of a class that functions may read. ``hidden``: names of the instance's attributes."""
        for base in cls.__mro__:
            if base.__module__.partition(".")[0] in _TRUSTED:
                continue
            for name, attribute in base.__dict__.items():
                if name.startswith("__") and name.endswith("__"):
                    if isinstance(attribute, types.FunctionType) and name not in unused:
                        self.add(attribute, depth)
                elif name in self._names and name not in hidden:
                    self.parts.append(name)
                    self._add_descriptor(attribute, depth)

    def _add_descriptor(self, attribute: Any, depth: int) -> None:
        if isinstance(attribute, (staticmethod, classmethod)):
            self.add(attribute.__func__, depth)
        elif isinstance(attribute, property):
            self.add(attribute.fget, depth)
        elif isinstance(attribute, types.FunctionType) or not hasattr(attribute, "__get__"):
            self.add(attribute, depth)
        else:
            self.is_complete = False


_names_found: dict[tuple, frozenset[str]] = {}  # attributes that Dependencies found, by codes or types of the functions


class QuickKey:
    """A key of functions and methods that read only tensors, numbers and modules.

    It takes a tenth of the time of Dependencies. The parts of the key and the tensors have a fixed order.
    """

    def __init__(self, *functions: Any) -> None:
        self.parts: list[Any] = []  # hashable
        self.tensors: list[Tensor] = []
        self.is_complete = all(map(self._add_function, functions))

    def _add_function(self, function: Any) -> bool:
        if function is None:
            self.parts.append(None)
            return True
        owner = None
        if type(function) is types.MethodType:
            function, owner = function.__func__, function.__self__
        if type(function) is not types.FunctionType or function.__defaults__ or function.__kwdefaults__:
            return False
        code = function.__code__
        quick_code = _quick_codes.get(id(code))
        if quick_code is None:
            if len(_quick_codes) >= _MOST_CODES:
                _quick_codes.clear()
            names = _names_of(code)
            globals_read = None if names.is_dynamic else names.globals_read
            attributes = _attributes_of_first_argument(code)
            quick_code = _quick_codes[id(code)] = _QuickCode(code, globals_read, attributes, next(_counter))
        if quick_code.globals_read is None:
            return False
        self.parts.append(quick_code.number)
        if owner is not None and not self._add_attributes(owner, quick_code.attributes):
            return False
        if function.__closure__ is not None:
            for cell in function.__closure__:
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

    def _add_attributes(self, owner: Any, names: tuple[str, ...] | None) -> bool:
        """Adds the values of an instance's attributes. Attributes of its class are not quick."""
        cls = type(owner)
        held = getattr(owner, "__dict__", None)
        if names is None or held is None or cls.__getattribute__ is not object.__getattribute__:
            return False
        get = getattr(cls, "__getattr__", None)
        if get is not None and get is not torch.nn.Module.__getattr__:
            return False
        for name in names:
            if hasattr(cls, name):
                return False
            if name in held:
                value = held[name]
            elif get is None:
                return False
            elif name in held["_parameters"]:
                value = held["_parameters"][name]
            elif name in held["_buffers"]:
                value = held["_buffers"][name]
            else:
                return False
            if not self._add(value):
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
        elif value is torch or (kind is types.ModuleType and _is_trusted(value.__name__, value)):
            self.parts.append(value)
        elif _is_function_of_module(value):
            self.parts += (kind, value)
        else:
            return False
        return True


_QUICK_CONSTANTS = frozenset({int, bool, str, type(None)})


class _QuickCode(NamedTuple):
    code: types.CodeType  # kept alive, so that no other code object gets the same id
    globals_read: tuple[str, ...] | None  # None: the code may read other names
    attributes: tuple[str, ...] | None  # of the first argument, for methods. None: the code uses it in other ways
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


def _is_function_of_module(value: object) -> bool:
    """Whether a builtin function is no method of an object, as ``table.get`` is."""
    return type(value) is types.BuiltinFunctionType and isinstance(value.__self__, (types.ModuleType, type, type(None)))


def _code_of(function: object) -> types.CodeType | None:
    return getattr(getattr(function, "__func__", function), "__code__", None)


def _attributes_of_first_argument(code: types.CodeType) -> tuple[str, ...] | None:
    """Returns the attributes that a method reads from ``self``. None: it may do anything else with ``self``."""
    if code.co_argcount == 0:
        return None
    name = code.co_varnames[0]
    if name in code.co_cellvars:  # an inner function reads it
        return None
    attributes: dict[str, None] = {}
    instructions = list(dis.get_instructions(code))
    for instruction, following in itertools.pairwise(instructions):
        value = instruction.argval
        if value != name and not (isinstance(value, tuple) and name in value):
            continue
        is_read = instruction.opname.startswith("LOAD_FAST") and value == name
        if not is_read or following.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            return None
        attributes[following.argval] = None
    return tuple(attributes)


class _Names(NamedTuple):
    """The names that a function reads, also in its inner functions."""

    globals_read: tuple[str, ...]
    attributes: frozenset[str]  # also strings, which may be names of attributes
    is_dynamic: bool  # the function may read other names


@functools.lru_cache(maxsize=1024)
def _names_of(code: types.CodeType) -> _Names:
    globals_read: dict[str, None] = {}
    attributes: set[str] = set()
    is_dynamic = False
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            globals_read[instruction.argval] = None
            is_dynamic |= instruction.argval in _DYNAMIC
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(instruction.argval)
        elif instruction.opname == "IMPORT_NAME":
            is_dynamic |= instruction.argval.partition(".")[0] not in _TRUSTED
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names_of(constant)
            globals_read.update(dict.fromkeys(inner.globals_read))
            attributes |= inner.attributes
            is_dynamic |= inner.is_dynamic
        elif isinstance(constant, str):
            attributes.add(constant)
    return _Names(tuple(globals_read), frozenset(attributes), is_dynamic)
