"""flash_attn(..., sink=...): one more column of the softmax in each head, a score without a value."""

import pytest
import torch
from helpers import check_against_reference, leaves, make_qkv

from flash_attn_ext import flash_attn, flash_attn_varlen

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def sinks(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype).add(1).requires_grad_()


@dtypes
@pytest.mark.parametrize("shape", [(4,), (2, 4)], ids=["H", "BH"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(70, 130), (1, 700), (3, 5)])
def test_against_the_dense_reference(isa, dtype, shape, seqlen_q, seqlen_k):
    q, k, v = make_qkv(2, 4, seqlen_q, seqlen_k, 24, heads_kv=2, dtype=dtype)
    check_against_reference(q, k, v, sink=sinks(*shape, dtype=dtype))


@pytest.mark.parametrize(
    "options",
    [
        {"causal": "lower_right"},
        {"causal": "upper_left", "window": (20, 0), "softcap": 2.0},
        {"num_splits": 3},
        {"num_splits": 2, "unified_max": 0.0},
        {"dropout_p": 0.3},
        {"scale": -0.7},
    ],
    ids=str,
)
def test_with_every_other_option(isa, options):
    q, k, v = make_qkv(2, 4, 50, 140, 16, heads_kv=2)
    mask = torch.randn(2, 1, 50, 140).masked_fill(torch.rand(2, 1, 50, 140) < 0.3, -torch.inf).requires_grad_()
    slopes = torch.rand(4).requires_grad_()
    check_against_reference(q, k, v, mask, alibi_slopes=slopes, sink=sinks(4), **options)


@pytest.mark.parametrize("seqlen_q", [1, 20])
def test_a_fully_masked_row_sees_the_sink_alone(isa, seqlen_q):
    q, k, v = make_qkv(2, 3, seqlen_q, 40, 8)
    sink = sinks(2, 3)
    out, lse = flash_attn(q, k, v, torch.zeros(seqlen_q, 40, dtype=torch.bool), sink=sink, return_lse=True)
    assert (out == 0).all()
    torch.testing.assert_close(lse, sink.detach()[:, :, None].expand_as(lse))
    grad = torch.randn_like(lse)
    *grads, dsink = torch.autograd.grad([out, lse], [q, k, v, sink], [torch.randn_like(out), grad])
    assert all((g == 0).all() for g in grads)
    torch.testing.assert_close(dsink, grad.sum(-1))


def test_without_keys_a_row_sees_the_sink_alone():
    q, k, v = make_qkv(2, 3, 5, 1, 8)
    sink = sinks(3)
    out, lse = flash_attn(q, k[:, :, :0], v[:, :, :0], sink=sink, return_lse=True)
    assert (out == 0).all()
    assert torch.equal(lse, sink.detach()[None, :, None].expand_as(lse))
    (dsink,) = torch.autograd.grad(lse.sum(), sink)
    assert torch.equal(dsink, torch.full((3,), 10.0))


@pytest.mark.parametrize("seqlen_q", [1, 100])
def test_minus_infinity_is_no_sink(isa, seqlen_q):
    q, k, v = make_qkv(1, 2, seqlen_q, 150, 16)
    sink = torch.full((2,), -torch.inf, requires_grad=True)
    results = []
    for given in (None, sink):
        inputs = leaves([q, k, v])
        outputs = flash_attn(*inputs, sink=given, return_lse=True)
        wanted = [*inputs, given] if given is not None else inputs
        results.append([*outputs, *torch.autograd.grad(outputs[0].sin().sum() + outputs[1].sum(), wanted)])
    without, (*with_sink, dsink) = results
    assert all(torch.equal(a, b) for a, b in zip(without, with_sink, strict=True))
    assert (dsink == 0).all()


def test_dtypes_and_shapes_of_a_sink():
    q, k, v = make_qkv(2, 4, 6, 6, 8)
    with pytest.raises(ValueError, match=r"sink: got shape \[3\]; allowed: \(heads\) = \[4\]"):
        flash_attn(q, k, v, sink=torch.zeros(3))
    with pytest.raises(TypeError, match="sink: got dtype int64"):
        flash_attn(q, k, v, sink=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(TypeError, match="sink: got list"):
        flash_attn(q, k, v, sink=[0.0] * 4)


@pytest.mark.parametrize("in_dims", [0, None])
def test_vmap(in_dims):
    q, k, v = (torch.randn(3, 2, 4, 6, 8) for _ in range(3))
    sink = torch.randn(3, 4) if in_dims == 0 else torch.randn(4)
    run = torch.func.vmap(lambda q, k, v, s: flash_attn(q, k, v, sink=s), in_dims=(0, 0, 0, in_dims))
    expected = [flash_attn(q[n], k[n], v[n], sink=sink[n] if in_dims == 0 else sink) for n in range(3)]
    torch.testing.assert_close(run(q, k, v, sink), torch.stack(expected))


@pytest.mark.parametrize("lengths", [[(5, 9), (0, 3), (70, 0), (40, 150)], [(3, 0), (2, 0)]], ids=str)
def test_packed_sequences(isa, lengths):
    """Each sequence alone has the same results. One sequence has no keys."""
    cu_seqlens = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in zip(*lengths, strict=True)]
    rows, keys = (int(offsets[-1]) for offsets in cu_seqlens)
    q, k, v = (torch.randn(n, 4, 8, requires_grad=True) for n in (rows, keys, keys))
    sink = sinks(len(lengths), 4)
    out, lse = flash_attn_varlen(q, k, v, *cu_seqlens, sink=sink, causal="lower_right", return_lse=True)
    grads = torch.autograd.grad(out.sin().sum() + lse.sum(), (q, k, v, sink))
    loss = torch.zeros(())
    for b, (n_q, n_k) in enumerate(lengths):
        i, j = (int(offsets[b]) for offsets in cu_seqlens)
        own = (t.transpose(0, 1)[None] for t in (q[i : i + n_q], k[j : j + n_k], v[j : j + n_k]))
        alone, alone_lse = flash_attn(*own, sink=sink[b], causal="lower_right", return_lse=True)
        torch.testing.assert_close(out[i : i + n_q], alone[0].transpose(0, 1))
        torch.testing.assert_close(lse[:, i : i + n_q], alone_lse[0])
        loss = loss + alone.sin().sum() + alone_lse.sum()
    for a, b in zip(grads, torch.autograd.grad(loss, (q, k, v, sink)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_sink_of_minus_infinity_without_any_key():
    """A sink of -inf is no sink: it changes no result, also in rows with no other column."""
    q, kv = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 0, 8)
    sink = torch.tensor([-torch.inf, 1.0], requires_grad=True)
    _, lse = flash_attn(q, kv, kv, sink=sink, return_lse=True)
    assert torch.equal(lse[0, :, 0].detach(), sink.detach())
    (gradient,) = torch.autograd.grad(lse, sink, torch.ones_like(lse))
    assert torch.equal(gradient, torch.tensor([0.0, 3.0]))
    _, (_, t_lse) = torch.func.jvp(
        lambda s: flash_attn(q, kv, kv, sink=s, return_lse=True), (sink.detach(),), (torch.ones(2),)
    )
    assert torch.equal(t_lse[0, :, 0], torch.tensor([0.0, 1.0]))
