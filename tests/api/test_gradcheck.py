"""Numerical gradients in fp64, for every input that has one and for out and lse together."""

import itertools

import pytest
import torch

from flash_attn_ext import flash_attn, new_rng_state

pytestmark = pytest.mark.any_device

OPTIONS = {
    "plain": {},
    "upper_left": {"causal": "upper_left"},
    "lower_right": {"causal": "lower_right"},
    "window": {"window": (3, 2)},
    "causal_window": {"causal": "lower_right", "window": (3, 0)},
    "softcap": {"softcap": 0.8},
    "scale": {"scale": -0.6},
    "dropout": {"dropout_p": 0.3},
    "everything": {"causal": "lower_right", "window": (6, -1), "softcap": 2.0, "scale": 0.5, "dropout_p": 0.2},
}


def leaf(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("heads", "heads_kv"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("bias", ["none", "mask", "alibi", "both"])
def test_gradcheck(isa, name, heads, heads_kv, bias):
    q, k, v = leaf(2, heads, 5, 3), leaf(2, heads_kv, 9, 3), leaf(2, heads_kv, 9, 4)
    mask = leaf(2, 1, 5, 9) if bias in ("mask", "both") else None
    slopes = torch.rand(heads, dtype=torch.float64).requires_grad_() if bias in ("alibi", "both") else None
    sink = leaf(heads) if bias == "both" else None
    options = dict(OPTIONS[name])
    if "dropout_p" in options:
        options["rng_state"] = new_rng_state()

    def run(q, k, v, mask, slopes, sink):
        return flash_attn(q, k, v, mask, enable_gqa=True, alibi_slopes=slopes, sink=sink, return_lse=True, **options)

    assert torch.autograd.gradcheck(run, (q, k, v, mask, slopes, sink), fast_mode=False)


@pytest.mark.parametrize("shape", [(5, 9), (1, 9), (5, 1), (1, 1), (2, 1, 1, 9), (1, 2, 5, 9), (2, 2, 1, 1)], ids=str)
def test_gradcheck_of_broadcast_masks(shape):
    q, k, v, mask = leaf(2, 2, 5, 3), leaf(2, 2, 9, 3), leaf(2, 2, 9, 3), leaf(*shape)
    assert torch.autograd.gradcheck(lambda *a: flash_attn(*a, return_lse=True), (q, k, v, mask))


def test_gradcheck_over_several_tiles():
    inputs = leaf(1, 1, 70, 2), leaf(1, 1, 140, 2), leaf(1, 1, 140, 2)
    options = {"causal": "lower_right", "window": (80, 0), "return_lse": True}
    assert torch.autograd.gradcheck(lambda *a: flash_attn(*a, **options), inputs, fast_mode=True)


def test_gradcheck_of_expanded_and_transposed_inputs():
    q = torch.randn(2, 5, 2, 3, dtype=torch.float64).requires_grad_()
    k, v = leaf(1, 2, 9, 3), leaf(2, 2, 3, 9)
    assert torch.autograd.gradcheck(
        lambda q, k, v: flash_attn(q.transpose(1, 2), k.expand(2, 2, 9, 3), v.transpose(2, 3)), (q, k, v)
    )


def test_only_inputs_that_require_a_gradient_get_one():
    """Each subset of the inputs alone, against the gradients with all of them."""
    tensors = [leaf(2, 4, 5, 3), leaf(2, 2, 9, 3), leaf(2, 2, 9, 4), leaf(5, 9), leaf(4), leaf(4)]

    def run(inputs):
        q, k, v, mask, slopes, sink = inputs
        return flash_attn(q, k, v, mask, enable_gqa=True, alibi_slopes=slopes, sink=sink, return_lse=True)

    out, lse = run(tensors)
    expected = torch.autograd.grad(out.sin().sum() + lse.sum(), tensors)
    for wanted in itertools.product([False, True], repeat=6):
        if not any(wanted):
            continue
        inputs = [t.detach().requires_grad_(w) for t, w in zip(tensors, wanted, strict=True)]
        out, lse = run(inputs)
        (out.sin().sum() + lse.sum()).backward()
        for t, w, e in zip(inputs, wanted, expected, strict=True):
            assert (t.grad is not None) == w
            if w:
                torch.testing.assert_close(t.grad, e, rtol=0, atol=1e-12)


def test_gradient_through_lse_alone_and_out_alone():
    q, k, v = leaf(1, 2, 5, 3), leaf(1, 2, 9, 3), leaf(1, 2, 9, 3)
    assert torch.autograd.gradcheck(lambda q, k: flash_attn(q, k, v.detach(), return_lse=True)[1], (q, k))
    assert torch.autograd.gradcheck(lambda *a: flash_attn(*a, return_lse=True)[0], (q, k, v))
