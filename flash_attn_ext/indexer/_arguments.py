"""Checks and conversions of the indexer's arguments before an operator call."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._options import as_type, band
from .._tensor_checks import check_are_dense


def checked_tensors(
    tensors: Mapping[str, Tensor | None],
    required: tuple[str, ...],
    detached: tuple[str, ...],
) -> list[Tensor | None]:
    """Returns the tensors of an operator: checks kinds and devices, casts to autocast's dtype, and detaches.

    Casts only operands of products; weights and lse keep their precision.
    """
    check_are_dense(tensors, required)
    first = tensors[required[0]]
    assert first is not None
    for name, t in tensors.items():
        if t is not None and t.device.type not in ("cpu", "cuda", "meta"):
            raise NotImplementedError(f"{name}: got a tensor on {t.device}; allowed: cpu, cuda")
        if t is not None and t.device != first.device and (t.is_cuda or first.is_cuda):
            raise TypeError(f"{name}: got device {t.device}; allowed: {required[0]}'s device, {first.device}")
    device = "cuda" if first.is_cuda else "cpu"
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def prepared(name: str, t: Tensor | None) -> Tensor | None:
        if t is not None and name in detached:
            t = t.detach()
        if t is not None and dtype is not None and name in _CAST and t.dtype in (torch.float32, *_HALF):
            t = t.to(dtype)
        return t

    return [prepared(name, t) for name, t in tensors.items()]


_HALF = (torch.float16, torch.bfloat16)
_CAST = ("q", "k", "q_index", "k_index", "query", "key")


def checked_scale(name: str, scale: float | None, rows: Tensor) -> float:
    """Returns ``scale``, or 1 / sqrt(columns)."""
    if scale is None:
        return 1.0 / math.sqrt(max(rows.shape[-1], 1)) if rows.dim() else 1.0
    return as_type("float", name, scale)  # type: ignore[return-value]


def band_options(is_causal: bool, causal: str | None, window: Any, diagonal: int) -> dict[str, Any]:
    """Returns the operator's options that decide by position which keys a query sees."""
    is_causal = as_type("bool", "causal", is_causal)  # type: ignore[assignment]
    is_causal, lower_right, left, right = band(causal, is_causal, window, aligned=False)
    return {
        "causal": is_causal,
        "lower_right": lower_right,
        "window_left": left,
        "window_right": right,
        "diagonal": as_type("int", "diagonal", diagonal),
    }
