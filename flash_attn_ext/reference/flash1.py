"""3. FlashAttention-1: no N x N matrix leaves the chip.

Source: Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", 2022 (arXiv
2205.14135), algorithm 2 (algorithm 1 with tau, MASK and dropout) and algorithm 4 (its backward).

The outer loop visits blocks of K and V, the inner loop blocks of Q. So O, l and m are in slow memory. Each inner step
corrects them in place by the two factors of the online softmax. At any time, O is the attention over the keys visited
so far. With a block mask the inner loop skips hidden blocks: algorithm 5, see block_sparse.py.
"""

import math

from torch import Tensor

from .dropout import Dropout
from .memory import SlowMemory, SlowTensor, blocks, statistics_dtype
from .standard import default_scale
from .tile import Tile, exp_minus, mask_, maximum, row_dot, row_max, row_sum


def block_sizes(M: int, d: int) -> tuple[int, int]:
    """B_c = ceil(M / 4d), B_r = min(ceil(M / 4d), d).

    Then K_j, V_j, Q_i and O_i together need about M elements. S_ij needs up to M/4 more, so the paper's O(M) has a
    constant above 1.
    """
    if M < 1 or d < 1:
        raise ValueError(f"M, d: got {M}, {d}; allowed: at least 1")
    B_c = math.ceil(M / (4 * d))
    return B_c, min(B_c, d)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    M: int,
    scale: float | None = None,
    mask: Tensor | None = None,
    block_mask: Tensor | None = None,
    dropout: Dropout | None = None,
    memory: SlowMemory | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 2 on one head: out (N_q, d_v), l and m (N_q, 1)."""
    memory = memory or SlowMemory()
    scale, (B_c, B_r) = default_scale(scale, q), block_sizes(M, q.shape[1])
    Q, K, V = memory.put("q", q), memory.put("k", k), memory.put("v", v)
    MASK = None if mask is None else memory.put("mask", mask)
    O = memory.new("out", Q, q.shape[0], v.shape[1], result=True)
    l, m = (memory.new(name, Q, q.shape[0], 1, dtype=statistics_dtype(q.dtype)) for name in ("l", "m"))
    O.fill(0.0)
    l.fill(0.0)
    m.fill(-math.inf)

    for column, j in enumerate(blocks(k.shape[0], B_c)):
        K_j, V_j = K.load(j), V.load(j)
        for row, i in enumerate(blocks(q.shape[0], B_r)):
            if block_mask is not None and not block_mask[row, column]:
                continue
            Q_i, O_i, l_i, m_i = Q.load(i), O.load(i), l.load(i), m.load(i)
            S_ij = scores(Q_i, K_j, scale, MASK, i, j)

            m_tile = row_max(S_ij)
            P_ij = S_ij.exp_minus_(m_tile)  # in the place of S_ij
            l_tile = row_sum(P_ij)

            m_new = maximum(m_i, m_tile)
            old, new = exp_minus(m_i, m_new), exp_minus(m_tile, m_new)
            l_new = old * l_i + new * l_tile

            if dropout:
                P_ij *= dropout.factors(i, j, like=Q)
            P_ij *= new
            O_i *= old * l_i
            O_i.add_product_(P_ij, V_j)
            O.store(O_i.divide_rows_(l_new), i)
            l.store(l_new, i)
            m.store(m_new, i)
            del Q_i, O_i, S_ij, P_ij  # frees the chip for the next block
        del K_j, V_j
    return O.tensor, l.tensor, m.tensor


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    l: Tensor,
    m: Tensor,
    *,
    M: int,
    scale: float | None = None,
    mask: Tensor | None = None,
    block_mask: Tensor | None = None,
    dropout: Dropout | None = None,
    memory: SlowMemory | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 4: dq, dk, dv. Pass the `dropout` of the forward: it holds the saved generator state R."""
    memory = memory or SlowMemory()
    scale, (B_c, B_r) = default_scale(scale, q), block_sizes(M, q.shape[1])
    names = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "l": l, "m": m}
    Q, K, V, O, dO, l, m = (memory.put(*named) for named in names.items())
    MASK = None if mask is None else memory.put("mask", mask)
    dQ, dK, dV = (memory.new(name, Q, *t.shape, result=True) for name, t in (("dq", q), ("dk", k), ("dv", v)))
    dQ.fill(0.0)  # dK and dV are written once, block by block

    for column, j in enumerate(blocks(k.shape[0], B_c)):
        K_j, V_j = K.load(j), V.load(j)
        dK_j, dV_j = K.on_chip(*K_j.shape, 0.0), V.on_chip(*V_j.shape, 0.0)
        for row, i in enumerate(blocks(q.shape[0], B_r)):
            if block_mask is not None and not block_mask[row, column]:
                continue
            Q_i, dO_i = Q.load(i), dO.load(i)
            D_i = row_dot(dO_i, O.load(i))  # delta, from O instead of P
            P_ij = scores(Q_i, K_j, scale, MASK, i, j).exp_minus_(m.load(i)).divide_rows_(l.load(i))

            Z_ij = dropout.factors(i, j, like=Q) if dropout else None
            dS_ij = dO_i @ V_j.T  # dP_ij, until it becomes dS_ij
            if Z_ij is not None:
                dV_j.add_product_((P_ij * Z_ij).T, dO_i)
                dS_ij *= Z_ij
            else:
                dV_j.add_product_(P_ij.T, dO_i)
            dS_ij -= D_i
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


def scores(Q_i: Tile, K_j: Tile, scale: float, MASK: SlowTensor | None, i: slice, j: slice) -> Tile:
    """S_ij = MASK(tau Q_i K_j^T)."""
    S_ij = Q_i @ K_j.T
    S_ij *= scale
    return S_ij if MASK is None else mask_(S_ij, MASK.load(i, j))
