"""Checks of a caller's tensors before csrc/ops/checks, which supports dense tensors only."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd import forward_ad


def check_is_dense(name: str, value: object) -> None:
    """Raises a TypeError that names the argument. torch's dispatcher would not name it."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}; allowed: a torch.Tensor")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
        raise TypeError(f"{name}: got a {kind} tensor; allowed: dense tensors")


def check_are_dense(tensors: Mapping[str, Tensor | None], required: tuple[str, ...]) -> None:
    """Checks all given tensors. Raises if a required tensor is missing."""
    for name, t in tensors.items():
        if t is not None or name in required:
            check_is_dense(name, t)


def check_not_differentiated(function: str, tensors: Mapping[str, Tensor | None], *, way_out: str) -> None:
    """Raises for a tensor with a gradient or a tangent, because the function has no derivative."""
    check_no_gradients(function, tensors, way_out=way_out)
    check_no_tangents(function, tensors)


def check_no_gradients(function: str, tensors: Mapping[str, Tensor | None], *, way_out: str) -> None:
    """Raises for a tensor with a gradient, because the function has no backward.

    Ignores values of other types, because later checks report them. ``way_out``: the last sentence of the error.
    """
    if not torch.is_grad_enabled():
        return
    for name, t in tensors.items():
        if isinstance(t, Tensor) and t.requires_grad:
            raise NotImplementedError(
                f"{name}: got a tensor that requires a gradient; allowed in {function}: tensors that require none, or "
                f"torch.no_grad(). {way_out}"
            )


def check_no_tangents(function: str, tensors: Mapping[str, Tensor | None]) -> None:
    """Raises for a tensor with a tangent, because the function has no forward mode."""
    for name, t in tensors.items():
        if isinstance(t, Tensor) and forward_ad.unpack_dual(t).tangent is not None:
            raise NotImplementedError(f"{name}: got a tensor with a tangent; allowed in {function}: tensors without")


def check_heads(query_heads: int, key_heads: int, enable_gqa: bool) -> None:
    """Raises a ValueError if key has another number of heads than query, unless ``enable_gqa`` allows it."""
    if not enable_gqa and query_heads != key_heads:
        raise ValueError(
            f"key: got {key_heads} heads for {query_heads} query heads; allowed: the same number, or a divisor with "
            "enable_gqa=True"
        )


def some_dtensor(*tensors: object) -> bool:
    """Returns whether one of the tensors is a DTensor. It does not import torch.distributed.tensor."""
    return any(type(t).__name__ == "DTensor" for t in tensors)


def is_causal_bias(mask: object) -> bool:
    """Returns whether the mask is a torch.nn.attention.bias.CausalBias.

    Does not import this module, which takes seconds.
    """
    return type(mask).__name__ == "CausalBias"
