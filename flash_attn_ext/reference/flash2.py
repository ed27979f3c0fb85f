"""4. FlashAttention-2: the outer loop visits the queries, O is divided once, and one number for each row is saved.

Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023 (arXiv
2307.08691), algorithm 1 (forward) and algorithm 2 (backward); section 3.1.1 for causal masks. MASK and dropout as in
flash1.py. csrc/cpu/kernels/forward-inl.h and backward-inl.h implement the same algorithm.

Three changes from FlashAttention-1. A block of queries keeps O, l and m on the chip while it visits all keys. O is
relative to the running maximum, and is divided by l once, at the end. The backward reads L = m + log l instead of l and
m, and computes delta once instead of in every tile.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from .dropout import Dropout
from .flash1 import scores
from .memory import SlowMemory, SlowTensor, blocks, statistics_dtype
from .standard import default_scale
from .tile import Tile, exp_minus, log, maximum, row_dot, row_max, row_sum


def check_blocks(block_q: int, block_k: int, d: int, M: int | None) -> None:
    """Raises ValueError for block sizes that cannot run, before the first tile is loaded.

    Q_i, O_i, K_j or V_j, and S_ij are on the chip together, so at least these tiles must fit M. The chip checks all
    tiles at run time.
    """
    for name, size in (("block_q", block_q), ("block_k", block_k)):
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{name}: got {size!r}; allowed: an int, at least 1")
    needed = 2 * block_q * d + block_k * d + block_q * block_k
    if M is not None and needed > M:
        raise ValueError(
            f"block_q, block_k: got {block_q}, {block_k}; allowed: sizes whose Q, O, K and S tiles "
            f"({needed} elements at d = {d}) fit the on-chip size M = {M}"
        )


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_q: int = 64,
    block_k: int = 64,
    scale: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: Dropout | None = None,
    memory: SlowMemory | None = None,
) -> tuple[Tensor, Tensor]:
    """Algorithm 1 on one head: out (N_q, d_v) and the logsumexp L (N_q, 1). causal: key j <= query i."""
    memory = memory or SlowMemory()
    check_blocks(block_q, block_k, q.shape[1], memory.capacity)
    scale = default_scale(scale, q)
    Q, K, V = memory.put("q", q), memory.put("k", k), memory.put("v", v)
    MASK = None if mask is None else memory.put("mask", mask)
    O = memory.new("out", Q, q.shape[0], v.shape[1], result=True)
    L = memory.new("lse", Q, q.shape[0], 1, dtype=statistics_dtype(q.dtype))

    for i in blocks(q.shape[0], block_q):
        keys = blocks(min(k.shape[0], i.stop) if causal else k.shape[0], block_k)
        O_i, l_i, m_i = attend(Q, K, V, i, keys, scale=scale, MASK=MASK, causal=causal, dropout=dropout)
        O.store(O_i.divide_rows_(l_i), i)
        L.store(m_i + log(l_i), i)
        del O_i  # frees the chip for the next block
    return O.tensor, L.tensor


def attend(
    Q: SlowTensor,
    K: SlowTensor,
    V: SlowTensor,
    i: slice,
    keys: Iterable[slice],
    *,
    scale: float,
    MASK: SlowTensor | None = None,
    causal: bool = False,
    dropout: Dropout | None = None,
) -> tuple[Tile, Tile, Tile]:
    """The inner loop: one block of queries visits blocks of keys. Returns O_i (not yet divided), l_i and m_i."""
    Q_i = Q.load(i)
    O_i = Q.on_chip(Q_i.shape[0], V.shape[1], 0.0)
    l_i, m_i = Q.on_chip(Q_i.shape[0], 1, 0.0), Q.on_chip(Q_i.shape[0], 1, -math.inf)
    for j in keys:
        S_ij = scores(Q_i, K.load(j), scale, MASK, i, j)
        hide_above_diagonal(S_ij, causal, i, j)

        m_new = maximum(m_i, row_max(S_ij))
        P_ij = S_ij.exp_minus_(m_new)  # in the place of S_ij
        rescale = exp_minus(m_i, m_new)
        l_i *= rescale
        l_i += row_sum(P_ij)
        m_i = m_new

        if dropout:
            P_ij *= dropout.factors(i, j, like=Q)
        O_i *= rescale
        O_i.add_product_(P_ij, V.load(j))
        del S_ij, P_ij
    return O_i, l_i, m_i


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    *,
    block_q: int = 64,
    block_k: int = 64,
    scale: float | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: Dropout | None = None,
    memory: SlowMemory | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2: dq, dk, dv."""
    memory = memory or SlowMemory()
    check_blocks(block_q, block_k, q.shape[1], memory.capacity)
    scale = default_scale(scale, q)
    names = {"q": q, "k": k, "v": v, "dout": dout, "lse": lse}
    Q, K, V, dO, L = (memory.put(*named) for named in names.items())
    MASK = None if mask is None else memory.put("mask", mask)
    dQ, dK, dV = (memory.new(name, Q, *t.shape, result=True) for name, t in (("dq", q), ("dk", k), ("dv", v)))
    delta = _delta(memory.put("out", out), dO, block_q)
    dQ.fill(0.0)

    for j in blocks(k.shape[0], block_k):
        K_j, V_j = K.load(j), V.load(j)
        dK_j, dV_j = K.on_chip(*K_j.shape, 0.0), V.on_chip(*V_j.shape, 0.0)
        for i in blocks(q.shape[0], block_q):
            if causal and j.start >= i.stop:
                continue
            Q_i, dO_i = Q.load(i), dO.load(i)
            P_ij = scores(Q_i, K_j, scale, MASK, i, j)
            hide_above_diagonal(P_ij, causal, i, j)
            P_ij.exp_minus_(L.load(i))

            Z_ij = dropout.factors(i, j, like=Q) if dropout else None
            dS_ij = dO_i @ V_j.T  # dP_ij, until it becomes dS_ij
            if Z_ij is not None:
                dV_j.add_product_((P_ij * Z_ij).T, dO_i)
                dS_ij *= Z_ij
            else:
                dV_j.add_product_(P_ij.T, dO_i)
            dS_ij -= delta.load(i)
            dS_ij *= P_ij
            dS_ij *= scale

            dQ_i = dQ.load(i)
            dQ_i.add_product_(dS_ij, K_j)
            dQ.store(dQ_i, i)
            dK_j.add_product_(dS_ij.T, Q_i)
            del Q_i, dO_i, dQ_i, P_ij, Z_ij, dS_ij
        dK.store(dK_j, j)
        dV.store(dV_j, j)
        del K_j, V_j, dK_j, dV_j
    return dQ.tensor, dK.tensor, dV.tensor


def _delta(O: SlowTensor, dO: SlowTensor, block: int) -> SlowTensor:
    """D = rowsum(dO o O), once."""
    dtype = statistics_dtype(O.tensor.dtype)
    delta = O.memory.new("delta", O, O.shape[0], 1, dtype=dtype)
    for i in blocks(O.shape[0], block):
        delta.store(row_dot(dO.load(i), O.load(i)), i)
    return delta


def hide_above_diagonal(S_ij: Tile, causal: bool, i: slice, j: slice) -> None:
    """Sets -inf at keys j > i, if the tile crosses the diagonal. Only indices are compared: no traffic, no FLOPs."""
    if causal and j.stop - 1 > i.start and S_ij.data is not None:
        above = torch.ones(S_ij.shape, dtype=torch.bool, device=S_ij.data.device).triu(i.start - j.start + 1)
        S_ij.data.masked_fill_(above, -math.inf)
