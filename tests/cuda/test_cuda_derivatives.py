"""Forward mode and double backward of the CUDA kernels (csrc/cuda/simt), compiled for the host. The CPU kernels' tests,
and tests of tiles and blocks. Forward mode of 16 bits is sm80's: test_cuda_sm80_jvp.py."""

from functools import partial

import pytest
import reference
import test_derivatives
import torch
from cuda_host import library
from helpers import leaves, make_qkv
from test_derivatives import second_order
from tolerances import assert_as_exact_as_torch

from flash_attn_ext import dropout_mask, flash_attn, new_rng_state

WITH_MASK = ("q", "k", "v", "attn_mask")

pytestmark = pytest.mark.usefixtures("kernels")


test_masked_rows_and_hidden_nan = test_derivatives.test_masked_rows_and_hidden_nan


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_against_the_dense_reference(isa, dtype):
    test_derivatives.test_against_the_dense_reference(isa, dtype, (66, 70), "options")


def check_against_dense(inputs, tangents=None, *, names=("q", "k", "v"), dropout_p=0.0, **options):
    """Checks all second derivatives by the error rule. `names`: the inputs' names in the dense reference."""
    q, v = inputs[0], inputs[2]
    tangents = [torch.randn_like(t) for t in inputs] if tangents is None else tangents
    cotangents = [torch.randn(*q.shape[:3], v.shape[3]), torch.randn(q.shape[:3])]
    ours, dense = dict(options), dict(options)
    if dropout_p > 0:
        ours |= {"rng_state": new_rng_state(), "dropout_p": dropout_p}
        kept = dropout_mask(ours["rng_state"], *q.shape[:3], v.shape[2], dropout_p)
        dense |= {"kept": kept, "dropout_p": dropout_p}

    def results_of(function, dtype, options):
        def run(q, k, v, *more):
            return function(q, k, v, **dict(zip(names[3:], more, strict=True)), **options)

        acc = torch.promote_types(dtype, torch.float32)
        c = [cotangents[0].to(dtype), cotangents[1].to(acc)]
        return second_order(run, leaves(inputs, dtype), tuple(t.to(dtype) for t in tangents), c)

    got = results_of(partial(flash_attn, enable_gqa=True, return_lse=True), q.dtype, ours)
    exact, theirs = (results_of(reference.attention, dtype, dense) for dtype in (torch.float64, q.dtype))
    results = ["out", "lse", "t_out", "t_lse", *("h" + name for name in names)]
    for name, a, b, c in zip(results, got, theirs, exact, strict=True):
        assert_as_exact_as_torch(name, a, b, c, 3)


OPTIONS = {
    "plain": {},
    "upper_left": {"causal": "upper_left"},
    "causal_window": {"causal": "lower_right", "window": (30, 0)},
    "softcap": {"softcap": 0.8, "scale": 0.5},
    "dropout": {"dropout_p": 0.3},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option(name):
    check_against_dense(make_qkv(1, 4, 40, 70, 8, 5, heads_kv=2, dtype=torch.float64), **OPTIONS[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_all_options_together(dtype):
    inputs = make_qkv(2, 2, 66, 70, 12, 20, heads_kv=1, dtype=dtype)
    mask = torch.randn(1, 2, 66, 70).masked_fill(torch.rand(1, 2, 66, 70) < 0.2, -torch.inf)
    inputs += [t.to(dtype).requires_grad_() for t in (mask, torch.rand(2, 2), torch.randn(2))]
    options = {"causal": "lower_right", "window": (50, -1), "softcap": 3.0, "dropout_p": 0.2}
    check_against_dense(inputs, names=("q", "k", "v", "attn_mask", "alibi_slopes", "sink"), **options)


def test_inputs_without_a_tangent():
    """Each input alone has a tangent, or no input. The results equal the results with tangents of zeros."""
    inputs = [t.detach() for t in make_qkv(1, 2, 20, 70, 8, dtype=torch.float64)]
    out, lse = flash_attn(*inputs, return_lse=True)
    zeros, tangents = ([f(t) for t in inputs] for f in (torch.zeros_like, torch.randn_like))
    grads, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    operators, none = torch.ops.flash_attn_ext, [None] * 3
    for moves in (0, 1, 2, None):
        given = [tangents[n] if n == moves else None for n in range(3)]
        full = [tangents[n] if n == moves else zeros[n] for n in range(3)]
        results, expected = (operators.attention_jvp(*t, *none, *inputs, softcap=2.0) for t in (given, full))
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
        wanted = [n == moves for n in range(6)]  # and each gradient alone
        for mask in (wanted, [True, True, True, False, False, False]):
            second, all_second = (
                operators.attention_double_backward(
                    grads,
                    grad_lse,
                    *t,
                    *none,
                    *inputs,
                    *[None] * 5,
                    out,
                    lse,
                    *results[2:],
                    softcap=2.0,
                    grad_mask=mask,
                )
                for t in (given, full)
            )
            for a, b, want in zip(second, all_second, mask, strict=True):
                assert torch.equal(a, b) if want else not (a is not None and a.numel())


# Tiles are 64 queries by 64 keys, in the double backward 32 by 64. Slices have 64 columns, or 128.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(1, 17), (64, 65), (130, 40), (17, 200)])
def test_head_dims(dtype, head_dim, head_dim_v):
    check_against_dense(make_qkv(1, 2, 33, 65, head_dim, head_dim_v, heads_kv=1, dtype=dtype), causal="lower_right")


@pytest.mark.parametrize("seqlens", [(1, 1), (31, 64), (32, 63), (33, 129), (64, 1), (65, 65)], ids=str)
@pytest.mark.parametrize("causal", ["upper_left", "lower_right"])
def test_tile_edges(seqlens, causal):
    check_against_dense(make_qkv(1, 1, *seqlens, 8), causal=causal, window=(40, -1))


@pytest.mark.parametrize("shape", [(1, 130), (70, 1), (2, 1, 70, 130)], ids=str)
def test_gradients_of_masks_that_span_tiles(shape):
    inputs = [*make_qkv(2, 2, 70, 130, 8), torch.randn(shape).requires_grad_()]
    check_against_dense(inputs, names=WITH_MASK, softcap=3.0)


def test_tangents_with_a_large_mean():
    """The subtraction of mu cancels: mu reaches 1000, and t_out is of order 1."""
    q, k, v = make_qkv(1, 1, 40, 200, 16)
    mask = torch.zeros(40, 200).requires_grad_()
    tangents = [torch.zeros_like(q), torch.zeros_like(k), torch.randn_like(v), 1000 + torch.randn_like(mask)]
    check_against_dense([q, k, v, mask], tangents, names=WITH_MASK)


def test_large_scores():
    q, k, v = make_qkv(1, 2, 40, 80, 16)
    with torch.no_grad():
        q *= 10
        k *= 10
    check_against_dense([q, k, v])


def test_results_do_not_depend_on_the_order_of_threads_and_blocks(kernels):
    inputs = [*make_qkv(1, 2, 40, 70, 8, heads_kv=1), torch.randn(1, 70), torch.rand(2), torch.randn(2)]
    tangents = tuple(torch.randn_like(t) for t in inputs)
    cotangents = [torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40)]

    def run(q, k, v, mask, slopes, sink):
        return flash_attn(q, k, v, mask, alibi_slopes=slopes, sink=sink, enable_gqa=True, return_lse=True)

    results = []
    for seed in range(3):
        kernels.seed_order(seed)
        results.append(second_order(run, [t.detach().requires_grad_() for t in inputs], tangents, cotangents))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("keys", [0, 5])
def test_empty(keys):
    q, k, v = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (3 if keys == 0 else 0, keys, keys))
    sink = torch.randn(2, requires_grad=True)
    inputs = (q, k, v, sink)
    tangents = tuple(torch.ones_like(t) for t in inputs)

    def run(q, k, v, sink):
        return flash_attn(q, k, v, sink=sink, return_lse=True)

    (out, lse), (t_out, t_lse) = torch.func.jvp(run, tuple(t.detach() for t in inputs), tangents)
    assert (out == 0).all()
    assert (t_out == 0).all()
    torch.testing.assert_close(lse, sink.detach()[None, :, None].expand_as(lse))
    assert (t_lse == 1).all()
    first = torch.autograd.grad(run(*inputs), inputs, (out, lse), create_graph=True)
    assert all((t == 0).all() for t in torch.autograd.grad(first, inputs, tangents))


def test_which_tier_runs_the_double_backward(kernels):
    params = library.DoubleBackwardParams(dtype=library.DTYPES[torch.bfloat16])
    not_sm90 = "sm90: this GPU has compute capability 8.0; wgmma and TMA need 9.0"
    assert kernels.choice(params) == ("simt", [not_sm90, "sm80: no double backward"])
    kernels.force_tier("sm80")
    try:
        assert kernels.choice(params)[0] == "sm80: no double backward (sm80 is forced)"
    finally:
        kernels.force_tier("")
