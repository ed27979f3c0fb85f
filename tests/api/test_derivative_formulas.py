"""docs/derivative_formulas.md: each formula, dense in fp64, against torch's autograd of tests/support/reference.py."""

import math

import pytest
import torch
from reference import attention, visible

B, H, S_Q, S_K, D, D_V = 2, 2, 5, 7, 3, 4
NAMES = ("query", "key", "value", "attn_mask", "alibi_slopes")


def make(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = (random(B, H, S_Q, D), random(B, H, S_K, D), random(B, H, S_K, D_V), random(B, H, S_Q, S_K), random(B, H))
    tangents = tuple(random(*t.shape) for t in x)
    cotangents = (random(B, H, S_Q, D_V), random(B, H, S_Q))
    kept = torch.rand(B, H, S_Q, S_K, generator=generator) > 0.3
    return x, tangents, cotangents, kept


def options(kept, softcap, causal):
    return {"softcap": softcap, "causal": causal, "kept": kept, "dropout_p": 0.25, "scale": 0.7}


def terms(x, tangents, o):
    """s, P, R, y', y'' and e, w of the page; P = 0 in rows without a visible key."""
    q, k, _, mask, slopes = x
    tq, tk, _, tmask, tslopes = tangents
    y = scaled = o["scale"] * q @ k.mT
    slope1, slope2 = torch.ones_like(y), torch.zeros_like(y)
    if o["softcap"] > 0:
        tanh = torch.tanh(scaled / o["softcap"])
        y, slope1 = o["softcap"] * tanh, 1 - tanh**2
        slope2 = -2 * tanh * slope1 / o["softcap"]
    diagonal = 0 if o["causal"] == "upper_left" else S_K - S_Q
    distance = (torch.arange(S_Q)[:, None] + diagonal - torch.arange(S_K)).abs().double()
    s = y - slopes[..., None, None] * distance + mask
    hidden = ~visible(S_Q, S_K, causal=o["causal"])
    lse = s.masked_fill(hidden, -math.inf).logsumexp(-1)
    probs = (s - lse[..., None]).exp().masked_fill(hidden | lse.isinf()[..., None], 0)
    factor = o["kept"].double() / (1 - o["dropout_p"])
    w = tq @ k.mT + q @ tk.mT
    e = slope1 * o["scale"] * w - tslopes[..., None, None] * distance + tmask
    return probs, factor, slope1, slope2, distance, w, e


def jvp(x, tangents, o):
    probs, factor, _, _, _, _, e = terms(x, tangents, o)
    mu = (probs * e).sum(-1)
    out = (factor * probs) @ x[2]
    return (factor * probs * e) @ x[2] + (factor * probs) @ tangents[2] - mu[..., None] * out, mu


def double_backward(x, cotangents, tangents, o):
    (q, k, v, _, _), (tq, tk, tv, _, _), (dout, dlse) = x, tangents, cotangents
    probs, factor, slope1, slope2, distance, w, e = terms(x, tangents, o)
    t_out, mu = (t[..., None] if t.dim() == 3 else t for t in jvp(x, tangents, o))
    delta = (dout * ((factor * probs) @ v)).sum(-1, keepdim=True) - dlse[..., None]
    gamma = (dout * t_out).sum(-1, keepdim=True) - mu * delta
    g, f = factor * (dout @ v.mT), factor * (dout @ tv.mT)
    ds = probs * (g - delta)
    gs = probs * ((g - delta) * e + f - mu * g - gamma)
    scale = o["scale"]
    z = scale * (slope1 * gs + slope2 * scale * w * ds)
    d = scale * slope1 * ds
    return (
        z @ k + d @ tk,
        z.mT @ q + d.mT @ tq,
        (factor * probs * (e - mu)).mT @ dout,
        gs,
        -(distance * gs).sum((-1, -2)),
    )


@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("causal", [None, "upper_left", "lower_right"])
def test_formulas_of_the_page(softcap, causal):
    x, tangents, cotangents, kept = make()
    o = options(kept, softcap, causal)

    def function(*inputs):
        return attention(*inputs[:4], alibi_slopes=inputs[4], **o)

    _, expected = torch.func.jvp(function, x, tangents)
    for got, want in zip(jvp(x, tangents, o), expected, strict=True):
        torch.testing.assert_close(got, want)

    leaves = tuple(t.clone().requires_grad_() for t in x)
    first = torch.autograd.grad(function(*leaves), leaves, cotangents, create_graph=True)
    expected = torch.autograd.grad(first, leaves, tangents)
    for name, got, want in zip(NAMES, double_backward(x, cotangents, tangents, o), expected, strict=True):
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")
