"""Calls with products of float8, and how exact they must be.

The kernels round P, times 2^8, to float8_e4m3fn. A normal number has a relative error of at most 2^-4, a smaller number
an error of at most 2^-10. So the error of out is at most

    2^-4 (P |v|) + 2^-18 sum |v| / l

l is the row's sum of P relative to its largest element, so it is at least 1. lse has no rounded P, and the tolerance of
float32.
"""

import reference
import torch
from tolerances import EPS, assert_as_exact_as_torch

FLOAT8, NAMES = torch.float8_e4m3fn, ("q_descale", "k_descale", "v_descale")


def make(batch, heads, seqlen_q, seqlen_k, head_dim, heads_kv=None, head_dim_v=None):
    """float8 tensors (B, H, S, D), and different factors (B, H_kv). Scores have a standard deviation of about 2."""
    heads_kv = heads_kv or heads
    shapes = (heads, seqlen_q, head_dim), (heads_kv, seqlen_k, head_dim), (heads_kv, seqlen_k, head_dim_v or head_dim)
    tensors = [(16 * torch.randn(batch, *shape)).to(FLOAT8) for shape in shapes]
    return tensors, {name: (torch.rand(batch, heads_kv) + 0.5) / 12 for name in NAMES}


def decoded(tensors, factors):
    """The values of (B, H, S, D) tensors in fp64."""
    heads_kv = tensors[1].shape[1]
    return [
        t.double() * factors[name].double().repeat_interleave(t.shape[1] // heads_kv, 1)[..., None, None]
        for t, name in zip(tensors, NAMES, strict=True)
    ]


def check_values(out, lse, values, **options):
    """out and lse, (B, H, S, D_v) and (B, H, S), of decoded values."""
    q, k, v = values
    exact, exact_lse = reference.attention(q, k, v, **options)
    of_magnitudes = reference.attention(q, k, v.abs(), **options)[0]
    sums = v.abs().sum(2, keepdim=True).repeat_interleave(q.shape[1] // v.shape[1], 1)
    bound = 2**-4 * of_magnitudes + 2**-18 * sums + 4 * EPS[out.dtype] * exact.abs()
    assert torch.equal(out.isfinite(), exact.isfinite())
    error = (out.double() - exact).abs()
    assert (error <= bound).all(), f"{(error / bound).max():.3g} of the bound"
    assert_as_exact_as_torch("lse", lse, exact_lse, exact_lse, 2)
