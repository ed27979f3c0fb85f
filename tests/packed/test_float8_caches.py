"""float8 caches with 1 to 7 rows of Q for each key head. Up to 6 rows, AVX2 multiplies codes without a copy.

The expected result is the same call with float64 queries, which converts each row of the cache.
"""

import pytest
import torch

from flash_attn_ext import flash_attn_with_kvcache

pytestmark = pytest.mark.usefixtures("one_thread")
HK = 2
DTYPES = [torch.float8_e4m3fn, torch.float8_e5m2]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 0.01, torch.float16: 0.002}
GROUPS = (1, 2, 3, 4, 5, 6, 7)


def caches_of(dtype, keys, columns=(64, 96), page_size=None, factor=1.0):
    shape, table = (1, keys), None
    if page_size:
        pages = -(-keys // page_size)
        shape, table = (pages, page_size), torch.randperm(pages, dtype=torch.int32)[None]
    k, v = ((torch.randn(*shape, HK, d) * factor).to(dtype) for d in columns)
    return {"k_cache": k, "v_cache": v, "block_table": table, "cache_seqlens": keys}


def check(q, **arguments):
    out, lse = flash_attn_with_kvcache(q, return_softmax_lse=True, **arguments)
    expected, expected_lse = flash_attn_with_kvcache(q.double(), return_softmax_lse=True, **arguments)
    tolerance = TOLERANCE[q.dtype]
    assert (out.double() - expected).abs().max() < tolerance * expected.abs().max()
    torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("coded", DTYPES, ids=str)
@pytest.mark.parametrize("keys", [1, 3, 16, 65, 700])
@pytest.mark.parametrize("columns", [(32, 32), (64, 96), (128, 160), (48, 40)])
def test_rows(isa, dtype, coded, keys, columns):
    """(48, 40): columns that are converted."""
    arguments = caches_of(coded, keys, columns)
    for group in GROUPS:
        check(torch.randn(1, 1, group * HK, columns[0]).to(dtype), **arguments)
    check(torch.randn(1, 3, 2 * HK, columns[0]).to(dtype), causal=True, **arguments)


@pytest.mark.parametrize("coded", DTYPES, ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 24, 64])
def test_pages(isa, coded, page_size):
    arguments = caches_of(coded, 203, page_size=page_size)
    for group in GROUPS:
        check(torch.randn(1, 1, group * HK, 64), **arguments)


@pytest.mark.parametrize("coded", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [2.0**-9, 2.0**-6, 100.0])
@pytest.mark.parametrize("of_q", [1e-25, 1.0, 1e25])
def test_ranges(isa, coded, factor, of_q):
    """Subnormal codes, large codes, and queries whose squares are below or above all float32."""
    arguments = caches_of(coded, 150, factor=factor)
    for group in GROUPS:
        q = torch.randn(1, 1, group * HK, 64) * of_q
        check(q, softmax_scale=1 / of_q / factor / 8, **arguments)


@pytest.mark.parametrize("coded", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["head", "token"])
def test_factors(isa, coded, form):
    arguments = caches_of(coded, 150)
    shape = (HK,) if form == "head" else (1, 150, HK)
    for name in ("k_descale", "v_descale"):
        arguments[name] = torch.rand(shape) + 0.5
    for group in GROUPS:
        check(torch.randn(1, 1, group * HK, 64), **arguments)
    # A factor that is not finite multiplies rows, not scores.
    arguments["v_descale"] = arguments["v_descale"].index_fill(-1, torch.tensor(1), torch.inf)
    q = torch.randn(1, 1, 4 * HK, 64)
    out, expected = (flash_attn_with_kvcache(x, **arguments) for x in (q, q.double()))
    torch.testing.assert_close(out[:, :, :4].double(), expected[:, :, :4], rtol=1e-5, atol=1e-5)
    assert not out[:, :, 4:].isfinite().any()


@pytest.mark.parametrize("coded", DTYPES, ids=str)
def test_every_code(isa, coded):
    """Each code is a value of a key with all the weight, so out has the decoded number."""
    codes = torch.arange(256, dtype=torch.uint8).view(coded)
    keys = torch.zeros(1, 8, 1, 32).to(coded)
    for group in GROUPS:
        for n in range(8):
            out = flash_attn_with_kvcache(
                torch.zeros(1, 1, group, 32), keys, codes.view(1, 8, 1, 32), cache_seqlens=n + 1, window_size=(0, 0)
            )
            expected = codes[32 * n : 32 * n + 32].float().expand(1, 1, group, 32)
            torch.testing.assert_close(out, expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("coded", DTYPES, ids=str)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_special_codes(isa, coded, value):
    """A NaN reaches the results of the queries that see it, and no other result. e4m3 has no Inf."""
    if value == "inf" and coded == torch.float8_e4m3fn:
        value = "nan"
    for group in GROUPS:
        q = torch.randn(1, 1, group * HK, 64)
        for name in ("k_cache", "v_cache"):
            arguments = caches_of(coded, 100)
            expected = flash_attn_with_kvcache(q, window_size=(40, 0), **arguments)
            arguments[name][0, 30, 0, 7] = float(value)  # hidden by the window
            assert torch.equal(flash_attn_with_kvcache(q, window_size=(40, 0), **arguments), expected)
            arguments[name][0, 80, 0, 7] = float(value)
            out, exact = (flash_attn_with_kvcache(x, window_size=(40, 0), **arguments) for x in (q, q.double()))
            torch.testing.assert_close(out.double(), exact, equal_nan=True, rtol=1e-5, atol=1e-5)
            if value == "nan" or name == "v_cache":  # a score of -Inf hides the key
                assert not out[:, :, :group, 7].isfinite().any()
            assert torch.equal(out[:, :, group:], expected[:, :, group:])


@pytest.mark.parametrize("coded", DTYPES, ids=str)
@pytest.mark.parametrize("sign", [1, -1])
def test_nan_in_each_column(isa, coded, sign):
    arguments = caches_of(coded, 20, (64, 64))
    for group in GROUPS:
        q = torch.randn(1, 1, group * HK, 64)
        expected = flash_attn_with_kvcache(q, **arguments)
        for column in range(64):
            for name in ("k_cache", "v_cache"):
                codes = arguments[name].clone()
                codes[0, column % 20, 1, column] = sign * torch.nan
                out = flash_attn_with_kvcache(q, **(arguments | {name: codes}))
                is_nan = torch.zeros_like(out, dtype=torch.bool)
                is_nan[:, :, group:, slice(None) if name == "k_cache" else column] = True
                assert torch.equal(out.isnan(), is_nan)
                assert torch.equal(out[~is_nan], expected[~is_nan])


@pytest.mark.parametrize("coded", DTYPES, ids=str)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_queries_that_are_not_finite_reach_only_their_row(isa, coded, value):
    arguments = caches_of(coded, 100)
    for group in (2, 3, 4):
        q = torch.randn(1, 1, group * HK, 64)
        expected = flash_attn_with_kvcache(q, **arguments)
        q[0, 0, 1, 5] = value
        out = flash_attn_with_kvcache(q, **arguments)
        assert out[0, 0, 1].isnan().all()
        others = [n for n in range(group * HK) if n != 1]
        assert torch.equal(out[0, 0, others], expected[0, 0, others])
