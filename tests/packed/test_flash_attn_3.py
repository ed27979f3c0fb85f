"""flash_attn_ext.flash_attn_3: FlashAttention-3's order of arguments, its results, and the arguments it refuses."""

import inspect

import pytest
import reference
import torch
from cache_helpers import DV, HK, LENGTHS, D, H, make

from flash_attn_ext import flash_attn_3 as fa3
from flash_attn_ext import flash_attn_with_kvcache

pytestmark = pytest.mark.usefixtures("one_thread")

DESCALES = "q_descale=None, k_descale=None, v_descale=None"
TAIL = (
    "softmax_scale=None, causal=False, qv=None, " + DESCALES + ", window_size=(-1, -1), attention_chunk=0, "
    "softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
)
SIGNATURES = {
    fa3.flash_attn_func: f"q, k, v, {TAIL}",
    fa3.flash_attn_qkvpacked_func: "qkv, softmax_scale=None, causal=False, " + DESCALES + ", window_size=(-1, -1), "
    "attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, sm_margin=0, return_attn_probs=False",
    fa3.flash_attn_varlen_func: "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, "
    f"seqused_k=None, {TAIL}",
    fa3.flash_attn_combine: "out_partial, lse_partial, out=None, out_dtype=None",
    fa3.flash_attn_with_kvcache: "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
    "cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, " + DESCALES + ", softmax_scale=None, "
    "causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
    "scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False",
    fa3.get_scheduler_metadata: "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
    "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
    "cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), attention_chunk=0, "
    "has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_arguments_in_their_order(function):
    parameters = inspect.signature(function).parameters.values()
    shown = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
    assert shown == SIGNATURES[function]
    assert fa3.__all__ == sorted(f.__name__ for f in SIGNATURES)


def make_inputs(seqlen_q=70, seqlen_k=90, heads_k=2):
    q = torch.randn(2, seqlen_q, 4, 16, requires_grad=True)
    return q, *(torch.randn(2, seqlen_k, heads_k, 16, requires_grad=True) for _ in range(2))


def assert_agrees(results, tensors, exact_results, exact_tensors):
    """out, lse and the gradients of both against the reference in float64."""
    for ours, exact in zip(results, exact_results, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=1e-5)
    upstream = [torch.randn_like(t) for t in results]
    grads = torch.autograd.grad(results, tensors, upstream)
    exact_grads = torch.autograd.grad(exact_results, exact_tensors, [t.double() for t in upstream])
    for ours, exact in zip(grads, exact_grads, strict=True):
        torch.testing.assert_close(ours.double(), exact.double(), rtol=1e-3, atol=1e-4)


CASES = [
    ({}, {}),
    ({"causal": True, "softmax_scale": 0.3}, {"causal": "lower_right", "scale": 0.3}),
    ({"window_size": (20, 3), "softcap": 2.0}, {"window": (20, 3), "softcap": 2.0}),
    ({"num_splits": 3, "pack_gqa": True, "sm_margin": 8, "deterministic": True}, {}),
    ({"num_splits": -1, "attention_chunk": 0}, {}),
    ({"causal": True, "attention_chunk": 16}, {"causal": "lower_right", "attention_chunk": 16}),
]


@pytest.mark.parametrize(("options", "expected"), CASES, ids=lambda options: "-".join(options) or "none")
def test_dense(options, expected):
    q, k, v = make_inputs()
    results = fa3.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    out, lse = reference.attention(*(t.transpose(1, 2).double() for t in (q, k, v)), **expected)
    assert_agrees(results, (q, k, v), (out.transpose(1, 2), lse), (q, k, v))
    assert torch.equal(fa3.flash_attn_func(q, k, v, **options), results[0])


def test_positional_arguments_have_the_same_meaning():
    q, k, v = make_inputs()
    out = fa3.flash_attn_func(q, k, v, 0.3, True, None, None, None, None, (20, -1), 0, 1.5, 1, None, False, 0, False)
    expected = fa3.flash_attn_func(q, k, v, softmax_scale=0.3, causal=True, window_size=(20, -1), softcap=1.5)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("separate", [True, False])
def test_qkv_in_one_tensor(separate):
    qkv = torch.randn(2, 50, *((3, 4) if separate else (8,)), 16, requires_grad=True)
    q, k, v = (t.detach().requires_grad_() for t in (qkv.unbind(2) if separate else qkv.split([4, 2, 2], 2)))
    expected = fa3.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    heads = None if separate else 4
    results = fa3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=heads, return_attn_probs=True)
    for ours, theirs in zip(results, expected, strict=True):
        assert torch.equal(ours, theirs)
    grads = torch.autograd.grad(expected[0].sum(), (q, k, v))
    joined = torch.stack(grads, 2) if separate else torch.cat(grads, 2)
    assert torch.equal(torch.autograd.grad(results[0].sum(), qkv)[0], joined)


@pytest.mark.parametrize("shape", [(2, 50, 8, 16), (2, 50, 2, 4, 16), (2, 50, 16)])
def test_shapes_of_qkv_that_are_not_allowed(shape):
    with pytest.raises(ValueError, match="qkv: got shape"):
        fa3.flash_attn_qkvpacked_func(torch.randn(shape))


def test_packed_sequences():
    lengths, used = (30, 1, 69), torch.tensor([30, 1, 40], dtype=torch.int32)
    cu_seqlens = torch.tensor([0, 30, 31, 100], dtype=torch.int32)
    q, k, v = (torch.randn(100, heads, 16, requires_grad=True) for heads in (4, 2, 2))
    results = fa3.flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, 69, 69, None, used, causal=True, pack_gqa=False, return_attn_probs=True
    )
    exact = []
    for n, sequence in enumerate(zip(*(t.split(lengths) for t in (q, k, v)), strict=True)):
        own_q, own_k, own_v = (t.double().transpose(0, 1).unsqueeze(0) for t in sequence)
        keys = int(used[n])
        exact.append(reference.attention(own_q, own_k[:, :, :keys], own_v[:, :, :keys], causal="lower_right"))
    out = torch.cat([own[0].transpose(0, 1) for own, _ in exact])
    lse = torch.cat([own[0] for _, own in exact], -1)
    visible = lse.isfinite()
    assert torch.equal(results[1].isfinite(), visible)
    results, lse = (results[0], results[1].masked_fill(~visible, 0.0)), lse.masked_fill(~visible, 0.0)
    assert_agrees(results, (q, k, v), (out, lse), (q, k, v))


def test_a_cache_that_appends():
    q, k_cache, v_cache, block_table = make(torch.float32, 3, 16)
    new = torch.randn(5, 3, HK, D), torch.randn(5, 3, HK, DV)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    copies = k_cache.clone(), v_cache.clone()
    metadata = fa3.get_scheduler_metadata(5, 3, 256, H, HK, D, lengths, page_size=16)
    assert (metadata.dtype, metadata.numel()) == (torch.int32, 0)
    results = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, *new, cache_seqlens=lengths, page_table=block_table, causal=True,
        scheduler_metadata=metadata, return_softmax_lse=True,
    )  # fmt: skip
    expected = flash_attn_with_kvcache(
        q, *copies, *new, cache_seqlens=lengths, block_table=block_table, causal=True, return_softmax_lse=True
    )
    assert results[2:] == (None, None)
    for ours, theirs in zip((*results[:2], k_cache, v_cache), (*expected, *copies), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    alone = fa3.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths + 3, page_table=block_table,
                                        causal=True)  # fmt: skip
    assert torch.equal(alone, results[0])


def test_factors_of_an_8_bit_cache_belong_to_sequences():
    q, lengths = torch.randn(3, 2, H, D), torch.tensor([20, 5, 48])
    caches = [torch.randint(-100, 100, (3, 48, HK, D), dtype=torch.int8) for _ in range(2)]
    factors = [torch.rand(3, HK) / 50 for _ in range(2)]
    out = fa3.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, k_descale=factors[0], v_descale=factors[1])
    wide = [t * f[:, None, :, None] for t, f in zip(caches, factors, strict=True)]
    expected = fa3.flash_attn_with_kvcache(q, *wide, cache_seqlens=lengths)
    torch.testing.assert_close(out, expected)

    pages = [t.view(9, 16, HK, D) for t in caches]
    table = torch.arange(9, dtype=torch.int32).view(3, 3)
    equal = [f[:1].expand(3, -1) for f in factors]
    out = fa3.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, k_descale=equal[0], v_descale=equal[1])
    paged = fa3.flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths, page_table=table, k_descale=equal[0],
                                        v_descale=equal[1].clone())  # fmt: skip
    torch.testing.assert_close(paged, out)
    with pytest.raises(NotImplementedError, match="v_descale: got different factors for the sequences"):
        fa3.flash_attn_with_kvcache(q, *pages, cache_seqlens=lengths, page_table=table, v_descale=factors[1])
    with pytest.raises(ValueError, match=rf"k_descale: got shape \[{HK}\]; allowed: .batch, heads_k., \[3, {HK}\]"):
        fa3.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, k_descale=factors[0][0])


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_factors_without_float8_tensors_are_refused(name):
    """tests/api/test_float8.py has the calls with float8 tensors."""
    x, offsets, factor = torch.randn(1, 4, 2, 8), torch.tensor([0, 4]), {name: torch.ones(1, 2)}
    with pytest.raises(ValueError, match=f"{name}: got one with a query of dtype torch.float32"):
        fa3.flash_attn_func(x, x, x, **factor)
    with pytest.raises(ValueError, match=f"{name}: got one with a query of dtype torch.float32"):
        fa3.flash_attn_varlen_func(x[0], x[0], x[0], offsets, offsets, 4, 4, **factor)
    with pytest.raises(ValueError, match=f"{name}: got one with "):
        fa3.flash_attn_with_kvcache(x, x, x, **factor)
    with pytest.raises(ValueError, match=f"{name}: got one with a query of dtype torch.float32"):
        fa3.flash_attn_qkvpacked_func(x[:, :, None].expand(-1, -1, 3, -1, -1), **factor)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(pack_gqa="yes"), "pack_gqa: got 'yes'; allowed: None or a bool"),
        (dict(sm_margin=1.5), "sm_margin: got 1.5; allowed: None or an int"),
        (dict(num_splits="2"), "num_splits: got '2'; allowed: None or an int"),
    ],
)
def test_hints_of_the_wrong_type(arguments, message):
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(TypeError, match=message):
        fa3.flash_attn_func(x, x, x, **arguments)


@pytest.mark.parametrize("packed", [False, True])
def test_combine(packed):
    """Three splits of the keys; the second split has no keys, so its values are not read."""
    q, k, v = make_inputs(seqlen_k=96)
    whole = fa3.flash_attn_func(q, k, v, return_attn_probs=True)
    parts = [fa3.flash_attn_func(q, k[:, keys], v[:, keys], return_attn_probs=True)
             for keys in (slice(0, 30), slice(30, 96))]  # fmt: skip
    empty = torch.full_like(parts[0][0], torch.nan), torch.full_like(parts[0][1], -torch.inf)
    outs, lses = (torch.stack(t) for t in zip(parts[0], empty, parts[1], strict=True))
    lses = lses.transpose(-1, -2)
    if packed:
        outs, lses = outs.flatten(1, 2), lses.flatten(1, 2)
    out, lse = fa3.flash_attn_combine(outs, lses)
    torch.testing.assert_close(out.reshape(whole[0].shape), whole[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.reshape(2, 70, 4).transpose(1, 2), whole[1], rtol=1e-4, atol=1e-5)
    grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v))
    for ours, theirs in zip(grads, torch.autograd.grad(whole[0].sum() + whole[1].sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_combine_writes_to_out_and_keeps_rows_without_keys():
    outs, lses = torch.full((2, 1, 3, 4, 8), torch.nan), torch.full((2, 1, 3, 4), -torch.inf)
    out, lse = fa3.flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    assert out.eq(0).all()
    assert lse.eq(-torch.inf).all()
    given = torch.empty(1, 3, 4, 8, dtype=torch.bfloat16)
    assert fa3.flash_attn_combine(torch.ones_like(outs), torch.zeros_like(lses), given)[0] is given
    assert given.eq(1).all()
    for arguments, error, message in (
        ((outs[0, 0], lses), ValueError, "out_partial: got shape"),
        ((outs, lses[0]), ValueError, "lse_partial: got shape"),
        ((outs.int(), lses), TypeError, "out_partial: got dtype torch.int32"),
        ((outs, lses, given[0]), ValueError, "out: got shape"),
        ((outs, lses, given, torch.float32), TypeError, "out: got dtype torch.bfloat16; allowed: out_dtype"),
    ):
        with pytest.raises(error, match=message):
            fa3.flash_attn_combine(*arguments)
