"""Prompts of many queries on caches in pages: the bits of a cache without pages, although no page is copied."""

import pytest
import torch

from flash_attn_ext import flash_attn_with_kvcache

LENGTHS = torch.tensor([333, 130, 256])
B, S_Q, ROWS, HK = 3, 120, 384, 2


def paged(caches, page_size, table):
    """Returns the same rows in pages of random places. ``caches``: (B, ROWS, H_k, D)."""
    count = ROWS // page_size
    pages = [torch.full((B * count + 2, page_size, *c.shape[2:]), float("nan"), dtype=c.dtype) for c in caches]
    for own, cache in zip(pages, caches, strict=True):
        own[table.long().flatten()] = cache.reshape(B * count, page_size, *cache.shape[2:])
    return pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("page_size", [1, 8, 16, 48, 128])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(64, 64), (40, 24), (33, 17)])
def test_bits_of_a_cache_without_pages(isa, dtype, page_size, head_dim, head_dim_v):
    torch.manual_seed(0)
    q = torch.randn(B, S_Q, 8, head_dim).to(dtype)
    caches = [torch.randn(B, ROWS, HK, d).to(dtype) for d in (head_dim, head_dim_v)]
    count = ROWS // page_size
    table = torch.randperm(B * count + 2)[: B * count].view(B, count).int()
    for options in (
        dict(causal=True),
        dict(window_size=(150, 40)),
        dict(cache_leftpad=torch.tensor([5, 0, 128]), causal=True, softcap=20.0),
    ):
        options |= dict(cache_seqlens=LENGTHS, return_softmax_lse=True)
        expected = flash_attn_with_kvcache(q, *caches, **options)
        results = flash_attn_with_kvcache(q, *paged(caches, page_size, table), block_table=table, **options)
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))
        assert all(t.isfinite().all() for t in expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [16, 128])
def test_values_that_are_not_finite_reach_only_queries_that_see_them(isa, dtype, page_size):
    """The last value is inf. Two blocks of queries share a tile, and only the last query sees the value."""
    torch.manual_seed(0)
    q = torch.randn(B, S_Q, 8, 64).to(dtype)
    caches = [torch.randn(B, ROWS, HK, 64).to(dtype) for _ in range(2)]
    table = torch.randperm(B * ROWS // page_size).view(B, -1).int()
    options = dict(cache_seqlens=LENGTHS, causal=True)
    expected = flash_attn_with_kvcache(q, *paged(caches, page_size, table), block_table=table, **options)
    for b, length in enumerate(LENGTHS):
        caches[1][b, length - 1] = float("inf")
        caches[1][b, length:] = float("nan")
    result = flash_attn_with_kvcache(q, *paged(caches, page_size, table), block_table=table, **options)
    assert torch.equal(result[:, :-1], expected[:, :-1])
    assert (result[:, -1] == float("inf")).all()


def test_all_keys_visible_with_values_that_are_not_finite(isa):
    torch.manual_seed(0)
    q = torch.randn(1, S_Q, 8, 64).bfloat16()
    caches = [torch.randn(1, ROWS, HK, 64).bfloat16() for _ in range(2)]
    caches[1][0, 100, 1, 5] = float("nan")
    table = torch.randperm(ROWS // 16).view(1, -1).int()
    pages = [c.view(-1, 16, HK, 64)[table[0].long().argsort()] for c in caches]
    out = flash_attn_with_kvcache(q, *pages, block_table=table)
    expected = flash_attn_with_kvcache(q, *caches)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    assert out.isnan().any()
