"""How vLLM's caches and steps become calls of our operators. These parts need no vLLM."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import reference
import torch
from tolerances import assert_as_exact_as_torch

from flash_attn_ext.integrations.vllm.cache_format import FORMATS, cache_views
from flash_attn_ext.integrations.vllm.layer import AttentionLayerCalls
from flash_attn_ext.integrations.vllm.packed_step import PackedStep, new_rows

pytestmark = pytest.mark.usefixtures("one_thread")
H, HK, D = 4, 2, 32
PAGE_SIZE, PAGES = 16, 40
# A prefill, a part of a prefill, guesses of speculative decoding, and two decodes: (new tokens, tokens in the cache).
MIXED = [(37, 0), (20, 45), (4, 60), (1, 100), (1, 0)]
# Orders of the dimensions (pages, heads, rows, content) in memory.
LAYOUTS = {"LBHNC": (0, 1, 2, 3), "LBNHC": (0, 2, 1, 3), "LHBNC": (1, 0, 2, 3)}


def make_cache(cache_format=FORMATS["auto"], dtype=torch.float32, order=LAYOUTS["LBHNC"]):
    """Returns a cache of vLLM's shape. Rows that no step wrote are NaN, or 0 in 8 bits."""
    content = 2 * D + (8 if cache_format.scale_per_token else 0)
    shape = (PAGES, HK, PAGE_SIZE, content)
    memory = torch.empty([shape[n] for n in order], dtype=cache_format.coded or dtype)
    if memory.is_floating_point() and memory.element_size() > 1:
        memory.fill_(torch.nan)
    else:
        memory.view(torch.uint8).zero_()
    return memory.permute([order.index(n) for n in range(4)])


def make_step(lengths=MIXED, *, padding=0, causal=True, columns=20):
    """vLLM's CommonAttentionMetadata for sequences of (new tokens, tokens before)."""
    table = torch.randperm(PAGES - 1, dtype=torch.int32).add(1)  # page 0 is vLLM's null page
    rows = torch.zeros(len(lengths), columns, dtype=torch.int32)
    slots, first = [], 0
    for b, (new, before) in enumerate(lengths):
        pages = -(-(new + before) // PAGE_SIZE)
        rows[b, :pages] = table[first : first + pages]
        first += pages
        at = torch.arange(before, before + new)
        slots.append(rows[b, at // PAGE_SIZE].long() * PAGE_SIZE + at % PAGE_SIZE)
    offsets = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0, dtype=torch.int32)
    used = torch.tensor([new + before for new, before in lengths], dtype=torch.int32)
    return SimpleNamespace(
        num_actual_tokens=int(offsets[-1]) + padding, query_start_loc=offsets, query_start_loc_cpu=offsets,
        seq_lens=used, block_table_tensor=rows, max_query_len=max(new for new, _ in lengths),
        max_seq_len=int(used.max()), slot_mapping=torch.cat([*slots, torch.full((padding,), -1)]), causal=causal,
    )  # fmt: skip


def fill(layer, cache, common, dtype):
    """Writes the rows of earlier steps. Returns keys and values of each sequence, the new tokens at the end."""
    rows, slots = [], []
    for b in range(len(common.seq_lens)):
        length = int(common.seq_lens[b])
        new = int(common.query_start_loc[b + 1] - common.query_start_loc[b])
        rows.append([torch.randn(length, HK, D).to(dtype) for _ in "kv"])
        at = torch.arange(length - new)
        slots.append(common.block_table_tensor[b, at // PAGE_SIZE].long() * PAGE_SIZE + at % PAGE_SIZE)
    earlier = SimpleNamespace(**vars(common) | {"slot_mapping": torch.cat(slots)})
    before = [torch.cat([pair[n][: len(at)] for pair, at in zip(rows, slots, strict=True)]) for n in (0, 1)]
    layer.write(*before, cache, PackedStep.from_vllm(earlier, PAGE_SIZE))
    return rows, [len(at) for at in slots]


def run(layer, common, cache, dtype=torch.float32, padding=0):
    """One step: returns queries, out, and each sequence's keys and values."""
    rows, before = fill(layer, cache, common, dtype)
    step = PackedStep.from_vllm(common, PAGE_SIZE)
    tokens = step.num_tokens + padding
    new = [torch.cat([pair[n][at:] for pair, at in zip(rows, before, strict=True)]) for n in (0, 1)]
    new = [torch.cat([t, t.new_full((padding, HK, D), torch.nan)]) for t in new]
    query, out = torch.randn(tokens, H, D).to(dtype), torch.full((tokens, H, D), 7.0, dtype=dtype)
    layer.write(*new, cache, step)
    layer.attend(query, cache, step, out)
    return query, out, rows


def check(common, query, out, rows, dtype, factor=2, **options):
    offsets = common.query_start_loc.tolist()
    for b, pair in enumerate(rows):
        part = slice(offsets[b], offsets[b + 1])
        q, k, v = (t.transpose(0, 1)[None] for t in (query[part], *pair))
        exact, theirs = (
            reference.attention(q.to(t), k.to(t), v.to(t), None, causal="lower_right", **options)[0]
            for t in (torch.float64, dtype)
        )
        assert_as_exact_as_torch("out", out[part].transpose(0, 1)[None], theirs, exact, factor)


def test_keys_of_a_page_are_adjacent():
    """A page of a head has all keys, then all values, if nothing else is between its rows. Other rows stay in place."""
    cache = torch.arange(2 * HK * PAGE_SIZE * 2 * D, dtype=torch.float32).view(2, HK, PAGE_SIZE, 2 * D)
    views = cache_views(cache, D, D, FORMATS["auto"])
    assert torch.equal(views.keys[1, :, 1].flatten(), cache[1, 1].flatten()[: PAGE_SIZE * D])
    assert torch.equal(views.values[1, :, 1].flatten(), cache[1, 1].flatten()[PAGE_SIZE * D :])
    for interleaved in (
        make_cache(order=LAYOUTS["LBNHC"]),
        cache.as_strided((1, HK, 8, 2 * D), (4096, 2048, 4 * D, 1)),
    ):
        views = cache_views(interleaved, D, D, FORMATS["auto"])
        assert views.values[0, 3, 1].data_ptr() == interleaved[0, 1, 3, D:].data_ptr()
    views = cache_views(cache, 24, 40, FORMATS["auto"])
    assert views.values[0, 3, 1].data_ptr() == cache[0, 1, 3, 24:].data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mixed_step(layout, dtype):
    """Prefill, part of a prefill, guesses and decodes in one call, with tokens that pad the batch."""
    common, cache = make_step(padding=3), make_cache(dtype=dtype, order=LAYOUTS[layout])
    address = cache.data_ptr()
    query, out, rows = run(AttentionLayerCalls(D, D, D**-0.5), common, cache, dtype, padding=3)
    check(common, query, out, rows, dtype)
    assert cache.data_ptr() == address
    assert (out[-3:] == 7).all()  # padding is not written


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (dict(window=9), dict(window=(8, None))),
        (dict(softcap=3.0), dict(softcap=3.0)),
        (dict(alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625])), None),
        (dict(sink=torch.randn(H)), None),
    ],
    ids=["window", "softcap", "alibi", "sink"],
)
def test_options(given, expected):
    common, cache = make_step(), make_cache()
    query, out, rows = run(AttentionLayerCalls(D, D, 0.3, **given), common, cache)
    check(common, query, out, rows, torch.float32, scale=0.3, **(given if expected is None else expected))


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "int8_per_token_head", "fp8_per_token_head"])
def test_caches_of_8_bits(name):
    """Equals attention to the numbers that the cache holds, and these are near the given numbers."""
    cache_format = FORMATS[name]
    common, cache = make_step(), make_cache(cache_format)
    layer = AttentionLayerCalls(D, D, D**-0.5, name)
    query, out, rows = run(layer, common, cache)
    views = cache_views(cache, D, D, cache_format)
    stored = []
    for b, pair in enumerate(rows):
        pages = common.block_table_tensor[b].long()
        parts = []
        for given, codes, scales in zip(pair, views[:2], views[2:], strict=True):
            part = codes[pages].flatten(0, 1)[: len(given)].float()
            if scales is not None:
                part = part * scales[pages].flatten(0, 1)[: len(given), :, None]
            # One unit in the last place: 1/127 of the largest element, 2^-3 or 2^-2 of the element itself.
            bound = given.abs().amax(-1, keepdim=True) / 127 if "int8" in name else given.abs() * 2.0**-2 + 0.02
            assert ((part - given).abs() <= bound).all()
            parts.append(part)
        stored.append(parts)
    check(common, query, out, stored, torch.float32)


def test_scales_of_the_layer():
    """fp8 with the two scales of a checkpoint: rows are divided by them before they are rounded."""
    cache_format = FORMATS["fp8"]
    layer, cache = AttentionLayerCalls(D, D, D**-0.5, "fp8"), make_cache(cache_format)
    common = make_step([(5, 0)])
    step = PackedStep.from_vllm(common, PAGE_SIZE)
    key, value, query = torch.randn(5, HK, D) * 300, torch.randn(5, HK, D), torch.randn(5, H, D) / 300
    out = torch.empty_like(query)
    layer.write(key, value, cache, step, 4.0, 0.5)
    layer.attend(query, cache, step, out, 4.0, 0.5)
    page = int(common.block_table_tensor[0, 0])
    views = cache_views(cache, D, D, cache_format)
    stored = [views.keys[page, :5].float() * 4, views.values[page, :5].float() * 0.5]
    assert (stored[0] - key).abs().max() <= key.abs().max() / 8
    check(common, query, out, [stored], torch.float32)


def test_pages_that_a_window_left():
    """vLLM frees pages before the window, and writes page 0 in their place. Their rows may be NaN."""
    common, cache = make_step([(1, 100)]), make_cache()
    layer = AttentionLayerCalls(D, D, D**-0.5, window=20)
    query, out, rows = run(layer, common, cache)
    common.block_table_tensor[0, :4] = 0
    again = torch.empty_like(out)
    layer.attend(query, cache, PackedStep.from_vllm(common, PAGE_SIZE), again)
    assert torch.equal(out, again)
    check(common, query, out, rows, torch.float32, window=(19, None))


def test_shared_cache_and_second_cache():
    """A layer may get another cache later. It must not use the views of the first cache then."""
    layer = AttentionLayerCalls(D, D, D**-0.5)
    for _ in range(2):
        common, cache = make_step([(3, 20)]), make_cache()
        query, out, rows = run(layer, common, cache)
        check(common, query, out, rows, torch.float32)


@pytest.mark.parametrize("window", [None, 6])
def test_encoder(window):
    """Packed sequences without a cache. A window reaches to both sides."""
    common = make_step([(9, 0), (1, 0), (30, 0)], causal=False)
    step = PackedStep.from_vllm(common, PAGE_SIZE)
    query, key, value = torch.randn(40, H, D), torch.randn(40, HK, D), torch.randn(40, HK, D)
    out = torch.empty_like(query)
    AttentionLayerCalls(D, D, D**-0.5, window=window).attend_without_cache(query, key, value, step, out)
    for begin, end in ((0, 9), (9, 10), (10, 40)):
        q, k, v = (t[begin:end].transpose(0, 1)[None] for t in (query, key, value))
        exact, theirs = (
            reference.attention(q.to(t), k.to(t), v.to(t), None, window=None if window is None else (5, 5))[0]
            for t in (torch.float64, torch.float32)
        )
        assert_as_exact_as_torch("out", out[begin:end].transpose(0, 1)[None], theirs, exact, 2)


def test_cross_attention():
    """All queries see all rows of the encoder, and the slots are replaced after the metadata is built."""
    common, cache = make_step([(2, 0), (1, 0)], causal=False), make_cache()
    common.seq_lens, common.max_seq_len = torch.tensor([30, 11], dtype=torch.int32), 30
    common.block_table_tensor[:, :2] = torch.tensor([[3, 9], [5, 0]])
    step = PackedStep.from_vllm(common, PAGE_SIZE)
    step.slot_mapping = torch.cat([torch.arange(48, 64), torch.arange(144, 158), torch.arange(80, 91)])
    layer, query = AttentionLayerCalls(D, D, D**-0.5), torch.randn(3, H, D)
    key, value, out = torch.randn(41, HK, D), torch.randn(41, HK, D), torch.empty(3, H, D)
    layer.write(key, value, cache, step)
    layer.attend(query, cache, step, out)
    for rows, keys in ((slice(0, 2), slice(0, 30)), (slice(2, 3), slice(30, 41))):
        q, k, v = (t.transpose(0, 1)[None] for t in (query[rows], key[keys], value[keys]))
        exact, theirs = (reference.attention(q.to(t), k.to(t), v.to(t), None)[0] for t in (torch.float64, q.dtype))
        assert_as_exact_as_torch("out", out[rows].transpose(0, 1)[None], theirs, exact, 2)


def test_only_used_columns_of_the_table():
    """vLLM's table is as wide as the longest allowed sequence, and the operator copies the whole table."""
    step = PackedStep.from_vllm(make_step([(1, 17)], columns=1000), PAGE_SIZE)
    assert step.block_table.shape == (1, 2)


def test_places_of_new_rows():
    places = new_rows(torch.tensor([35, -1, 16]), 16)
    assert places.tokens.tolist() == [0, 2]
    assert places.pages.tolist() == [[2], [1]]
    assert places.rows.tolist() == [3, 0]
    step = PackedStep.from_vllm(make_step(), PAGE_SIZE)
    assert step.new_rows(16) is step.new_rows(16)  # once for all layers


@pytest.mark.parametrize("name", ["auto", "fp8"])
def test_the_default_device_has_no_effect(name):
    """vLLM makes and runs layers under a default device."""
    new, common, results = [torch.randn(63, n, D) for n in (HK, HK, H)], make_step(), []
    for device in ("meta", "cpu"):
        cache, out = make_cache(FORMATS[name]), torch.empty(63, H, D)
        with torch.device(device):
            layer, step = AttentionLayerCalls(D, D, 0.2, name), PackedStep.from_vllm(common, PAGE_SIZE)
            layer.write(*new[:2], cache, step, 0.05, 0.1)
            layer.attend(new[2], cache, step, out, 0.05, 0.1)
        results.append((out, cache.view(torch.uint8)))
    for on_meta, on_cpu in zip(*results, strict=True):
        torch.testing.assert_close(on_meta, on_cpu, rtol=0, atol=0, equal_nan=True)


def test_refused():
    with pytest.raises(NotImplementedError, match="causal: got a tensor"):
        PackedStep.from_vllm(make_step(causal=torch.tensor([True] * 5)), PAGE_SIZE)
    layer, cache = AttentionLayerCalls(D, D, 1.0, window=3), make_cache()
    step = PackedStep.from_vllm(make_step([(2, 0)], causal=False), PAGE_SIZE)
    with pytest.raises(NotImplementedError, match="sliding_window: got 3 with attention that is not causal"):
        layer.attend(torch.zeros(2, H, D), cache, step, torch.empty(2, H, D))
    with pytest.raises(ValueError, match=r"kv_cache: got shape \[40, 2, 16, 64\]; allowed: .* 72\)"):
        cache_views(make_cache(dtype=torch.int8).view(torch.int8), D, D, FORMATS["int8_per_token_head"])


def test_importing_us_does_not_import_vllm():
    code = "import flash_attn_ext, flash_attn_ext.integrations.vllm, sys; assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
