"""Checks of a caller's tensors that come before csrc/ops/checks, which sees dense tensors only."""

from collections.abc import Mapping

import torch
from torch import Tensor


def check_is_dense(name: str, value: object) -> None:
    """Raises a TypeError for everything that the dispatcher would refuse without naming the argument."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}; allowed: a torch.Tensor")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
        raise TypeError(f"{name}: got a {kind} tensor; allowed: dense tensors")


def check_are_dense(tensors: Mapping[str, Tensor | None], required: tuple[str, ...]) -> None:
    """Checks each tensor that was given, and that the required ones were."""
    for name, t in tensors.items():
        if t is not None or name in required:
            check_is_dense(name, t)


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
    """Returns whether the mask is a torch.nn.attention.bias.CausalBias. That module's import takes seconds."""
    return type(mask).__name__ == "CausalBias"
