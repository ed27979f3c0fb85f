"""float8_e4m3fn query, key and value in the CUDA kernels' host build: simt widens keys and values as it reads them."""

import pytest
import reference
import torch
from tolerances import assert_as_exact_as_torch

from flash_attn_ext import flash_attn, flash_attn_varlen

NAMES = ("q_descale", "k_descale", "v_descale")
H, HK, D = 4, 2, 64

pytestmark = pytest.mark.usefixtures("kernels")


def make(batch, seqlen):
    tensors = [(8 * torch.randn(batch, heads, seqlen, D)).to(torch.float8_e4m3fn) for heads in (H, HK, HK)]
    factors = {name: torch.rand(batch, HK) / 5 + 0.02 for name in NAMES}
    values = [
        t.double() * factors[name].double().repeat_interleave(t.shape[1] // HK, 1)[..., None, None]
        for t, name in zip(tensors, NAMES, strict=True)
    ]
    return tensors, factors, values


def check(out, lse, values, **options):
    exact = reference.attention(*values, **options)
    theirs = reference.attention(*(t.to(out.dtype) for t in values), **options)
    for name, a, b, c in zip(("out", "lse"), (out, lse), theirs, exact, strict=True):
        assert_as_exact_as_torch(name, a, b, c, 2)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16])
def test_dense(kernels, out_dtype):
    tensors, factors, values = make(2, 70)
    given = dict(out_dtype=out_dtype, causal="lower_right", return_lse=True)
    out, lse = flash_attn(*tensors, enable_gqa=True, **given, **factors)
    assert kernels.tier == "simt"
    assert out.dtype == out_dtype
    check(out, lse, values, causal="lower_right")


def test_packed(kernels):
    """Both sequences have factors of their own, and the rows of one cache."""
    tensors, factors, values = make(2, 40)
    rows, at = [t.transpose(1, 2).flatten(0, 1) for t in tensors], torch.tensor([0, 40, 80])
    out, lse = flash_attn_varlen(*rows, at, at, 40, 40, enable_gqa=True, return_lse=True, **factors)
    assert kernels.tier == "simt"
    check(out.unflatten(0, (2, 40)).transpose(1, 2), lse.unflatten(1, (2, 40)).transpose(0, 1), values)
