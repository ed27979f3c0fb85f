"""The Hopper tier's backward on the host (tests/cuda_host), against the dense oracle."""

import random
import re

import pytest
import reference
import test_contract
import torch
from cuda_host import library
from helpers import check_against_reference, make_qkv
from test_cuda_sm90 import NEVER_TAKEN

from flash_attn_ext import flash_attn

# Query rows and keys of a tile, by head dimension.
TILES = {64: (128, 128), 128: (64, 128), 256: (64, 64)}
head_dims = pytest.mark.parametrize("head_dim", TILES)


@pytest.fixture(autouse=True)
def kernels(built):
    with library.on_hopper(built, deterministic=True) as loaded:
        yield loaded


def make(*shape, dtype=torch.bfloat16, **options):
    return make_qkv(*shape, dtype=dtype, **options)


def check(kernels, q, k, v, **options):
    check_against_reference(q, k, v, **options)
    assert b"sm90::dq_kernel" in kernels.c.last_kernel()


def run(inputs, grads, **options):
    """out, lse and the gradients of fresh leaves of the same values and strides; `grads` of out and, perhaps, lse."""
    inputs = [t.detach().requires_grad_() for t in inputs]
    outputs = flash_attn(*inputs, enable_gqa=True, return_lse=True, **options)
    return [*outputs, *torch.autograd.grad(outputs[: len(grads)], inputs, grads)]


@head_dims
@pytest.mark.parametrize(("edge", "dtype"), [(-1, torch.float16), (0, torch.bfloat16), (1, torch.bfloat16)], ids=str)
def test_tile_edges(kernels, head_dim, edge, dtype):
    rows, keys = TILES[head_dim]
    for seqlen_q, seqlen_k in [(rows + edge, keys + edge), (2 * rows + edge, 5), (17, 2 * keys + edge)]:
        check(kernels, *make(1, 1, seqlen_q, seqlen_k, head_dim, dtype=dtype))


@head_dims
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 200), (200, 1), (2, 3)])
def test_short(kernels, head_dim, seqlen_q, seqlen_k):
    check(kernels, *make(1, 1, seqlen_q, seqlen_k, head_dim))


@head_dims
@pytest.mark.parametrize("causal", ["upper_left", "lower_right"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(130, 130), (260, 97), (97, 260)])
def test_causal(kernels, head_dim, causal, seqlen_q, seqlen_k):
    check(kernels, *make(1, 1, seqlen_q, seqlen_k, head_dim), causal=causal)


@head_dims
def test_sink(kernels, head_dim):
    q, k, v = make(2, 4, 140, 97, head_dim, heads_kv=2)
    check_against_reference(q, k, v, causal="lower_right", sink=torch.randn(4).requires_grad_())
    assert b"sink_gradient_kernel" in kernels.c.last_kernel()


@head_dims
@pytest.mark.parametrize(
    ("window", "deterministic"),
    [((0, 0), True), ((3, 100), True), ((130, -1), True), ((-1, 70), False), ((1000, 1000), False)],
)
def test_windows(kernels, head_dim, window, deterministic):
    kernels.deterministic = deterministic
    check(kernels, *make(1, 1, 260, 300, head_dim), window=window)
    check(kernels, *make(1, 1, 300, 260, head_dim), window=window, causal="lower_right")


@pytest.mark.parametrize("seed", range(8))
def test_any_band(kernels, seed):
    """The band determines which blocks add to a tile of dQ, and in which turn.

    A turn without a block would be a deadlock.
    """
    generator = random.Random(seed)
    seqlen_q, seqlen_k = generator.randint(1, 300), generator.randint(1, 300)
    window = (generator.randint(-1, 200), generator.randint(-1, 200))
    causal = generator.choice([None, "upper_left", "lower_right"])
    check(kernels, *make(1, 1, seqlen_q, seqlen_k, generator.choice([64, 128])), window=window, causal=causal)


@head_dims
@pytest.mark.parametrize(("heads", "heads_kv", "deterministic"), [(4, 2, True), (3, 1, False), (2, 2, True)])
def test_heads_and_batches(kernels, head_dim, heads, heads_kv, deterministic):
    kernels.deterministic = deterministic
    q, k, v = make(2, heads, 140, 150, head_dim, heads_kv=heads_kv, dtype=torch.float16)
    check(kernels, q, k, v, causal="lower_right", scale=0.3)


@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_any_scale(kernels, scale):
    check(kernels, *make(1, 1, 40, 50, 64), scale=scale)


@head_dims
def test_rows_and_keys_that_see_nothing(kernels, head_dim):
    grads = [torch.randn(1, 1, 300, head_dim).bfloat16(), torch.zeros(1, 1, 300)]
    inputs = make(1, 1, 300, 100, head_dim)
    check(kernels, *inputs, causal="lower_right")
    dq = run(inputs, grads, causal="lower_right")[2]
    assert (dq[:, :, :200] == 0).all()
    inputs = make(1, 1, 100, 300, head_dim)
    check(kernels, *inputs, causal="upper_left")
    for grad in run(inputs, [g[:, :, :100] for g in grads], causal="upper_left")[3:]:
        assert (grad[:, :, 100:] == 0).all()


@pytest.mark.parametrize("layout", ["B S H D", "S B H D"])
def test_strided_inputs(kernels, layout):
    inputs, grads = make(2, 3, 70, 200, 64), [torch.randn(2, 3, 70, 64).bfloat16(), torch.randn(2, 3, 70)]
    strided = [dict(test_contract.strided_versions(t.detach()))[layout] for t in inputs]
    grad = dict(test_contract.strided_versions(grads[0]))[layout]
    expected = run(inputs, grads, causal="upper_left")
    for a, b in zip(run(strided, [grad, grads[1]], causal="upper_left"), expected, strict=True):
        assert torch.equal(a, b)
    assert b"sm90::dq_kernel" in kernels.c.last_kernel()


@pytest.mark.parametrize("which", [0, 1, 2, 3])
@pytest.mark.parametrize(("first", "taken"), [(8, True), (1, False)])
def test_slices_of_wider_rows(kernels, which, first, taken):
    """TMA needs tensors that start at a multiple of 16 bytes; another tier runs the other calls."""
    tensors = [*make(2, 2, 30, 40, 64), torch.randn(2, 2, 30, 64).bfloat16()]
    expected = run(tensors[:3], [tensors[3]])
    wide = torch.randn(*tensors[which].shape[:3], 80).bfloat16()
    wide[..., first : first + 64] = tensors[which].detach()
    tensors[which] = wide[..., first : first + 64]
    found = run(tensors[:3], [tensors[3]])
    assert (b"sm90" in kernels.c.last_kernel()) == taken
    for a, b in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.0 if taken else 0.05)


# A query sees its key and the 20 before: the rows of dq, dk and dv that a poisoned row reaches. P does not depend on v.
WINDOW, AT = 20, 140
BEFORE, AFTER, BOTH, NOWHERE = (AT - WINDOW, AT), (AT, AT + WINDOW), (AT - WINDOW, AT + WINDOW), (1, 0)
REACHED = {
    "q": ((AT, AT), BEFORE, BEFORE),
    "dout": ((AT, AT), BEFORE, BEFORE),
    "k": (AFTER, BOTH, BOTH),
    "v": (AFTER, BOTH, NOWHERE),
}


@pytest.mark.parametrize(
    ("head_dim", "poison"), [(64, torch.nan), (64, torch.inf), (128, torch.nan), (256, torch.inf), (256, torch.nan)]
)
@pytest.mark.parametrize("where", REACHED)
def test_poison_reaches_exactly_the_rows_that_depend_on_it(kernels, head_dim, where, poison):
    """0 x NaN is NaN, so the kernel repairs the rows that do not see the poisoned row."""
    names = ("q", "k", "v", "dout")
    tensors = [*make(1, 2, 300, 300, head_dim), torch.randn(1, 2, 300, head_dim).bfloat16()]
    inputs = dict(zip(names, (t.detach() for t in tensors), strict=True))
    options = dict(window=(WINDOW, 0))
    clean = run([inputs[n] for n in names[:3]], [inputs["dout"], torch.ones(1, 2, 300)], **options)
    inputs[where][:, 0, AT, 5] = poison
    found = run([inputs[n] for n in names[:3]], [inputs["dout"], torch.ones(1, 2, 300)], **options)
    assert b"sm90::dq_kernel" in kernels.c.last_kernel()
    for got, expected, (first, last) in zip(found[2:], clean[2:], REACHED[where], strict=True):
        far = (torch.arange(300) < first) | (torch.arange(300) > last)
        torch.testing.assert_close(got[:, 0, far], expected[:, 0, far], rtol=0, atol=0.02)
        assert torch.equal(got[:, 1], expected[:, 1])  # the other head
        if poison is torch.nan or where == "dout":
            assert not torch.isfinite(got[:, 0, ~far]).all(-1).any()


@head_dims
@pytest.mark.parametrize("options", [{}, dict(causal="lower_right"), dict(window=(50, 0))], ids=str)
def test_an_overflow_costs_next_to_nothing(kernels, head_dim, options):
    """All of dout is NaN, or the row of one token. Rows that must be NaN are not computed element by element."""
    length = 300
    q, k, v = (t.detach() for t in make(1, 1, length, length, head_dim))
    sees = reference.visible(length, length, **options)
    for where in (slice(None), 200):
        work = []
        for poison in (1.0, torch.nan):
            dout = torch.ones(1, 1, length, head_dim).bfloat16()
            dout[:, :, where] = poison
            before = kernels.c.exponentials()
            _, dk, dv = run([q, k, v], [dout], **options)[2:]
            work.append(kernels.c.exponentials() - before)
        assert b"sm90::dq_kernel" in kernels.c.last_kernel()
        reached = sees[where].reshape(-1, length).any(0)
        for grad in (dk, dv):
            assert torch.equal(grad[0, 0].isnan().any(1), reached)
        # Keys that the poisoned row does not see, in a tile with a key that it sees: all steps. Other keys: a few
        # steps.
        rows = sees.sum(0)[~reached].sum().item() if isinstance(where, int) else 0
        assert work[1] - work[0] <= 32 * (2 * rows + 8 * length)


@pytest.mark.parametrize("where", ["q", "dout"])
def test_poison_in_a_row_without_keys_reaches_no_result(kernels, where):
    q, k, v = (t.detach() for t in make(1, 1, 300, 100, 64))
    dout = torch.randn(1, 1, 300, 64).bfloat16()
    clean = run([q, k, v], [dout], causal="lower_right")
    {"q": q, "dout": dout}[where][:, :, 50] = torch.nan
    for a, b in zip(run([q, k, v], [dout], causal="lower_right")[2:], clean[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.02)


def test_memory_after_the_end_reaches_no_result(kernels):
    """TMA loads zeros from outside a tensor, not the memory after it."""
    q, k, v = (t.detach()[:, :, :100] for t in make(1, 1, 128, 128, 128))
    dout = torch.randn(1, 1, 128, 128).bfloat16()[:, :, :100]
    expected = run([q, k, v], [dout])
    for t in (q, k, v, dout):
        t._base[:, :, 100:] = torch.nan
    for a, b in zip(run([q, k, v], [dout]), expected, strict=True):
        assert torch.equal(a, b)


def test_each_gradient_alone(kernels):
    inputs = make(1, 2, 140, 150, 64, heads_kv=1)
    out = flash_attn(*inputs, enable_gqa=True)
    grad = torch.randn_like(out)
    every = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    for wanted in ([0], [1], [2], [0, 2]):
        some = torch.autograd.grad(out, [inputs[n] for n in wanted], grad, retain_graph=True)
        assert b"sm90" in kernels.c.last_kernel()
        assert all(torch.equal(g, every[n]) for n, g in zip(wanted, some, strict=True))


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("options", [{}, dict(causal="lower_right"), dict(window=(100, 50))], ids=str)
def test_orders_of_blocks_threads_and_copies(kernels, deterministic, options):
    """Blocks add to dQ in any order.

    With deterministic=True they add in one order, and the host run reports additions without a wait for the block
    before. All other results have the same bits in every run.
    """
    kernels.deterministic = deterministic
    inputs, grads = make(1, 2, 200, 500, 64, heads_kv=1), [torch.randn(1, 2, 200, 64).bfloat16()]
    results = []
    for seed in range(4):
        kernels.seed_order(seed)
        results.append(run(inputs, grads, **options))
    dq = [result.pop(2) for result in results]
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
    for other in dq[1:]:
        torch.testing.assert_close(other, dq[0], rtol=0, atol=0.0 if deterministic else 0.01)


REFUSED = NEVER_TAKEN | {
    "broadcast gradient": ({}, {}, "not aligned to 16 bytes, or its rows are broadcast"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_rest_goes_elsewhere_and_says_why(kernels, case, monkeypatch):
    shape, options, reason = REFUSED[case]
    shape = dict(batch=1, heads=1, seqlen_q=20, seqlen_k=30, head_dim=64, dtype=torch.bfloat16) | shape
    said = []
    backward = kernels.c.backward

    def asked(params, workspace):
        said.append(kernels.c.why_not_sm90_backward(params).decode())
        return backward(params, workspace)

    monkeypatch.setattr(kernels.c, "backward", asked)
    inputs = make_qkv(**shape)
    out = flash_attn(*inputs, **options)
    row = torch.ones(out.shape[-1], dtype=out.dtype)
    torch.autograd.grad(out, inputs, row.expand_as(out) if case == "broadcast gradient" else torch.ones_like(out))
    assert re.search(reason, said[0])
    assert b"sm90" not in kernels.c.last_kernel()


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_do_not_get_it(kernels, capability):
    kernels.c.set_compute_capability(*capability)
    check_against_reference(*make(1, 1, 20, 30, 64))
    assert b"sm90" not in kernels.c.last_kernel()
