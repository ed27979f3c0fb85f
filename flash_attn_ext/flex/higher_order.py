"""torch's higher-order operator flex_attention, run by the operator attention_flex.

Dynamo traces a call of the higher-order operator together with its functions, which become graphs. Its kernel for
autograd is replaced here: the graphs become a program, and AOTAutograd sees attention_flex alone. So torch.compile has
one operator and no break. This module imports torch's flex_attention, which takes seconds. The package does not import
it.
"""

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
from .._call import Call
from . import attention
from .block_masks import states_of_lists
from .functions import Compiled, compile_functions, is_traced, rows_of

_OURS = "FLASH_ATTN_EXT"  # in kernel_options: the call is one of ours, and never goes to torch's kernel
_LN_2 = math.log(2.0)
_torch_module = sys.modules["torch._higher_order_ops.flex_attention"]
_AUTOGRAD = torch._C.DispatchKey.Autograd

_why_not: Callable[[dict[str, Any]], str | None] | None = None  # set while torch's own calls run here
_count: Callable[[str], None] | None = None
_graphs: "weakref.WeakKeyDictionary[Any, dict]" = weakref.WeakKeyDictionary()


def run_in_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: Any,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of a call that Dynamo traces."""
    if block_mask is None:
        block_mask = torch_flex._create_empty_block_mask(query, key)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    results = _operator(
        query, key, value, torch_flex._identity if score_mod is None else score_mod, block_mask.as_tuple(), scale,
        {_OURS: True},
    )  # fmt: skip
    return results[0], results[1] * _LN_2


def take_calls_of_torch(why_not: Callable[[dict[str, Any]], str | None], count: Callable[[str], None]) -> None:
    """From now on torch's own calls on CPU run here, too. ``why_not(kernel_options)``: a reason to leave one to torch.

    ``count(reason)`` is called for each; "" if it runs here.
    """
    global _why_not, _count
    _why_not, _count = why_not, count


def leave_calls_to_torch() -> None:
    global _why_not, _count
    _why_not = _count = None


def _kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Any],
    block_mask: tuple,
    scale: float,
    kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple = (),
    mask_mod_other_buffers: tuple = (),
) -> tuple[Tensor, ...]:
    arguments = (
        query, key, value, score_mod, block_mask, scale, kernel_options, score_mod_other_buffers,
        mask_mod_other_buffers,
    )  # fmt: skip
    is_ours = _OURS in kernel_options
    why_not, count = _why_not, _count
    if not is_ours and (why_not is None or count is None or query.device.type != "cpu"):
        return _kernel_of_torch(*arguments)
    if not is_ours:
        assert why_not is not None
        assert count is not None
        if reason := why_not(kernel_options):
            count(reason)
            return _kernel_of_torch(*arguments)
    try:
        results = _attend(*arguments)
    except NotImplementedError as error:
        if is_ours:
            raise
        assert count is not None
        count(str(error).partition(";")[0])
        return _kernel_of_torch(*arguments)
    if count is not None and not is_ours and not isinstance(query, FakeTensor):
        count("")
    return results


def _attend(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Any], block_mask: tuple, scale: float,
    _: object, score_buffers: tuple, mask_buffers: tuple,
) -> tuple[Tensor, ...]:  # fmt: skip
    if key.shape[0] == 1 and query.shape[0] != 1:
        key, value = (t.expand(query.shape[0], -1, -1, -1) for t in (key, value))
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    mask_mod, block_k, block_q = block_mask[-1], block_mask[-2], block_mask[-3]
    compiled, floats, ints = _compiled(score_mod, mask_mod, score_buffers, mask_buffers, query.device, dtype)
    states = None
    if not attention.is_one_block(block_q, block_k):
        states = states_of_lists(block_mask[:2], (block_q, block_k), block_mask[2:4], block_mask[4:6])
    functions = rows_of(compiled, floats, ints, dtype)
    tensors = attention.NO_TENSORS | {"query": query, "key": key, "value": value} | functions._asdict()
    options = {"scale": float(scale), "block_size_q": block_q, "block_size_k": block_k}
    out, lse = attention.run_operator(Call(_ops.FLEX, tensors | {"block_states": states}, options))
    if hasattr(_torch_module, "_permute_strides"):  # the layout that Dynamo expects
        wanted = _torch_module._permute_strides(torch.empty_like(out, device="meta"), query.stride()).stride()
        if out.stride() != wanted:
            out = torch.empty_strided(out.shape, wanted, dtype=out.dtype, device=out.device).copy_(out)
    return out, lse / _LN_2, torch.zeros_like(lse, requires_grad=False)


def _compiled(
    score_mod: Any, mask_mod: Any, score_buffers: tuple, mask_buffers: tuple, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, tuple, tuple]:
    """(programs, captured floats, captured ints). Kept with the graph as long as no buffer is derived in it."""
    buffers = (*score_buffers, *mask_buffers)
    is_real = all(type(t) in (Tensor, torch.nn.Parameter) for t in buffers if isinstance(t, Tensor))
    needs = tuple(isinstance(t, Tensor) and t.requires_grad for t in buffers)
    # A trace gets its own constant: Dynamo's fake tensors first, and then the tensors of the call.
    is_kept = is_real and not is_traced() and isinstance(score_mod, torch.nn.Module)
    kept = _graphs.setdefault(score_mod, {}) if is_kept else {}
    entry = kept.get((mask_mod, dtype, needs))
    if entry is None:
        traced: Compiled = compile_functions(
            lambda *arguments: score_mod(*arguments, *score_buffers),
            lambda *arguments: mask_mod(*arguments, *mask_buffers),
            device,
            dtype,
        )
        numbers = {id(t): n for n, t in enumerate(buffers)}
        positions = [[numbers.get(id(t)) for t in row] for row in (traced.floats, traced.ints)]
        if not is_kept or any(n is None for row in positions for n in row):
            return traced.programs, traced.floats, traced.ints
        entry = kept[mask_mod, dtype, needs] = (traced.programs, positions)
    programs, positions = entry
    return programs, *(tuple(buffers[n] for n in row) for row in positions)


_kernel_of_torch = _operator.py_kernels[_AUTOGRAD]
_operator.py_kernels[_AUTOGRAD] = _kernel
_operator._dispatch_cache.clear()
