"""attention_weights: the softmax averaged over the heads, and its gradients, as a separate operator."""

import math

import pytest
import reference
import torch
from helpers import gradients, leaves, make_qkv
from tolerances import assert_as_exact_as_torch

from flash_attn_ext import _ops, dropout_mask, flash_attn, new_rng_state

OPTIONS = {
    "plain": {},
    "upper_left": {"causal": "upper_left"},
    "causal_window": {"causal": "lower_right", "window": (30, 0)},
    "softcap": {"softcap": 0.8, "scale": 0.5},
    "dropout": {"dropout_p": 0.3},
}
NAMES = ("query", "key", "attn_mask", "alibi_slopes", "sink")


def operator_options(causal=None, window=(None, None), **options):
    left, right = window
    return {"causal": causal is not None, "lower_right": causal != "upper_left", "window_left": left,
            "window_right": right, **options}  # fmt: skip


def given_to_operator(q, k, mask=None, slopes=None, sink=None, rng_state=None, key_mask=None, **options):
    """The operator's tensors, lse among them, and its options."""
    tensors = (q, k, mask, slopes, sink, rng_state, key_mask)
    lse = _ops.attention(q, k, torch.zeros_like(k), *tensors[2:], **operator_options(**options))[1]
    return (*tensors, lse.detach()), operator_options(**options)


def weights_of(*tensors, **options):
    tensors, options = given_to_operator(*tensors, **options)
    return _ops.attention_weights(*tensors, **options)


def dense_weights(q, k, mask=None, slopes=None, sink=None, **options):
    """Attention over the unit vectors."""
    units = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    return reference.attention(q, k, units, mask, alibi_slopes=slopes, sink=sink, **options)[0].mean(1)


def check(q, k, mask=None, slopes=None, sink=None, dropout_p=0.0, **options):
    """Weights and all gradients by the error rule."""
    inputs, rng_state = [q, k, mask, slopes, sink], None
    ours, dense = dict(options), dict(options)
    if dropout_p:
        rng_state = new_rng_state()
        ours["dropout_p"] = dense["dropout_p"] = dropout_p
        dense["kept"] = dropout_mask(rng_state, *q.shape[:3], k.shape[2], dropout_p)
    results = []
    grad = torch.randn(q.shape[0], q.shape[2], k.shape[2], dtype=torch.float64).to(q.dtype)
    for dtype in (None, q.dtype, torch.float64):
        tensors = leaves(inputs, dtype)
        weights = weights_of(*tensors, rng_state, **ours) if dtype is None else dense_weights(*tensors, **dense)
        results.append((weights, *gradients([weights], tensors, [grad])))
    names = [name for name, t in zip(NAMES, inputs, strict=True) if t is not None and t.requires_grad]
    for name, a, b, c in zip(["weights", *names], *results, strict=True):
        assert a.shape == c.shape
        assert_as_exact_as_torch(name, a, b, c, 2 if name == "weights" else 3)


# Tiles are 64 x 64, and a task of the CPU kernels has 256 queries.
@pytest.mark.parametrize("seqlens", [(1, 1), (7, 65), (64, 128), (257, 70)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_against_the_dense_reference(isa, dtype, seqlens):
    q, k, _ = make_qkv(2, 4, *seqlens, 17, heads_kv=2, dtype=dtype)
    check(q, k, causal="lower_right")


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_each_option(isa, dtype, name):
    q, k, _ = make_qkv(2, 4, 66, 70, 8, heads_kv=2, dtype=dtype)
    mask = torch.randn(2, 1, 66, 70).masked_fill(torch.rand(2, 1, 66, 70) < 0.2, -math.inf)
    added = [t.to(dtype).requires_grad_() for t in (mask, torch.rand(4), torch.randn(2, 4))]
    check(q, k, *added, **OPTIONS[name])


@pytest.mark.parametrize("shape", [(66, 70), (1, 70), (66, 1), (1, 1)], ids=str)
def test_broadcast_masks(shape):
    q, k, _ = make_qkv(2, 3, 66, 70, 8)
    check(q, k, torch.randn(1, 3, *shape).requires_grad_())
    check(q, k, torch.rand(1, 3, *shape) < 0.7)


def test_gradcheck_of_first_and_second_derivatives():
    q, k, _ = make_qkv(2, 4, 3, 5, 2, heads_kv=2, dtype=torch.float64)
    mask = torch.randn(1, 1, 3, 5, dtype=torch.float64).requires_grad_()
    slopes, sink = (torch.rand(4, dtype=torch.float64).requires_grad_() for _ in range(2))
    options = {"causal": "lower_right", "softcap": 2.0, "dropout_p": 0.2}
    rng_state = new_rng_state()

    def run(*tensors):
        return weights_of(*tensors, rng_state, **options)

    inputs = (q, k, mask, slopes, sink)
    assert torch.autograd.gradcheck(run, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, inputs)


def test_second_derivatives_over_several_values():
    """More keys than value has columns."""
    inputs = [t.detach().requires_grad_() for t in make_qkv(1, 2, 3, 520, 4, dtype=torch.float64)[:2]]
    results = []
    for weights in (weights_of, dense_weights):
        grads = torch.autograd.grad(weights(*inputs).square().sum(), inputs, create_graph=True)
        results.append((*grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), inputs)))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want)


def test_rows_without_keys_and_hidden_nan(isa):
    """Fully masked rows are 0. Values in masked positions reach neither weights nor gradients."""
    q, k, _ = make_qkv(2, 2, 5, 9, 4)
    with torch.no_grad():
        k[:, :, 8] = math.nan
    mask = torch.rand(2, 1, 5, 9) < 0.7
    mask[..., 8], mask[0, 0, 2] = False, False
    key_mask = torch.ones(2, 9, dtype=torch.bool)
    key_mask[1] = False
    tensors, options = given_to_operator(q, k, mask, key_mask=key_mask)
    weights = _ops.attention_weights(*tensors, **options)
    grads = torch.autograd.grad(weights.square().sum(), (q, k))
    assert weights.isfinite().all()
    assert (weights[0, 2] == 0).all()
    assert (weights[1] == 0).all()
    torch.testing.assert_close(weights[0, [0, 1, 3, 4]].sum(-1), torch.ones(4))
    assert all(g.isfinite().all() for g in grads)
    assert all((g[1] == 0).all() for g in grads)


@pytest.mark.parametrize("added", [-1e9, torch.finfo(torch.float32).min / 2])
def test_large_scores(isa, added):
    """Scores are so large that lse rounds log(sum) away. The weights of the row still add up to 1."""
    q, k, _ = make_qkv(1, 2, 70, 90, 8)
    mask = torch.zeros(1, 1, 70, 90)
    mask[:, :, ::3] = added
    weights = weights_of(q, k, mask)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 70), rtol=1e-5, atol=0)


def test_the_bits_do_not_depend_on_threads(isa, threads):
    q, k, _ = make_qkv(2, 3, 300, 200, 16)
    results = []
    for count in (1, 3):
        threads(count)
        weights = weights_of(q, k, causal="upper_left")
        results.append((weights, *torch.autograd.grad(weights.square().sum(), (q, k))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("shape", [(0, 2, 3, 5), (2, 2, 0, 5), (2, 2, 3, 0)], ids=str)
def test_nothing_to_compute(shape):
    batch, heads, seqlen_q, seqlen_k = shape
    q, k, _ = make_qkv(batch, heads, seqlen_q, seqlen_k, 4)
    weights = weights_of(q, k)
    assert weights.shape == (batch, seqlen_q, seqlen_k)
    assert all((g == 0).all() for g in torch.autograd.grad(weights.sum(), (q, k)))


def test_strided_inputs():
    """Any strides of q, k and the gradient. The gradient of a sum is one expanded element."""
    q, k = (torch.randn(2, 20, 3, 8).transpose(1, 2).requires_grad_() for _ in range(2))
    check(q, k)
    grads = torch.autograd.grad(weights_of(q, k).sum(), (q, k))
    assert max(g.abs().max() for g in grads) < 1e-5, "each row of weights adds up to 1"


def operator_arguments(requires_grad, **options):
    q, k, _ = make_qkv(2, 4, 5, 9, 8, heads_kv=2)
    added = [torch.randn(2, 1, 1, 9), torch.rand(4), torch.rand(2, 4)]
    tensors = [t.detach().requires_grad_(requires_grad) for t in (q, k, *added)]
    return given_to_operator(*tensors, new_rng_state(), torch.rand(2, 9) > 0.2, dropout_p=0.3, **options)


def test_opcheck():
    arguments, options = operator_arguments(True, causal="lower_right")
    torch.library.opcheck(_ops.attention_weights, arguments, options)
    arguments, options = operator_arguments(False, softcap=2.0)
    grad = torch.randn(2, 5, 9)
    for grad_mask in ([True, True, False, True, True, True], [False, True, False, False, False, True]):
        torch.library.opcheck(
            _ops.attention_weights_backward, (grad, *arguments), {**options, "grad_mask": grad_mask}
        )  # fmt: skip


def test_compile_fullgraph():
    def step(q, k, v):
        out, lse = flash_attn(q, k, v, return_lse=True)
        weights = _ops.attention_weights(q, k, None, None, None, None, None, lse.detach())
        return out.sum() + weights.square().sum()

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (9, 21):
        inputs = make_qkv(2, 3, length, length + 5, 8)
        expected = torch.autograd.grad(step(*inputs), inputs)
        for got, want in zip(torch.autograd.grad(compiled(*inputs), inputs), expected, strict=True):
            torch.testing.assert_close(got, want)


def test_autocast():
    q, k, _ = make_qkv(1, 2, 5, 9, 8)
    tensors, options = given_to_operator(q, k)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        weights = _ops.attention_weights(*tensors, **options)
    assert weights.dtype == torch.bfloat16
    expected = _ops.attention_weights(q.bfloat16(), k.bfloat16(), *tensors[2:], **options)
    assert torch.equal(weights, expected)


def test_errors():
    q, k, _ = make_qkv(1, 2, 5, 9, 8)
    tensors, _ = given_to_operator(q, k)
    lse = tensors[-1]

    def call(q=q, k=k, key_mask=None, lse=lse, **options):
        return _ops.attention_weights(q, k, None, None, None, None, key_mask, lse, **options)

    with pytest.raises(ValueError, match=r"lse: got shape \[1, 2, 4\], .*allowed there: 5 \(query's seqlen_q\)"):
        call(lse=lse[..., :4])
    with pytest.raises(TypeError, match=r"lse: got dtype float64; allowed: float32"):
        call(lse=lse.double())
    with pytest.raises(ValueError, match=r"key: got a tensor of shape \[2, 9, 8\]"):
        call(k=k[0])
    with pytest.raises(ValueError, match=r"dropout_p: got 2; allowed: 0 to 1"):
        call(dropout_p=2.0)
    with pytest.raises(ValueError, match=r"rng_state: got none; allowed with dropout_p > 0"):
        call(dropout_p=0.5)
    for name, wanting in (("lse", lse.clone()), ("key_mask", torch.zeros(1, 9))):
        with pytest.raises(ValueError, match=rf"^{name}: got a tensor that needs a gradient"):
            call(**{name: wanting.requires_grad_()})
    tensors = [None if t is None else t.detach() for t in tensors]
    with pytest.raises(ValueError, match=r"grad_mask: got a request for value's gradient"):
        _ops.attention_weights_backward(torch.zeros(1, 5, 9), *tensors, grad_mask=[True] * 3 + [False] * 3)
