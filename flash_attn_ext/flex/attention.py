"""flex_attention: attention with functions of the user, forward and backward, without a compiler."""

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from .. import _functorch, _ops
from .block_masks import check_block_mask, states_of
from .functions import functions_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

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

    On CPU it computes tile by tile and never stores the score matrix, in the forward and in the backward. The functions
    are traced once; no compiler runs.

    Args:
        query: (B, H, S_q, D). float32, float64, bfloat16 or float16; D from 1 to 1024.
        key: (B, H_kv, S_k, D), dtype and device of ``query``.
        value: (B, H_kv, S_k, D_v), likewise.
        score_mod: ``score_mod(score, b, h, q_idx, kv_idx)`` returns the new score. All arguments are 0-d tensors. The
            function may read other tensors by index, which then receive gradients. docs/flex.md lists the operators.
        block_mask: a BlockMask of torch (``create_block_mask``). Hidden blocks are not computed. Its ``mask_mod`` is
            computed in partial blocks only.
        scale: factor of ``query @ key^T``; ``1 / sqrt(D)`` if None.
        enable_gqa: allow H_kv < H: query head h uses key head ``h // (H // H_kv)``.
        return_lse: also return the logsumexp of the new scores, natural logarithm.
        kernel_options: options of torch's kernels. They change no result, and are ignored here.
        return_aux: ``AuxRequest(lse=True)`` of torch: return (out, AuxOutput).

    Returns:
        out (B, H, S_q, D_v); or (out, lse); or (out, AuxOutput). A row to which everything is masked has out 0, lse
        -inf and gradients 0.

    Raises:
        NotImplementedError: an operator that no program has (the message names its line); a device other
            than the CPU; forward mode; a second derivative.
        TypeError, ValueError: an argument that is not allowed.

    Source: Dong et al., "Flex Attention", 2024 (arXiv 2412.05496).
    """
    if return_aux is not None:
        if return_lse:
            raise ValueError("return_lse: got True with return_aux; allowed: one of them")
        if return_aux.max_scores:
            raise NotImplementedError("return_aux: got max_scores=True; allowed: lse")
    key, value = _expanded(query, key, value, enable_gqa)
    tensors = {"query": query, "key": key, "value": value}
    out, lse = run_with_functions(
        tensors, {"scale": None if scale is None else float(scale)}, score_mod=score_mod, block_mask=block_mask
    )
    if return_aux is not None:
        flex = sys.modules[type(return_aux).__module__]  # torch's, whose import takes seconds
        return out, flex.AuxOutput(lse=lse if return_aux.lse else None)
    return (out, lse) if return_lse else out


def run_with_functions(
    tensors: Mapping[str, Tensor | None],
    options: Mapping[str, object],
    *,
    score_mod: ScoreMod | None = None,
    mask_mod: MaskMod | None = None,
    block_mask: "BlockMask | None" = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the operator attention_flex. ``tensors`` and ``options`` have the names of attention's schema."""
    run = _run_outside_of_graphs if torch.compiler.is_compiling() else _run
    return run(tensors, options, score_mod, mask_mod, block_mask)


def _run(
    tensors: Mapping[str, Tensor | None],
    options: Mapping[str, object],
    score_mod: ScoreMod | None,
    mask_mod: MaskMod | None,
    block_mask: "BlockMask | None",
) -> tuple[Tensor, Tensor]:
    if _functorch.active():
        raise NotImplementedError("score_mod, mask_mod, block_mask: got a call under torch.func; allowed: autograd")
    query, key = tensors["query"], tensors["key"]
    assert query is not None
    assert key is not None
    if query.device.type not in ("cpu", "meta"):
        raise NotImplementedError(
            f"score_mod, mask_mod, block_mask: got tensors on {query.device}; allowed: CPU. torch's own flex_attention "
            "runs there"
        )
    states, sizes = None, {}
    if block_mask is not None:
        if mask_mod is not None:
            raise ValueError("mask_mod: got one with block_mask; allowed: one of them")
        check_block_mask(block_mask, query, key)
        mask_mod, states = _mask_function(block_mask), states_of(block_mask)
        sizes = dict(zip(("block_size_q", "block_size_k"), block_mask.BLOCK_SIZE, strict=True))
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    functions = functions_of(score_mod, mask_mod, query.device, dtype)
    return _ops.attention_flex(**tensors, **functions._asdict(), block_states=states, **options, **sizes)


# torch.compiler.disable would import torch._dynamo, which takes a second, with this module.
_run_outside_of_graphs = _disable_dynamo(_run)


def _expanded(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor]:
    """key and value with query's batch, checked as torch's flex_attention does."""
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
    """A BlockMask's function; None where it shows everything."""
    return None if getattr(block_mask.mask_mod, "__name__", "") == "noop_mask" else block_mask.mask_mod
