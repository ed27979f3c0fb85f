"""Scores far from 0: the backward's P, and mask values up to finfo.min in the scores and in lse."""

import math

import pytest
import torch
from helpers import gradients, leaves, make_qkv
from tolerances import EPS
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flash_attn_ext import flash_attn

wide_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


@pytest.mark.any_device
@wide_dtypes
@pytest.mark.parametrize("seqlen_q", [4, 64])  # the decode kernel's forward, the other one's
@pytest.mark.parametrize("deviation", [1, 10, 80])  # scores up to 3, 300, 20000
def test_one_key_has_all_the_weight(isa, dtype, seqlen_q, deviation):
    """P is 1, so dv is the sum of dout: to the last bits, however large the score."""
    q, k, v = make_qkv(1, 2, seqlen_q, 1, 64, dtype=dtype)
    with torch.no_grad():
        q *= deviation
        k *= deviation
    dout = torch.randn(1, 2, seqlen_q, 64, dtype=dtype)
    (dv,) = torch.autograd.grad(flash_attn(q, k, v), v, dout)
    exact = dout.double().sum(2, keepdim=True)
    assert (dv - exact).abs().max() <= 8 * EPS[dtype] * dout.abs().sum(2).max()


@pytest.mark.parametrize("seqlen_q", [4, 130])  # the decode kernel's forward, the other one's
@pytest.mark.parametrize("deviation", [1, 3, 10, 30])
def test_gradients_of_peaked_rows_err_as_torch_s(isa, seqlen_q, deviation):
    inputs = make_qkv(1, 4, seqlen_q, 150, 64)
    with torch.no_grad():
        inputs[0] *= deviation
        inputs[1] *= deviation
    dout = torch.randn(1, 4, seqlen_q, 64)
    exact_in = leaves(inputs, torch.float64)
    exact = gradients([sdpa(*exact_in)], exact_in, [dout.double()])
    ours, theirs = (gradients([f(*inputs)], inputs, [dout]) for f in (flash_attn, sdpa))
    for name, a, b, c in zip(("dq", "dk", "dv"), ours, theirs, exact, strict=True):
        error, allowed = ((x - c).norm().item() for x in (a, b))
        assert error <= 1.3 * allowed + 16 * EPS[torch.float32] * c.norm().item(), (name, error, allowed)


@pytest.mark.any_device
@wide_dtypes
@pytest.mark.parametrize("seqlen_q", [2, 20])
def test_mask_values_up_to_the_largest_keep_their_difference(isa, dtype, seqlen_q):
    lowest = torch.finfo(dtype).min
    q, k, v = make_qkv(1, 1, seqlen_q, 40, 16, dtype=dtype)
    mask = torch.full((1, 1, seqlen_q, 40), lowest, dtype=dtype)
    out, lse = flash_attn(q, k, v, mask, return_lse=True)
    assert (lse == lowest).all()
    torch.testing.assert_close(out, v.mean(2, keepdim=True).expand_as(out))
    mask[..., 7] = lowest * 0.9  # the only key with a weight
    out, lse = flash_attn(q, k, v, mask, return_lse=True)
    assert torch.equal(out, v[:, :, 7:8].expand_as(out))
    torch.testing.assert_close(lse, mask[:, :, :, 7])


@wide_dtypes
@pytest.mark.parametrize("seqlen_q", [1, 64])  # the decode kernel, the other one
def test_no_weight_is_subnormal(isa, dtype, seqlen_q):
    """CPUs of Intel take 100 cycles and more for a multiply-add with a subnormal number. Smaller weights are 0."""
    keys, smallest = 256, torch.finfo(dtype).smallest_normal
    scores = torch.linspace(0, 1.1 * math.log(smallest), keys, dtype=dtype)
    q, k = (torch.zeros(1, 1, rows, 16, dtype=dtype) for rows in (seqlen_q, keys))
    v = (8 * torch.eye(keys, dtype=dtype)).expand(1, 1, keys, keys).requires_grad_()  # out is 8 P
    out = flash_attn(q, k, v, scores.expand(1, 1, seqlen_q, keys))
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    weights = scores.double().softmax(0)
    least_of_backward = {torch.float32: 2.0**-98, torch.float64: 2.0**-898}[dtype]
    for found, factor, least in ((out[0, 0, 0], 8, 8 * smallest), (dv[0, 0, :, 0], seqlen_q, least_of_backward)):
        assert ((found == 0) | (found >= smallest)).all()
        assert (found == 0).any()
        shown = weights >= least
        torch.testing.assert_close(found[shown].double(), factor * weights[shown], rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("log2_score", [5, 12, 13, 60])  # the same part of all products
def test_a_common_part_of_the_scores_cancels(isa, dtype, log2_score):
    """The maximum of a row is subtracted with an error that is far below a weight's, however large the scores."""
    if dtype == torch.float16 and log2_score > 28:
        pytest.skip("not a number of float16")
    q, k, v = make_qkv(1, 2, 64, 200, 64, dtype=dtype)
    with torch.no_grad():
        q[..., 0] = 2.0 ** (log2_score / 2)
        k[..., 0] = 1.5 * q[0, 0, 0, 0]  # 1.5 log2(e) is rounded
    out, lse = flash_attn(q, k, v, return_lse=True)
    scores = q.double() @ k.double().mT / 8
    # A score errs by some ulp of the largest score. At 60 this is more than the differences between scores.
    rounding = min(8 * EPS[torch.float32] * scores.abs().max().item(), 1)
    exact = scores.softmax(-1) @ v.double()
    assert (out - exact).norm() <= (2 * EPS[dtype] + rounding) * exact.norm()
    assert ((lse - scores.logsumexp(-1)).abs() <= 4 * EPS[torch.float32] * scores.abs().amax(-1).clamp(1)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_large_scores_of_a_row_keep_the_bits_of_other_rows(isa, dtype):
    """The rows of a vector share the code that chooses how to compute P."""
    q, k, v = (t.detach().to(dtype) for t in make_qkv(1, 1, 70, 150, 64))
    large = q.clone()
    large[:, :, 5] *= 2.0**12
    others = [i for i in range(70) if i != 5]
    assert torch.equal(flash_attn(large, k, v)[:, :, others], flash_attn(q, k, v)[:, :, others])
