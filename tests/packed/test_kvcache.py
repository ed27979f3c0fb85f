"""flash_attn_with_kvcache: appending and attention, in caches of every form."""

import re

import pytest
import reference
import torch
from cache_helpers import DV, HK, LENGTHS, ROWS, D, H, check, make, rotary_tables, rotated_pair, row_of_cache, rows_of

from flash_attn_ext import _ops, flash_attn_with_kvcache

pytestmark = pytest.mark.usefixtures("one_thread")
PAGES = [None, 1, 16, 48, 64, 256]


@pytest.mark.parametrize("page_size", PAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_decode(isa, dtype, page_size):
    q, k_cache, v_cache, block_table = make(dtype, 1, page_size)
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=torch.tensor(LENGTHS, dtype=torch.int32),
                                       block_table=block_table, return_softmax_lse=True)  # fmt: skip
    check(out, lse, q, k_cache, v_cache, LENGTHS, block_table)


@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize("seqlen_q", [3, 50])
def test_several_new_tokens(isa, seqlen_q, page_size):
    """Speculative decoding, and a chunk of prefill."""
    q, k_cache, v_cache, block_table = make(torch.float32, seqlen_q, page_size)
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=torch.tensor(LENGTHS), causal=True,
                                       block_table=block_table, return_softmax_lse=True)  # fmt: skip
    check(out, lse, q, k_cache, v_cache, LENGTHS, block_table, causal=True)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("packed", [False, True])
def test_appends_in_place(page_size, packed):
    new = [4] * 5 if not packed else [4, 1, 0, 6, 2]
    _, k_cache, v_cache, block_table = make(torch.float32, 1, page_size)
    before = k_cache.clone(), v_cache.clone()
    q = torch.randn(5, 4, H, D)
    k, v = torch.randn(sum(new), HK, D), torch.randn(sum(new), HK, DV)
    cu_seqlens = torch.tensor([0, *new]).cumsum(0, dtype=torch.int32)
    given = (
        dict(k=k, v=v, cu_seqlens_k_new=cu_seqlens) if packed else dict(k=k.view(5, 4, HK, D), v=v.view(5, 4, HK, DV))
    )
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, **given, cache_seqlens=torch.tensor(LENGTHS), causal=True,
                                       block_table=block_table, return_softmax_lse=True)  # fmt: skip
    written = torch.zeros(k_cache.shape[:2], dtype=torch.bool)
    for b, length in enumerate(LENGTHS):
        for n in range(new[b]):
            for cache, values in ((k_cache, k), (v_cache, v)):
                assert torch.equal(row_of_cache(cache, block_table, b, length + n), values[cu_seqlens[b] + n])
            row_of_cache(written[..., None], block_table, b, length + n).fill_(True)
    for cache, old in zip((k_cache, v_cache), before, strict=True):
        assert torch.equal(cache[~written].nan_to_num(7.0), old[~written].nan_to_num(7.0))
    check(out, lse, q, k_cache, v_cache, [a + b for a, b in zip(LENGTHS, new, strict=True)], block_table, causal=True)


@pytest.mark.parametrize("options", [
    {"window": (30, 0)}, {"window": (30, 2), "causal": True}, {"softcap": 2.0}, {"scale": 0.2}, {"slopes": True},
    {"num_splits": 3},
], ids=lambda options: "-".join(options))  # fmt: skip
def test_options(options):
    names = {"window": "window_size", "scale": "softmax_scale", "slopes": "alibi_slopes"}
    if "slopes" in options:
        options = {"slopes": torch.rand(H)}
    q, k_cache, v_cache, block_table = make(torch.float32, 2, 16)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=torch.tensor(LENGTHS), block_table=block_table, return_softmax_lse=True,
        **{names.get(name, name): value for name, value in options.items()},
    )  # fmt: skip
    of_oracle = {name: value for name, value in options.items() if name != "num_splits"}
    check(out, lse, q, k_cache, v_cache, LENGTHS, block_table, **of_oracle)


def test_one_number_of_rows_and_all_of_them():
    q, k_cache, v_cache, _ = make(lengths=[ROWS] * 3)
    for seqlens, length in ((77, 77), (None, ROWS)):
        out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=seqlens, return_softmax_lse=True)
        check(out, lse, q, k_cache, v_cache, [length] * 3)


@pytest.mark.parametrize("page_size", [None, 16])
def test_batch_index_and_left_padding(page_size):
    """With pages cache_batch_idx selects rows of block_table."""
    q, k_cache, v_cache, block_table = make(page_size=page_size, lengths=[ROWS] * 6)
    caches, lengths = torch.tensor([4, 0, 5], dtype=torch.int32), [200, 5, 64]
    leftpad = torch.tensor([0, 5, 10], dtype=torch.int32)
    out, lse = flash_attn_with_kvcache(
        q[:3], k_cache, v_cache, cache_seqlens=torch.tensor(lengths), cache_batch_idx=caches, cache_leftpad=leftpad,
        block_table=block_table, causal=True, return_softmax_lse=True,
    )  # fmt: skip
    check(out, lse, q[:3], k_cache, v_cache, lengths, block_table, caches=caches, leftpad=leftpad, causal=True)


def test_new_keys_go_to_the_selected_row_of_the_table():
    pages = torch.zeros(2, 12, 16, HK, D)
    table, rows = torch.randperm(12, dtype=torch.int32).view(4, 3), torch.tensor([3, 1], dtype=torch.int32)
    q, k, v = torch.randn(2, 2, H, D), torch.randn(2, 2, HK, D), torch.randn(2, 2, HK, D)
    lengths = torch.tensor([15, 20])
    copies = pages.clone()
    out = flash_attn_with_kvcache(q, *pages, k, v, cache_seqlens=lengths, block_table=table, cache_batch_idx=rows)
    expected = flash_attn_with_kvcache(q, *copies, k, v, cache_seqlens=lengths, block_table=table[rows.long()])
    assert torch.equal(out, expected)
    assert torch.equal(pages, copies)
    assert torch.equal(pages[0, table[3, 0], 15], k[0, 0])
    assert torch.equal(pages[0, table[3, 1], 0], k[0, 1])


@pytest.mark.parametrize("page_size", [None, 16])
def test_packed_queries(page_size):
    lengths, rows = [70, 0, 200], [3, 0, 20]
    _, k_cache, v_cache, block_table = make(lengths=lengths, page_size=page_size)
    q = torch.randn(23, H, D)
    cu_seqlens = torch.tensor([0, 3, 3, 23], dtype=torch.int32)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=torch.tensor(lengths), causal=True, cu_seqlens_q=cu_seqlens,
        block_table=block_table, return_softmax_lse=True,
    )  # fmt: skip
    for b in (0, 2):
        own = slice(*cu_seqlens[b : b + 2].tolist())
        k, v = (rows_of(t, block_table, b, 0, lengths[b]) for t in (k_cache, v_cache))
        exact, exact_lse = reference.attention(q[own].transpose(0, 1)[None], k, v, causal="lower_right")
        assert rows[b] == exact.shape[2]
        torch.testing.assert_close(out[own].transpose(0, 1)[None], exact, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[None, :, own], exact_lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [16, 32])
@pytest.mark.parametrize("causal", [False, True])
def test_rotary(interleaved, rotary_dim, causal):
    lengths, new = [70, 5], 3
    _, k_cache, v_cache, _ = make(lengths=lengths)
    q, k, v = torch.randn(2, new, H, D), torch.randn(2, new, HK, D), torch.randn(2, new, HK, DV)
    cos, sin = rotary_tables(ROWS, rotary_dim)
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, torch.tensor(lengths), causal=causal, rotary_interleaved=interleaved,
    )  # fmt: skip
    expected_q = q.clone()
    for b, length in enumerate(lengths):
        for n in range(new):
            for h in range(HK):
                expected = rotated_pair(k[b, n, h], length + n, rotary_dim, interleaved)
                torch.testing.assert_close(k_cache[b, length + n, h], expected, rtol=1e-4, atol=1e-5)
            for h in range(H):  # without a mask all queries have the first new position
                expected_q[b, n, h] = rotated_pair(q[b, n, h], length + n * causal, rotary_dim, interleaved)
    ends = [length + new for length in lengths]
    for b, end in enumerate(ends):
        keys, values = (rows_of(t, None, b, 0, end) for t in (k_cache, v_cache))
        exact, _ = reference.attention(expected_q[b].transpose(0, 1)[None], keys, values,
                                       causal="lower_right" if causal else None)  # fmt: skip
        torch.testing.assert_close(out[b].transpose(0, 1)[None], exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize(
    ("form", "page_size"),
    [("none", None), ("none", 24), ("head", 24), ("cache and head", 16), ("token", None), ("token", 16), ("token", 24)],
)
def test_8_bit_caches(isa, dtype, form, page_size):
    """Attention to the decoded values of 8-bit caches."""
    q, k_cache, v_cache, block_table = make(torch.bfloat16, 2, page_size)
    coded = [(20 * t.float().nan_to_num(100.0)).clamp(-127, 127).to(dtype) for t in (k_cache, v_cache)]
    shapes = {"head": (HK,), "cache and head": (len(k_cache), HK), "token": k_cache.shape[:3]}
    scales = [None if form == "none" else torch.rand(shapes[form]) / 20 + 0.01 for _ in coded]
    full = [
        1.0 if s is None else (s[:, None] if s.dim() == 2 else s).expand(k_cache.shape[:3])[..., None] for s in scales
    ]
    k, v = (c.float() * s for c, s in zip(coded, full, strict=True))
    if form == "none":
        q = q / 20
    arguments = dict(cache_seqlens=torch.tensor(LENGTHS), causal=True, block_table=block_table, return_softmax_lse=True)
    out, lse = flash_attn_with_kvcache(q, *coded, **arguments, k_descale=scales[0], v_descale=scales[1])
    check(out, lse, q, k, v, LENGTHS, block_table, causal=True)


def test_nan_scales_of_hidden_rows_reach_nothing():
    q, k_cache, v_cache, _ = make(torch.bfloat16, lengths=[200, 200])
    coded = [(20 * t.float().nan_to_num()).to(torch.int8) for t in (k_cache, v_cache)]
    scale = torch.full(k_cache.shape[:3], 0.05)
    arguments = dict(cache_seqlens=200, window_size=(50, 0))
    expected = flash_attn_with_kvcache(q, *coded, **arguments, k_descale=scale, v_descale=scale)
    scale[:, 100:149] = torch.nan
    out = flash_attn_with_kvcache(q, *coded, **arguments, k_descale=scale, v_descale=scale)
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    ("heads", "seqlen_q", "page_size"), [(16, 1, None), (16, 1, 16), (8, 4, 48), (6, 8, None), (2, 8, 1)]
)
def test_heads_times_queries_that_fill_vectors(isa, dtype, page_size, heads, seqlen_q):
    """One key head: all rows are multiplied at once, in caches and in pages."""
    lengths = [70, 9, 200]
    _, k_cache, v_cache, block_table = make(dtype, 1, page_size, lengths)
    k_cache, v_cache = k_cache[:, :, :1], v_cache[:, :, :1]
    q = torch.randn(3, seqlen_q, heads, D).to(dtype)
    out, lse = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=torch.tensor(lengths), causal=True,
                                       block_table=block_table, return_softmax_lse=True)  # fmt: skip
    check(out, lse, q, k_cache, v_cache, lengths, block_table, causal=True)


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_rows_that_fill_vectors_and_8_bits(isa, cache_dtype, page_size):
    """Scores stay transposed: a factor belongs to some lanes of a vector, or to whole vectors."""
    lengths = [70, 9, 200]
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        _, k_cache, v_cache, block_table = make(torch.float32, 1, page_size, lengths)
        coded = [(20 * t[:, :, :1].nan_to_num(100.0)).clamp(-127, 127).to(cache_dtype) for t in (k_cache, v_cache)]
        scales = [torch.rand(t.shape[:3]) / 20 + 0.01 for t in coded]
        k, v = (c.double() * s[..., None] for c, s in zip(coded, scales, strict=True))
        for heads in (3, 8, 12, 20, 72):
            q = torch.randn(3, 1, heads, D).to(dtype)
            out, lse = flash_attn_with_kvcache(
                q, *coded, cache_seqlens=torch.tensor(lengths), block_table=block_table, return_softmax_lse=True,
                k_descale=scales[0], v_descale=scales[1],
            )  # fmt: skip
            check(out, lse, q, k, v, lengths, block_table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [4, 32])
def test_bits_do_not_depend_on_threads(threads, dtype, heads):
    """The number of key heads in a task depends on the number of threads."""
    lengths = [250, 3, 100]
    _, k_cache, v_cache, block_table = make(dtype, 1, 16, lengths)
    q = torch.randn(3, 2, heads, D).to(dtype)
    results = []
    for count in (1, 2, 5):
        threads(count)
        results.append(flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=torch.tensor(lengths),
                                               block_table=block_table))  # fmt: skip
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_append_to_8_bits():
    _, k_cache, v_cache, _ = make(lengths=[0, 0])
    k_cache, v_cache = (torch.zeros_like(t, dtype=torch.int8) for t in (k_cache, v_cache))
    q, k, v = torch.randn(2, 3, H, D), torch.randn(2, 3, HK, D), torch.randn(2, 3, HK, DV)
    scale = torch.tensor([0.03, 0.04])
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=0, causal=True, k_descale=scale, v_descale=scale
    )
    for cache, new in ((k_cache, k), (v_cache, v)):
        assert ((cache[:, :3] * scale[:, None] - new).abs() <= 0.5 * scale[:, None] + 1e-6).all()
    exact, _ = reference.attention(*(t.transpose(1, 2) for t in (q, k, v)), causal="lower_right")
    assert (out.transpose(1, 2) - exact).abs().max() < 0.1


def test_bits_do_not_depend_on_the_batch_or_on_pages():
    q, k_cache, v_cache, block_table = make(torch.float32, 1, 16)
    lengths = torch.tensor(LENGTHS)
    together = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, block_table=block_table)
    for b in range(len(LENGTHS)):
        own = slice(b, b + 1)
        alone = flash_attn_with_kvcache(
            q[own], k_cache, v_cache, cache_seqlens=lengths[own], block_table=block_table[own]
        )
        assert torch.equal(alone, together[own])
        rows = [t[block_table[b].long()].flatten(0, 1)[None] for t in (k_cache, v_cache)]
        assert torch.equal(flash_attn_with_kvcache(q[own], *rows, cache_seqlens=lengths[own]), together[own])


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("form", ["none", "head", "token"])
@pytest.mark.parametrize("heads", [2, 4, 6, 16, 48, 200])
def test_bits_of_8_bits_do_not_depend_on_runs_of_pages(isa, cache_dtype, form, heads):
    """Up to 64 rows that follow each other are converted at once, also across pages."""
    q = torch.randn(2, 1, heads, D).bfloat16()
    caches = [(20 * torch.randn(2, 320, HK, d)).clamp(-127, 127).to(cache_dtype) for d in (D, DV)]
    scales = {"none": [None] * 2, "head": torch.rand(2, HK) / 20, "token": torch.rand(2, 2, 320, HK) / 20}[form]

    def attend(caches, scales, table=None):
        return flash_attn_with_kvcache(
            q,
            *caches,
            cache_seqlens=torch.tensor([301, 70]),
            block_table=table,
            k_descale=scales[0],
            v_descale=scales[1],
        )

    expected = attend(caches, scales)
    in_order = torch.arange(40, dtype=torch.int32)
    for table in (in_order, in_order.view(10, 4)[torch.randperm(10)].flatten()):  # one run; runs of 64 rows
        places = torch.empty(40, dtype=torch.long).scatter_(0, table.long(), torch.arange(40))
        in_pages = [t.reshape(40, 16, *t.shape[2:])[places] for t in caches]
        own = [t.reshape(40, 16, HK)[places] for t in scales] if form == "token" else scales
        assert torch.equal(attend(in_pages, own, table.view(2, 20)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [16, 48, 128])
@pytest.mark.parametrize("heads", [2, 4, 8, 16, 48])
def test_bits_do_not_depend_on_where_rows_are(isa, dtype, page_size, heads):
    """Products read a run of pages at once. vLLM's cache has the rows of a head side by side."""
    lengths = torch.tensor([1100, 45, 250])
    count = -(-1100 // page_size)
    numbers = torch.randperm(3 * count // 2 + 1)[: (3 * count + 1) // 2]
    in_pairs = torch.stack([2 * numbers, 2 * numbers + 1], 1).flatten()[: 3 * count]  # runs of two pages and more
    table = in_pairs.view(3, count).int()
    q = torch.randn(3, 1, heads, D).to(dtype)
    caches = [torch.randn(3 * count + 3, page_size, HK, d).to(dtype) for d in (D, DV)]
    options = dict(cache_seqlens=lengths, return_softmax_lse=True)
    expected = flash_attn_with_kvcache(q, *(cache[table.long()].flatten(1, 2) for cache in caches), **options)
    heads_apart = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]
    for paged in (caches, heads_apart):
        result = flash_attn_with_kvcache(q, *paged, block_table=table, **options)
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


BAD = {
    "too long": (dict(cache_seqlens=torch.tensor([5, 257])), "cache_seqlens: got 257 at 1; allowed: 0 to 256"),
    "negative": (dict(cache_seqlens=torch.tensor([-5, 7])), "cache_seqlens: got -5 at 0; allowed: 0 to 256"),
    "no room": (dict(cache_seqlens=255, k=torch.ones(2, 2, HK, D), v=torch.ones(2, 2, HK, DV)),
                "cache_seqlens: got new rows at 255 to 256; allowed: 0 to 255"),
    "index": (dict(cache_batch_idx=torch.tensor([0, 9])), "cache_batch_idx: got 9 at 1; allowed: 0 to 1"),
    "leftpad": (dict(cache_leftpad=torch.tensor([0, 300])), "cache_leftpad: got 300 at 1; allowed: 0 to 256"),
    "page": (dict(block_table=torch.tensor([[0], [9]])), "block_table: got 9 at 1; allowed: 0 to 1"),
    "negative page": (dict(block_table=torch.tensor([[0], [-1]])), "block_table: got -1 at 1; allowed: 0 to 1"),
    "table": (dict(block_table=torch.tensor([[0, 1]])), "block_table: got shape [1, 2]; allowed: (sequences, pages)"),
    "row of the table": (dict(block_table=torch.zeros(3, 1, dtype=torch.int32), cache_batch_idx=torch.tensor([0, 3])),
                         "cache_batch_idx: got [0, 3]; allowed: 0 to 2, the rows of block_table"),
    "rows of the table": (dict(block_table=torch.zeros(3, 1, dtype=torch.int32), cache_batch_idx=torch.tensor([0])),
                          "cache_batch_idx: got shape [1]; allowed: (2,)"),
    "number as a table": (dict(block_table=torch.tensor(0)), "block_table: got shape []; allowed: at least 2"),
    "length": (dict(cache_seqlens=2**70), "cache_seqlens: got 1180591620717411303424; allowed: 0 to"),
    "longest": (dict(max_seqlen_q=-1), "max_seqlen_q: got -1; allowed: None, or an int of 0"),
    "rotary": (dict(rotary_cos=torch.ones(9, 4)), "rotary_cos: got one without rotary_sin; allowed: both"),
    "k alone": (dict(k=torch.ones(2, 1, HK, D)), "k: got one without v"),
    "positions": (dict(k=torch.ones(2, 1, HK, D), v=torch.ones(2, 1, HK, DV), cache_seqlens=9,
                       rotary_cos=torch.ones(9, 4), rotary_sin=torch.ones(9, 4)),
                  "rotary_cos: got positions 9 to 9; allowed: 0 to 8"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case):
    arguments, message = BAD[case]
    q, k_cache, v_cache, _ = make(lengths=[ROWS] * 2)
    before = k_cache.clone()
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_attn_with_kvcache(q, k_cache, v_cache, **arguments)
    assert torch.equal(k_cache, before)


def test_nan_scales_reach_only_their_head():
    q, k_cache, v_cache, _ = make(lengths=[50, 50])
    coded = [(20 * t.nan_to_num()).to(torch.int8) for t in (k_cache, v_cache)]
    scale = torch.tensor([0.05, torch.nan])
    out = flash_attn_with_kvcache(q, *coded, cache_seqlens=50, k_descale=scale, v_descale=scale)
    assert out[:, :, : H // 2].isfinite().all()
    assert out[:, :, H // 2 :].isnan().all()


def test_opcheck_and_compile():
    q, k_cache, v_cache, block_table = make(torch.float32, 2, 16)
    lengths, cu_seqlens = torch.tensor(LENGTHS), torch.arange(6) * 2
    torch.library.opcheck(
        _ops.attention_cache,
        (q.flatten(0, 1), k_cache, v_cache, None, None, cu_seqlens, lengths, None, None, block_table),
        {"causal": True, "lower_right": True},
    )

    def step(q, k_cache, v_cache, k, v, lengths, block_table):
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True,
                                       block_table=block_table)  # fmt: skip

    k, v = torch.randn(5, 2, HK, D), torch.randn(5, 2, HK, DV)
    caches = [t.clone() for t in (k_cache, v_cache)]
    expected = step(q, *caches, k, v, lengths, block_table)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k_cache, v_cache, k, v, lengths, block_table), expected)
    assert torch.equal(k_cache.nan_to_num(), caches[0].nan_to_num())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [None, 1, 24, 32])
def test_int8_with_queries_of_very_different_sizes(isa, dtype, page_size):
    """Rows and elements of q differ by factors from 1e-4 to 1e3. Weights have one peak or a long tail."""
    q, k_cache, v_cache, block_table = make(dtype, 2, page_size, [250, 70, 129])
    q = (q * 10.0 ** torch.randint(-2, 2, q.shape) * 10.0 ** torch.randint(-2, 1, (*q.shape[:3], 1))).to(dtype)
    coded = [(20 * t.float().nan_to_num()).clamp(-128, 127).to(torch.int8) for t in (k_cache, v_cache)]
    scales = [10.0 ** torch.randint(-3, 0, t.shape[:3]) for t in coded]
    out, lse = flash_attn_with_kvcache(
        q, *coded, cache_seqlens=torch.tensor([250, 70, 129]), causal=True, block_table=block_table,
        return_softmax_lse=True, k_descale=scales[0], v_descale=scales[1],
    )  # fmt: skip
    k, v = (c.float() * s[..., None] for c, s in zip(coded, scales, strict=True))
    check(out, lse, q, k, v, [250, 70, 129], block_table, causal=True)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_query_that_is_not_finite_changes_its_row_only(isa, bad):
    q, k_cache, v_cache, _ = make(torch.bfloat16, 2, None, [200, 70])
    coded = [(20 * t.float().nan_to_num()).to(torch.int8) for t in (k_cache, v_cache)]
    expected = flash_attn_with_kvcache(q, *coded, cache_seqlens=torch.tensor([200, 70]))
    q[0, 1, 2, 5] = bad
    out = flash_attn_with_kvcache(q, *coded, cache_seqlens=torch.tensor([200, 70]))
    spoiled = torch.zeros(out.shape[:3], dtype=torch.bool)
    spoiled[0, 1, 2] = True
    assert out[spoiled].isnan().all()
    assert torch.equal(out[~spoiled], expected[~spoiled])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_float8_is_read_exactly(isa, dtype, cache_dtype):
    """One key has the probability 1, so out is its value: all 256 codes, with subnormals, Inf and NaN.

    Rows of pages of 1 are copied one by one, other rows as a chunk.
    """
    for heads_kv, head_dim in ((2, 128), (3, 100), (7, 40)):
        codes = torch.arange(heads_kv * head_dim).remainder(256).to(torch.uint8).view(1, 1, heads_kv, head_dim)
        v_cache = codes.view(cache_dtype)
        k_cache = torch.zeros_like(codes).view(cache_dtype)
        for group in (1, 4):
            q = torch.ones(1, 1, group * heads_kv, head_dim, dtype=dtype)
            expected = v_cache.to(dtype).repeat_interleave(group, 2)
            for block_table in (None, torch.zeros(1, 1, dtype=torch.int32)):
                out = flash_attn_with_kvcache(q, k_cache, v_cache, block_table=block_table)
                torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
