"""Masks of transformers that are a band of the score matrix, and perhaps padding, without their S_q x S_k values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType

import torch
from torch import Tensor
from transformers import masking_utils

__all__ = ["Pattern", "PatternMask", "read_pattern"]


@dataclass(frozen=True)
class Pattern:
    """Query i sees key j where ``i + shift - left <= j <= i + shift + right``, ``j < keys`` and ``padding[:, j]``.

    ``left`` and ``right`` are -1 where that side has no limit; ``padding`` is bool (B, keys), or None.
    """

    keys: int
    shift: int
    left: int
    right: int
    padding: Tensor | None

    def options(self, seqlen_q: int) -> dict | None:
        """As options of ``flash_attn``, for that many queries and the first ``keys`` keys; None if it has none."""
        if self.left < 0 and self.right < 0:
            return {}
        lower_right = self.shift == self.keys - seqlen_q
        if self.right == 0 and (lower_right or self.shift == 0):
            window = None if self.left < 0 else (self.left, -1)
            return {"causal": "lower_right" if lower_right else "upper_left", "window": window}
        return {"window": (self.left, self.right)} if lower_right else None


class PatternMask(Tensor):
    """A bool mask (B, 1, S_q, S_k) that knows its pattern; its values are made when somebody asks for them.

    Models pass masks on and look at their shape, which costs nothing here. Whatever else is done with one (slicing,
    moving, combining) is done with the dense mask, so that no model can lose part of it.
    """

    pattern: Pattern
    _dense: Callable[[], Tensor]

    # What may be asked without the values.
    _FREE = frozenset(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "is_nested", "layout", "is_leaf")
    ) | {Tensor.dim, Tensor.size, Tensor.is_floating_point, Tensor.numel, Tensor.get_device}

    @staticmethod
    def make(pattern: Pattern, shape: tuple[int, ...], dense: Callable[[], Tensor], device) -> PatternMask:
        # One element, broadcast: the memory order is never looked at.
        held = torch.zeros((), dtype=torch.bool, device=device).expand(shape)
        mask = Tensor._make_subclass(PatternMask, held)
        mask.pattern = pattern
        mask._dense = dense
        return mask

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in cls._FREE:
            return super().__torch_function__(function, types, args, kwargs)
        args, kwargs = torch.utils._pytree.tree_map_only(PatternMask, cls.dense, (args, kwargs or {}))
        return function(*args, **kwargs)

    def dense(self) -> Tensor:
        """The mask with its values, as transformers would have made it."""
        return self._dense()


def read_pattern(mask_function: Callable) -> tuple[int, int] | None:
    """(left, right) of a mask function of transformers, relative to the positions; None if it is no band.

    A function is known by what it is made of, never by samples of its values. One that is not known is no band.
    """
    if mask_function is masking_utils.causal_mask_function:
        return -1, 0
    if mask_function is masking_utils.bidirectional_mask_function:
        return -1, -1
    code = getattr(mask_function, "__code__", None)
    if code is None or code not in _MADE_BY:
        return None
    maker, cells = _MADE_BY[code], _closure(mask_function)
    if maker != "all_of":
        size = cells["sliding_window"]
        if not isinstance(size, int) or size < 1:
            return None
        return (size - 1, -1) if maker == "window" else (size, size)
    parts = [read_pattern(part) for part in cells["mask_functions"]]
    if None in parts:
        return None
    return tuple(min((side for side in sides if side >= 0), default=-1) for sides in zip(*parts, strict=True))


def _closure(function: FunctionType) -> dict:
    return dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ()), strict=True))


def _makers() -> dict[CodeType, str]:
    """The code of the inner functions that transformers' makers return: every call of a maker shares it."""
    makers = {}
    for name, kind, variables, arguments in (
        ("and_masks", "all_of", {"mask_functions"}, ()),
        ("sliding_window_overlay", "window", {"sliding_window"}, (1,)),
        ("sliding_window_bidirectional_overlay", "window_both", {"sliding_window"}, (1,)),
    ):
        maker = getattr(masking_utils, name, None)
        if maker is not None:
            inner = maker(*arguments)
            if set(inner.__code__.co_freevars) == variables:  # a version that is built otherwise gives dense masks
                makers[inner.__code__] = kind
    return makers


_MADE_BY = _makers()
