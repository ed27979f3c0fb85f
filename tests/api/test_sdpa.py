"""The positional arguments have the meaning of torch.nn.functional.scaled_dot_product_attention."""

import inspect

import pytest
import torch
from helpers import gradients, leaves
from tolerances import assert_as_exact_as_torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flash_attn_ext import explain, flash_attn


def check(q, k, v, mask=None, **options):
    inputs = [t.requires_grad_(t.is_floating_point()) for t in (q, k, v)]
    inputs.append(mask.requires_grad_(mask.is_floating_point()) if mask is not None else None)
    results = []
    grad = None
    for attention, dtype in ((flash_attn, None), (sdpa, None), (sdpa, torch.float64)):
        tensors = leaves(inputs, dtype)
        out = attention(*tensors, **options)
        grad = torch.randn_like(out) if grad is None else grad
        results.append([out, *gradients([out], tensors, [grad])])
    assert results[0][0].shape == results[1][0].shape
    for n, (ours, theirs, exact) in enumerate(zip(*results, strict=True)):
        assert_as_exact_as_torch(f"output {n}", ours, theirs, exact, 3)


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype)


def test_the_signature_starts_with_torchs():
    ours = list(inspect.signature(flash_attn).parameters.values())
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa"]
    assert [p.name for p in ours[: len(names)]] == names
    assert [p.default for p in ours[3 : len(names)]] == [None, 0.0, False, None, False]
    assert all(p.kind == p.KEYWORD_ONLY for p in ours[len(names) :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(70, 70), (33, 100), (100, 33), (1, 64)])
def test_4d(dtype, is_causal, seqlen_q, seqlen_k):
    q, k, v = randn(2, 3, seqlen_q, 24), randn(2, 3, seqlen_k, 24), randn(2, 3, seqlen_k, 24)
    check(*(t.to(dtype) for t in (q, k, v)), is_causal=is_causal)


def test_2d_and_3d():
    check(randn(20, 8), randn(30, 8), randn(30, 8))
    check(randn(5, 20, 8), randn(5, 30, 8), randn(5, 30, 12), scale=0.7)
    check(randn(5, 20, 8), randn(5, 30, 8), randn(5, 30, 8), randn(20, 30))
    check(randn(5, 20, 8), randn(5, 30, 8), randn(5, 30, 8), randn(5, 20, 30))
    check(randn(5, 20, 8), randn(5, 20, 8), randn(5, 20, 8), is_causal=True)


def test_more_batch_dimensions():
    check(randn(2, 3, 4, 20, 8), randn(2, 3, 4, 30, 8), randn(2, 3, 4, 30, 8))
    for mask in (randn(20, 30), randn(3, 1, 20, 30), randn(2, 1, 1, 1, 30), randn(2, 3, 4, 20, 30)):
        check(randn(2, 3, 4, 20, 8), randn(2, 3, 4, 30, 8), randn(2, 3, 4, 30, 8), mask)


def test_broadcast_batch_and_heads():
    check(randn(2, 3, 20, 8), randn(1, 3, 30, 8), randn(2, 3, 30, 8))
    check(randn(2, 3, 20, 8), randn(3, 30, 8), randn(2, 1, 30, 8))
    check(randn(1, 1, 20, 8), randn(2, 3, 30, 8), randn(2, 3, 30, 8))


def test_enable_gqa():
    check(randn(2, 8, 20, 16), randn(2, 2, 30, 16), randn(2, 2, 30, 16), enable_gqa=True)
    check(randn(8, 20, 16), randn(2, 30, 16), randn(2, 30, 16), enable_gqa=True)


def test_one_key_head_is_read_once_for_all_query_heads():
    """Multi-query attention has the bits of a group, with and without enable_gqa: no key head is expanded."""
    q, k, v = randn(2, 8, 1, 16), randn(2, 1, 300, 16), randn(2, 1, 300, 16)
    check(q, k, v)
    assert torch.equal(flash_attn(q, k, v), flash_attn(q, k, v, enable_gqa=True))
    assert "key (2, 1, 300, 16)" in str(explain(q, k, v))


@pytest.mark.parametrize("shape", [(30,), (20, 30), (1, 1, 30), (3, 20, 30), (2, 1, 1, 30), (2, 3, 20, 30)], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks(shape, kind):
    mask = torch.rand(shape) > 0.2 if kind == "bool" else randn(*shape)
    if shape == (30,):
        mask = mask[None]  # torch requires at least 2 dimensions
    check(randn(2, 3, 20, 8), randn(2, 3, 30, 8), randn(2, 3, 30, 8), mask)


def test_a_1d_mask_is_a_key_mask():
    q, k, v, mask = randn(2, 3, 20, 8), randn(2, 3, 30, 8), randn(2, 3, 30, 8), torch.rand(30) > 0.5
    torch.testing.assert_close(flash_attn(q, k, v, mask), flash_attn(q, k, v, mask[None, :]))


def test_dropout_keeps_the_mean():
    """Different random numbers than torch's, the same distribution."""
    q, k = randn(2, 4, 128, 16), randn(2, 4, 128, 16)
    v = torch.ones(2, 4, 128, 16)
    out = flash_attn(q, k, v, dropout_p=0.3)
    assert out.mean().item() == pytest.approx(1.0, abs=0.02)
    assert out.std() > 0.01
