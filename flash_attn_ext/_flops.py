"""What torch.utils.flop_counter.FlopCounterMode counts for the operators: as torch counts its own attention.

All pairs of queries and keys count, also those that a mask, a window or the diagonal hides; the backward is five
products, whichever gradients are asked for.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from . import _ops


def _shapes(op: torch._ops.OpOverload, args: tuple, kwargs: dict) -> tuple[int, int, int]:
    """B * H * S_q * S_k, D and D_v of a call; D_v 0 without a value."""
    given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    (B, H, S_q, D), S_k, D_v = given["query"], given["key"][2], given.get("value", [0])[-1]
    return B * H * S_q * S_k, D, D_v


@register_flop_formula(_ops.attention.overloadpacket)
def attention_flops(*args, out_shape=None, **kwargs) -> int:
    """Q K^T and P V, a product and a sum each."""
    pairs, D, D_v = _shapes(_ops.attention, args, kwargs)
    return 2 * pairs * (D + D_v)


@register_flop_formula(_ops.attention_backward.overloadpacket)
def attention_backward_flops(*args, out_shape=None, **kwargs) -> int:
    """Q K^T again, dO V^T, P^T dO, dS K and dS^T Q."""
    pairs, D, D_v = _shapes(_ops.attention_backward, args, kwargs)
    return 2 * pairs * (3 * D + 2 * D_v)


@register_flop_formula(_ops.attention_jvp.overloadpacket)
def attention_jvp_flops(*args, out_shape=None, **kwargs) -> int:
    """The forward's two, tQ K^T, Q tK^T, (P e) V and P tV, whichever tangents there are."""
    pairs, D, D_v = _shapes(_ops.attention_jvp, args, kwargs)
    return 2 * pairs * (3 * D + 3 * D_v)


@register_flop_formula(_ops.attention_double_backward.overloadpacket)
def attention_double_backward_flops(*args, out_shape=None, **kwargs) -> int:
    """Ten: docs/derivative_formulas.md."""
    pairs, D, D_v = _shapes(_ops.attention_double_backward, args, kwargs)
    return 2 * pairs * (7 * D + 3 * D_v)


@register_flop_formula(_ops.attention_weights.overloadpacket)
def attention_weights_flops(*args, out_shape=None, **kwargs) -> int:
    """Q K^T."""
    pairs, D, _ = _shapes(_ops.attention_weights, args, kwargs)
    return 2 * pairs * D


@register_flop_formula(_ops.attention_weights_backward.overloadpacket)
def attention_weights_backward_flops(*args, out_shape=None, **kwargs) -> int:
    """Q K^T again, dS K and dS^T Q."""
    pairs, D, _ = _shapes(_ops.attention_weights_backward, args, kwargs)
    return 2 * pairs * 3 * D
