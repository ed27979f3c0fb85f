"""Numbers near 2^63 in offsets, lengths, page tables and options: an error or the right result, never an overflow."""

import pytest
import torch

from flash_attn_ext import _ops, dropout_mask, flash_attn, flash_attn_varlen, flash_attn_with_kvcache, new_rng_state

MOST, LEAST = 2**63 - 1, -(2**63)


@pytest.mark.parametrize("middle", [MOST, LEAST, MOST - 3])
@pytest.mark.parametrize("side", ["q", "k"])
def test_offsets(side, middle):
    rows = torch.randn(6, 2, 8)
    offsets = {"q": torch.tensor([0, 3, 6]), "k": torch.tensor([0, 3, 6])}
    offsets[side] = torch.tensor([0, middle, 6])
    with pytest.raises(ValueError, match=f"cu_seqlens_{side}: got .*; allowed: ascending offsets"):
        flash_attn_varlen(rows, rows, rows, offsets["q"], offsets["k"])


@pytest.mark.parametrize("number", [MOST, LEAST])
@pytest.mark.parametrize("side", ["q", "k"])
def test_used_rows(side, number):
    rows, offsets = torch.randn(6, 2, 8), torch.tensor([0, 3, 6])
    with pytest.raises(ValueError, match=f"seqused_{side}: got .* allowed: 0 to the sequence's 3 rows"):
        flash_attn_varlen(rows, rows, rows, offsets, offsets, **{f"seqused_{side}": torch.tensor([1, number])})


@pytest.mark.parametrize("number", [MOST, LEAST])
@pytest.mark.parametrize("name", ["cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table"])
@pytest.mark.parametrize("appends", [False, True])
def test_caches(name, number, appends):
    q, new = torch.randn(2, 1, 2, 8), torch.randn(2, 1, 2, 8)
    cache = [torch.randn(4, 16, 2, 8) for _ in range(2)]
    given = {"cache_seqlens": torch.tensor([3, 4])}
    given[name] = torch.tensor([[0, 1], [2, number]]) if name == "block_table" else torch.tensor([1, number])
    if name == "block_table":
        given["cache_seqlens"] = torch.tensor([3, 17])  # the second page is in use
    before = cache[0].clone()
    with pytest.raises(ValueError, match=f"{name}: got"):
        flash_attn_with_kvcache(q, *cache, *((new, new) if appends else ()), **given)
    assert torch.equal(cache[0], before)


def test_the_rows_of_expanded_caches():
    """rows times pages is 2^63."""
    cache = torch.randn(1, 1, 1, 1).expand(1, 2**60, 1, 1)
    with pytest.raises(ValueError, match=r"block_table: got 8 pages of 1152921504606846976 rows .* at most 2\^62 rows"):
        _ops.attention_cache(
            torch.randn(1, 1, 1), cache, cache, None, None, torch.tensor([0, 1]), torch.tensor([5]),
            block_table=torch.zeros(1, 8, dtype=torch.int64),
        )  # fmt: skip


@pytest.mark.parametrize("number", [MOST, LEAST])
def test_windows_and_diagonals(number):
    q = torch.randn(1, 1, 5, 8)
    everything = flash_attn(q, q, q)
    band = {"window_left": MOST, "window_right": MOST}
    assert torch.equal(_ops.attention(q, q, q, **band)[0], everything)
    out = _ops.attention(q, q, q, window_left=2, window_right=2, diagonal=number)[0]
    assert torch.equal(out, torch.zeros_like(q))  # no key is inside the window


def test_splits_and_longest_sequences():
    q = torch.randn(1, 1, 1, 8)
    k = torch.randn(1, 1, 600, 8)
    torch.testing.assert_close(flash_attn(q, k, k, num_splits=MOST), flash_attn(q, k, k))
    rows, offsets = torch.randn(6, 2, 8), torch.tensor([0, 3, 6])
    out = flash_attn_varlen(rows, rows, rows, offsets, offsets, MOST, MOST)
    assert torch.equal(out, flash_attn_varlen(rows, rows, rows, offsets, offsets))


def test_the_first_row_of_a_dropout_mask():
    state = new_rng_state(torch.device("cpu"))
    with pytest.raises(ValueError, match="first_row: got 9223372036854775807; allowed: 0 to 9223372036854775802"):
        dropout_mask(state, 1, 1, 5, 7, 0.5, first_row=MOST)
