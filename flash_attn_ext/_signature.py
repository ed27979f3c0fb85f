"""Functions with a short Python signature, which callers see with the arguments of another function.

Python looks up the default of each keyword argument in each call. For 26 arguments this takes a sixth of the smallest
call. So ``flash_attn`` and ``flash_attn_with_kvcache`` have ``**options`` in place of their keyword arguments.
"""

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")


def with_arguments_of(full: Callable[_P, _R]) -> Callable[[Callable[..., _R]], Callable[_P, _R]]:
    """Gives a function the signature of ``full``, for :func:`inspect.signature`, documentation and type checkers."""
    signature = inspect.signature(full)
    named = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]

    def set_signature(function: Any) -> Callable[_P, _R]:
        function.__signature__ = signature.replace(parameters=named)
        full.__qualname__ = function.__qualname__  # Python's errors about arguments name it
        return function

    return set_signature
