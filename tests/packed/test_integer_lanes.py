"""int8 and int4 caches that are multiplied without a conversion, with 1 to 33 rows of Q for each key head.

The expected result is the same call with float64 queries, which converts each row of the cache.
"""

import pytest
import torch

from flash_attn_ext import flash_attn_with_kvcache, quantize_int4

pytestmark = pytest.mark.usefixtures("one_thread")
HK = 2
# The columns of a group, or None: the whole row; and whether groups have zero points.
INT4 = {"int4": (None, False), "int4 zeros": (None, True), "int4 32": (32, False), "int4 32 zeros": (32, True)}
INT4 |= {"int4 64": (64, False), "int4 96": (96, True)}
FORMS = ["int8", "int8 token", *INT4]
# The largest error, as a part of the largest element. Instruction sets that convert rows round them to the dtype of Q.
TOLERANCE = {torch.bfloat16: 0.02, torch.float16: 0.003}


def caches_of(form, keys, columns, page_size=None):
    """``form``: int8 with a scale for each head or for each token, or int4 with a scale for each group of columns."""
    table, shape = None, (1, keys)
    if page_size:
        pages = -(-keys // page_size)
        table, shape = torch.randperm(pages, dtype=torch.int32)[None], (pages, page_size)
    arguments = {"block_table": table}
    for name, d in zip("kv", columns, strict=True):
        x = torch.randn(*shape, HK, d) * 2.0 ** torch.randint(-2, 2, (*shape, 1, 1)) + 0.3
        if form in INT4:
            group, zeros = INT4[form]
            group = group if group and d % group == 0 else None
            coded = quantize_int4(x, group, with_zeros=zeros)
            arguments |= dict(zip((f"{name}_cache", f"{name}_scales", f"{name}_zeros"), coded, strict=True))
            continue
        scale = x.abs().amax(-1) / 127 if form == "int8 token" else x.abs().amax((0, 1, 3)) / 127
        arguments[f"{name}_cache"] = (x / scale[..., None]).round().to(torch.int8)
        arguments[f"{name}_descale"] = scale
    return arguments


def check(q, keys, **arguments):
    options = dict(cache_seqlens=keys, causal=True, return_softmax_lse=True, **arguments)
    out, lse = flash_attn_with_kvcache(q, **options)
    expected, expected_lse = flash_attn_with_kvcache(q.double(), **options)
    error = (out.double() - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[q.dtype], error
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keys", [1, 7, 8, 9, 63, 65, 300, 1000])
def test_rows(isa, dtype, form, keys):
    """Rows that fill a part of a vector, a vector, and several blocks of rows. 3 x 2 rows: tiles on the diagonal."""
    arguments = caches_of(form, keys, (128, 64))
    single = [(group, 1) for group in (1, 2, 3, 4, 5, 8, 9, 16, 17, 31, 33)]
    for group, seqlen_q in (*single, (3, 2), (4, 4)):
        check(torch.randn(1, seqlen_q, group * HK, 128).to(dtype), keys, **arguments)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("columns", [(64, 128), (96, 32), (80, 48), (40, 2), (192, 256), (576, 96), (32, 24)])
def test_head_dimensions(isa, form, columns):
    """Also columns that the products of integers refuse: keys, values or both are converted."""
    arguments = caches_of(form, 150, columns)
    for group in (2, 3, 4, 8, 12):
        check(torch.randn(1, 1, group * HK, columns[0]).bfloat16(), 150, **arguments)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("page_size", [1, 16, 24, 64])
def test_pages(isa, form, page_size):
    """A page ends within a block of keys."""
    arguments = caches_of(form, 203, (64, 64), page_size)
    for group in (2, 3, 4, 8, 16):
        check(torch.randn(1, 1, group * HK, 64).half(), 203, **arguments)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("columns", [(32, 64), (128, 128), (32, 256), (32, 288)])
def test_bits_do_not_depend_on_the_distance_of_rows(isa, form, columns):
    """Values 1 KiB apart and more are multiplied in turns of 16, if 4 rows read up to 256 columns."""
    for keys in (15, 16, 17, 64, 81):
        arguments = caches_of(form, keys, columns)
        far = {}
        for name in ("k_cache", "v_cache"):
            cache = arguments[name]
            far[name] = cache.new_zeros(1, keys, 16 * HK, cache.shape[-1])[:, :, 5 : 5 + HK].copy_(cache)
        for group in (2, 3, 4, 8):
            q = torch.randn(1, 1, group * HK, columns[0]).bfloat16()
            out = flash_attn_with_kvcache(q, **(arguments | far))
            assert torch.equal(out, flash_attn_with_kvcache(q, **arguments))


@pytest.mark.parametrize("form", ["int8 token", *INT4])
@pytest.mark.parametrize("group", [1, 2, 4, 8, 16])
def test_nan_scales_of_hidden_rows_reach_nothing(isa, form, group):
    """The last tile of each length has 8 keys or fewer, and the tile before it has scales that are NaN."""
    for keys in (200, 193):
        arguments = caches_of(form, keys, (64, 64))
        q = torch.randn(1, 1, group * HK, 64).bfloat16()
        options = dict(cache_seqlens=keys, window_size=(50, 0))
        expected = flash_attn_with_kvcache(q, **options, **arguments)
        for name in ("k", "v"):
            scale = arguments[f"{name}_descale" if form not in INT4 else f"{name}_scales"]
            scale[:, keys - 100 : keys - 51] = torch.nan
        out = flash_attn_with_kvcache(q, **options, **arguments)
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("form", ["int8", "int4", "int4 32", "int4 32 zeros"])
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_queries_that_are_not_finite_reach_only_their_row(isa, form, value):
    arguments = caches_of(form, 100, (64, 64))
    for group in (2, 3, 4, 8, 12):
        q = torch.randn(1, 1, group * HK, 64).bfloat16()
        expected = flash_attn_with_kvcache(q, cache_seqlens=100, **arguments)
        q[0, 0, 1, 5] = value
        out = flash_attn_with_kvcache(q, cache_seqlens=100, **arguments)
        assert out[0, 0, 1].isnan().all()
        others = [n for n in range(group * HK) if n != 1]
        assert torch.equal(out[0, 0, others], expected[0, 0, others])
