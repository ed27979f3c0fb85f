"""Nested tensors, in both of torch's layouts, as padded batches and back: for MultiheadAttention."""

from __future__ import annotations

import torch
from torch import Tensor


def lengths(x: Tensor) -> Tensor:
    """(B,) int64: the sequence lengths of a nested tensor (B, *, features), on its device."""
    if x.layout is torch.jagged:
        return x.offsets().diff() if x.lengths() is None else x.lengths()
    return torch.tensor([part.size(0) for part in x.unbind()], dtype=torch.int64, device=x.device)


def to_padded(x: Tensor) -> Tensor:
    """(B, longest, features), zeros after each sequence."""
    if x.layout is not torch.jagged:
        return torch.nested.to_padded_tensor(x, 0.0)
    starts, counts = x.offsets()[:-1], lengths(x)
    longest = int(counts.max()) if counts.numel() else 0
    positions = torch.arange(longest, device=x.device)
    inside = positions < counts.unsqueeze(1)
    rows = torch.where(inside, starts.unsqueeze(1) + positions, 0)
    if x.values().size(0) == 0:
        return x.values().new_zeros(*rows.shape, x.values().size(-1))
    # Not a product with the mask: the rows read in the place of padding may hold NaN.
    return x.values()[rows].masked_fill(~inside.unsqueeze(-1), 0.0)


def is_padding(counts: Tensor, longest: int) -> Tensor:
    """(B, longest) bool: True where a row of that padded batch is padding."""
    return torch.arange(longest, device=counts.device) >= counts.unsqueeze(1)


def like(padded: Tensor, x: Tensor) -> Tensor:
    """The sequences of `padded` as a nested tensor in the layout, and with the lengths, of `x`."""
    if x.layout is not torch.jagged:
        parts = x.unbind()
        return torch.nested.as_nested_tensor([row[: part.size(0)] for row, part in zip(padded, parts, strict=True)])
    # With the very offsets of `x`: torch takes two jagged tensors for equally shaped only if they share them.
    starts, counts = x.offsets()[:-1], lengths(x)
    inside = ~is_padding(counts, padded.size(1))
    rows = (starts.unsqueeze(1) + torch.arange(padded.size(1), device=padded.device))[inside]
    values = padded.new_zeros(x.values().size(0), padded.size(-1)).index_copy(0, rows, padded[inside])
    return torch.nested.nested_tensor_from_jagged(values, x.offsets(), x.lengths())
