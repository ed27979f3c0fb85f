"""Forward mode, second derivatives and torch.func of functions of the user."""

import pytest
import torch
from flex_gallery import mask_mods, score_mods
from flex_reference import softmax_of
from torch.nn.attention.flex_attention import create_block_mask

from flash_attn_ext import flash_attn, flex_attention
from flash_attn_ext.flex import derivatives


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(derivatives, "_ELEMENTS", 2 * 6 * 3)  # three queries of a head pair


def inputs(*shape, count=3):
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(count)]


def attend(q, k, v, table, temperature, attention=flex_attention):
    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.tanh(score * torch.exp(temperature[h, 0])) + table[h, q_idx - kv_idx + 6]

    mask = create_block_mask(lambda b, h, i, j: i + 2 >= j, None, None, 7, 6, "cpu", BLOCK_SIZE=4)
    return attention(q, k, v, score_mod, mask, return_lse=True)


def dense(q, k, v, score_mod, mask_mod):
    """(out, lse) of functions that take all indices at once: torch.vmap has no second derivative of ``table[h]``."""
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    b, h, i, j = (torch.arange(n).view([-1 if d == m else 1 for d in range(4)]) for m, n in enumerate(sizes))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (k, v))
    scores = score_mod(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, b, h, i, j)
    scores = scores.masked_fill(~mask_mod(b, h, i, j), -torch.inf)
    return softmax_of(scores) @ v, torch.logsumexp(scores, -1)


def arguments():
    q, k, v = inputs(1, 2, 7, 4)
    table, temperature = (torch.rand(2, n, dtype=torch.float64, requires_grad=True) for n in (13, 1))
    return q, k[:, :, :6].detach().requires_grad_(), v[:, :, :6].detach().requires_grad_(), table, temperature


def test_gradgradcheck_and_forward_mode():
    x = arguments()
    assert torch.autograd.gradcheck(attend, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, x, fast_mode=True)


@pytest.mark.parametrize("name", ["softcap", "relative_table", "t5_buckets", "everything", "integers"])
def test_second_derivatives_of_the_gallery(name):
    score_mod, captured = score_mods(2, 11, 9, torch.float64)[name]
    q, k, v = (torch.randn(2, h, s, 5, dtype=torch.float64, requires_grad=True) for h, s in ((2, 11), (1, 9), (1, 9)))
    mask_mod = mask_mods(2, 11, 9)["prefix_lm"]
    mask = create_block_mask(mask_mod, 2, None, 11, 9, "cpu", BLOCK_SIZE=4)
    x = (q, k, v, *captured)

    def second(out):
        grads = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in grads), x)

    wanted = second(dense(q, k, v, score_mod, mask_mod)[0])
    torch.testing.assert_close(second(flex_attention(q, k, v, score_mod, mask, enable_gqa=True)), wanted)


def test_second_derivatives_with_the_other_options():
    q, k, v = inputs(2, 2, 9, 4)
    slopes, sink = (torch.rand(2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    (bias,) = inputs(2, 1, 9, 9, count=1)

    def run(q, k, v, bias, slopes, sink):
        return flash_attn(
            q,
            k,
            v,
            bias,
            alibi_slopes=slopes,
            sink=sink,
            softcap=3.0,
            window=(4, 1),
            score_mod=lambda s, *_: s * s.sigmoid(),
        )

    assert torch.autograd.gradgradcheck(run, (q, k, v, bias, slopes, sink), fast_mode=True)


def test_torch_func():
    q, k, v, table, temperature = (t.detach() for t in arguments())

    def loss(q, table, attention=flex_attention):
        out, lse = attend(q, k, v, table, temperature, attention)
        return out.sin().sum() + lse.sum()

    def exact(q, table):
        return loss(q, table, lambda q, k, v, score_mod, mask, return_lse: dense(q, k, v, score_mod, mask.mask_mod))

    func = torch.func
    for transform in (
        lambda f: func.grad(f, argnums=(0, 1)),
        lambda f: func.jacfwd(f, argnums=1),
        lambda f: lambda q, t: func.jvp(f, (q, t), (torch.ones_like(q), torch.ones_like(t))),
        lambda f: func.jacrev(func.grad(f, argnums=1), argnums=1),
    ):
        torch.testing.assert_close(transform(loss)(q, table), transform(exact)(q, table))


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_detached_parts_of_a_score_have_no_derivative(backend):
    """A straight-through estimator, and a detached element of a table."""
    q, k, v = inputs(1, 2, 9, 4)
    table = torch.rand(2, dtype=torch.float64, requires_grad=True)

    def score_mod(s, b, h, i, j):
        return (s + (torch.round(s * 4) / 4 - s).detach()) * table[h].detach() + table[h] * i

    def attend(q):
        return flex_attention(q, k, v, score_mod).sin()

    run = attend if backend is None else torch.compile(attend, backend=backend, fullgraph=True)
    h, i = torch.arange(2)[:, None, None], torch.arange(9)[:, None]
    wanted = (score_mod(q @ k.mT / 2, 0, h, i, None).softmax(-1) @ v).sin()
    out = run(q)
    torch.testing.assert_close(out, wanted)
    has_second = backend is None  # AOTAutograd has no second derivatives
    ours, exact = (torch.autograd.grad(o.sum(), (q, table), create_graph=has_second) for o in (out, wanted))
    for g, g_exact in zip(ours, exact, strict=True):
        torch.testing.assert_close(g, g_exact)
        if has_second:
            seconds = [torch.autograd.grad(x.square().sum(), q, retain_graph=True)[0] for x in (g, g_exact)]
            torch.testing.assert_close(*seconds)


def test_vmap_over_batch_tables_and_gradients():
    q, k, v, table, temperature = (t.detach() for t in arguments())
    tables = torch.stack([table, table * 2, table - 1])
    queries = torch.stack([q, q * 2, q - 1])
    wanted = torch.stack([attend(*(a, k, v, t, temperature))[0] for a, t in zip(queries, tables, strict=True)])
    out = torch.func.vmap(lambda a, t: attend(a, k, v, t, temperature)[0])(queries, tables)
    torch.testing.assert_close(out, wanted)

    def loss(a, t):
        return attend(a, k, v, t, temperature)[0].square().sum()

    got = torch.func.vmap(torch.func.grad(loss, argnums=1))(queries, tables)
    exact = torch.stack([torch.func.grad(loss, argnums=1)(a, t) for a, t in zip(queries, tables, strict=True)])
    torch.testing.assert_close(got, exact)


@pytest.mark.parametrize("place", [(), (40, 6, 3, 11)])
def test_derivatives_with_dropout(place):
    """The same elements are dropped in each derivative, also in a part of a larger call."""
    q, k, v = inputs(2, 2, 5, 4)
    state = torch.tensor([1, 2, *place])
    tangent = torch.randn_like(q)
    results = []
    for options in ({"score_mod": lambda s, *_: s * 2}, {"scale": 1.0}):  # scale is 1 / 2 with the function

        def attend(q, options=options):
            return flash_attn(q, k, v, dropout_p=0.5, rng_state=state, **options).sin()

        (grad,) = torch.autograd.grad(attend(q).sum(), q, create_graph=True)
        (second,) = torch.autograd.grad((grad * tangent).sum(), q)
        with torch.autograd.forward_ad.dual_level():
            dual = attend(torch.autograd.forward_ad.make_dual(q.detach(), tangent))
            results.append([*torch.autograd.forward_ad.unpack_dual(dual), grad, second])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


def test_derivatives_that_are_refused():
    q, k, v = inputs(1, 2, 5, 4)
    out = flex_attention(q, k, v, lambda s, *_: s * s)
    (grad,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"third derivative"):
        torch.autograd.grad(second.sum(), q)
