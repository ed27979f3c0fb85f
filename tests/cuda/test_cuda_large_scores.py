"""Scores far from 0 in the CUDA kernels' host run: the CPU kernels' tests."""

import pytest
import test_large_scores
import torch

from flash_attn_ext import flash_attn

pytestmark = pytest.mark.usefixtures("kernels")


test_one_key_has_all_the_weight = test_large_scores.test_one_key_has_all_the_weight
test_gradients_of_peaked_rows = test_large_scores.test_gradients_of_peaked_rows_err_as_torch_s
test_mask_values_up_to_the_largest = test_large_scores.test_mask_values_up_to_the_largest_keep_their_difference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seqlen_q", [2, 20], ids=["decode", "forward"])
def test_mask_values_up_to_the_largest_on_tensor_cores(kernels, dtype, seqlen_q):
    """In fp32 arithmetic, where bfloat16's finfo.min is near the end of the range."""
    lowest = torch.finfo(dtype).min
    q, k, v = (torch.randn(1, 1, n, 16, dtype=dtype) for n in (seqlen_q, 40, 40))
    mask = torch.full((1, 1, seqlen_q, 40), lowest, dtype=dtype)
    out, lse = flash_attn(q, k, v, mask, return_lse=True)
    torch.testing.assert_close(lse, torch.full_like(lse, lowest), rtol=1e-3, atol=0)
    if dtype == torch.bfloat16:  # in float16 the scores still matter next to it
        assert (lse == lowest).all()
        torch.testing.assert_close(out, v.float().mean(2, keepdim=True).to(dtype).expand_as(out))
    mask[..., 7] = lowest * 0.875  # the only key with a weight
    out, lse = flash_attn(q, k, v, mask, return_lse=True)
    assert torch.equal(out, v[:, :, 7:8].expand_as(out))
    torch.testing.assert_close(lse, mask[:, :, :, 7].float(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("seqlen_q", [4, 64], ids=["decode", "forward"])
@pytest.mark.parametrize("deviation", [1, 10, 80])  # scores up to 3, 300, 20000
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_one_key_has_all_the_weight_on_tensor_cores(kernels, dtype, seqlen_q, deviation):
    """P is 1: fp32 in between rounds it less than 16 bits would."""
    q, k, v = (torch.randn(1, 2, n, 64).mul(f).to(dtype) for n, f in ((seqlen_q, deviation), (1, deviation), (1, 1)))
    dout = torch.randn(1, 2, seqlen_q, 64).to(dtype)
    (dv,) = torch.autograd.grad(flash_attn(q, k, v.requires_grad_()), v, dout)
    exact = dout.double().sum(2, keepdim=True)
    bound = 2 * 2.0 ** (-8 if dtype == torch.bfloat16 else -11)
    assert (dv - exact).abs().max() <= bound * dout.double().abs().sum(2).max()
