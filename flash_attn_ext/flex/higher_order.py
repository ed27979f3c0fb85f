"""Runs torch's higher-order operator flex_attention by the operator attention_flex.

Dynamo traces a call of the higher-order operator together with its functions, which become graphs. This file replaces
its kernel for autograd: the kernel converts the graphs to a program, and AOTAutograd sees only attention_flex. So a
compiled graph has one operator and no graph break. This module imports torch's flex_attention, which takes seconds. So
the package does not import this module.
"""

import functools
import math
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.attention.flex_attention as torch_flex
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as _operator
from torch._subclasses import FakeTensor

from .. import _ops
from .._call import FUNCTIONS, Call
from . import attention
from .block_masks import states_of_lists, with_row_before
from .functions import Compiled, compile_functions, is_traced, rows_of_tensors

_OURS = "FLASH_ATTN_EXT"  # a key of kernel_options: marks a call of this package, and holds its other arguments
_REQUIRED = ("query", "key", "value")
_OTHER_TORCH = "a call outside of torch.compile, as this version of torch has another flex_attention"
_LN_2 = math.log(2.0)
_torch_module = sys.modules["torch._higher_order_ops.flex_attention"]

_why_not: Callable[[dict[str, Any]], str | None] | None = None  # not None: torch's own calls run here, too
_count: Callable[[str], None] | None = None
_graphs: "weakref.WeakKeyDictionary[Any, dict]" = weakref.WeakKeyDictionary()


def run_in_graph(
    call: Call, score_mod: Callable[..., Tensor] | None, mask_mod: Callable[..., Tensor] | None, block_mask: Any
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of a call that Dynamo traces. ``call`` is for the operator without functions.

    The higher-order operator has no arguments for the other tensors and options, so kernel_options holds them.
    """
    if not is_installed:
        raise NotImplementedError(f"{', '.join(FUNCTIONS)}: got one under torch.compile; allowed: {_OTHER_TORCH}")
    query, key, value = (call.tensors[name] for name in _REQUIRED)
    assert query is not None
    assert key is not None
    if block_mask is None:
        block_mask = torch_flex._create_empty_block_mask(query, key)
    blocks = block_mask.as_tuple()
    if mask_mod is not None:
        blocks = (*blocks[:-1], mask_mod)
    ours = {
        "function": call.operator.function,
        "tensors": {name: t for name, t in call.tensors.items() if t is not None and name not in _REQUIRED},
        "options": {name: option for name, option in call.options.items() if name != "scale"},
    }
    scale = call.options.get("scale")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    score_mod = torch_flex._identity if score_mod is None else score_mod
    results = _operator(query, key, value, score_mod, blocks, scale, {_OURS: ours})
    return results[0], results[1]


def take_calls_of_torch(why_not: Callable[[dict[str, Any]], str | None], count: Callable[[str], None]) -> None:
    """Makes torch's own calls on CPU run here. ``why_not(kernel_options)`` returns the reason why torch must run a
    call, or None.

    Each call calls ``count(reason)``, with "" if the call runs here.
    """
    global _why_not, _count
    _why_not, _count = why_not, count


def leave_calls_to_torch() -> None:
    global _why_not, _count
    _why_not = _count = None


def _instead_of(kernel: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """Wraps ``kernel`` of torch's operator: it is called only for calls that torch must run."""

    @functools.wraps(kernel)
    def run(
        query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any], block_mask: tuple, scale: float,
        kernel_options: dict[str, Any], score_buffers: tuple = (), mask_buffers: tuple = (),
    ) -> tuple[Tensor, ...]:  # fmt: skip
        functions = (score_mod, block_mask, score_buffers, mask_buffers)
        tensors = {"query": query, "key": key, "value": value}
        if ours := kernel_options.get(_OURS):
            operator = attention.OPERATORS[ours["function"]]
            return _attend(Call(operator, tensors | ours["tensors"], ours["options"] | {"scale": scale}), *functions)

        def run_torch() -> tuple[Tensor, ...]:
            return kernel(
                query, key, value, score_mod, block_mask, scale, kernel_options, score_buffers, mask_buffers
            )  # fmt: skip

        why_not, count = _why_not, _count
        if why_not is None or count is None or query.device.type != "cpu":
            return run_torch()
        if reason := why_not(kernel_options):
            count(reason)
            return run_torch()
        if key.shape[0] == 1 and query.shape[0] != 1:
            tensors |= {
                "key": key.expand(query.shape[0], -1, -1, -1),
                "value": value.expand(query.shape[0], -1, -1, -1),
            }
        try:
            out, lse = _attend(Call(_ops.FLEX, tensors, {"scale": float(scale)}), *functions)
        except NotImplementedError as error:
            count(str(error).partition(";")[0])
            return run_torch()
        if not isinstance(query, FakeTensor):
            count("")
        return _in_layout_of(query, out), lse / _LN_2, torch.zeros_like(lse, requires_grad=False)

    return run


def _attend(
    call: Call, score_mod: Callable[..., Any], block_mask: tuple, score_buffers: tuple, mask_buffers: tuple
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of an operator with functions. ``call`` has no functions yet."""
    query = call.tensors["query"]
    assert query is not None
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    mask_mod, block_k, block_q = block_mask[-1], block_mask[-2], block_mask[-3]
    compiled, floats, ints = _compiled(score_mod, mask_mod, score_buffers, mask_buffers, query.device, dtype)
    states = None
    if not attention.is_one_block(block_q, block_k):
        states = states_of_lists(block_mask[:2], (block_q, block_k), block_mask[2:4], block_mask[4:6])
        if call.operator is _ops.CACHE_FLEX:
            states = with_row_before(states)
    programs, captured, captured_ints = rows_of_tensors(compiled, floats, ints, dtype)
    functions = {
        "programs": programs, "captured": captured, "captured_ints": captured_ints, "block_states": states,
    }  # fmt: skip
    tensors = dict.fromkeys(call.operator.tensor_names) | call.tensors | functions
    options = call.options | {"block_size_q": block_q, "block_size_k": block_k}
    return attention.run_operator(Call(call.operator, tensors, options))


def _in_layout_of(query: Tensor, out: Tensor) -> Tensor:
    """Returns ``out`` with the strides that Dynamo expects from torch's operator."""
    if not hasattr(_torch_module, "_permute_strides"):
        return out
    wanted = _torch_module._permute_strides(torch.empty_like(out, device="meta"), query.stride()).stride()
    if out.stride() == wanted:
        return out
    return torch.empty_strided(out.shape, wanted, dtype=out.dtype, device=out.device).copy_(out)


def _compiled(
    score_mod: Any, mask_mod: Any, score_buffers: tuple, mask_buffers: tuple, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, tuple, tuple]:
    """Returns (programs, captured floats, captured ints). The graph caches them if it derives no buffer."""
    buffers = (*score_buffers, *mask_buffers)
    is_real = all(type(t) in (Tensor, torch.nn.Parameter) for t in buffers if isinstance(t, Tensor))
    # A trace gets its own constant: Dynamo's fake tensors first, and then the tensors of the call.
    is_kept = is_real and not is_traced() and isinstance(score_mod, torch.nn.Module)
    kept, key = {}, None
    if is_kept:  # a program contains the sizes of tensors, and numbers
        read = ((t.requires_grad, t.dtype, t.shape) if isinstance(t, Tensor) else (type(t), t) for t in buffers)
        kept, key = _graphs.setdefault(score_mod, {}), (mask_mod, dtype, *read)
    entry = kept.get(key)
    if entry is None:
        traced: Compiled = compile_functions(
            lambda *arguments: score_mod(*arguments, *score_buffers),
            lambda *arguments: mask_mod(*arguments, *mask_buffers),
            device,
            dtype,
        )
        numbers = {id(t): n for n, t in enumerate(buffers)}
        positions = [[numbers.get(id(t)) for t in row] for row in (traced.floats, traced.ints)]
        if not is_kept or traced.is_for_one_call or any(n is None for row in positions for n in row):
            return traced.programs, traced.floats, traced.ints
        entry = kept[key] = (traced.programs, positions)
    programs, positions = entry
    return programs, *(tuple(buffers[n] for n in row) for row in positions)


def _install() -> bool:
    """Replaces the kernels of torch's operator. Returns False if this version of torch has other kernels."""
    # Inference mode has no Autograd key.
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeExplicitAutograd)
    kernels = getattr(_operator, "py_kernels", {})
    if not all(key in kernels for key in keys):
        return False
    kernels.update({key: _instead_of(kernels[key]) for key in keys})
    _operator._dispatch_cache.clear()
    return True


is_installed = _install()
