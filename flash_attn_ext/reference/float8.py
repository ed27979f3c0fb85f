"""8. FlashAttention-3 with products in 8 bits: block quantisation and incoherent processing.

Source: Shah et al., "FlashAttention-3", 2024 (arXiv 2407.08608), section 3.3, and section 4.3 for the table of errors.

A product of float8_e4m3fn operands is twice as fast as a product of 16-bit operands. A float8_e4m3fn number has 3 bits
after the leading one, and its range is 2^-9 to 448. So a factor first scales the largest element of a tensor to 448.
One outlier makes the other elements less exact. Two steps help, and both are exact before the rounding:

    block quantisation       each block of rows has a separate factor; the loop over tiles multiplies by it
    incoherent processing    Q M and K M in place of Q and K, for an orthogonal M: (Q M)(K M)^T = Q K^T

M = D H / sqrt(d), with random signs D and the Hadamard matrix H, spreads an outlier over all columns. The product with
M costs O(d log d) for each row.

P is rounded to float8, too: P <= 1, so its factor is a constant. Sums stay exact here, as they stay in fp32 on the GPU.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .memory import blocks
from .standard import default_scale

LARGEST = 448.0  # of float8_e4m3fn
FACTOR_OF_P = 256.0  # scales the largest P, 1, near the largest float8


class Quantised(NamedTuple):
    """A tensor (N, d) in float8_e4m3fn, and the factor of each of its rows, (N, 1): the value is codes * factors."""

    codes: Tensor
    factors: Tensor

    def rows(self, i: slice) -> Tensor:
        """The values of some rows, in the dtype of the factors."""
        return self.codes[i].to(self.factors.dtype) * self.factors[i]


def to_float8(t: Tensor) -> Tensor:
    """Rounds to the nearest float8_e4m3fn. Numbers above 448 become 448."""
    return t.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)


def quantise(t: Tensor, block: int | None = None) -> Quantised:
    """One factor for each `block` rows of t (N, d); None: one factor for the tensor."""
    factors = t.new_empty(t.shape[0], 1)
    for rows in blocks(t.shape[0], block or max(t.shape[0], 1)):
        largest = t[rows].abs().max()
        factors[rows] = torch.where(largest == 0, 1, largest / LARGEST)
    return Quantised(to_float8(t / factors), factors)


def spread(t: Tensor, signs: Tensor) -> Tensor:
    """t M for M = diag(signs) H / sqrt(d), by the fast Walsh-Hadamard transform: log2(d) sweeps of sums.

    t (N, d), d a power of two; signs (d), each 1 or -1.
    """
    d = t.shape[1]
    if d & (d - 1) or d == 0:
        raise ValueError(f"t: got {d} columns; allowed: a power of two")
    t, half = t * signs, 1
    while half < d:
        even, odd = t.view(-1, d // (2 * half), 2, half).unbind(2)
        t = torch.stack([even + odd, even - odd], 2).view(-1, d)
        half *= 2
    return t / math.sqrt(d)


def random_signs(d: int, generator: torch.Generator | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randint(0, 2, (d,), generator=generator, device=_device_of(generator)).to(dtype) * 2 - 1


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block_q: int = 128,
    block_k: int = 128,
    scale: float | None = None,
    block_quantisation: bool = True,
    signs: Tensor | None = None,
) -> Tensor:
    """Attention of one head, q (N_q, d), k (N_k, d), v (N_k, d_v): out (N_q, d_v). Operands of products are float8.

    signs (d): incoherent processing with these signs. Without `block_quantisation` each tensor has one factor.
    """
    scale = default_scale(scale, q)
    if signs is not None:
        q, k = spread(q, signs), spread(k, signs)
    q8 = quantise(q, block_q if block_quantisation else None)
    k8, v8 = (quantise(t, block_k if block_quantisation else None) for t in (k, v))
    out = q.new_empty(q.shape[0], v.shape[1])
    for i in blocks(q.shape[0], block_q):
        rows = i.stop - i.start
        O_i = q.new_zeros(rows, v.shape[1])
        l_i, m_i = O_i.new_zeros(rows, 1), O_i.new_full((rows, 1), -math.inf)
        for j in blocks(k.shape[0], block_k):
            S_ij = scale * q8.rows(i) @ k8.rows(j).T
            m_new = torch.maximum(m_i, S_ij.amax(1, keepdim=True))
            P_ij, rescale = (S_ij - m_new).exp(), (m_i - m_new).exp()
            l_i = l_i * rescale + P_ij.sum(1, keepdim=True)
            P_ij = to_float8(FACTOR_OF_P * P_ij).to(q.dtype) / FACTOR_OF_P
            O_i = O_i * rescale + P_ij @ v8.rows(j)
            m_i = m_new
        out[i] = O_i / l_i
    return out


def with_outliers(rows: int, columns: int, generator: torch.Generator | None = None) -> Tensor:
    """The paper's data in fp64: N(0, 1), plus N(0, 100) (standard deviation 10) in one element of 1000."""
    options = {"generator": generator, "device": _device_of(generator)}
    x, large = (torch.randn(rows, columns, dtype=torch.float64, **options) for _ in range(2))
    return x + 10 * large * (torch.rand(rows, columns, **options) < 0.001)


def _device_of(generator: torch.Generator | None) -> torch.device | None:
    """Returns the generator's device. None is torch's default device."""
    return None if generator is None else generator.device


def standard_float16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The standard algorithm in float16: S and P are rounded, because they go to slow memory. Sums in q's dtype."""
    S = (_rounded(q) @ _rounded(k).T * default_scale(None, q)).half()
    return _rounded(_rounded(torch.softmax(S.to(q.dtype), 1)) @ _rounded(v))


def flash_float16(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """FlashAttention in float16: S is not rounded; P is rounded before it is divided by its sum."""
    S = _rounded(q) @ _rounded(k).T * default_scale(None, q)
    P = (S - S.amax(1, keepdim=True)).exp()
    return _rounded(_rounded(P) @ _rounded(v) / P.sum(1, keepdim=True))


def _rounded(t: Tensor) -> Tensor:
    return t.half().to(t.dtype)


def rms_error(ours: Tensor, exact: Tensor) -> float:
    return (ours.double() - exact).square().mean().sqrt().item()
