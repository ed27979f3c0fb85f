"""Functions of the user and block masks on the CUDA kernels' host build, against dense references.

Here is the tier simt; test_cuda_sm80_flex.py and test_cuda_sm90_flex.py have the other tiers.
"""

import pytest
import test_flex_attention as cpu
import torch
from cuda_host import library
from flex_gallery import MASKS, SCORES, mask_mods, score_mods
from flex_reference import dense_flex
from torch.nn.attention.flex_attention import create_block_mask

from flash_attn_ext import flash_attn, flash_attn_varlen, flex_attention

pytestmark = pytest.mark.usefixtures("kernels")

SHAPE = (1, 2, 1, 67, 70, 8)  # B, H, H_kv, S_q, S_k, D

# CPU tests that also apply here.
test_masked_nan = cpu.test_masked_nan_does_not_reach_other_rows


@pytest.mark.parametrize("name", SCORES)
def test_score_functions(name):
    score_mod, captured = score_mods(2, 67, 70, torch.float64)[name]
    cpu.check(SHAPE, torch.float64, score_mod, captured=captured)


@pytest.mark.parametrize("name", MASKS)
def test_block_masks(name):
    for block_size in (32, (48, 100)):
        cpu.check(SHAPE, torch.float32, None, mask_mods(1, 67, 70)[name], block_size=block_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_and_wide_head_dimensions(dtype):
    score_mod, _ = score_mods(4, 20, 70, torch.float64)["everything"]
    cpu.check((2, 4, 2, 20, 70, 136), dtype, score_mod, mask_mods(2, 20, 70)["document"], block_size=16)


@pytest.mark.parametrize("bias_shape", [(67, 70), (2, 1, 70)], ids=str)
def test_with_the_other_options(bias_shape):
    q, k, v, dout = cpu.make(SHAPE, torch.float64)
    slopes = torch.rand(2, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(*bias_shape, dtype=torch.float64, requires_grad=True)
    factors = torch.rand(2, dtype=torch.float64, requires_grad=True)
    score_mod = lambda s, b, h, i, j: torch.tanh(s) * factors[h]  # noqa: E731
    distance = (torch.arange(67)[:, None] - torch.arange(70)).abs()

    def all_of_it(s, b, h, i, j):
        return score_mod(s - slopes[h] * distance[i, j], b, h, i, j) + bias.expand(2, 67, 70)[h, i, j]

    ours = flash_attn(
        q, k, v, bias, enable_gqa=True, causal="upper_left", softcap=2.0, alibi_slopes=slopes, score_mod=score_mod,
        return_lse=True,
    )  # fmt: skip
    exact = dense_flex(q, k, v, all_of_it, lambda b, h, i, j: i >= j, softcap=2.0)
    inputs = (q, k, v, slopes, bias, factors)
    for a, b in zip(ours, exact, strict=True):
        torch.testing.assert_close(a, b)
    got, wanted = (torch.autograd.grad((out * dout.detach()).sum(), inputs) for out, _ in (ours, exact))
    torch.testing.assert_close(got, wanted)


def test_packed_sequences():
    lengths, heads = (70, 0, 5, 33), 2
    cu = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = (torch.randn(108, heads, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    score_mod = lambda s, b, h, i, j: torch.tanh(s) * (b + 1) + 0.125 * (i - j)  # noqa: E731
    out = flash_attn_varlen(q, k, v, cu, cu, score_mod=score_mod, mask_mod=lambda b, h, i, j: i + h >= j)
    alone = []
    for b, length in enumerate(lengths):
        rows = slice(cu[b], cu[b] + length)
        own = [t[rows].transpose(0, 1)[None] for t in (q, k, v)]
        if length:
            exact = dense_flex(
                *own, lambda s, _, h, i, j, b=b: score_mod(s, b, h, i, j), lambda _, h, i, j: i + h >= j
            )[0]
            alone.append(exact[0].transpose(0, 1))
    wanted, dout = torch.cat(alone), torch.randn_like(out)
    torch.testing.assert_close(out, wanted)
    got, exact = (torch.autograd.grad((o * dout).sum(), (q, k, v)) for o in (out, wanted))
    torch.testing.assert_close(got, exact)


def test_large_scores_keep_the_sum():
    """At scores near -1e9 a float32 lse loses log l. The backward computes log l again, with the function."""
    q, k, v = (torch.randn(1, 1, 5, 8, requires_grad=True) for _ in range(3))
    out = flex_attention(q, k, v, lambda s, b, h, i, j: s * 0 - 1e9)
    dv = torch.autograd.grad(out.sum(), v)[0]
    torch.testing.assert_close(dv, torch.ones_like(dv))  # 5 rows of weights 1 / 5


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30, torch.inf, -torch.inf, torch.nan])
def test_gradients_of_captured_elements_of_any_size(value):
    """Each element has its own unit. An infinite or NaN contribution reaches only the element that it belongs to."""
    q, k, v, dout = (torch.randn(1, 2, 70, 8, dtype=torch.float64) for _ in range(4))
    table = torch.zeros(70, dtype=torch.float64, requires_grad=True)
    sizes = torch.ones(70, dtype=torch.float64)
    sizes[3] = value
    score_mod = lambda s, b, h, i, j: s + table[j] * sizes[j]  # noqa: E731
    ours, exact = flex_attention(q, k, v, score_mod), dense_flex(q, k, v, score_mod)[0]
    got, wanted = (torch.autograd.grad((out * dout).sum(), table)[0] for out in (ours, exact))
    torch.testing.assert_close(
        got / sizes.where(sizes.isfinite(), 1), wanted / sizes.where(sizes.isfinite(), 1), equal_nan=True
    )


def test_gradients_of_captured_elements_have_the_same_bits_in_any_order(kernels):
    q, k, v = (torch.randn(1, 2, 70, 8) for _ in range(3))
    slopes = torch.rand(2, requires_grad=True)
    grads = []
    for seed in (1, 2):
        kernels.seed_order(seed)
        out = flex_attention(q, k, v, lambda s, b, h, i, j: s * slopes[h])
        grads += torch.autograd.grad(out.square().sum(), slopes)
    assert torch.equal(*grads)


def test_what_it_refuses(kernels):
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))

    def long(s, b, h, i, j):
        for n in range(200):
            s = torch.tanh(s * (n + 1.5))
        return s

    with torch.no_grad(), pytest.raises(library.KernelError, match="more than 384 instructions or 64 values"):
        flex_attention(q, k, v, long)


def test_blocks_that_a_mask_hides_are_not_read():
    """Values of hidden blocks are not loaded. A hidden NaN times a weight of 0 would be NaN."""
    q, k, v = (torch.randn(1, 1, 128, 8) for _ in range(3))
    mask = create_block_mask(lambda b, h, i, j: j < 64, None, None, 128, 128, "cpu", BLOCK_SIZE=64)
    expected = flex_attention(q, k[:, :, :64], v[:, :, :64])
    k[:, :, 64:] = v[:, :, 64:] = torch.nan
    assert torch.equal(flex_attention(q, k, v, block_mask=mask), expected)
