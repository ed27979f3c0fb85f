"""Multi-head latent attention end to end, and FlashAttention-3's second query ``qv``."""

import math

import pytest
import reference
import torch
from cache_helpers import rotary_tables
from tolerances import assert_as_exact_as_torch
from torch import nn

from flash_attn_ext import (
    explain_kvcache,
    explain_varlen,
    flash_attn,
    flash_attn_3,
    flash_attn_varlen,
    flash_attn_with_kvcache,
)
from flash_attn_ext.flash_attn_interface import flash_attn_func, flash_attn_varlen_func

LATENT, ROTARY, NOPE, V_DIM, HEADS = 96, 16, 24, 20, 20


class LatentAttention(nn.Module):
    """The attention of DeepSeek-V3, small: queries of low rank; one latent row and one rotary key for each token."""

    def __init__(self, width: int = 40, rank: int = 28):
        super().__init__()
        make = lambda a, b: nn.Linear(a, b, bias=False, dtype=torch.float64)  # noqa: E731
        self.down_q, self.up_q = make(width, rank), make(rank, HEADS * (NOPE + ROTARY))
        self.down_kv, self.norm = make(width, LATENT + ROTARY), nn.RMSNorm(LATENT, dtype=torch.float64)
        self.up_kv, self.out = make(LATENT, HEADS * (NOPE + V_DIM)), make(HEADS * V_DIM, width)
        self.scale = 1 / math.sqrt(NOPE + ROTARY)

    def rotated(self, x, first=0):
        cos, sin = (t[first:, None].double() for t in rotary_tables(first + x.shape[-3], ROTARY))
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    def queries(self, x, first=0):
        q = self.up_q(self.down_q(x)).unflatten(-1, (HEADS, -1))
        return q[..., :NOPE], self.rotated(q[..., NOPE:], first)

    def rows(self, x, first=0):
        """(B, S, 1, LATENT + ROTARY): what a cache stores."""
        latent, rotary = self.down_kv(x).split([LATENT, ROTARY], -1)
        return torch.cat([self.norm(latent)[..., None, :], self.rotated(rotary[..., None, :], first)], -1)

    def weights(self):
        """The parts of up_kv for keys and for values: (H, NOPE, LATENT) and (H, V_DIM, LATENT)."""
        return self.up_kv.weight.unflatten(0, (HEADS, NOPE + V_DIM)).split([NOPE, V_DIM], 1)

    def expanded(self, x):
        """Keys and values of each head; dense attention."""
        (q_nope, q_rotary), rows, (w_k, w_v) = self.queries(x), self.rows(x), self.weights()
        latent, rotary = rows.split([LATENT, ROTARY], -1)
        k = torch.cat([torch.einsum("bsl,hnl->bshn", latent[:, :, 0], w_k), rotary.expand(-1, -1, HEADS, -1)], -1)
        v = torch.einsum("bsl,hnl->bshn", latent[:, :, 0], w_v)
        q, k, v = (t.transpose(1, 2) for t in (torch.cat([q_nope, q_rotary], -1), k, v))
        out, _ = reference.attention(q, k, v, causal="lower_right", scale=self.scale)
        return self.out(out.transpose(1, 2).flatten(-2))

    def absorbed_queries(self, x, first=0):
        """The weights of the keys move to the queries: (B, S, H, LATENT) and (B, S, H, ROTARY)."""
        q_nope, q_rotary = self.queries(x, first)
        return torch.einsum("bshn,hnl->bshl", q_nope, self.weights()[0]), q_rotary

    def result(self, attended):
        """The weights of the values, after the attention to latent rows."""
        return self.out(torch.einsum("bshl,hnl->bshn", attended, self.weights()[1]).flatten(-2))

    def absorbed(self, x):
        q, rows = torch.cat(self.absorbed_queries(x), -1), self.rows(x)
        q, k, v = (t.transpose(1, 2) for t in (q, rows, rows[..., :LATENT]))
        out = flash_attn(q, k, v, causal="lower_right", scale=self.scale, enable_gqa=True)
        return self.result(out.transpose(1, 2))


def test_absorbed_equals_expanded():
    layer, x = LatentAttention(), torch.randn(2, 70, 40, dtype=torch.float64, requires_grad=True)
    expected, ours = layer.expanded(x), layer.absorbed(x)
    torch.testing.assert_close(ours, expected)
    inputs, grad = [x, *layer.parameters()], torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(y, inputs, grad) for y in (ours, expected)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("page_size", [5, 16, 64])
@pytest.mark.parametrize("with_qv", [False, True])
@torch.no_grad()
def test_decode_from_pages_equals_prefill(page_size, with_qv):
    layer, x = LatentAttention(), torch.randn(2, 70, 40, dtype=torch.float64)
    expected = layer.expanded(x)
    pages = -(-70 // page_size)
    cache = torch.full((2 * pages, page_size, 1, LATENT + ROTARY), torch.nan, dtype=torch.float64)
    table = torch.randperm(2 * pages).view(2, pages)
    latent, rotary = cache.split([LATENT, ROTARY], -1)
    for first, count in ((0, 60), (60, 1), (61, 1), (62, 8)):
        tokens = x[:, first : first + count]
        new, (q_latent, q_rotary) = layer.rows(tokens, first), layer.absorbed_queries(tokens, first)
        common = dict(cache_seqlens=first, block_table=table, causal=True, softmax_scale=layer.scale)
        if with_qv:
            k, v = new[..., LATENT:], new[..., :LATENT]
            out = flash_attn_with_kvcache(q_rotary, rotary, latent, k, v, qv=q_latent, **common)
        else:
            at = torch.arange(first, first + count)
            cache[table[:, at // page_size], at % page_size] = new
            common["cache_seqlens"] = first + count
            out = flash_attn_with_kvcache(torch.cat([q_latent, q_rotary], -1), cache, latent, **common)
        torch.testing.assert_close(layer.result(out), expected[:, first : first + count])


def dense_with_qv(q, k, v, qv, **options):
    """(B, S, H, D): scores q k^T + qv v^T, by their definition, in the inputs' dtype."""
    scale = options.pop("scale", None) or 1 / math.sqrt(q.shape[-1] + v.shape[-1])
    joined = (torch.cat(pair, -1).transpose(1, 2) for pair in ((q, qv), (k, v)))
    out, lse = reference.attention(*joined, v.transpose(1, 2), scale=scale, **options)
    return out.transpose(1, 2), lse


def make_with_qv(dtype, seqlen_q=20, seqlen_k=30):
    q, qv = (torch.randn(2, seqlen_q, 6, d, dtype=dtype, requires_grad=True) for d in (16, 40))
    k, v = (torch.randn(2, seqlen_k, 1, d, dtype=dtype, requires_grad=True) for d in (16, 40))
    return q, k, v, qv


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softmax_scale", [None, 0.3])
def test_qv_of_whole_and_packed_sequences(dtype, softmax_scale):
    q, k, v, qv = inputs = make_with_qv(dtype)
    exact, theirs = (
        dense_with_qv(*(t.detach().to(x) for t in inputs), causal="lower_right", scale=softmax_scale)
        for x in (torch.float64, dtype)
    )
    whole = flash_attn_func(q, k, v, softmax_scale=softmax_scale, causal=True, qv=qv, return_attn_probs=True)[:2]
    of_3 = flash_attn_3.flash_attn_func(q, k, v, softmax_scale, True, qv, return_attn_probs=True)
    offsets = [torch.arange(3) * n for n in (20, 30)]
    packed = [t.flatten(0, 1) for t in (q, k, v)], *offsets, 20, 30
    flat = flash_attn_varlen(*packed[0], *packed[1:], qv=qv.flatten(0, 1), scale=softmax_scale, causal="lower_right",
                             enable_gqa=True, return_lse=True)  # fmt: skip
    flat_3 = flash_attn_3.flash_attn_varlen_func(
        *packed[0], *packed[1:], softmax_scale=softmax_scale, causal=True, qv=qv.flatten(0, 1), return_attn_probs=True
    )
    for name, a, b, c in zip(("out", "lse"), whole, theirs, exact, strict=True):
        assert_as_exact_as_torch(name, a, b, c, 2)
    assert torch.equal(of_3[0], whole[0])
    for out, lse in (flat, flat_3):
        assert torch.equal(out.unflatten(0, (2, 20)), whole[0])
        assert torch.equal(lse.unflatten(1, (2, 20)).transpose(0, 1), whole[1])
    said = explain_varlen(*packed[0], *packed[1:], qv=qv.flatten(0, 1), enable_gqa=True)
    assert "query (40, 6, 56), key (60, 1, 56), value (60, 1, 40)" in said.call
    grad = torch.randn_like(whole[0])
    grads = [torch.autograd.grad(y, inputs, grad, retain_graph=True) for y in (whole[0], flat[0].unflatten(0, (2, 20)))]
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_gradients_with_qv():
    inputs = make_with_qv(torch.float64)
    ours = flash_attn_func(*inputs[:3], causal=True, qv=inputs[3])
    expected, _ = dense_with_qv(*inputs, causal="lower_right")
    grad = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(y, inputs, grad) for y in (ours, expected)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("seqlen_q", [1, 20])
@pytest.mark.parametrize("paged", [False, True])
@torch.no_grad()
def test_qv_of_caches(seqlen_q, v_first, paged):
    q, k, v, qv = make_with_qv(torch.float32, seqlen_q, 32)
    columns = [40, 16] if v_first else [16, 40]
    cache = torch.cat([v, k] if v_first else [k, v], -1)
    cache = cache.reshape(8, 8, 1, 56).contiguous() if paged else cache
    parts = cache.split(columns, -1)
    k_cache, v_cache = reversed(parts) if v_first else parts
    table = torch.arange(8).view(2, 4) if paged else None
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, qv=qv, cache_seqlens=torch.tensor([32, 32]), causal=True,
                                       block_table=table, return_softmax_lse=True)  # fmt: skip
    expected, expected_lse = dense_with_qv(q, k, v, qv, causal="lower_right")
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    of_3 = flash_attn_3.flash_attn_with_kvcache(
        q, k_cache, v_cache, qv=qv, cache_seqlens=torch.tensor([32, 32]), causal=True, page_table=table
    )
    assert torch.equal(of_3, out)
    if paged:
        packed = q.flatten(0, 1), k_cache, v_cache, torch.arange(3) * seqlen_q, torch.arange(3) * 32, seqlen_q, 32
        by_varlen = flash_attn_varlen_func(*packed, causal=True, block_table=table, qv=qv.flatten(0, 1))
        assert torch.equal(by_varlen.unflatten(0, (2, seqlen_q)), out)
    said = explain_kvcache(q, k_cache, v_cache, qv=qv, causal=True, block_table=table)
    assert said.forward.allocates["joined query"] == q.nbytes + qv.nbytes


@torch.no_grad()
def test_rotated_queries_with_qv():
    """The rotation turns q and the new keys, not qv and the latent rows."""
    q, k, v, qv = make_with_qv(torch.float32, 3, 3)
    cache = torch.zeros(2, 10, 1, 56)
    cos, sin = rotary_tables(10, 16)
    tables = dict(rotary_cos=cos, rotary_sin=sin)
    out = flash_attn_with_kvcache(q, *cache.split([16, 40], -1), k, v, qv=qv, cache_seqlens=0, causal=True, **tables)
    apart = [torch.zeros(2, 10, 1, 16), torch.zeros(2, 10, 1, 40)]
    flash_attn_with_kvcache(q, *apart, k, v, cache_seqlens=0, causal=True, **tables)  # writes the rotated keys
    assert torch.equal(cache, torch.cat(apart, -1))
    a, b = q[..., 0::2], q[..., 1::2]
    c, s = cos[:3, None], sin[:3, None]
    rotated = torch.stack([a * c - b * s, a * s + b * c], -1).flatten(-2)
    expected, _ = dense_with_qv(rotated, cache[:, :3, :, :16], v, qv, causal="lower_right")
    torch.testing.assert_close(out, expected)


BAD = {
    "columns": (lambda q, qv: qv[..., 1:], ValueError, r"qv: got shape \[2, 20, 6, 39\]; allowed: \[2, 20, 6, 40\]"),
    "dtype": (lambda q, qv: qv.double(), TypeError, "qv: got dtype torch.float64; allowed: torch.float32"),
    "device": (lambda q, qv: qv.to("meta"), ValueError, "qv: got device meta; allowed: cpu"),
    "type": (lambda q, qv: 3, TypeError, "qv: got int; allowed: .*Tensor"),
    "sparse": (lambda q, qv: qv.detach().to_sparse(), TypeError, "qv: got a torch.sparse_coo tensor"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_second_queries(name):
    change, exception, message = BAD[name]
    q, k, v, qv = (t.detach() for t in make_with_qv(torch.float32))
    cache = torch.cat([k, v], -1)
    with pytest.raises(exception, match=message):
        flash_attn_func(q, k, v, qv=change(q, qv))
    with pytest.raises(exception, match=message):
        flash_attn_with_kvcache(q, *cache.split([16, 40], -1), qv=change(q, qv))


def test_qv_needs_caches_in_one_tensor():
    q, k, v, qv = (t.detach() for t in make_with_qv(torch.float32))
    with pytest.raises(NotImplementedError, match="qv: got a tensor with two separate caches; allowed"):
        flash_attn_with_kvcache(q, k, v, qv=qv)
    cache = torch.cat([k, v], -1).to(torch.int8)
    with pytest.raises(NotImplementedError, match=r"qv: got a tensor with caches of torch\.int8"):
        flash_attn_with_kvcache(q, *cache.split([16, 40], -1), qv=qv)
    with pytest.raises(NotImplementedError, match="qv: got a tensor that requires a gradient"):
        flash_attn_with_kvcache(q, *torch.cat([k, v], -1).split([16, 40], -1), qv=qv.requires_grad_())
