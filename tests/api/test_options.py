"""Masks, windows, softcap, ALiBi, scale and dropout, alone and together, with the gradients of all of them."""

import pytest
import torch
from helpers import check_against_reference, make_qkv

from flash_attn_ext import flash_attn

pytestmark = pytest.mark.any_device

SHAPE = (2, 4, 70, 131, 24)
MASK_SHAPES = [
    (70, 131), (1, 131), (70, 1), (1, 1), (2, 1, 1, 131), (1, 4, 70, 131), (2, 4, 70, 131), (2, 1, 70, 1), (1, 4, 1, 1),
]  # fmt: skip
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_bool_mask(isa, shape):
    check_against_reference(*make_qkv(*SHAPE), torch.rand(shape) > 0.3)


@dtypes
@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_float_mask_and_its_gradient(isa, dtype, shape):
    check_against_reference(*make_qkv(*SHAPE, dtype=dtype), torch.randn(shape, dtype=dtype).requires_grad_())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_mask_on_16_bit_inputs(dtype):
    q, k, v = make_qkv(*SHAPE, dtype=dtype)
    mask = torch.randn(2, 1, 70, 131)
    exact_in_16_bit = mask.to(dtype).float().requires_grad_()
    check_against_reference(q, k, v, exact_in_16_bit)


def test_float_mask_with_minus_infinity(isa):
    mask = torch.randn(70, 131).masked_fill(torch.rand(70, 131) < 0.4, -torch.inf)
    mask[3] = -torch.inf
    check_against_reference(*make_qkv(*SHAPE), mask)


def test_transposed_and_strided_masks(isa):
    check_against_reference(*make_qkv(*SHAPE), torch.randn(131, 70).t().requires_grad_())
    check_against_reference(*make_qkv(*SHAPE), torch.randn(2, 4, 140, 262)[:, :, ::2, ::2].requires_grad_())
    check_against_reference(*make_qkv(*SHAPE), (torch.rand(131, 4, 2, 70) > 0.2).permute(2, 1, 3, 0))


@dtypes
def test_a_float_mask_gives_the_same_bits_in_any_layout(isa, dtype):
    """The CPU reads contiguous rows of a mask in place, and copies other rows to a tile."""
    mask = torch.randn(70, 131, dtype=dtype)
    mask[:48, :90] = -torch.inf  # a whole tile, and the beginning of the next
    mask[60, 70:] = -torch.inf
    inputs = make_qkv(*SHAPE, dtype=dtype)
    odd_rows = torch.empty(70, 141, dtype=dtype)[:, 3:134].copy_(mask)
    by_columns = mask.t().contiguous().t()
    slopes = torch.rand(4, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for options in ({}, {"softcap": 3.0, "alibi_slopes": slopes, "window": (60, 40)}):
        expected = flash_attn(*inputs, mask, **options)
        assert torch.equal(flash_attn(*inputs, odd_rows, **options), expected)
        assert torch.equal(flash_attn(*inputs, by_columns, **options), expected)


@pytest.mark.parametrize("causal", ["upper_left", "lower_right"])
def test_mask_combined_with_causal(isa, causal):
    """torch refuses the combination; here both apply (padding of a causal model needs no S x S mask)."""
    check_against_reference(*make_qkv(*SHAPE), torch.rand(2, 1, 1, 131) > 0.3, causal=causal)
    check_against_reference(*make_qkv(*SHAPE), torch.randn(70, 131).requires_grad_(), causal=causal)


@dtypes
@pytest.mark.parametrize("causal", [None, "upper_left", "lower_right"])
@pytest.mark.parametrize("window", [0, 5, (20, 0), (0, 20), (-1, 3), (64, 64), (7, -1), (1000, 1000)], ids=str)
def test_sliding_window(isa, dtype, causal, window):
    check_against_reference(*make_qkv(1, 2, 100, 150, 16, dtype=dtype), causal=causal, window=window)
    check_against_reference(*make_qkv(1, 2, 150, 100, 16, dtype=dtype), causal=causal, window=window)


@dtypes
@pytest.mark.parametrize("softcap", [0.5, 5.0, 50.0])
def test_softcap(isa, dtype, softcap):
    check_against_reference(*make_qkv(*SHAPE, dtype=dtype), softcap=softcap)


@dtypes
@pytest.mark.parametrize("causal", [None, "upper_left", "lower_right"])
@pytest.mark.parametrize("per_batch", [False, True])
def test_alibi_and_the_gradient_of_its_slopes(isa, dtype, causal, per_batch):
    slopes = (torch.rand((2, 4) if per_batch else (4,), dtype=dtype) * 0.2).requires_grad_()
    check_against_reference(*make_qkv(*SHAPE, dtype=dtype), alibi_slopes=slopes, causal=causal)


@pytest.mark.parametrize("scale", [0.0, 1.0, -0.3, 2.5])
def test_scale(isa, scale):
    check_against_reference(*make_qkv(*SHAPE), scale=scale)
    check_against_reference(*make_qkv(*SHAPE), scale=scale, softcap=3.0)


@dtypes
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.9])
def test_dropout(isa, dtype, dropout_p):
    check_against_reference(*make_qkv(*SHAPE, dtype=dtype), dropout_p=dropout_p, causal="lower_right")


def test_dropout_of_all_elements(isa):
    out, lse = check_against_reference(*make_qkv(*SHAPE), dropout_p=1.0)
    assert (out == 0).all()
    assert torch.isfinite(lse).all()


@dtypes
def test_all_options_together(isa, dtype):
    q, k, v = make_qkv(2, 4, 70, 131, 24, 40, heads_kv=2, dtype=dtype)
    mask = torch.randn(2, 1, 70, 131, dtype=dtype).requires_grad_()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=dtype).requires_grad_()
    check_against_reference(
        q, k, v, mask, alibi_slopes=slopes, causal="lower_right", window=(60, 0), softcap=8.0, scale=0.4, dropout_p=0.2
    )
