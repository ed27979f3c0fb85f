"""indexer_topk of torch's operators, which runs on CUDA: the same function on CPU tensors equals the CPU kernel."""

import pytest
import torch
from test_indexer import BANDS, SIZES, make

from flash_attn_ext import indexer_topk
from flash_attn_ext.indexer import _composite
from flash_attn_ext.indexer._arguments import band_options


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(_composite, "BLOCK_Q", 8)
    monkeypatch.setattr(_composite, "BLOCK_K", 48)


def band_of(is_causal=False, causal=None, window=None, diagonal=0):
    return band_options(is_causal, causal, window, diagonal)


def both(q, k, weights, count, band=None, **tensors):
    names = ("key_mask", "cache_seqlens", "block_table")
    given = [tensors.get(name) for name in names]
    ours = _composite.topk(q, k, weights, *given, count, scale=0.5, **band_of(**band or {}))
    expected = indexer_topk(q, k, weights, count, scale=0.5, return_scores=True, **band or {}, **tensors)
    return ours, expected


def check(ours, expected):
    assert torch.equal(ours[0], expected[0])
    torch.testing.assert_close(ours[1], expected[1], equal_nan=True)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_equals_the_kernel(dtype, band):
    for size in SIZES:
        q, k, weights = make(*size, dtype, whole=True)  # exact scores with many ties
        for key_mask in (None, torch.rand(size[0], size[3]) < 0.8):
            for count in (0, 5, size[3] + 2):
                check(*both(q, k, weights, count, band, key_mask=key_mask))


@pytest.mark.usefixtures("small_tiles")
def test_nan_and_infinite_scores():
    q, k, weights = make(1, 3, 20, 190, 4, whole=True)
    k[0, 70] = torch.nan
    weights[0, 1] = -torch.inf
    q[0, :, 2, 0] = torch.inf
    check(*both(q, k, weights, 9, {"is_causal": True, "diagonal": 60}))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("causal", [None, "lower_right"])
def test_caches_and_pages(causal):
    q, k, weights = make(3, 4, 5, 96, 8, whole=True)
    lengths = torch.tensor([96, 50, 5])
    check(*both(q, k, weights, 20, {"causal": causal}, cache_seqlens=lengths))
    table = torch.randperm(18).view(3, 6).int()
    pages = torch.empty(18, 16, 8, dtype=k.dtype)
    pages[table.long()] = k.view(3, 6, 16, 8)
    check(*both(q, pages, weights, 20, {"causal": causal}, cache_seqlens=lengths, block_table=table))


def test_never_all_scores_at_once(monkeypatch):
    """Tiles of 64 queries and 2048 keys, whatever the lengths."""
    sizes = []
    largest = _composite._largest
    monkeypatch.setattr(_composite, "_largest", lambda s, n, c: sizes.append(s.numel()) or largest(s, n, c))
    q, k, weights = make(1, 2, 200, 5000, 4, torch.float32, whole=True)
    check(*both(q, k, weights, 16))
    assert max(sizes) <= 64 * (2048 + 16)
