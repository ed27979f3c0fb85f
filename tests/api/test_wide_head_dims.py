"""Head dimensions above 512, up to 1024, in every pass; values that are columns of the keys."""

import pytest
import torch
from helpers import (
    assert_hessian_vector_products_agree,
    check_against_reference,
    check_forward_against_reference,
    check_jvp_against_reference,
    leaves,
    make_qkv,
)

from flash_attn_ext import flash_attn

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@dtypes
@pytest.mark.parametrize("head_dim", [513, 528, 576, 1000, 1024])
def test_forward_and_backward(isa, dtype, head_dim):
    for head_dim_v in (1, 512, 576, 1024):
        inputs = make_qkv(1, 2, 33, 67, head_dim, head_dim_v, heads_kv=1, dtype=dtype)
        check_against_reference(*inputs, causal="lower_right")


@dtypes
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(513, 1), (576, 512), (1024, 1024)])
@pytest.mark.parametrize("heads", [3, 16, 40, 128])
def test_decode(isa, dtype, head_dim, head_dim_v, heads):
    check_forward_against_reference(*make_qkv(1, heads, 1, 83, head_dim, head_dim_v, heads_kv=1, dtype=dtype))


def test_a_narrow_head_dim_with_wide_values():
    check_against_reference(*make_qkv(1, 2, 20, 70, 16, 1024))


def test_forward_mode(isa):
    check_jvp_against_reference(make_qkv(1, 2, 20, 70, 576, 512), causal="lower_right")


def test_double_backward(isa):
    inputs = tuple(t.detach() for t in make_qkv(1, 1, 5, 9, 576, 513, dtype=torch.float64))
    assert_hessian_vector_products_agree(lambda q, k, v: flash_attn(q, k, v, is_causal=True).pow(3).sum(), inputs)


@dtypes
@pytest.mark.parametrize("seqlen_q", [1, 20])
def test_values_that_are_columns_of_the_keys(isa, dtype, seqlen_q):
    """One row is key and value, as in latent attention: bits as with a copy, and both gradients add up in the row."""
    q = torch.randn(2, 16, seqlen_q, 576, dtype=dtype, requires_grad=True)
    rows = torch.randn(2, 1, 70, 576, dtype=dtype, requires_grad=True)
    copies = leaves([q, rows, rows[..., :512].detach().clone().requires_grad_()])

    def attend(q, k, v):
        return flash_attn(q, k, v, causal="lower_right", enable_gqa=True)

    out, apart = attend(q, rows, rows[..., :512]), attend(*copies)
    assert torch.equal(out, apart)
    grad = torch.randn_like(out)
    dq, d_rows = torch.autograd.grad(out, [q, rows], grad)
    expected_dq, dk, dv = torch.autograd.grad(apart, copies, grad)
    assert torch.equal(dq, expected_dq)
    assert torch.equal(d_rows, dk + torch.nn.functional.pad(dv, (0, 64)))
