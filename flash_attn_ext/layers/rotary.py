"""apply_rotary_emb: rotary position embedding (Su et al. 2021, arXiv 2104.09864), as in flash_attn.layers.rotary."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """``x`` (..., D) with its first R columns rotated by cos, sin (..., R / 2), computed in float32 at least."""
    half = cos.shape[-1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    turned, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    cos, sin = cos.to(dtype), sin.to(dtype)
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        turned = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def check_rotary(cos: Tensor, sin: Tensor, head_dim: int) -> None:
    if cos.dim() != 2 or cos.shape != sin.shape:
        raise ValueError(f"sin: got shape {list(sin.shape)}; allowed: that of cos, (positions, rotary_dim / 2)")
    if 2 * cos.shape[1] > head_dim:
        raise ValueError(f"cos: got rotary_dim {2 * cos.shape[1]}; allowed: at most head_dim, {head_dim}")


def rows_at(table: Tensor, name: str, positions: Tensor) -> Tensor:
    """Rows of cos or sin. On CPU a position outside the table is an error; elsewhere indexing itself reports it."""
    if positions.is_cpu and positions.numel() and not torch.compiler.is_compiling():
        low, high = positions.min().item(), positions.max().item()
        if low < 0 or high >= len(table):
            raise ValueError(
                f"{name}: got positions {low} to {high}; allowed: 0 to {len(table) - 1}, the rows of {name}"
            )
    return table[positions]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotates the first ``rotary_dim`` columns of each head by the row's position.

    Args:
        x: (B, S, H, D), or (T, H, D) with ``cu_seqlens``.
        cos: (positions, rotary_dim / 2); rotary_dim is at most D, further columns stay.
        sin: likewise.
        interleaved: pairs are columns (0, 1), (2, 3), ... (GPT-J); otherwise column c and c + rotary_dim / 2
            (GPT-NeoX). The default differs from that of ``flash_attn_with_kvcache``, as in flash-attention.
        inplace: write the result to ``x`` and return it.
        seqlen_offsets: added to the positions, a number or (B).
        cu_seqlens: (B + 1) offsets of packed sequences: positions count from each sequence's start.
        max_seqlen: not needed here.

    Returns:
        ``x``'s shape and dtype; differentiable.
    """
    check_rotary(cos, sin, x.shape[-1])
    if cu_seqlens is None:
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)
        offsets = seqlen_offsets[:, None] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
        positions = positions + offsets
    else:
        rows = torch.arange(x.shape[0], device=x.device)
        sequence = torch.searchsorted(cu_seqlens[1:].to(rows.dtype), rows, right=True)
        offsets = seqlen_offsets[sequence] if isinstance(seqlen_offsets, Tensor) else seqlen_offsets
        positions = rows - cu_seqlens[sequence] + offsets
    rotated = rotate(x, rows_at(cos, "cos", positions)[..., None, :], rows_at(sin, "sin", positions)[..., None, :],
                     interleaved)  # fmt: skip
    return x.copy_(rotated) if inplace else rotated
