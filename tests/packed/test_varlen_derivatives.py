"""Forward mode and double backward of packed sequences: numerically, against the dense derivatives, and through
torch.func."""

import pytest
import torch
from helpers import assert_hessian_vector_products_agree
from varlen_helpers import make_pack, of_sequence, offsets

from flash_attn_ext import _ops, flash_attn, flash_attn_varlen, new_rng_state

pytestmark = pytest.mark.usefixtures("one_thread")
SHORT = [(3, 4), (1, 2), (0, 1), (5, 2), (2, 0)]
LONG = [(70, 130), (1, 64), (0, 5), (97, 3), (65, 65)]
OPTIONS = {
    "plain": {},
    "causal": {"causal": "lower_right", "window": (3, 0)},
    "softcap": {"softcap": 0.8, "causal": "upper_left"},
    "dropout": {"dropout_p": 0.3},
}


def case(name, bias, lengths=SHORT, used=None, mask_rows=True):
    """Returns a function of the tensors that have a gradient, and the tensors."""
    tensors = make_pack(lengths, 4, 2, 3, 2, torch.float64)
    longest = [max(side) for side in zip(*lengths, strict=True)]
    if bias:
        shape = (4, len(tensors[0]), longest[1]) if mask_rows else (len(lengths), 1, 1, longest[1])
        shapes = shape, (4,), (len(lengths), 4)
        tensors += [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    options = dict(OPTIONS[name])
    if "dropout_p" in options:
        options["rng_state"] = new_rng_state()
    cu_seqlens = offsets(lengths)

    def run(q, k, v, mask=None, slopes=None, sink=None):
        return flash_attn_varlen(q, k, v, *cu_seqlens, *longest, mask, alibi_slopes=slopes, sink=sink, enable_gqa=True,
                                 return_lse=True, **options)  # fmt: skip

    def visible(*x):
        """Replaces lse of rows without keys, which is -inf."""
        out, lse = run(*x)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    return (run if bias else visible), tensors


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_numerically(isa, name, bias):
    run, tensors = case(name, bias)
    assert torch.autograd.gradcheck(run, tensors, check_forward_ad=True, check_backward_ad=False, fast_mode=True)
    assert torch.autograd.gradgradcheck(
        run, tensors, check_fwd_over_rev=True, check_rev_over_rev=True, fast_mode=True, atol=1e-4
    )


def test_numerically_with_key_padding():
    run, tensors = case("plain", True, mask_rows=False)
    assert torch.autograd.gradcheck(run, tensors, check_forward_ad=True, check_backward_ad=False, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, tensors, check_fwd_over_rev=True, fast_mode=True, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_sequence_as_alone(isa, dtype):
    """Tangents and second gradients have the bits of the dense operators on each sequence."""
    tensors = make_pack(LONG, 4, 2, 16, 16, dtype)
    tangents = [torch.randn_like(t) for t in tensors]
    cu_seqlens = offsets(LONG)

    def second(function, x, t):
        out, out_tangents = torch.func.jvp(function, tuple(a.detach() for a in x), tuple(t))
        x = [a.detach().requires_grad_() for a in x]
        first = torch.autograd.grad(function(*x), x, torch.ones_like(out), create_graph=True)
        return out, out_tangents, *torch.autograd.grad(first, x, t)

    together = second(
        lambda q, k, v: flash_attn_varlen(q, k, v, *cu_seqlens, causal="lower_right", enable_gqa=True),
        tensors,
        tangents,
    )
    sides = (0, 0, 0, 1, 1)
    for b, (seqlen_q, seqlen_k) in enumerate(LONG):
        if not seqlen_q or not seqlen_k:
            continue
        own = [[of_sequence(t, cu_seqlens[n > 0], b) for n, t in enumerate(x)] for x in (tensors, tangents)]
        alone = second(lambda q, k, v: flash_attn(q, k, v, causal="lower_right", enable_gqa=True), *own)
        for name, a, whole, side in zip(("out", "t_out", "hq", "hk", "hv"), alone, together, sides, strict=True):
            torch.testing.assert_close(of_sequence(whole, cu_seqlens[side], b), a, msg=lambda m, n=name: f"{n}: {m}")


def test_rows_out_of_use_have_no_tangent():
    lengths = [(5, 7), (4, 4)]
    q, k, v = (t.detach() for t in make_pack(lengths, 2, 2, 8, 8))
    cu_seqlens, seqused = offsets(lengths), [torch.tensor([3, 4]), torch.tensor([7, 2])]

    def attend(q, k, v):
        return flash_attn_varlen(q, k, v, *cu_seqlens, seqused_q=seqused[0], seqused_k=seqused[1], return_lse=True)

    outside = torch.tensor([3, 4])
    inside = torch.tensor([0, 1, 2, 5, 6, 7, 8])
    (_, lse), (t_out, t_lse) = torch.func.jvp(
        lambda v: attend(q, k, v), (v,), (torch.ones_like(v),)
    )  # fmt: skip
    torch.testing.assert_close(t_out[inside], torch.ones_like(t_out[inside]))  # weights sum up to 1
    assert (t_out[outside] == 0).all()
    assert (t_lse == 0).all()
    assert (lse[:, outside] == -torch.inf).all()
    _, (t_out, t_lse) = torch.func.jvp(lambda q: attend(q, k, v), (q,), (q,))
    assert (t_out[outside] == 0).all()
    assert (t_lse[:, outside] == 0).all()
    assert (t_lse[:, inside] != 0).all()


def test_no_keys_at_all():
    cu_seqlens = [torch.tensor([0, 3]), torch.tensor([0, 0])]
    q, k, v = (torch.randn(n, 2, 8) for n in (3, 0, 0))
    results = torch.func.jvp(lambda q: flash_attn_varlen(q, k, v, *cu_seqlens, return_lse=True), (q,), (q,))
    assert (results[0][0] == 0).all()
    assert all((t == 0).all() for t in results[1])
    sink = torch.randn(2)
    (_, lse), (t_out, t_lse) = torch.func.jvp(
        lambda sink: flash_attn_varlen(q, k, v, *cu_seqlens, sink=sink, return_lse=True), (sink,), (torch.ones(2),)
    )
    assert torch.equal(lse, sink[:, None].expand(2, 3))
    assert (t_out == 0).all()
    assert (t_lse == 1).all()


def test_hessian_vector_products_both_ways():
    run, tensors = case("softcap", True)
    inputs = tuple(t.detach() for t in tensors)

    def loss(*x):
        out, lse = run(*x)
        return out.sin().sum() + (lse * lse).sum()

    assert_hessian_vector_products_agree(loss, inputs)


def test_vmap_of_jvp():
    run, (q, k, v) = case("plain", False)
    q, k, v = (t.detach() for t in (q, k, v))
    directions = torch.randn(3, *q.shape, dtype=torch.float64)

    def move(t):
        return torch.func.jvp(lambda q: run(q, k, v)[0], (q,), (t,))[1]

    torch.testing.assert_close(torch.vmap(move)(directions), torch.stack([move(t) for t in directions]))


def test_opcheck():
    q, k, v = make_pack([(5, 7), (0, 2), (9, 4)], 2, 1, 8, 8)
    cu_seqlens = offsets([(5, 7), (0, 2), (9, 4)])
    x = (q, k, v, None, None, None, *cu_seqlens, None, None, None)
    t = (torch.randn_like(q), None, torch.randn_like(v), None, None, None)
    torch.library.opcheck(_ops.attention_varlen_jvp, (*t, *x), {"causal": True})
    with torch.no_grad():
        out, lse, t_out, t_lse = _ops.attention_varlen_jvp(*t, *x, causal=True)
    torch.library.opcheck(
        _ops.attention_varlen_double_backward,
        (torch.randn_like(out), None, *t, *(a.detach() if a is not None else None for a in x), out, lse, t_out, t_lse),
        {"causal": True, "grad_mask": [True, True, True, False, False, False]},
        test_utils=("test_schema", "test_faketensor"),
    )


def test_the_third_order_is_refused_by_name():
    run, (q, k, v) = case("plain", False)
    out = run(q, k, v)[0]
    (first,) = torch.autograd.grad(out.sin().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(first.sin().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="flash_attn_varlen: its third derivative"):
        second.sin().sum().backward()
    with pytest.raises(NotImplementedError, match="flash_attn_varlen: forward-mode AD of its forward-mode AD"):
        torch.func.jacfwd(torch.func.jacfwd(lambda q: run(q, k.detach(), v.detach())[0].sum()))(q.detach())
