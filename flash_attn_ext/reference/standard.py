"""2. Standard attention: one kernel for each step. Each N x N matrix between two steps is written to slow memory.

Source: Dao et al., "FlashAttention", 2022 (arXiv 2205.14135): algorithm 0, and algorithm 3 for the backward
(derivation: appendix B). With tau the scale and Z the dropout factors,

    S = tau Q K^T      P = softmax(MASK(S))     P_dropped = P o Z     O = P_dropped V

    dV = P_dropped^T dO
    dP = (dO V^T) o Z
    dS = P o (dP - delta)
    dQ = tau dS K
    dK = tau dS^T Q

The gradients of the products are the gradients of a linear layer. The third line is the gradient of the softmax. y =
softmax(s) has the Jacobian diag(y) - y y^T. It maps the row dP_i to P_i o dP_i - P_i <P_i, dP_i>. So delta_i = <P_i,
dP_i>. Because O_i = sum_j P_ij Z_ij V_j, delta_i = <dO_i, O_i>, too. FlashAttention uses this second form, without P.

The kernels are PyTorch's kernels in figure 1 (right) of the paper: matmul, mask, softmax, dropout, matmul.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .dropout import Dropout
from .memory import SlowMemory, SlowTensor, TransposedView, blocks
from .tile import mask_, row_dot, row_max, row_sum


class Saved(NamedTuple):
    """The N x N matrices that the backward needs, in addition to q, k, v."""

    probs: Tensor  # P
    probs_dropped: Tensor  # P o Z; P itself without dropout
    kept: Tensor | None  # Z != 0, one byte for each element


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    mask: Tensor | None = None,
    dropout: Dropout | None = None,
    M: int | None = None,
    memory: SlowMemory | None = None,
) -> tuple[Tensor, Saved]:
    """Algorithm 0 on one head, q (N_q, d), k (N_k, d), v (N_k, d_v): out and the matrices that the backward needs.

    M: on-chip size in elements. If M is None, each kernel reads its operands exactly once.
    """
    memory = memory or SlowMemory()
    Q, K, V = memory.put("q", q), memory.put("k", k), memory.put("v", v)
    S = memory.new("S", Q, q.shape[0], k.shape[0])
    P = memory.new("P", Q, *S.shape)
    O = memory.new("out", Q, q.shape[0], v.shape[1], result=True)

    multiply(S, Q, K.T, scale=default_scale(scale, q), M=M)
    if mask is not None:
        _mask(S, memory.put("mask", mask), M)
    _softmax(P, S, M)
    P_dropped, Z = _dropout(P, dropout, M) if dropout else (P, None)
    multiply(O, P_dropped, V, M=M)
    return O.tensor, Saved(P.tensor, P_dropped.tensor, None if Z is None else Z.tensor)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    saved: Saved,
    *,
    scale: float | None = None,
    dropout: Dropout | None = None,
    M: int | None = None,
    memory: SlowMemory | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 3: dq, dk, dv. The mask needs no separate step: if it hides a key, P and dS are 0."""
    memory = memory or SlowMemory()
    Q, K, V, dO = (memory.put(*named) for named in (("q", q), ("k", k), ("v", v), ("dout", dout)))
    P, P_dropped = memory.put("P", saved.probs), memory.put("P_dropped", saved.probs_dropped)
    dP, dS = memory.new("dP", Q, *P.shape), memory.new("dS", Q, *P.shape)
    dQ, dK, dV = (memory.new(name, Q, *t.shape, result=True) for name, t in (("dq", q), ("dk", k), ("dv", v)))
    scale = default_scale(scale, q)

    multiply(dV, P_dropped.T, dO, M=M)
    multiply(dP, dO, V.T, M=M)
    if dropout:
        _dropout_backward(dP, memory.put("Z", saved.kept), dropout, M)
    _softmax_backward(dS, P, dP, M)
    multiply(dQ, dS, K, scale=scale, M=M)
    multiply(dK, dS.T, Q, scale=scale, M=M)
    return dQ.tensor, dK.tensor, dV.tensor


def multiply(
    C: SlowTensor,
    A: SlowTensor | TransposedView,
    B: SlowTensor | TransposedView,
    *,
    scale: float = 1.0,
    M: int | None = None,
) -> None:
    """C = scale A B in square blocks. The chip can hold three blocks."""
    inner = A.shape[1]
    side = max(*C.shape, inner, 1) if M is None else max(1, math.isqrt(M // 3))
    for rows in blocks(C.shape[0], side):
        for cols in blocks(C.shape[1], side):
            c = C.on_chip(rows.stop - rows.start, cols.stop - cols.start, 0.0)
            for middle in blocks(inner, side):
                c.add_product_(A.load(rows, middle), B.load(middle, cols))
            if scale != 1.0:
                c *= scale
            C.store(c, rows, cols)
            del c  # frees the chip for the next block


def _mask(S: SlowTensor, mask: SlowTensor, M: int | None) -> None:
    for rows in _whole_rows(S, 2, M):
        S.store(mask_(S.load(rows), mask.load(rows)), rows)


def _softmax(P: SlowTensor, S: SlowTensor, M: int | None) -> None:
    """Reads each row once, because a whole row fits the chip here."""
    for rows in _whole_rows(S, 1, M):
        tile = S.load(rows)
        tile.exp_minus_(row_max(tile))
        P.store(tile.divide_rows_(row_sum(tile)), rows)
        del tile


def _dropout(P: SlowTensor, dropout: Dropout, M: int | None) -> tuple[SlowTensor, SlowTensor]:
    memory = P.memory
    P_dropped, Z = memory.new("P_dropped", P, *P.shape), memory.new("Z", P, *P.shape, dtype=torch.bool)
    for rows in _whole_rows(P, 2, M):
        factors = dropout.factors(rows, slice(0, P.shape[1]), like=P)
        tile = P.load(rows)
        tile *= factors
        P_dropped.store(tile, rows)
        Z.store(factors, rows)
        del factors, tile
    return P_dropped, Z


def _dropout_backward(dP: SlowTensor, Z: SlowTensor, dropout: Dropout, M: int | None) -> None:
    for rows in _whole_rows(dP, 2, M):
        tile = dP.load(rows)
        tile *= Z.load(rows)
        tile *= dropout.scale
        dP.store(tile, rows)
        del tile


def _softmax_backward(dS: SlowTensor, P: SlowTensor, dP: SlowTensor, M: int | None) -> None:
    for rows in _whole_rows(P, 2, M):
        p, ds = P.load(rows), dP.load(rows)
        ds -= row_dot(p, ds)
        ds *= p
        dS.store(ds, rows)
        del p, ds


def _whole_rows(matrix: SlowTensor, tiles: int, M: int | None):
    """Cuts the rows into blocks, so that `tiles` blocks of whole rows and a few columns fit the chip."""
    rows, cols = matrix.shape
    return blocks(rows, max(rows, 1) if M is None else max(1, M // (tiles * cols + 4)))


def default_scale(scale: float | None, q: Tensor) -> float:
    """tau: 1 / sqrt(d), as in torch."""
    return q.shape[1] ** -0.5 if scale is None else scale
