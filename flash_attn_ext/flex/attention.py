"""flex_attention: attention with functions of the user, forward and backward, without a compiler."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import _functorch, _ops, _packed
from .._call import FUNCTIONS, Call
from .._tensor_checks import check_no_tangents, some_dtensor
from . import derivatives  # noqa: F401  registers kernels
from .block_masks import WHOLE, check_block_mask, states_of
from .functions import compile_functions, functions_of, is_traced

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

_NO_OTHER_TENSORS = (None,) * (len(_ops.DENSE.tensor_names) - 3)
_DEFAULTS_AFTER_SCALE = tuple(_ops.DENSE.option_defaults.values())[1:]
_DEFAULT_BLOCK_SIZE = (_ops.FLEX.option_defaults["block_size_q"], _ops.FLEX.option_defaults["block_size_k"])
NO_TENSORS: dict[str, Tensor | None] = dict.fromkeys(_ops.DENSE.tensor_names)
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: "BlockMask | None" = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: "AuxRequest | None" = None,
) -> "Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]":
    """``softmax(score_mod(scale * query @ key^T))  @ value``: torch's flex_attention, with its arguments and meanings.

    Forward and backward compute tile by tile and never store the score matrix. The functions are traced once, and no
    compiler runs. torch's operators compute forward mode, second derivatives and torch.func, on blocks of queries.
    torch.compile traces one operator, without a graph break.

    Args:
        query: (B, H, S_q, D). float32, float64, bfloat16 or float16; D from 1 to 1024.
        key: (B, H_kv, S_k, D), dtype and device of ``query``.
        value: (B, H_kv, S_k, D_v), as ``key``.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)`` returns the new score. All arguments are 0-d tensors. The
            function may read other tensors by index; these tensors receive gradients. docs/flex.md lists the operators.
        block_mask: a BlockMask of torch (``create_block_mask``). Hidden blocks are skipped. Its ``mask_mod`` is
            evaluated in partial blocks only.
        scale: factor of ``query @ key^T``; ``1 / sqrt(D)`` if None.
        enable_gqa: allows H_kv < H. Query head h uses key head ``h // (H // H_kv)``.
        return_lse: also returns the logsumexp of the new scores, natural logarithm.
        kernel_options: options of torch's kernels, which are ignored. They do not change results.
        return_aux: torch's ``AuxRequest(lse=True)``: returns (out, AuxOutput).

    Returns:
        out (B, H, S_q, D_v); or (out, lse); or (out, AuxOutput). A row without a visible key has out 0, lse -inf
        and gradients 0.

    Raises:
        NotImplementedError: a function uses an operator that programs do not have (the message names the line). Or the
        device has no kernel for the call (docs/flex.md, "On a GPU"). Or a third derivative. TypeError, ValueError: an
        argument that is not allowed.

    Source: Dong et al., "Flex Attention", 2024 (arXiv 2412.05496).
    """
    if return_aux is not None:
        if return_lse:
            raise ValueError("return_lse: got True with return_aux; allowed: one of them")
        if return_aux.max_scores:
            raise NotImplementedError("return_aux: got max_scores=True; allowed: lse")
    result = None
    # The kernels take one key head without enable_gqa. torch's function does not, so _expanded() raises.
    if enable_gqa or _have_same_heads(query, key):
        result = run_if_ordinary(
            enable_gqa, True, (query, key, value, *_NO_OTHER_TENSORS), (scale, *_DEFAULTS_AFTER_SCALE),
            (score_mod, None, block_mask),
        )  # fmt: skip
    if result is None:
        key, value = _expanded(query, key, value, enable_gqa)
        tensors = NO_TENSORS | {"query": query, "key": key, "value": value}
        call = Call(_ops.DENSE, tensors, {"scale": None if scale is None else float(scale)})
        result = run_with_functions(call, score_mod=score_mod, block_mask=block_mask)
    out, lse = result
    if return_aux is not None:
        flex = sys.modules[type(return_aux).__module__]  # torch's module. An import statement here would take seconds
        return out, flex.AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def run_with_functions(
    call: Call,
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: "BlockMask | None" = None,
) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) with functions of the user. ``call`` is for the operator without functions."""
    if torch.compiler.is_dynamo_compiling():
        from .higher_order import run_in_graph

        check_functions(call, mask_mod, block_mask)
        return run_in_graph(call, score_mod, mask_mod, block_mask)
    return run_operator(with_functions(call, score_mod, mask_mod, block_mask))


def run_packed_with_functions(call: Call, functions: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of a call of flash_attn_varlen."""
    refuse_dtensors_with_functions(call.tensors)
    call = _packed.to_operator_form(call.with_rng_state())
    return run_with_functions(call, **functions)


def refuse_dtensors_with_functions(tensors: dict[str, Tensor | None]) -> None:
    for name, t in tensors.items():
        if some_dtensor(t):
            raise TypeError(f"{name}: got a DTensor with {' or '.join(FUNCTIONS)}; allowed: to_local(), a dense tensor")


def run_if_ordinary(
    enable_gqa: bool,
    return_lse: bool,
    tensors: tuple[Tensor | None, ...],
    options: tuple[Any, ...],
    functions: "tuple[ScoreMod | None, MaskMod | None, BlockMask | None]",
) -> Any:
    """Computes an ordinary eager call. Returns None if the call has another form, or a mode or transform must see it.

    ``tensors``, ``options``: of the operator without functions, in the order of its schema. Returns out or (out, lse).
    """
    query, key, value, attn_mask, alibi_slopes, sink, rng_state, key_mask = tensors
    if is_traced():
        return None
    for t in (query, key):
        if type(t) is not Tensor or t.dim() != 4:
            return None
    score_mod, mask_mod, block_mask = functions
    _check_functions(query, key, mask_mod, block_mask, is_packed=False)
    programs, captured, captured_ints, states, block_size_q, block_size_k = _function_arguments(
        query, score_mod, mask_mod, block_mask
    )
    return _ops.flex_if_ordinary(
        enable_gqa, return_lse,
        query, key, value, attn_mask, alibi_slopes, sink, captured, rng_state, key_mask, captured_ints, states,
        programs, *options, block_size_q, block_size_k,
    )  # fmt: skip


def run_operator(call: Call) -> tuple[Tensor, Tensor]:
    if call.operator is _ops.FLEX and not is_traced():
        options = {**call.operator.option_defaults, **call.options}
        result = _ops.flex_if_ordinary(True, True, *call.positional(), *options.values())
        if result is not None:
            return result
    return _functorch.run(call)


def is_one_block(block_size_q: int, block_size_k: int) -> bool:
    """Whether a BlockMask is torch's empty mask: one block, for all lengths."""
    return (block_size_q, block_size_k) == (WHOLE, WHOLE)


# Operator without functions -> the operator with functions.
OPERATORS = {
    _ops.DENSE.function: _ops.FLEX, _ops.VARLEN.function: _ops.VARLEN_FLEX, _ops.CACHE.function: _ops.CACHE_FLEX
}  # fmt: skip


def with_functions(
    call: Call, score_mod: ScoreMod | None, mask_mod: MaskMod | None, block_mask: "BlockMask | None"
) -> Call:
    """Returns the call of the operator with functions of the user."""
    check_functions(call, mask_mod, block_mask)
    query = call.tensors["query"]
    assert query is not None
    operator = OPERATORS[call.operator.function]
    programs, captured, captured_ints, states, block_size_q, block_size_k = _function_arguments(
        query, score_mod, mask_mod, block_mask, is_cache=operator is _ops.CACHE_FLEX
    )
    tensors = {
        **call.tensors, "programs": programs, "captured": captured, "captured_ints": captured_ints,
        "block_states": states,
    }  # fmt: skip
    options = {**call.options, "block_size_q": block_size_q, "block_size_k": block_size_k}
    return Call(operator, tensors, options, call.enable_gqa, call.return_lse)


def _function_arguments(
    query: Tensor,
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    block_mask: "BlockMask | None",
    *,
    is_cache: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, int, int]:
    """Returns programs, captured, captured_ints, block_states, block_size_q and block_size_k of the operator."""
    states, block_size = None, _DEFAULT_BLOCK_SIZE
    if block_mask is not None:
        mask_mod, block_size = _mask_function(block_mask), block_mask.BLOCK_SIZE
        states = states_of(block_mask, is_cache=is_cache)
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    return (*functions_of(score_mod, mask_mod, query.device, dtype), states, *block_size)


def check_captured_tangents(function: str, tensors: dict[str, Tensor | None], functions: dict[str, Any]) -> None:
    """Raises for a captured tensor with a tangent. The error names the function of the user that captures the tensor.

    ``tensors``: of the operator with ``functions``.
    """
    query, captured = tensors["query"], tensors["captured"]
    if captured is None or forward_ad.unpack_dual(captured).tangent is None:
        return
    assert query is not None
    score_mod, mask_mod, block_mask = (functions[name] for name in FUNCTIONS)
    mask_name = "mask_mod" if block_mask is None else "block_mask"
    if block_mask is not None:
        mask_mod = _mask_function(block_mask)
    compiled = compile_functions(score_mod, mask_mod, query.device, captured.dtype)
    for name, traced in (("score_mod", compiled.score), (mask_name, compiled.mask)):
        for t in () if traced is None else traced.floats:
            check_no_tangents(function, {name: t})
    check_no_tangents(function, {"score_mod, mask_mod": captured})


def check_functions(call: Call, mask_mod: MaskMod | None, block_mask: "BlockMask | None") -> None:
    query, key = call.tensors["query"], call.tensors["key"]
    assert query is not None
    assert key is not None
    is_packed = call.operator.function != _ops.DENSE.function
    _check_functions(query, key, mask_mod, block_mask, is_packed=is_packed)


def _check_functions(
    query: Tensor, key: Tensor, mask_mod: MaskMod | None, block_mask: "BlockMask | None", *, is_packed: bool
) -> None:
    """Checks the device, and the block mask against the call's tensors."""
    if query.device.type not in ("cpu", "cuda", "meta"):
        raise NotImplementedError(
            f"score_mod, mask_mod, block_mask: got tensors on {query.device}; allowed: CPU and CUDA"
        )
    if block_mask is not None:
        if mask_mod is not None:
            raise ValueError("mask_mod: got one with block_mask; allowed: one of them")
        check_block_mask(block_mask, query, None if is_packed else (query.shape[-2], key.shape[-2]))


def _have_same_heads(query: Tensor, key: Tensor) -> bool:
    return type(query) is Tensor and type(key) is Tensor and query.shape[1:2] == key.shape[1:2]


def _expanded(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor]:
    """Returns key and value, expanded to query's batch. Checks them as torch's flex_attention does."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: got {type(t).__name__}; allowed: a torch.Tensor")
        if t.layout is not torch.strided or t.is_nested:
            raise TypeError(f"{name}: got a nested or sparse tensor; allowed: dense tensors")
        if t.dim() != 4:
            raise ValueError(f"{name}: got {t.dim()} dimensions; allowed: 4")
    if not enable_gqa and key.shape[1] != query.shape[1]:
        raise ValueError(
            f"key, value: got {key.shape[1]} heads for {query.shape[1]} query heads; allowed: the same number, or a "
            "divisor with enable_gqa=True"
        )
    if key.shape[0] == 1 and query.shape[0] != 1:
        key, value = (t.expand(query.shape[0], -1, -1, -1) for t in (key, value))
    return key, value


def _mask_function(block_mask: "BlockMask") -> MaskMod | None:
    """Returns the mask function of a BlockMask, or None if the function shows everything."""
    return None if getattr(block_mask.mask_mod, "__name__", "") == "noop_mask" else block_mask.mask_mod
