"""Forward mode and double backward: numerically in fp64, against torch's math backend, and through torch.func."""

import os
import subprocess
import sys

import pytest
import reference
import torch
from helpers import assert_hessian_vector_products_agree, leaves, make_qkv
from tolerances import assert_as_exact_as_torch

from flash_attn_ext import dropout_mask, flash_attn, new_rng_state

OPTIONS = {
    "plain": {},
    "upper_left": {"causal": "upper_left"},
    "causal_window": {"causal": "lower_right", "window": (3, 0)},
    "softcap": {"softcap": 0.8},
    "dropout": {"dropout_p": 0.3},
    "everything": {"causal": "lower_right", "window": (6, -1), "softcap": 2.0, "scale": 0.5, "dropout_p": 0.2},
}


def leaf(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def case(name, heads=2, heads_kv=2, bias="none", seqlen_q=4, seqlen_k=6):
    """Returns a function of the tensors that have a gradient, and the tensors."""
    tensors = [leaf(2, heads, seqlen_q, 3), leaf(2, heads_kv, seqlen_k, 3), leaf(2, heads_kv, seqlen_k, 2)]
    if bias == "all":
        tensors += [leaf(2, 1, seqlen_q, seqlen_k), leaf(heads), leaf(2, heads)]
    options = dict(OPTIONS[name])
    if "dropout_p" in options:
        options["rng_state"] = new_rng_state()

    def run(q, k, v, mask=None, slopes=None, sink=None):
        return flash_attn(
            q, k, v, mask, alibi_slopes=slopes, sink=sink, enable_gqa=True, return_lse=True, **options
        )  # fmt: skip

    return run, tensors


@pytest.mark.any_device
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(("heads", "heads_kv"), [(2, 2), (4, 2)])
@pytest.mark.parametrize("bias", ["none", "all"])
def test_numerically(isa, name, heads, heads_kv, bias):
    run, tensors = case(name, heads, heads_kv, bias)
    assert torch.autograd.gradcheck(run, tensors, check_forward_ad=True, check_backward_ad=False, fast_mode=True)
    assert torch.autograd.gradgradcheck(
        run, tensors, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True, atol=1e-4
    )


@pytest.mark.any_device
@pytest.mark.parametrize("shape", [(4, 6), (1, 6), (4, 1), (1, 1), (2, 1, 1, 6)], ids=str)
def test_broadcast_masks_numerically(shape):
    q, k, v, mask = leaf(2, 2, 4, 3), leaf(2, 2, 6, 3), leaf(2, 2, 6, 3), leaf(*shape)
    torch.autograd.gradcheck(flash_attn, (q, k, v, mask), check_forward_ad=True, check_backward_ad=False)
    torch.autograd.gradgradcheck(flash_attn, (q, k, v, mask), check_fwd_over_rev=True, fast_mode=True)


def second_order(function, inputs, tangents, cotangents):
    """(out, lse), their tangents, and the gradient of <gradients, tangents>, by reverse mode twice."""
    results, out_tangents = torch.func.jvp(function, tuple(t.detach() for t in inputs), tangents)
    first = torch.autograd.grad(function(*inputs), inputs, cotangents, create_graph=True)
    return [*results, *out_tangents, *torch.autograd.grad(first, inputs, tangents)]


@pytest.mark.any_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seqlens", [(70, 130), (130, 67), (3, 200)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "options"])
def test_against_the_dense_reference(isa, dtype, seqlens, kind):
    """The error rule compares with the errors of torch's own autograd in the same dtype."""
    seqlen_q, seqlen_k = seqlens
    inputs = make_qkv(2, 4, seqlen_q, seqlen_k, 24, heads_kv=2, dtype=dtype)
    options, dense_options = {}, {}
    if kind == "options":
        mask = torch.randn(2, 1, seqlen_q, seqlen_k).masked_fill(torch.rand(2, 1, seqlen_q, seqlen_k) < 0.2, -torch.inf)
        inputs += [t.to(dtype).requires_grad_() for t in (mask, torch.rand(4), torch.randn(4))]
        rng_state = new_rng_state()
        options = {"causal": "lower_right", "softcap": 3.0, "dropout_p": 0.2}
        kept = dropout_mask(rng_state, 2, 4, seqlen_q, seqlen_k, 0.2)
        options, dense_options = {**options, "rng_state": rng_state}, {**options, "kept": kept}
    tangents = tuple(torch.randn_like(t) for t in inputs)
    cotangents = [torch.randn(2, 4, seqlen_q, 24), torch.randn(2, 4, seqlen_q)]

    def ours(q, k, v, mask=None, slopes=None, sink=None):
        return flash_attn(
            q, k, v, mask, alibi_slopes=slopes, sink=sink, enable_gqa=True, return_lse=True, **options
        )  # fmt: skip

    def dense(q, k, v, mask=None, slopes=None, sink=None):
        return reference.attention(q, k, v, mask, alibi_slopes=slopes, sink=sink, **dense_options)

    def results_of(function, dtype, lse_dtype):
        c = [cotangents[0].to(dtype), cotangents[1].to(lse_dtype)]
        return second_order(function, leaves(inputs, dtype), tuple(t.to(dtype) for t in tangents), c)

    got = results_of(ours, dtype, torch.float32)
    theirs = results_of(dense, dtype, dtype)
    exact = results_of(dense, torch.float64, torch.float64)
    names = ["out", "lse", "t_out", "t_lse", "hq", "hk", "hv", "hmask", "hslopes", "hsink"][: len(got)]
    for name, a, b, c in zip(names, got, theirs, exact, strict=True):
        assert_as_exact_as_torch(name, a, b, c, 3)


@pytest.mark.any_device
def test_hessian_vector_products_both_ways():
    run, tensors = case("everything", 4, 2, "all")
    inputs = tuple(t.detach() for t in tensors)

    def loss(*x):
        out, lse = run(*x)
        return out.sin().sum() + (lse * lse).sum()

    assert_hessian_vector_products_agree(loss, inputs)


def test_hessian_jacfwd_and_vmap_of_jvp():
    run, tensors = case("softcap", 2, 2)
    q, k, v = (t.detach()[:1, :1] for t in tensors)
    dense = reference.attention

    def ours(q):
        return run(q, k, v)[0]

    def theirs(q):
        return dense(q, k, v, softcap=0.8)[0]

    torch.testing.assert_close(torch.func.jacfwd(ours)(q), torch.func.jacfwd(theirs)(q))
    torch.testing.assert_close(
        torch.func.hessian(lambda q: ours(q).sin().sum())(q), torch.func.hessian(lambda q: theirs(q).sin().sum())(q)
    )
    directions = torch.randn(3, *q.shape, dtype=torch.float64)
    several = torch.func.vmap(lambda t: torch.func.jvp(ours, (q,), (t,))[1])(directions)
    torch.testing.assert_close(several, torch.stack([torch.func.jvp(theirs, (q,), (t,))[1] for t in directions]))
    # The mapped dimension below the transform.
    qs = torch.randn(3, *q.shape, dtype=torch.float64)
    out_tangents = torch.func.jvp(lambda qs: torch.func.vmap(ours)(qs), (qs,), (directions,))[1]
    expected = torch.stack([torch.func.jvp(theirs, (a,), (t,))[1] for a, t in zip(qs, directions, strict=True)])
    torch.testing.assert_close(out_tangents, expected)


def test_only_inputs_with_a_tangent_and_only_wanted_gradients():
    """Each input has a tangent, and a second gradient, without the other inputs."""
    run, tensors = case("softcap", 4, 2, "all")
    tangents = tuple(torch.randn_like(t) for t in tensors)
    zeros = tuple(torch.zeros_like(t) for t in tensors)
    inputs = tuple(t.detach() for t in tensors)
    for n, tangent in enumerate(tangents):
        expected = torch.func.jvp(run, inputs, (*zeros[:n], tangent, *zeros[n + 1 :]))[1]
        got = torch.func.jvp(lambda x, n=n: run(*inputs[:n], x, *inputs[n + 1 :]), (inputs[n],), (tangent,))[1]
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)

    def penalty(x):
        out, lse = run(*x)
        wanted = [t for t in x if t.requires_grad]
        grads = torch.autograd.grad(out.sin().sum() + lse.sum(), wanted, create_graph=True)
        return sum(g.square().sum() for g in grads)

    for n in range(len(inputs)):
        alone = [t.detach().requires_grad_(m == n) for m, t in enumerate(inputs)]
        (got,) = torch.autograd.grad(penalty(alone), alone[n])
        dense = [t.detach().requires_grad_(m == n) for m, t in enumerate(inputs)]
        out, lse = reference.attention(*dense[:4], alibi_slopes=dense[4], sink=dense[5], softcap=0.8)
        (first,) = torch.autograd.grad(out.sin().sum() + lse.sum(), dense[n], create_graph=True)
        (expected,) = torch.autograd.grad(first.square().sum(), dense[n])
        torch.testing.assert_close(got, expected)


@pytest.mark.any_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_masked_rows_and_hidden_nan(isa, dtype):
    """A row without a visible key has zero derivatives. A NaN that no query sees reaches no result."""
    q, k, v = make_qkv(1, 2, 100, 90, 16, dtype=dtype)
    mask = torch.rand(100, 90) < 0.5
    mask[[0, 50]] = False
    mask[:, 40] = False
    tangents = [torch.randn_like(t) for t in (q, k, v)]
    with torch.no_grad():
        for t in (k, v, tangents[1], tangents[2]):
            t[:, :, 40] = torch.nan
        for t in (q, tangents[0]):
            t[:, :, [0, 50]] = torch.nan
    inputs, cotangents = leaves([q, k, v]), [torch.randn_like(q), torch.randn(1, 2, 100)]
    got = second_order(lambda *x: flash_attn(*x, mask, return_lse=True), inputs, tuple(tangents), cotangents)
    out, lse, t_out, t_lse, hq, hk, hv = got
    for rows in (out, t_out, t_lse, hq):
        assert (rows[:, :, [0, 50]] == 0).all()
    assert (lse[:, :, [0, 50]] == -torch.inf).all()
    assert (hk[:, :, 40] == 0).all()
    assert (hv[:, :, 40] == 0).all()
    assert all(torch.isfinite(t).all() for t in (t_out, t_lse, hq, hk, hv))


def test_third_derivatives_are_refused_not_wrong():
    q, k, v = leaf(1, 1, 4, 2), leaf(1, 1, 4, 2), leaf(1, 1, 4, 2)
    (first,) = torch.autograd.grad(flash_attn(q, k, v).sin().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="flash_attn: its third derivative"):
        second.sum().backward()
    x = tuple(t.detach() for t in (q, k, v))

    def loss(q):
        return flash_attn(q, *x[1:]).sin().sum()

    with pytest.raises(NotImplementedError, match="flash_attn: its third derivative"):
        torch.func.grad(lambda q: torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(q).sum())(x[0])
    with pytest.raises(NotImplementedError, match="flash_attn: forward-mode AD of its forward-mode AD"):
        torch.func.jacfwd(torch.func.jacfwd(loss))(x[0])


def test_gradient_penalty_through_checkpointing():
    inputs = make_qkv(1, 2, 30, 30, 8, dtype=torch.float64)

    def penalty(function, x):
        grads = torch.autograd.grad(function(*x).sin().sum(), x, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), x)

    def checkpointed(*x):
        return torch.utils.checkpoint.checkpoint(flash_attn, *x, use_reentrant=False)

    for a, b in zip(penalty(checkpointed, leaves(inputs)), penalty(flash_attn, leaves(inputs)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("op", ["attention_jvp", "attention_double_backward"])
def test_operators_are_registered_properly(op):
    """opcheck: schema, autograd registration, FakeTensor and aot with dynamic shapes."""
    q, k, v = make_qkv(2, 4, 5, 7, 8, heads_kv=2)
    slopes, sink, mask = torch.rand(4).requires_grad_(), torch.rand(4).requires_grad_(), torch.randn(1, 1, 5, 7)
    x = (q, k, v, mask.requires_grad_(), slopes, sink, None, None)
    tangents = tuple(None if t is None else torch.randn_like(t).requires_grad_() for t in x[:-2])
    operators = torch.ops.flash_attn_ext
    if op == "attention_jvp":
        arguments, options = (*tangents, *x), {"softcap": 2.0}
    else:
        with torch.no_grad():
            out, lse, t_out, t_lse = operators.attention_jvp(*tangents, *x, softcap=2.0)
        grads = torch.randn_like(out), torch.randn_like(lse)
        x = tuple(None if t is None else t.detach() for t in x)
        arguments = (*grads, *(t.detach() for t in tangents), *x, out, lse, t_out, t_lse)
        options = {"softcap": 2.0, "grad_mask": [True] * 6}
    torch.library.opcheck(getattr(operators, op).default, arguments, options)


@pytest.mark.parametrize("bias", ["none", "all"])
def test_bitwise_equal_for_any_thread_count(isa, threads, bias):
    inputs = make_qkv(2, 2, 150, 170, 24)
    if bias == "all":
        inputs += [torch.randn(1, 2, 150, 170).requires_grad_(), torch.rand(2, requires_grad=True)]
    tangents = tuple(torch.randn_like(t) for t in inputs)
    cotangents = [torch.randn(2, 2, 150, 24), torch.randn(2, 2, 150)]

    def run(q, k, v, mask=None, slopes=None):
        return flash_attn(q, k, v, mask, alibi_slopes=slopes, causal="lower_right", return_lse=True)

    results = []
    for count in (1, 2, 4):
        threads(count)
        results.append(second_order(run, leaves(inputs), tangents, cotangents))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


MEMORY_PROGRAM = """
import resource, torch
from flash_attn_ext import flash_attn

n = 16384
q, k, v = (torch.randn(1, 1, n, 16).requires_grad_() for _ in range(3))
window = (64, 0)  # few tiles to compute: the test measures memory only
run = lambda q, k, v: flash_attn(q, k, v, window=window)
small = [torch.randn(1, 1, 64, 16).requires_grad_() for _ in range(3)]


def derivatives(x):
    tangents = tuple(torch.ones_like(t) for t in x)
    torch.func.jvp(run, tuple(t.detach() for t in x), tangents)
    first = torch.autograd.grad(run(*x).sum(), x, create_graph=True)
    torch.autograd.grad(first, x, tangents)


derivatives(small)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
derivatives((q, k, v))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def test_peak_memory_is_linear():
    """At N = 16384 the N x N matrix in fp32 would be 1024 MiB."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    run = subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM], capture_output=True, text=True, env=environment, check=True
    )
    assert int(run.stdout) < 16384 * 16 * 4 * 100, run.stdout  # a hundred (N, D) tensors: 100 MiB
