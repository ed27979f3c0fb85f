"""The tests of flash_attn_with_kvcache again, on the CUDA kernels' host build: pages, 8 bits, trees."""

import pytest
import test_int4
import test_kvcache
import test_tree_mask
import torch
from cache_helpers import LENGTHS, make
from test_tree_mask import TREE, tree

from flash_attn_ext import _ops, flash_attn_with_kvcache

pytestmark = pytest.mark.usefixtures("kernels")


test_decode = test_kvcache.test_decode
test_several_new_tokens = test_kvcache.test_several_new_tokens
test_options = test_kvcache.test_options
test_batch_index_and_left_padding = test_kvcache.test_batch_index_and_left_padding
test_packed_queries = test_kvcache.test_packed_queries
test_8_bit_caches = test_kvcache.test_8_bit_caches
test_int4_caches = test_int4.test_read
test_int4_head_dimensions = test_int4.test_head_dimensions
test_nan_scales_of_int4 = test_int4.test_nan_scales_reach_their_head_and_no_hidden_row
test_nan_scales_of_hidden_rows_reach_nothing = test_kvcache.test_nan_scales_of_hidden_rows_reach_nothing
test_nan_scales_reach_only_their_head = test_kvcache.test_nan_scales_reach_only_their_head
test_bits_do_not_depend_on_the_batch_or_on_pages = test_kvcache.test_bits_do_not_depend_on_the_batch_or_on_pages
test_each_token_sees_its_ancestors = test_tree_mask.test_each_token_sees_its_ancestors
test_with_other_options = test_tree_mask.test_with_other_options
test_many_new_tokens = test_tree_mask.test_many_new_tokens
test_left_padding_of_a_tree = test_tree_mask.test_a_float_mask_is_added_and_left_padding_is_left_out
test_packed_trees_of_different_sizes = test_tree_mask.test_packed_trees_of_different_sizes
test_a_hidden_token_may_be_nan = test_tree_mask.test_a_hidden_token_may_be_nan


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_byte(kernels, dtype):
    """One key with the weight 1: out is the value of the byte, NaN and Inf included."""
    cache = torch.arange(256, dtype=torch.uint8).view(dtype).view(1, 1, 1, 256)
    keys = torch.zeros(1, 1, 1, 256, dtype=torch.uint8).view(dtype)
    out = flash_attn_with_kvcache(torch.ones(1, 1, 1, 256), keys, cache)
    assert kernels.tier == "simt"
    torch.testing.assert_close(out.flatten(), cache.flatten().float(), rtol=0, atol=0, equal_nan=True)


def test_the_tier_and_why_no_faster_one(kernels):
    q, k_cache, v_cache, block_table = make(torch.bfloat16, 6, 16, TREE)
    given = {"cache_seqlens": torch.tensor(TREE), "block_table": block_table}
    flash_attn_with_kvcache(q, k_cache, v_cache, **given)
    assert kernels.tier == "sm80"
    flash_attn_with_kvcache(q, k_cache, v_cache, **given, tree_mask=tree())
    assert kernels.tier == "simt"
    assert "sm80: no tree_mask" in kernels.why_not
    coded = [t.nan_to_num().to(torch.int8) for t in (k_cache, v_cache)]
    flash_attn_with_kvcache(q, *coded, **given)
    assert kernels.tier == "simt"
    assert "sm80: no caches of 8 or 4 bits" in kernels.why_not


@pytest.mark.parametrize("hostile", [-5, 1 << 30])
@pytest.mark.parametrize("page_size", [None, 16])
def test_hostile_numbers_read_nothing_outside(kernels, hostile, page_size):
    """The host run checks every access. The results are not compared."""
    q, k_cache, v_cache, block_table = make(torch.float32, 2, page_size)
    coded = [t.nan_to_num().to(torch.int8) for t in (k_cache, v_cache)]
    scales = [torch.rand(t.shape[:3]) for t in coded]
    given = {"cu_seqlens_q": torch.arange(6) * 2, "seqused_k": torch.tensor(LENGTHS), "block_table": block_table}
    given |= {"key_scale": scales[0], "value_scale": scales[1], "tree_mask": tree(5, parents=(-1, 0))[:, None]}
    names = ["cu_seqlens_q", "seqused_k", "leftpad", "batch_idx" if block_table is None else "block_table"]
    for name in names:
        like = given.get(name)
        bad = {name: torch.full_like(torch.zeros(5, dtype=torch.int64) if like is None else like, hostile)}
        _ops.attention_cache(q.flatten(0, 1), *coded, None, None, **given | bad, max_seqlen_q=2)
