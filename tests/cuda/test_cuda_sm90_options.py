"""Softcap, and masks that all heads and queries share, in the Hopper tier on the host (tests/cuda_host), against the
dense oracle.

Tiles: test_cuda_sm90.py, test_cuda_sm90_backward.py; at head dimension 64 the backward's have 64 query rows here.
"""

import pytest
import reference
import torch
from cuda_host import library
from helpers import check_against_reference, make_qkv

from flash_attn_ext import flash_attn

head_dims = pytest.mark.parametrize("head_dim", [64, 128, 256])


@pytest.fixture(autouse=True)
def kernels(built):
    # test_cuda_sm90_few_rows.py tests splits of the keys.
    with library.on_hopper(built, num_splits=1, deterministic=True) as loaded:
        yield loaded


def make(*shape, dtype=torch.bfloat16, **options):
    return make_qkv(*shape, dtype=dtype, **options)


def check(kernels, q, k, v, *mask, **options):
    """Both passes, on this tier."""
    with torch.no_grad():
        flash_attn(q, k, v, *mask, enable_gqa=True, **options)
    assert b"sm90::forward_kernel" in kernels.c.last_kernel()
    check_against_reference(q, k, v, *mask, **options)
    assert b"sm90::dq_kernel" in kernels.c.last_kernel()


def run(inputs, grad, *mask, **options):
    """out and the gradients of q, k and v."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    out = flash_attn(*inputs, *mask, enable_gqa=True, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


# ---- softcap


@head_dims
@pytest.mark.parametrize(("softcap", "dtype"), [(2.0, torch.float16), (30.0, torch.bfloat16)], ids=str)
def test_softcap(kernels, head_dim, softcap, dtype):
    check(kernels, *make(1, 1, 129, 131, head_dim, dtype=dtype), softcap=softcap, causal="lower_right")
    check(kernels, *make(1, 2, 200, 65, head_dim, heads_kv=1, dtype=dtype), softcap=softcap, window=(30, 40))


@head_dims
def test_softcap_of_scores_far_beyond_it(kernels, head_dim):
    """The tanh is 1 in most places and its derivative 0."""
    q, k, v = make(1, 1, 70, 150, head_dim)
    check(kernels, (8 * q).detach().requires_grad_(), k, v, softcap=3.0)


def test_softcap_takes_any_scale(kernels):
    check(kernels, *make(1, 1, 40, 150, 64), softcap=3.0, scale=-0.3)


def test_softcap_is_as_exact_as_fp32(kernels):
    """An approximation of tanh with an error of 2^-11 would move a score by 15 x 2^-11 = 0.007, and lse by 0.001."""
    q, k, v = (t.detach() for t in make(1, 1, 40, 300, 128))
    q[:, :, :, 0] *= 40
    lse = flash_attn(q, k, v, softcap=15.0, return_lse=True)[1]
    assert b"sm90::forward_kernel" in kernels.c.last_kernel()
    exact = reference.attention(q.double(), k.double(), v.double(), softcap=15.0)[1]
    torch.testing.assert_close(lse.double(), exact, rtol=0, atol=2e-5)


@head_dims
@pytest.mark.parametrize("where", [0, 1, 2])
def test_softcap_and_hidden_keys(kernels, head_dim, where):
    """The kernel also repairs rows with a softcap."""
    inputs = [t.detach() for t in make(1, 1, 150, 150, head_dim)]
    grad = torch.randn(1, 1, 150, head_dim).bfloat16()
    clean = run(inputs, grad, softcap=2.0, causal="upper_left")
    inputs[where][:, :, 100, 5] = torch.nan
    found = run(inputs, grad, softcap=2.0, causal="upper_left")
    assert b"sm90::dq_kernel" in kernels.c.last_kernel()
    reached = slice(100) if where else [i for i in range(150) if i != 100]
    for ours, expected in zip(found[:2], clean[:2], strict=True):  # out and dq
        torch.testing.assert_close(ours[:, :, reached], expected[:, :, reached], rtol=0, atol=0.02)
    for ours, expected in zip(found[2:], clean[2:], strict=True):
        if where == 0:  # keys that the poisoned query does not see
            torch.testing.assert_close(ours[:, :, 101:], expected[:, :, 101:], rtol=0, atol=0.02)


# ---- masks


def padding(batch, length, case):
    """bool (B, 1, 1, S_k), another mask for each sequence."""
    at = torch.arange(length)
    rows = {
        "right": lambda b: at < (length * (b + 1)) // (batch + 1),
        "left": lambda b: at >= (length * (b + 1)) // (batch + 1),
        "holes": lambda b: (at // (40 + 31 * b)) % 2 == b % 2,
        "random": lambda b: torch.rand(length) > 0.3,
        "nothing or one": lambda b: at == (length - 1 if b else length),
    }[case]
    return torch.stack([rows(b) for b in range(batch)])[:, None, None]


@pytest.mark.parametrize(
    ("head_dim", "case"),
    [(64, "nothing or one"), (64, "random"), (128, "right"), (128, "holes"), (256, "left"), (256, "random")],
)
def test_key_masks(kernels, head_dim, case):
    mask = padding(2, 300, case)
    check(kernels, *make(2, 2, 70, 300, head_dim, heads_kv=1), mask)


@pytest.mark.parametrize(
    ("head_dim", "case", "deterministic"),
    [(64, "right", True), (64, "holes", True), (64, "left", False), (128, "left", True), (256, "right", True)],
)
def test_key_masks_with_a_band(kernels, head_dim, case, deterministic):
    """Whole tiles are masked. Band and mask determine which blocks add to a tile of dQ, and in which turn."""
    kernels.deterministic = deterministic
    check(kernels, *make(2, 1, 200, 400, head_dim), padding(2, 400, case), causal="lower_right", window=(150, 0))


@pytest.mark.parametrize("seed", range(4))
def test_softcap_mask_and_band(kernels, seed):
    torch.manual_seed(seed)
    seqlen_q, seqlen_k, head_dim = torch.randint(17, 300, ()), torch.randint(1, 400, ()), (64, 128, 256)[seed % 3]
    mask = torch.rand(3, 1, 1, seqlen_k) > torch.rand(())
    q, k, v = make(3, 2, seqlen_q, seqlen_k, head_dim, heads_kv=1, dtype=torch.float16)
    check(kernels, q, k, v, mask, softcap=5.0, causal=(None, "upper_left", "lower_right")[seed % 3])


def test_one_mask_for_the_batch_and_a_sink(kernels):
    q, k, v = make(2, 2, 70, 200, 64)
    mask = torch.arange(200).lt(130)[None, None, None]
    check_against_reference(q, k, v, mask, sink=torch.randn(2).requires_grad_())
    assert b"sink_gradient_kernel" in kernels.c.last_kernel()


def test_key_mask_beside_a_mask(kernels):
    """A key is hidden if either of the two masks hides it."""
    q, k, v = (t.detach() for t in make(2, 2, 70, 200, 64))
    mask, keys = padding(2, 200, "holes"), padding(2, 200, "right")[:, 0, 0]
    assert torch.equal(flash_attn(q, k, v, mask, key_mask=keys), flash_attn(q, k, v, mask & keys[:, None, None]))
    assert b"sm90::forward_kernel" in kernels.c.last_kernel()


@pytest.mark.parametrize(
    ("head_dim", "where", "poison"),
    [(64, "k", torch.nan), (64, "v", torch.inf), (128, "k", torch.inf), (256, "v", torch.nan)],
)
def test_masked_values_cannot_poison(kernels, head_dim, where, poison):
    inputs = dict(zip("qkv", (t.detach() for t in make(2, 1, 70, 200, head_dim)), strict=True))
    grad = torch.randn(2, 1, 70, head_dim).bfloat16()
    mask = padding(2, 200, "holes")
    clean = run(inputs.values(), grad, mask)
    inputs[where].masked_fill_(~mask[:, :, 0, :, None], poison)
    found = run(inputs.values(), grad, mask)
    assert b"sm90::dq_kernel" in kernels.c.last_kernel()
    for ours, expected in zip(found, clean, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0.02)


@head_dims
def test_masked_keys_have_no_gradient_whatever_the_queries_hold(kernels, head_dim):
    q, k, v = (t.detach() for t in make(1, 1, 70, 200, head_dim))
    grad = torch.randn(1, 1, 70, head_dim).bfloat16()
    q[:, :, 30] = torch.nan
    mask = padding(1, 200, "random")
    for ours in run([q, k, v], grad, mask)[2:]:
        assert (ours[:, :, ~mask[0, 0, 0]] == 0).all()
        assert ours[:, :, mask[0, 0, 0]].isnan().all()


def test_whole_tiles_that_are_masked_cost_nothing(kernels):
    """The test counts exponentials: for each tile as many as two warps compute."""
    q, k, v = (t.detach() for t in make(1, 1, 192, 1280, 64))
    work = []
    for shown in (128, 1280):
        before = kernels.c.exponentials()
        flash_attn(q, k, v, torch.arange(1280).lt(shown)[None, None, None])
        work.append(kernels.c.exponentials() - before)
    assert work[1] > 8 * work[0]


REFUSED = {
    "values": torch.zeros(1, 1, 1, 30),
    "by queries": torch.ones(20, 30, dtype=torch.bool),
    "by heads": torch.ones(1, 2, 1, 30, dtype=torch.bool),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_masks_go_elsewhere(kernels, case):
    mask = REFUSED[case]
    q, k, v = make(1, 2, 20, 30, 64)
    check_against_reference(q, k, v, mask.bfloat16() if mask.is_floating_point() else mask)
    assert b"sm90" not in kernels.c.last_kernel()
