"""activate() for torch's flex_attention: on CPU, flash_attn_ext runs it, also with inputs that require gradients.

Three parts of torch.nn.attention.flex_attention are replaced:

- the function itself, for eager calls: torch's function would first trace the call with Dynamo;
- the check that refuses gradients on CPU;
- the kernel of the higher-order operator (higher_order.py), for compiled calls, and for callers that imported torch's
  function before.
"""

import functools
import importlib.abc
import importlib.util
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import attention

_MODULE = "torch.nn.attention.flex_attention"
_OPERATOR = "flex_attention"

counts: Counter[tuple[str, str]] = Counter()  # {(operator, reason): calls}; the reason "": flash_attn_ext ran the call
_replaced: dict[str, Any] = {}  # attributes of torch's module
_is_wanted = False


def activate() -> None:
    global _is_wanted
    _is_wanted = True
    if _MODULE in sys.modules:
        _replace(sys.modules[_MODULE])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())  # not imported here, because its import takes seconds


def deactivate() -> None:
    global _is_wanted
    _is_wanted = False
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _AfterImport)]
    if not _replaced:
        return
    module = sys.modules[_MODULE]
    for name, value in _replaced.items():
        setattr(module, name, value)
    _replaced.clear()
    from .higher_order import leave_calls_to_torch  # imports torch's module, which takes seconds

    leave_calls_to_torch()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Replaces torch's functions when their module is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                if _is_wanted:
                    _replace(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _replace(module: ModuleType) -> None:
    if _replaced:
        return
    names = ("flex_attention", "_validate_device")
    try:
        from .higher_order import is_installed, take_calls_of_torch
    except (ImportError, AttributeError):  # from torch's operator, or from an operator that it calls
        is_installed, take_calls_of_torch = False, None
    if take_calls_of_torch is None or not is_installed or not all(hasattr(module, name) for name in names):
        counts[_OPERATOR, "this version of torch has another flex_attention"] += 1
        return

    _replaced.update({name: getattr(module, name) for name in names})
    module.flex_attention = _eager_or(_replaced["flex_attention"])  # type: ignore[attr-defined]
    module._validate_device = _any_gradients_or(_replaced["_validate_device"])  # type: ignore[attr-defined]
    take_calls_of_torch(_why_not, _count)


def _count(reason: str) -> None:
    counts[_OPERATOR, reason] += 1


def _why_not(kernel_options: dict[str, Any]) -> str | None:
    return "return_aux asks for max_scores" if kernel_options.get("OUTPUT_MAX") else None


def _any_gradients_or(validate: Any) -> Any:
    @functools.wraps(validate)
    def _validate_device(query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.device.type != "cpu":
            validate(query, key, value)

    return _validate_device


def _eager_or(of_torch: Any) -> Any:
    """Returns torch's flex_attention with another path for eager calls on CPU."""

    @functools.wraps(of_torch)
    def flex_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() or query.device.type != "cpu":
            return of_torch(query, key, value, *args, **kwargs)
        aux = kwargs.get("return_aux")
        if aux is not None and aux.max_scores:
            _count("return_aux asks for max_scores")
            return of_torch(query, key, value, *args, **kwargs)
        try:
            result = attention.flex_attention(query, key, value, *args, **kwargs)
        except NotImplementedError as error:
            _count(str(error).partition(";")[0])
            return of_torch(query, key, value, *args, **kwargs)
        _count("")
        return result

    return flex_attention
