"""Multi-head latent attention end to end, and FlashAttention-3's second query ``qv``."""

import math

import pytest
import reference
import torch
from cache_helpers import rotary_tables
from tolerances import assert_as_exact_as_torch
from torch import nn

from flash_attn_ext import (
    _ops,
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
        """(B, S, 1, LATENT + ROTARY): the rows of a cache."""
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


@pytest.mark.parametrize("order", ["k first", "v first", "separate"])
@pytest.mark.parametrize("seqlen_q", [1, 20])
@pytest.mark.parametrize("paged", [False, True])
@torch.no_grad()
def test_qv_of_caches(seqlen_q, order, paged):
    q, k, v, qv = make_with_qv(torch.float32, seqlen_q, 32)
    v_first = order == "v first"
    columns = [40, 16] if v_first else [16, 40]
    cache = torch.cat([v, k] if v_first else [k, v], -1)
    cache = cache.reshape(8, 8, 1, 56).contiguous() if paged else cache
    parts = cache.split(columns, -1)
    k_cache, v_cache = reversed(parts) if v_first else parts
    if order == "separate":
        k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("heads", [2, 20])
@torch.no_grad()
def test_separate_caches_equal_one_tensor(dtype, heads):
    """Also with lengths, left padding, masked NaN rows, several key heads, and new rows."""
    q, qv = (torch.randn(2, 3, heads, d, dtype=dtype) for d in (16, 40))
    cache = torch.randn(4, 150, 2, 56, dtype=dtype)
    cache[:, 130:] = torch.nan
    k, v = (torch.randn(2, 3, 2, d, dtype=dtype) for d in (16, 40))
    given = dict(qv=qv, cache_seqlens=torch.tensor([120, 70]), causal=True, window_size=(90, 0),
                 cache_batch_idx=torch.tensor([3, 0]), cache_leftpad=torch.tensor([7, 0]))  # fmt: skip
    apart = [part.contiguous() for part in cache.split([16, 40], -1)]
    expected = flash_attn_with_kvcache(q, *cache.split([16, 40], -1), k, v, **given)
    out = flash_attn_with_kvcache(q, *apart, k, v, **given)
    torch.testing.assert_close(out, expected)
    assert torch.equal(torch.cat(apart, -1).nan_to_num(), cache.nan_to_num())


def test_limits_of_qv_with_caches():
    q, k, v, qv = (t.detach() for t in make_with_qv(torch.float32))
    cache = torch.cat([k, v], -1).to(torch.int8)
    with pytest.raises(NotImplementedError, match=r"qv: got a tensor with caches of torch\.int8"):
        flash_attn_with_kvcache(q, *cache.split([16, 40], -1), qv=qv)
    with pytest.raises(NotImplementedError, match="qv: got a tensor that requires a gradient"):
        flash_attn_with_kvcache(q, *torch.cat([k, v], -1).split([16, 40], -1), qv=qv.requires_grad_())


def flashmla_rows(rows):
    """FlashMLA's bytes of latent rows (..., 576), and the numbers that they represent."""
    latent = rows[..., :512].float().unflatten(-1, (4, 128))
    factors = latent.abs().amax(-1, keepdim=True) / 448
    coded = (latent / factors).to(torch.float8_e4m3fn)
    rotary = rows[..., 512:].bfloat16()
    parts = (coded.flatten(-2), factors.squeeze(-1), rotary)
    bytes_of_rows = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
    return bytes_of_rows, torch.cat([(coded.float() * factors).flatten(-2), rotary.float()], -1)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("heads", "seqlen_q"), [(2, 1), (16, 2), (4, 40)])
@pytest.mark.parametrize("paged", [True, False])
@torch.no_grad()
def test_flashmla_caches(dtype, bound, heads, seqlen_q, paged):
    rows, numbers = flashmla_rows(torch.randn(6, 32, 1, 576))
    q = torch.randn(2, seqlen_q, heads, 576, dtype=dtype)
    table = torch.tensor([[4, 1, 0], [2, 5, 3]])
    cache = rows if paged else rows[table].flatten(1, 2)
    lengths = torch.tensor([90, 47])
    out, lse = flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=lengths, block_table=table if paged else None, softmax_scale=0.05, causal=True,
        return_softmax_lse=True, cache_format="flashmla_fp8",
    )  # fmt: skip
    wide = numbers[table].flatten(1, 2).to(torch.float64)
    expected, expected_lse = flash_attn_with_kvcache(
        q.double(), wide, wide[..., :512], cache_seqlens=lengths, softmax_scale=0.05, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    torch.testing.assert_close(out.double(), expected, rtol=bound, atol=bound)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=bound, atol=bound)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("heads", "paged"), [(2, True), (70, False)])
@torch.no_grad()
def test_flashmla_caches_by_index(isa, dtype, bound, heads, paged):
    """DeepSeek V3.2's sparse decoding. Rows that no query names are NaN."""
    rows, numbers = flashmla_rows(torch.randn(6, 32, 1, 576))
    table, lengths = torch.tensor([[4, 1, 0], [2, 5, 3]]), torch.tensor([90, 47])
    chosen = torch.stack([torch.randint(-1, int(n), (1, 3, 70)) for n in lengths])
    chosen[0, 0, 0] = torch.arange(5, 75)  # neighbours
    chosen[chosen == 9] = 10
    page_of_9 = table[:, 0]
    rows[page_of_9, 9] = 255
    q = torch.randn(2, 3, heads, 576, dtype=dtype)
    cache = rows if paged else rows[table].flatten(1, 2)
    out, lse = flash_attn_with_kvcache(
        q, cache, cache, cache_seqlens=lengths, block_table=table if paged else None, softmax_scale=0.05, causal=True,
        return_softmax_lse=True, cache_format="flashmla_fp8", key_indices=chosen,
    )  # fmt: skip
    wide = numbers[table].flatten(1, 2).double()
    for b in range(2):
        keys = wide[b, : lengths[b]].transpose(0, 1)[None]
        seen = torch.zeros(3, 91, dtype=torch.bool).scatter(1, chosen[b, 0] % 91, True)[:, : lengths[b]]
        exact, exact_lse = reference.attention(
            q[b].transpose(0, 1)[None].double(), keys, keys[..., :512], seen, causal="lower_right", scale=0.05
        )
        torch.testing.assert_close(out[b].transpose(0, 1)[None].double(), exact, rtol=bound, atol=bound)
        torch.testing.assert_close(lse[b][None].double(), exact_lse, rtol=bound, atol=bound)


@torch.no_grad()
def test_autocast_copies_no_cache_that_is_read_by_index():
    rows, _ = flashmla_rows(torch.randn(2, 32, 1, 576))
    q, chosen = torch.randn(2, 1, 4, 576), torch.randint(0, 32, (2, 1, 1, 9))
    given = {"cache_seqlens": 32, "key_indices": chosen, "cache_format": "flashmla_fp8"}
    expected = flash_attn_with_kvcache(q, rows, rows, **given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(flash_attn_with_kvcache(q, rows, rows, **given), expected)


def test_errors_of_flashmla_caches():
    q, cache = torch.randn(1, 1, 2, 576), torch.zeros(1, 8, 1, 656, dtype=torch.uint8)
    format = {"cache_format": "flashmla_fp8"}
    narrow, wide = cache[..., :576], cache.int()
    # The operator itself: the kernels would read 80 bytes behind the last row.
    short = torch.zeros(8 * 656 - 80, dtype=torch.uint8).view(torch.float8_e4m3fn)
    caches = [short.as_strided((1, 8, 1, columns), (8 * 656, 656, 656, 1)) for columns in (576, 512)]
    given = dict.fromkeys(row.name for row in _ops.CACHE.rows) | {"query": q[0], "key": caches[0], "value": caches[1]}
    given |= {"cu_seqlens_q": torch.tensor([0, 1]), "seqused_k": torch.tensor([8])}
    with pytest.raises(ValueError, match="latent_rows: got key"):
        _ops.attention_cache(**given, latent_rows=True)
    for tensors, given, error, message in (
        ((q, cache, cache), {"cache_format": "fp8"}, ValueError, "cache_format: got 'fp8'; allowed: None, 'flashmla"),
        ((q, cache, cache[..., :512]), format, ValueError, "v_cache: got another tensor with cache_format"),
        ((q, wide, wide), format, TypeError, "k_cache: got dtype torch.int32"),
        ((q, narrow, narrow), format, ValueError, r"k_cache: got shape \[1, 8, 1, 576\]"),
        ((q[..., :64], cache, cache), format, ValueError, "k_cache: got shape"),
        ((q, cache, cache), format | {"qv": q}, NotImplementedError, "qv: got a tensor with cache_format"),
        ((q, cache, cache, q, q), format, NotImplementedError, "k: got a tensor with cache_format"),
    ):
        with pytest.raises(error, match=message):
            flash_attn_with_kvcache(*tensors, **given)
