"""3. Block-sparse FlashAttention: FlashAttention-1 that skips the blocks of S that a block mask hides.

Source: Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", 2022 (arXiv
2205.14135), section 3.3 and appendix D.1: algorithm 5 (forward). The backward skips the same blocks of algorithm 4.

`block_mask` is a bool matrix (T_r, T_c): element (i, j) is False if no query of block i sees a key of block j. A `mask`
can hide single elements of the visible blocks. K_j and V_j are loaded even if column j has no visible block, as the
paper prints it. So the accesses are Theta(N d + N^2 d^2 s / M), with s = the share of visible blocks (proposition 4).
The proposition does not count reads of the block mask, and neither does this file.
"""

import torch
from torch import Tensor

from . import flash1
from .dropout import Dropout
from .memory import SlowMemory


def grid(n_q: int, n_k: int, d: int, M: int) -> tuple[int, int]:
    """T_r and T_c: the numbers of blocks of queries and of keys, so the shape of the block mask."""
    B_c, B_r = flash1.block_sizes(M, d)
    return -(-n_q // B_r), -(-n_k // B_c)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_mask: Tensor,
    *,
    M: int,
    scale: float | None = None,
    mask: Tensor | None = None,
    dropout: Dropout | None = None,
    memory: SlowMemory | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 5 on one head: out (N_q, d_v), l and m (N_q, 1)."""
    check_block_mask(block_mask, grid(len(q), len(k), q.shape[1], M))
    options = {"M": M, "scale": scale, "mask": mask, "dropout": dropout, "memory": memory}
    return flash1.forward(q, k, v, block_mask=block_mask, **options)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    l: Tensor,
    m: Tensor,
    block_mask: Tensor,
    *,
    M: int,
    scale: float | None = None,
    mask: Tensor | None = None,
    dropout: Dropout | None = None,
    memory: SlowMemory | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 4 on the visible blocks: dq, dk, dv. The hidden blocks of P are 0, so the hidden blocks of dS are 0."""
    check_block_mask(block_mask, grid(len(q), len(k), q.shape[1], M))
    options = {"M": M, "scale": scale, "mask": mask, "dropout": dropout, "memory": memory}
    return flash1.backward(q, k, v, out, dout, l, m, block_mask=block_mask, **options)


def expand_block_mask(block_mask: Tensor, n_q: int, n_k: int, d: int, M: int) -> Tensor:
    """The (N_q, N_k) bool mask of the paper's section 3.3. Element (k, l) equals block (k // B_r, l // B_c)."""
    B_c, B_r = flash1.block_sizes(M, d)
    check_block_mask(block_mask, grid(n_q, n_k, d, M))
    return block_mask.repeat_interleave(B_r, 0)[:n_q].repeat_interleave(B_c, 1)[:, :n_k]


def check_block_mask(block_mask: Tensor, shape: tuple[int, int]) -> None:
    """Raises ValueError if the block mask is not a bool matrix with one element for each block."""
    if tuple(block_mask.shape) != shape:
        raise ValueError(
            f"block_mask: got shape {tuple(block_mask.shape)}; allowed: {shape}, one element for each block"
        )
    if block_mask.dtype != torch.bool:
        raise ValueError(f"block_mask: got {block_mask.dtype}; allowed: torch.bool")
