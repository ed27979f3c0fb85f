"""Recognises masks of transformers that are a band of the score matrix, with or without padding or packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

__all__ = ["Band", "Chunks", "Pattern", "PatternMask", "read_packed", "read_pattern", "sequence_offsets"]


class Chunks(NamedTuple):
    """Chunked attention: a query sees only keys in the chunk of its position (Llama 4)."""

    size: int
    starts: Tensor  # (B): the position at which the first chunk of each element of the batch begins


class Band(NamedTuple):
    """A query at position p sees the keys at the positions p - left to p + right, in its own chunk.

    -1 means no limit.
    """

    left: int
    right: int
    chunks: Chunks | None = None


@dataclass(frozen=True)
class Pattern:
    """Query i sees key j if ``i + shift - left <= j <= i + shift + right``, ``j < keys`` and ``padding[:, j]``.

    With ``chunk`` above 0, both must be in one chunk: ``(i + shift + first_key) // chunk == (j + first_key) // chunk``.
    ``left`` or ``right`` is -1 if that side has no limit. ``padding`` is bool (B, keys), or None. With ``sequences``,
    the rows of the whole batch are packed sequences: sequence n has the rows ``[sequences[n], sequences[n + 1])``, and
    attends only to itself. Then ``shift`` is 0 and ``padding`` is None.
    """

    keys: int
    shift: int
    left: int
    right: int
    padding: Tensor | None
    sequences: Tensor | None = None
    chunk: int = 0
    first_key: int = 0

    def options(self, seqlen_q: int) -> dict | None:
        """Returns the options of ``flash_attn`` for ``seqlen_q`` queries and the first ``keys`` keys; None if no
        options fit.

        The options are also correct for each packed sequence, because it has as many queries as keys.
        """
        chunks = {"attention_chunk": self.chunk, "first_key": self.first_key} if self.chunk else {}
        if self.left < 0 and self.right < 0 and not chunks:
            return {}
        lower_right = self.shift == self.keys - seqlen_q
        if self.right == 0 and (lower_right or self.shift == 0):
            window = None if self.left < 0 else (self.left, -1)
            return {"causal": "lower_right" if lower_right else "upper_left", "window": window, **chunks}
        return {"window": (self.left, self.right), **chunks} if lower_right else None


class PatternMask(Tensor):
    """A bool mask (B, 1, S_q, S_k) that stores its pattern. Its values are computed only if they are needed.

    Models pass masks on and read their shape, which needs no values. Any other operation (slicing, moving, combining)
    runs on the dense mask, so no part of the mask can be lost.
    """

    pattern: Pattern
    _dense: Callable[[], Tensor]

    # Operations that do not need the values.
    _WITHOUT_VALUES = frozenset(
        getattr(Tensor, name).__get__
        for name in ("shape", "ndim", "dtype", "device", "requires_grad", "is_cuda", "is_nested", "layout", "is_leaf")
    ) | {Tensor.dim, Tensor.size, Tensor.is_floating_point, Tensor.numel, Tensor.get_device}

    @staticmethod
    def make(pattern: Pattern, shape: tuple[int, ...], dense: Callable[[], Tensor], device) -> PatternMask:
        # One element, broadcast. The strides are never read.
        storage = torch.zeros((), dtype=torch.bool, device=device).expand(shape)
        mask = Tensor._make_subclass(PatternMask, storage)
        mask.pattern = pattern
        mask._dense = dense
        return mask

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in cls._WITHOUT_VALUES:
            return super().__torch_function__(function, types, args, kwargs)
        args, kwargs = torch.utils._pytree.tree_map_only(PatternMask, cls.dense, (args, kwargs or {}))
        return function(*args, **kwargs)

    def dense(self) -> Tensor:
        """Returns the dense mask, as transformers makes it."""
        return self._dense()


def read_pattern(mask_function: Callable) -> Band | None:
    """Returns the band of a mask function of transformers, relative to the positions; None if the mask is not a band.

    Recognises a function by its code and its closure, never by samples of its values. Returns None for unknown code.
    """
    if mask_function is masking_utils.causal_mask_function:
        return Band(-1, 0)
    if mask_function is masking_utils.bidirectional_mask_function:
        return Band(-1, -1)
    kind = _kind(mask_function)
    if kind not in ("all_of", "window", "window_both", "chunks"):
        return None
    cells = _closure(mask_function)
    if kind == "all_of":
        return _intersection([read_pattern(part) for part in cells["mask_functions"]])
    size = cells["chunk_size" if kind == "chunks" else "sliding_window"]
    if not isinstance(size, int) or size < 1:
        return None
    if kind == "chunks":
        starts = cells["left_padding"]
        return Band(-1, -1, Chunks(size, starts)) if isinstance(starts, Tensor) and starts.dim() == 1 else None
    return Band(size - 1, -1) if kind == "window" else Band(size, size)


def _intersection(bands: list[Band | None]) -> Band | None:
    """Returns the intersection of the bands; None if a band is None, or if several bands have chunks."""
    parts = [band for band in bands if band is not None]
    chunks = [band.chunks for band in parts if band.chunks is not None]
    if len(parts) < len(bands) or len(chunks) > 1:
        return None
    limits = [
        min((side for side in sides if side >= 0), default=-1) for sides in zip(*(b[:2] for b in parts), strict=True)
    ]
    return Band(*limits, *chunks)


def read_packed(mask_function: Callable) -> tuple[Callable, Tensor] | None:
    """Splits the mask function of packed sequences. Returns None for another mask function.

    The results are the mask function within a sequence, for positions from the sequence's start, and the sequence
    number of each row, (B, S).
    """
    if _kind(mask_function) != "all_of":
        return None
    parts = _closure(mask_function)["mask_functions"]
    by_kind = {_kind(part): part for part in parts}  # the order of the parts depends on the version of transformers
    if len(parts) != 2 or by_kind.keys() != {"packed", "remapped"}:
        return None
    return _closure(by_kind["remapped"])["mask_function"], _closure(by_kind["packed"])["packed_sequence_mask"]


def sequence_offsets(numbers: Tensor) -> Tensor:
    """Returns (sequences + 1) int32, the first row of each sequence, from the sequence number of each row, (B, S).

    Rows count through the whole batch. No sequence continues in the next element of the batch.
    """
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([numbers.numel()])]).to(torch.int32)


def _kind(function: Callable) -> str | None:
    return _MADE_BY.get(getattr(function, "__code__", None))


def _closure(function: FunctionType) -> dict:
    return dict(zip(function.__code__.co_freevars, (c.cell_contents for c in function.__closure__ or ()), strict=True))


def _makers() -> dict[CodeType, str]:
    """Returns {code object: kind of mask function}.

    All mask functions that one function of transformers makes share one code object.
    """
    makers = {}
    for name, kind, variables, arguments in (
        ("and_masks", "all_of", {"mask_functions"}, ()),
        ("sliding_window_overlay", "window", {"sliding_window"}, (1,)),
        ("sliding_window_bidirectional_overlay", "window_both", {"sliding_window"}, (1,)),
        ("chunked_overlay", "chunks", {"chunk_size", "left_padding"}, (1, None)),
        ("packed_sequence_mask_function", "packed", {"packed_sequence_mask"}, (None,)),
        ("remap_positions_for_packed_sequence", "remapped", {"mask_function", "position_ids"}, (None, None)),
    ):
        maker = getattr(masking_utils, name, None)
        if maker is not None:
            inner = maker(*arguments)
            # another version of transformers: no pattern, so masks are dense
            if set(inner.__code__.co_freevars) == variables:
                makers[inner.__code__] = kind
    return makers


_MADE_BY = _makers()
