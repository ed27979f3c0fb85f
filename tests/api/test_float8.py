"""query, key and value in float8_e4m3fn with factors (FlashAttention-3's fp8 forward): dense, packed and caches.

The reference is attention of the decoded values in fp64. The error rule compares with torch's attention of these values
in bfloat16.
"""

from itertools import accumulate

import pytest
import reference
import torch
from tolerances import assert_as_exact_as_torch

from flash_attn_ext import explain, explain_kvcache, explain_varlen, flash_attn, flash_attn_varlen
from flash_attn_ext import flash_attn_3 as fa3
from flash_attn_ext import flash_attn_with_kvcache as with_cache

FLOAT8 = torch.float8_e4m3fn
H, HK, D, DV = 4, 2, 40, 16
NAMES = ("q_descale", "k_descale", "v_descale")
SIDES = {"full": {}, "lower_right": dict(causal="lower_right"), "window": dict(causal="upper_left", window=(20, 0))}


def make(batch=2, seqlen_q=70, seqlen_k=90, heads=H):
    """float8 tensors (B, H, S, D), and factors (B, H_kv), all different."""
    shapes = (heads, seqlen_q, D), (HK, seqlen_k, D), (HK, seqlen_k, DV)
    tensors = [(8 * torch.randn(batch, *shape)).to(FLOAT8) for shape in shapes]
    return tensors, {name: torch.rand(batch, HK) / 5 + 0.02 for name in NAMES}


def decoded(tensors, factors):
    """The values of (B, H, S, D) tensors in fp64."""
    return [
        t.double() * factors[name].double().repeat_interleave(t.shape[1] // HK, 1)[..., None, None]
        for t, name in zip(tensors, NAMES, strict=True)
    ]


def check(out, lse, tensors, factors, out_dtype=torch.bfloat16, **options):
    values = decoded(tensors, factors)
    assert out.dtype == out_dtype
    assert lse.dtype == torch.float32
    exact, theirs = (
        reference.attention(
            *(t.to(dtype) for t in values), **{n: t.to(dtype) if torch.is_tensor(t) else t for n, t in options.items()}
        )
        for dtype in (torch.float64, out_dtype)
    )
    for name, a, b, c in zip(("out", "lse"), (out, lse), theirs, exact, strict=True):
        assert_as_exact_as_torch(name, a, b, c, 2)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("seqlen_q", [1, 70])
def test_dense(isa, side, seqlen_q):
    tensors, factors = make(seqlen_q=seqlen_q)
    out, lse = flash_attn(*tensors, enable_gqa=True, return_lse=True, **SIDES[side], **factors)
    check(out, lse, tensors, factors, **SIDES[side])


@pytest.mark.parametrize("seqlen_q", [1, 70])
def test_out_in_float16(isa, seqlen_q):
    """Dense, packed, compiled and of a cache: the same bits."""
    tensors, factors = make(seqlen_q=seqlen_q)
    given = dict(out_dtype=torch.float16) | factors
    out, lse = flash_attn(*tensors, enable_gqa=True, causal="lower_right", return_lse=True, **given)
    check(out, lse, tensors, factors, out_dtype=torch.float16, causal="lower_right")
    rows = [t.transpose(1, 2) for t in tensors]
    assert torch.equal(with_cache(*rows, causal=True, **given).transpose(1, 2), out)
    packed = [t.flatten(0, 1) for t in rows]
    at = offsets([seqlen_q] * 2), offsets([90] * 2)
    of_packed = flash_attn_varlen(*packed, *at, enable_gqa=True, causal="lower_right", **given)
    assert torch.equal(of_packed, out.transpose(1, 2).flatten(0, 1))
    assert explain(*tensors, enable_gqa=True, **given).forward.kernel


def test_float16_of_shared_caches():
    """Queries with different factors of one cache are multiplied in float32."""
    (q, k, v), factors = make(2, 3, 20)
    rows = [t.transpose(1, 2).contiguous() for t in (q, k[:1], v[:1])]
    both = dict(cache_batch_idx=torch.zeros(2, dtype=torch.int32), q_descale=factors["q_descale"])
    of_keys = {name: factors[name][:1] for name in NAMES[1:]}
    out = with_cache(*rows, **both, **of_keys, out_dtype=torch.float16).transpose(1, 2)
    expected = flash_attn(
        q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1), enable_gqa=True, out_dtype=torch.float16,
        q_descale=factors["q_descale"], **{name: f.expand(2, -1) for name, f in of_keys.items()},
    )  # fmt: skip
    assert out.dtype == torch.float16
    torch.testing.assert_close(out, expected, rtol=2**-9, atol=2**-9)


def test_other_options():
    tensors, factors = make()
    for options in (
        dict(softcap=3.0),
        dict(scale=0.3, sink=torch.randn(H)),
        dict(alibi_slopes=torch.rand(H)),
        dict(causal="lower_right", attention_chunk=32),
    ):
        out, lse = flash_attn(*tensors, enable_gqa=True, return_lse=True, **options, **factors)
        check(out, lse, tensors, factors, **options)


def test_factors_are_applied_without_rounding():
    """Powers of two change no bit of P, so out and the scores change by exactly these powers."""
    tensors, _ = make()
    plain = flash_attn(*tensors, enable_gqa=True, scale=1 / 64)
    factors = {name: torch.full((1, 1), value) for name, value in zip(NAMES, (4.0, 0.25, 2.0), strict=True)}
    assert torch.equal(flash_attn(*tensors, enable_gqa=True, scale=1 / 64, **factors), 2 * plain)
    wide = flash_attn(*(t.bfloat16() for t in tensors), enable_gqa=True, scale=1 / 64)
    torch.testing.assert_close(plain, wide, rtol=2**-7, atol=2**-7)


def test_nan_reaches_the_rows_that_see_it():
    """e4m3 has a NaN, 0x7f. The contract: a visible NaN reaches out, a hidden one does not."""
    (q, k, v), factors = make(1, 9, 9)
    clean = flash_attn(q, k, v, enable_gqa=True, causal="upper_left", **factors)
    for t in (k, v):
        saved = t.clone()
        t.view(torch.uint8)[0, :, 5, 3] = 0x7F
        out = flash_attn(q, k, v, enable_gqa=True, causal="upper_left", **factors)
        assert torch.equal(out[:, :, :5], clean[:, :, :5])
        assert out[:, :, 5:].isnan().any(-1).all()
        t.copy_(saved)


@pytest.mark.parametrize("side", SIDES)
def test_blocks_of_queries_share_converted_tiles(isa, one_thread, side):
    """With enough tasks two blocks of queries share a tile of keys. Each head has the same bits as alone."""
    (q, k, v), factors = make(2, 200, 210, heads=8)
    k.view(torch.uint8)[:, :, 205] = 0x7F  # hidden from most queries
    out, lse = flash_attn(q, k, v, enable_gqa=True, return_lse=True, **SIDES[side], **factors)
    for b, h in ((0, 0), (1, 7)):
        key = slice(h // 4, h // 4 + 1)
        own = {name: f[b : b + 1, key] for name, f in factors.items()}
        alone = flash_attn(q[b, h], k[b, key], v[b, key], enable_gqa=True, return_lse=True, **SIDES[side], **own)
        for whole, part in zip((out[b, h], lse[b, h]), alone, strict=True):
            torch.testing.assert_close(part[0], whole, rtol=0, atol=0, equal_nan=True)


def test_no_query_or_no_key():
    (q, k, v), factors = make(2, 3, 4)
    assert flash_attn(q[:, :, :0], k, v, enable_gqa=True, **factors).shape == (2, H, 0, DV)
    out, lse = flash_attn(q, k[:, :, :0], v[:, :, :0], enable_gqa=True, return_lse=True, **factors)
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()


LENGTHS_Q, LENGTHS_K = [5, 0, 70, 1], [9, 6, 65, 0]


def offsets(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@pytest.mark.parametrize("side", SIDES)
def test_packed(side):
    tensors, factors = make(1, sum(LENGTHS_Q), sum(LENGTHS_K))
    factors = {name: torch.rand(4, HK) / 5 + 0.02 for name in NAMES}
    at = offsets(LENGTHS_Q), offsets(LENGTHS_K)
    rows = [t[0].transpose(0, 1) for t in tensors]
    out, lse = flash_attn_varlen(*rows, *at, enable_gqa=True, return_lse=True, **SIDES[side], **factors)
    used = torch.tensor([7, 6, 60, 0])
    shorter = flash_attn_varlen(*rows, *at, seqused_k=used, enable_gqa=True, return_lse=True, **factors)
    for b in range(4):
        q, k = (slice(int(t[b]), int(t[b + 1])) for t in at)
        own = {name: f[b : b + 1] for name, f in factors.items()}
        cut = [tensors[0][:, :, q], tensors[1][:, :, k], tensors[2][:, :, k]]
        check(out[q].transpose(0, 1)[None], lse[None, :, q], cut, own, **SIDES[side])
        cut = [cut[0], *(t[:, :, : int(used[b])] for t in cut[1:])]
        check(shorter[0][q].transpose(0, 1)[None], shorter[1][None, :, q], cut, own)


@pytest.mark.parametrize("form", ["own caches", "pages"])
@pytest.mark.parametrize("packed", [False, True])
def test_caches(form, packed):
    """New rows are copied into the caches. In pages q_descale belongs to the sequence, k_descale to the page."""
    (q, k, v), factors = make(2, 3, 32)
    lengths, new = torch.tensor([20, 5], dtype=torch.int32), [t[:, :, -3:].transpose(1, 2) for t in (k, v)]
    caches = [t.transpose(1, 2).contiguous() for t in (k, v)]
    for cache in caches:
        cache.view(torch.uint8)[:, 20:] = 0x7F
    given, where = dict(factors), {}
    if form == "pages":
        given |= {name: factors[name].repeat_interleave(2, 0) for name in NAMES[1:]}
        caches, where = [t.unflatten(1, (2, 16)).flatten(0, 1) for t in caches], dict(
            block_table=torch.tensor([[0, 1], [2, 3]], dtype=torch.int32))  # fmt: skip
    heads_last, queries = q.transpose(1, 2), {}
    if packed:
        heads_last, queries = heads_last.flatten(0, 1), dict(cu_seqlens_q=offsets([3, 3]))
    out, lse = with_cache(
        heads_last, *caches, *new, cache_seqlens=lengths, causal=True, return_softmax_lse=True, **queries, **where,
        **given,
    )  # fmt: skip
    if packed:
        out, lse = out.unflatten(0, (2, 3)), lse.unflatten(1, (2, 3)).transpose(0, 1)
    for b, length in enumerate(lengths.tolist()):
        own = [torch.cat([t[b : b + 1, :, :length], t[b : b + 1, :, -3:]], 2) for t in (k, v)]
        rows = [t.flatten(0, 1).unflatten(0, (2, 32))[b, length : length + 3] for t in caches]
        assert all(torch.equal(a.float(), t[b].float()) for a, t in zip(rows, new, strict=True))
        of_b = {name: f[b : b + 1] for name, f in factors.items()}
        check(out[b].transpose(0, 1)[None], lse[b][None], [q[b : b + 1], *own], of_b, causal="lower_right")


def test_flash_attn_3():
    """FlashAttention-3's names give the same bits."""
    tensors, factors = make()
    q, k, v = (t.transpose(1, 2) for t in tensors)
    out, lse = flash_attn(*tensors, enable_gqa=True, causal="lower_right", return_lse=True, **factors)
    ours = fa3.flash_attn_func(q, k, v, causal=True, num_splits=0, return_attn_probs=True, **factors)
    assert torch.equal(ours[0].transpose(1, 2), out)
    assert torch.equal(ours[1], lse)
    packed = [t.flatten(0, 1) for t in (q, k, v)]
    at = offsets([70, 70]), offsets([90, 90])
    assert torch.equal(
        fa3.flash_attn_varlen_func(*packed, *at, 70, 90, causal=True, num_splits=0, **factors),
        out.transpose(1, 2).flatten(0, 1),
    )
    assert torch.equal(fa3.flash_attn_with_kvcache(q, k, v, causal=True, **factors).transpose(1, 2), out)
    qkv = torch.cat([q, q, q], 2)
    same = {name: factors[name].repeat_interleave(2, 1) for name in NAMES}
    expected = fa3.flash_attn_func(q, q, q, **same)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv, num_heads_q=H, **same), expected)


def test_compiled_mapped_and_autocast():
    tensors, factors = make()

    def function(q, k, v):
        return flash_attn(q, k, v, enable_gqa=True, causal="lower_right", **factors)

    expected = function(*tensors)
    assert torch.equal(torch.compile(function, backend="aot_eager", fullgraph=True)(*tensors), expected)
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(function(*tensors), expected)
    mapped = torch.vmap(lambda q, k, v: flash_attn(q, k, v, enable_gqa=True))(*(t[None] for t in tensors))
    assert torch.equal(mapped[0], flash_attn(*tensors, enable_gqa=True))
    five = [torch.stack([t, t]) for t in tensors]
    both = {name: torch.cat([f, f]) for name, f in factors.items()}
    assert torch.equal(flash_attn(*five, enable_gqa=True, causal="lower_right", **both)[1], expected)
    factors = {name: f.to("meta") for name, f in factors.items()}
    on_meta = function(*(t.to("meta") for t in tensors))
    assert (on_meta.shape, on_meta.dtype, on_meta.stride()) == (expected.shape, expected.dtype, expected.stride())


def test_explain():
    (q, k, v), factors = make()
    found = explain(q, k, v, enable_gqa=True, **factors)
    assert "float8_e4m3fn" in found.call
    assert found.backward is None
    assert found.forward.kernel
    assert found.forward.allocates["widened query"] == 2 * q.numel()
    rows = [t[0].transpose(0, 1) for t in (q, k, v)]
    packed = explain_varlen(*rows, offsets([70]), offsets([90]), enable_gqa=True)
    assert packed.forward.allocates["widened query"] == q.numel()
    assert packed.call.endswith("1 sequence")
    cached = explain_kvcache(*(t.transpose(1, 2) for t in (q, k, v)), **factors)
    assert cached.forward.allocates["widened query"] == 2 * q.numel()


Q, K, V = make(2, 3, 4)[0]
ONES = torch.ones(2, HK)
ERRORS = {
    "key of bfloat16": (dict(key=K.bfloat16()), TypeError, "key: got dtype torch.bfloat16; allowed: query's"),
    "query of bfloat16": (dict(query=Q.bfloat16(), k_descale=ONES), ValueError, "k_descale: got one with a query of"),
    "shape of key": (dict(key=K[..., :8]), ValueError, "key: got shape .* 8.*; allowed there: 40"),
    "shape of a factor": (
        dict(v_descale=ONES[0]),
        ValueError,
        r"v_descale: got shape \[2\]; allowed: .batch, heads_",
    ),
    "dtype of a factor": (dict(q_descale=ONES.double()), TypeError, "q_descale: got dtype torch.float64; allowed: flo"),
    "device of a factor": (dict(q_descale=ONES.to("meta")), ValueError, "q_descale: got device meta; allowed: query's"),
    "no tensor": (dict(q_descale=1.0), TypeError, "q_descale: got float; allowed: a torch.Tensor"),
    "mask": (dict(attn_mask=torch.ones(3, 4)), NotImplementedError, "attn_mask: got one with a query of"),
    "indices": (dict(key_indices=torch.zeros(1, 1, 3, 1)), NotImplementedError, "key_indices: got one with a query"),
    "function": (dict(score_mod=lambda s, *_: s), NotImplementedError, "score_mod: got one with a query of"),
    "dropout": (dict(dropout_p=0.5), NotImplementedError, "dropout_p: got 0.5 with a query of"),
    "gradient": (dict(query=Q.clone().requires_grad_()), NotImplementedError, "query: got a tensor that requires"),
    "gradient of a factor": (dict(k_descale=ONES.clone().requires_grad_()), NotImplementedError, "k_descale: got a"),
    "option": (dict(scale="a"), TypeError, "scale: got 'a'; allowed"),
    "dtype of out": (dict(out_dtype=torch.float32), TypeError, "out_dtype: got torch.float32; allowed: None, torch.bf"),
    "dtype of out, bfloat16": (
        dict(query=Q.bfloat16(), out_dtype=torch.float16),
        ValueError,
        "out_dtype: got torch.float16 with a query of dtype torch.bfloat16; allowed with float8",
    ),
    "heads": (dict(enable_gqa=False), ValueError, "key, value: got 2 and 2 heads for 4 query heads"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    arguments, error, message = ERRORS[name]
    with pytest.raises(error, match=message):
        flash_attn(**dict(query=Q, key=K, value=V, enable_gqa=True) | arguments)


def test_gradients_of_other_dtypes_stay():
    """no_grad() allows tensors that require a gradient, as for caches."""
    with torch.no_grad():
        assert flash_attn(Q.clone().requires_grad_(), K, V, enable_gqa=True).shape == (2, H, 3, DV)


def test_errors_of_packed_sequences():
    rows = [t.transpose(1, 2).flatten(0, 1) for t in (Q, K, V)]
    at, call = dict(cu_seqlens_q=offsets([3, 3]), cu_seqlens_k=offsets([4, 4])), dict(enable_gqa=True)
    for arguments, error, message in (
        (dict(cu_seqlens_k=offsets([4, 3])), ValueError, "cu_seqlens_k: got offsets from 0 to 7; allowed: from 0 to 8"),
        (dict(cu_seqlens_k=torch.tensor([0, 9, 8])), ValueError, "cu_seqlens_k: got 8 after 9 at 2; allowed: ascend"),
        (dict(seqused_k=torch.tensor([4, 5])), ValueError, "seqused_k: got 5 at 1; allowed: 0 to the sequence's 4"),
        (dict(seqused_k=torch.tensor([4])), ValueError, r"seqused_k: got shape \[1\]; allowed: \[2\]"),
        (dict(cu_seqlens_q=offsets([3, 2])), ValueError, "cu_seqlens_q: got offsets from 0 to 5; allowed: from 0 to 6"),
        (dict(cu_seqlens_k=offsets([8])), ValueError, "cu_seqlens_k: got shape"),
        (dict(seqused_q=torch.tensor([3, 3])), NotImplementedError, "seqused_q: got one with a query of"),
        (dict(qv=rows[0]), NotImplementedError, "qv: got one with a query of"),
        (dict(enable_gqa=False), ValueError, "key: got 2 heads for 4 query heads"),
    ):
        with pytest.raises(error, match=message):
            flash_attn_varlen(*rows, **at | call | arguments)


def test_errors_of_caches():
    q, k, v = (t.transpose(1, 2) for t in (Q, K, V))
    rotary = torch.ones(8, 4)
    for given, arguments, error, message in (
        ((q.bfloat16(), k, v), dict(q_descale=ONES), ValueError, "q_descale: got one with q of dtype torch.bfloat16"),
        ((q, k.bfloat16(), v.bfloat16()), {}, TypeError, "k_cache: got dtype torch.bfloat16; allowed: q's"),
        ((q, k, v), dict(k=k[:, :1].bfloat16(), v=v[:, :1]), TypeError, "k: got dtype torch.bfloat16; allowed: q's"),
        ((q, k, v), dict(q_descale=ONES[:1, :1].double()), TypeError, "q_descale: got dtype torch.float64"),
        ((q, k, v), dict(q_descale=torch.ones(3, HK)), ValueError, r"q_descale: got shape \[3, 2\]; allowed"),
        ((q[0], k, v), dict(q_descale=ONES), ValueError, r"q: got shape .* allowed: \(batch, seqlen_q"),
        ((q, k[0], v), dict(q_descale=ONES), ValueError, "k_cache: got shape .* allowed: .caches or pages"),
        ((q[:, :, :3], k, v), dict(q_descale=ONES, block_table=torch.zeros(2, 1, dtype=torch.int32)), ValueError,
         "k_cache: got 2 heads for 3 query heads"),
        ((q[0], k, v), dict(q_descale=torch.ones(0, HK), cu_seqlens_q=offsets([])), ValueError, "cu_seqlens_q: got"),
        ((q[0], k, v), dict(q_descale=ONES, cu_seqlens_q=offsets([2, 2]), cache_batch_idx=torch.tensor([0, 1])),
         ValueError, "cu_seqlens_q: got offsets from 0 to 4; allowed: from 0 to 3"),
        ((q, k, v), dict(qv=q), NotImplementedError, "qv: got one with q of"),
        ((q, k, v), dict(out_dtype=torch.float32), TypeError, "out_dtype: got torch.float32; allowed: None"),
        ((q.half(), k, v), dict(out_dtype=torch.float16), ValueError, "out_dtype: got torch.float16 with q of dtype"),
        ((q, k, v), dict(k=k[:, :1], v=v[:, :1], cache_seqlens=1, rotary_cos=rotary, rotary_sin=rotary),
         NotImplementedError, "rotary_cos: got one with q of"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            with_cache(*given, **arguments)
