"""explain_varlen and explain_kvcache describe a call correctly, and do not run it."""

import re

import pytest
import torch
from cache_helpers import rotary_tables
from helpers import allocated_by
from varlen_helpers import LENGTHS, longest, make_pack, offsets

from flash_attn_ext import (
    _ops,
    active_kernel,
    explain,
    explain_kvcache,
    explain_varlen,
    flash_attn_varlen,
    flash_attn_with_kvcache,
)


def packed(lengths=LENGTHS, dtype=torch.float32, **options):
    """Positional and keyword arguments of one call. With int32 offsets the call would copy them to check them."""
    arguments = [*make_pack(lengths, dtype=dtype), *offsets(lengths, torch.int64), *longest(lengths)]
    return arguments, {"enable_gqa": True, **options}


def leaf(*shape):
    return torch.rand(shape).requires_grad_()


SEVEN = len(LENGTHS)
CALLS = {
    "plain": lambda: packed(),
    "long": lambda: packed([(900, 900), (30, 700)], causal="lower_right"),
    "bfloat16": lambda: packed(dtype=torch.bfloat16, window=(20, 0)),
    "few queries": lambda: packed([(1, 3000), (2, 70), (1, 1)]),
    "splits on request": lambda: packed([(100, 3000), (20, 500)], num_splits=3),
    "mask": lambda: packed(attn_mask=leaf(1, 4, *longest(LENGTHS))),
    "mask by rows": lambda: packed(attn_mask=leaf(sum(n for n, _ in LENGTHS), longest(LENGTHS)[1])),
    "slopes": lambda: packed(alibi_slopes=leaf(4)),
    "slopes of each sequence": lambda: packed(alibi_slopes=leaf(SEVEN, 4)),
    "sink": lambda: packed(sink=leaf(4)),
    "dropout": lambda: packed(dropout_p=0.2),
    "rows out of use": lambda: packed(seqused_k=torch.tensor([m // 2 for _, m in LENGTHS])),
    "no query": lambda: packed([(0, 5), (0, 7)]),
    "no key": lambda: packed([(4, 0), (5, 0)]),
    "no sequence": lambda: packed([(0, 0)]),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("count", [1, 2])
def test_reported_memory_equals_allocated_memory(name, count, threads):
    threads(count)
    arguments, options = CALLS[name]()
    said = explain_varlen(*arguments, **options)
    forward, out = allocated_by(lambda: flash_attn_varlen(*arguments, **options))
    assert said.forward.allocated_bytes == forward

    inputs = [*arguments[:3], *(options.get(name) for name in ("attn_mask", "alibi_slopes", "sink"))]
    wanted, grad = [t for t in inputs if t is not None], torch.ones_like(out)
    backward, _ = allocated_by(lambda: torch.autograd.grad(out, wanted, grad))
    assert said.backward.allocated_bytes == backward


def test_memory_of_copies(one_thread):
    (q, k, v, *rest), options = packed()
    strided = [torch.stack([t.detach()] * 2, -1)[..., 0] for t in (q, k, v)]
    said = explain_varlen(*strided, *rest, **options).forward
    assert said.allocates["copies"] == q.nbytes + k.nbytes + v.nbytes
    assert said.allocated_bytes == allocated_by(lambda: flash_attn_varlen(*strided, *rest, **options))[0]
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        said = explain_varlen(q, k, v, *rest, **options).forward
        assert said.allocates["copies"] == (q.nbytes + k.nbytes + v.nbytes) // 2
        assert said.allocated_bytes == allocated_by(lambda: flash_attn_varlen(q, k, v, *rest, **options))[0]


@pytest.mark.parametrize("options", [{}, {"causal": "lower_right"}, {"window": (50, 10)}], ids=str)
def test_a_pack_costs_the_sum_of_its_sequences(options):
    q, k, v = make_pack(LENGTHS)
    said = explain_varlen(q, k, v, *offsets(LENGTHS), enable_gqa=True, **options)
    alone = [
        explain(*(torch.empty(1, heads, n, d) for heads, n, d in ((4, S_q, 17), (2, S_k, 17), (2, S_k, 9))),
                enable_gqa=True, **options)
        for S_q, S_k in LENGTHS
    ]  # fmt: skip
    for which in ("forward", "backward"):
        got, parts = getattr(said, which), [getattr(one, which) for one in alone]
        assert got.flops == pytest.approx(sum(part.flops for part in parts), rel=1e-12)
        assert got.traffic == pytest.approx(sum(part.traffic for part in parts), rel=1e-12)
    assert said.forward.splits == max(one.forward.splits for one in alone)
    assert said.forward.decoded == sum(one.forward.splits > 0 for one in alone)


def test_kernels_and_gradients():
    arguments, options = packed([(100, 100), (8, 5000), (1, 0)])
    said = explain_varlen(*(t.detach() for t in arguments[:3]), *arguments[3:], **options)
    assert said.forward.kernel == said.backward.kernel == active_kernel()
    assert said.gradients == ("query", "key", "value")
    assert (said.forward.decoded, said.forward.sequences) == (1, 3)
    assert not any("decode" in reason for reason in said.forward.why_not)
    assert f"decode kernel for 1 of 3 sequences, at most {said.forward.splits} splits" in str(said)
    alone = explain_varlen(*packed([(100, 100)])[0], enable_gqa=True)
    assert alone.forward.decoded == 0
    assert "decode: for at most 8 queries" in alone.forward.why_not[-1]


def test_it_runs_nothing():
    arguments, options = packed([(2000, 2000)])
    calls, generator = _ops._C.kernel_calls(), torch.get_rng_state()
    nbytes, said = allocated_by(lambda: explain_varlen(*arguments, dropout_p=0.5, **options))
    assert _ops._C.kernel_calls() == calls
    assert torch.equal(torch.get_rng_state(), generator)
    assert said.forward.allocated_bytes > arguments[0].nbytes // 2 > 100 * nbytes


BAD_PACKS = {
    "offsets beyond the rows": {"cu_seqlens_q": torch.tensor([0, 9])},
    "descending offsets": {"cu_seqlens_k": torch.tensor([0, 4, 3, 6])},
    "offsets of floats": {"cu_seqlens_k": torch.tensor([0.0, 6.0])},
    "a longest sequence too short": {"max_seqlen_q": 3},
    "heads": {"enable_gqa": False, "key": torch.randn(6, 1, 8)},
    "a number": {"scale": "x"},
}


@pytest.mark.parametrize("name", BAD_PACKS)
def test_bad_packs_give_the_errors_of_the_call(name):
    q, cu_seqlens = torch.randn(6, 2, 8), torch.tensor([0, 6])
    arguments = {"query": q, "key": q, "value": q, "cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    arguments |= BAD_PACKS[name]
    with pytest.raises((TypeError, ValueError)) as theirs:
        flash_attn_varlen(**arguments)
    with pytest.raises(type(theirs.value), match=re.escape(str(theirs.value).splitlines()[0])):
        explain_varlen(**arguments)


def test_offsets_without_numbers():
    q, cu_seqlens = torch.empty(6, 2, 8, device="meta"), torch.empty(2, dtype=torch.int32, device="meta")
    with pytest.raises(ValueError, match="cu_seqlens_q: got a tensor on the Meta device, which has no numbers"):
        explain_varlen(q, q, q, cu_seqlens, cu_seqlens)
    with pytest.raises(ValueError, match="on the Meta device"):
        explain_kvcache(*[torch.empty(1, 4, 2, 8, device="meta")] * 3)


def test_printed_pack():
    text = str(explain_varlen(*packed()[0], enable_gqa=True))
    assert text.startswith(
        "flash_attn_varlen of query (248, 4, 17), key (467, 2, 17), value (467, 2, 9), float32 on cpu"
    )
    assert ", 7 sequences\nforward: " in text
    assert "\nbackward of query, key, value: " in text


def cache_call(page_size=None, dtype=torch.float32, cache_dtype=None, new=0, seqlen_q=1, **options):
    """Four sequences with 100, 7, 0 and 255 rows, in caches of 512 or in pages; packed queries and new rows."""
    k_cache, v_cache = (torch.zeros(4, 512, 2, d, dtype=dtype).to(cache_dtype or dtype) for d in (32, 16))
    if page_size:
        k_cache, v_cache = (t.view(-1, page_size, *t.shape[2:]) for t in (k_cache, v_cache))
        options["block_table"] = torch.arange(len(k_cache)).view(4, -1)
    if new:
        options |= {"k": torch.ones(4 * new, 2, 32, dtype=dtype), "v": torch.ones(4 * new, 2, 16, dtype=dtype)}
        options["cu_seqlens_k_new"] = new * torch.arange(5)
    q = torch.randn(4 * seqlen_q, 8, 32).to(dtype)
    options |= {"cu_seqlens_q": seqlen_q * torch.arange(5), "cache_seqlens": torch.tensor([100, 7, 0, 255])}
    return {"q": q, "k_cache": k_cache, "v_cache": v_cache, **options}


CACHES = {
    "plain": lambda: cache_call(),
    "pages": lambda: cache_call(page_size=16),
    "bfloat16": lambda: cache_call(dtype=torch.bfloat16),
    "int8": lambda: cache_call(cache_dtype=torch.int8),
    "many queries": lambda: cache_call(seqlen_q=40, causal=True),
    "appended": lambda: cache_call(new=3, seqlen_q=3, causal=True),
    "rotated": lambda: cache_call(
        new=2, seqlen_q=2, page_size=16, **dict(zip(("rotary_cos", "rotary_sin"), rotary_tables(600, 16), strict=True))
    ),
    "tree": lambda: cache_call(new=3, seqlen_q=3, tree_mask=torch.eye(3, dtype=torch.bool).repeat(4, 1)),
    "sink": lambda: cache_call(sink=torch.zeros(8)),
}


@pytest.mark.parametrize("name", CACHES)
def test_memory_of_a_cache_call(name, one_thread):
    arguments = CACHES[name]()
    before = [arguments[cache].clone() for cache in ("k_cache", "v_cache")]
    calls = _ops._C.kernel_calls()
    said = explain_kvcache(**arguments)
    assert _ops._C.kernel_calls() == calls
    for cache, t in zip(("k_cache", "v_cache"), before, strict=True):  # nothing was appended
        assert torch.equal(arguments[cache], t)
    assert said.forward.allocated_bytes == allocated_by(lambda: flash_attn_with_kvcache(**arguments))[0]
    assert (said.forward.kernel, said.backward) == (active_kernel(), None)
    assert "backward" not in str(said)


def test_a_cache_call_counts_the_lengths_after_appending():
    appended = explain_kvcache(**cache_call(new=3, seqlen_q=3, causal=True)).forward
    longer = cache_call(seqlen_q=3, causal=True)
    longer["cache_seqlens"] = longer["cache_seqlens"] + 3
    there = explain_kvcache(**longer).forward
    assert (appended.flops, appended.traffic) == (there.flops, there.traffic)
    assert appended.decoded == 4


def test_a_cache_is_read_once_for_the_heads_that_share_it():
    arguments = cache_call()
    del arguments["cache_seqlens"]  # all 512 rows
    said = explain_kvcache(**arguments).forward
    read = arguments["k_cache"].nbytes + arguments["v_cache"].nbytes
    assert read < said.traffic < 1.05 * read
    eight = explain_kvcache(**arguments | {name: arguments[name].to(torch.int8) for name in ("k_cache", "v_cache")})
    assert read / 4 < eight.forward.traffic < 0.3 * read
    assert str(eight).splitlines()[0].endswith("float32 on cpu, int8 caches, 4 sequences")


BAD_CACHES = {
    "rows beyond the cache": {"new": 300},
    "a page that is not there": {"page_size": 16, "block_table": torch.full((4, 32), 999)},
    "both names": {"sink": torch.zeros(8), "learnable_sink": torch.zeros(8)},
    "positions without rotation": {"new": 1, "rotary_cos": torch.ones(4, 8), "rotary_sin": torch.ones(4, 8)},
    "qv": {"qv": torch.zeros(1)},
}


@pytest.mark.parametrize("name", BAD_CACHES)
def test_bad_cache_calls_give_the_errors_of_the_call(name):
    changed = dict(BAD_CACHES[name])
    made = {key: changed.pop(key) for key in ("new", "page_size") if key in changed}
    with pytest.raises((ValueError, NotImplementedError)) as theirs:
        flash_attn_with_kvcache(**cache_call(**made) | changed)
    with pytest.raises(type(theirs.value), match=re.escape(str(theirs.value).splitlines()[0])):
        explain_kvcache(**cache_call(**made) | changed)
