"""The forward for few queries (Flash-Decoding): tile edges, grouped heads, splits of the keys, the unified maximum."""

import subprocess
import sys

import pytest
import torch
from helpers import check_against_reference, check_forward_against_reference, make_qkv

from flash_attn_ext import explain, flash_attn, flash_attn_with_kvcache

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
KEY_EDGES = [1, 2, 3, 7, 15, 16, 17, 63, 64, 65, 127, 129, 256, 257, 1030]


@dtypes
@pytest.mark.parametrize("seqlen_q", [1, 2, 3, 4, 7, 8])
def test_few_queries_at_the_edges_of_the_key_tiles(isa, dtype, seqlen_q):
    for seqlen_k in KEY_EDGES:
        check_against_reference(*make_qkv(1, 2, seqlen_q, seqlen_k, 20, 12, dtype=dtype), causal="lower_right")


@dtypes
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 13])
def test_heads_that_share_keys(isa, dtype, group):
    for seqlen_q in (1, 3):
        inputs = make_qkv(2, 2 * group, seqlen_q, 200, 33, 40, heads_kv=2, dtype=dtype)
        check_against_reference(*inputs, causal="lower_right")


@dtypes
@pytest.mark.parametrize("head_dim_v", [16, 32, 48, 64, 80, 112, 128, 144])
def test_values_of_several_vectors(isa, dtype, head_dim_v):
    for seqlen_q in (1, 2, 4):
        q, k, v = (t.detach() for t in make_qkv(1, 2, seqlen_q, 70, 16, head_dim_v, dtype=dtype))
        check_forward_against_reference(q, k, v)


@dtypes
@pytest.mark.parametrize("seqlen_q", [1, 2, 3, 4, 5])
def test_the_backward_of_few_queries(isa, dtype, seqlen_q):
    """Up to 4 queries, S and dP are dot products of rows, without a transposition of the keys."""
    for seqlen_k, head_dim in ((1, 64), (17, 64), (66, 33), (130, 128)):
        check_against_reference(*make_qkv(2, 4, seqlen_q, seqlen_k, head_dim, heads_kv=2, dtype=dtype), softcap=3.0)
    inputs = make_qkv(1, 2, seqlen_q, 20, 16, dtype=dtype)
    keep = torch.arange(20) != 5

    def gradients_of(k, v):
        leaves = [t.detach().requires_grad_() for t in (inputs[0], k, v)]
        return torch.autograd.grad(flash_attn(*leaves, key_mask=keep[None]).float().sum(), leaves)

    hidden = [t.detach().clone() for t in inputs[1:]]
    for t in hidden:
        t[:, :, 5] = torch.nan
    for clean, got in zip(gradients_of(*inputs[1:]), gradients_of(*hidden), strict=True):
        assert torch.equal(got, clean)


@dtypes
@pytest.mark.parametrize("rows", [2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17])
def test_rows_that_fill_a_part_of_a_vector(isa, dtype, rows):
    """Rows are lanes. Odd head dimensions, partial tiles, and rows of keys that are far from each other."""
    for seqlen_k, head_dim in ((1, 64), (17, 33), (66, 72), (130, 128)):
        q, k, v = (t.detach() for t in make_qkv(1, 2 * rows, 1, seqlen_k, head_dim, heads_kv=2, dtype=dtype))
        check_forward_against_reference(q, k, v)
        far_k, far_v = (torch.cat([t] * 40, dim=-1)[..., :head_dim] for t in (k, v))
        assert torch.equal(flash_attn(q, far_k, far_v, enable_gqa=True), flash_attn(q, k, v, enable_gqa=True))


@dtypes
def test_rows_on_both_sides_of_each_block(isa, dtype):
    """Rows are blocks of lanes: one row to one vector of them. More than 4, 6 or 8 vectors of rows are no blocks."""
    for rows in (10, 11, 13, 14, 18, 19, 20, 21, 24, 25, 28, 29, 31, 32, 33, 36, 37, 40, 44, 48, 49, 56, 60, 64, 65):
        q, k, v = (t.detach() for t in make_qkv(1, rows, 1, 66, 40, heads_kv=1, dtype=dtype))
        check_forward_against_reference(q, k, v)
        check_forward_against_reference(q, k, v, softcap=3.0)  # scores are transposed back
        keep = torch.arange(66) != 5
        clean = flash_attn(q, k, v, key_mask=keep[None], enable_gqa=True)
        v[:, :, 5] = torch.nan
        assert torch.equal(flash_attn(q, k, v, key_mask=keep[None], enable_gqa=True), clean)


@dtypes
@pytest.mark.parametrize("rows", [7, 8, 11, 13, 16, 21, 24, 29, 32, 40])
def test_tails_of_several_vectors_of_rows(isa, dtype, rows):
    """Several vectors of rows multiply 6 or 4 keys at once, and 6 or 4 columns of V. Any number may be left."""
    for seqlen_k in range(1, 18):
        q, k, v = (t.detach() for t in make_qkv(1, rows, 1, seqlen_k, seqlen_k, heads_kv=1, dtype=dtype))
        check_forward_against_reference(q, k, v)
    for head_dim, head_dim_v in ((1, 35), (33, 1), (66, 7), (97, 20)):
        q, k, v = (t.detach() for t in make_qkv(1, rows, 1, 205, head_dim, head_dim_v, heads_kv=1, dtype=dtype))
        check_forward_against_reference(q, k, v)


@dtypes
@pytest.mark.parametrize("group", [3, 4, 7, 8, 12, 16])
def test_large_scores_of_a_head_keep_the_bits_of_other_heads(isa, dtype, group):
    for seqlen_k in (5, 333):
        q, k, v = make_qkv(1, group, 1, seqlen_k, 64, 64, heads_kv=1, dtype=dtype)
        large = q.clone()
        large[:, 1] *= 2.0**12
        others = [head for head in range(group) if head != 1]
        out, out_of_large = (flash_attn(x, k, v, enable_gqa=True) for x in (q, large))
        assert torch.equal(out_of_large[:, others], out[:, others])


@dtypes
@pytest.mark.parametrize("rows", [1, 3, 5, 8, 13])
def test_heads_of_few_keys_share_a_task(isa, dtype, rows, threads):
    threads(1)
    for seqlen_k in (1, 7, 20, 70):
        q, k, v = (t.detach() for t in make_qkv(1, 16 * rows, 1, seqlen_k, 24, heads_kv=16, dtype=dtype))
        check_forward_against_reference(q, k, v)
        check_forward_against_reference(q, k, v, softcap=3.0)


@dtypes
@pytest.mark.parametrize("rows", [4, 9, 12, 16, 24, 32, 33, 40])
@pytest.mark.parametrize("head_dim_v", [64, 72, 128])
def test_rows_far_apart_in_memory_have_the_bits_of_adjacent_rows(isa, dtype, rows, head_dim_v):
    """(B, S, H, D): rows of a head are 2 KiB or more apart. Values that several groups of rows read are copied."""
    q, k, v = (t.detach() for t in make_qkv(1, 16, rows, 600, 64, head_dim_v, dtype=dtype))
    far = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    for causal in (None, "lower_right"):
        expected = flash_attn(q, k, v, causal=causal)
        assert torch.equal(flash_attn(*far, causal=causal), expected)
    check_forward_against_reference(*far)
    pages = torch.randperm(40, dtype=torch.int32)[None]
    caches = [torch.zeros(40, 16, 16, t.shape[3], dtype=dtype) for t in (k, v)]
    for cache, t in zip(caches, far[1:], strict=True):
        for n, chunk in enumerate(t[0].transpose(0, 1).split(16)):
            cache[pages[0, n], : len(chunk)] = chunk
    options = {"cache_seqlens": torch.tensor([600], dtype=torch.int32), "block_table": pages, "causal": True}
    from_pages = flash_attn_with_kvcache(far[0].transpose(1, 2), *caches, **options)
    assert torch.equal(from_pages.transpose(1, 2), expected)


@dtypes
@pytest.mark.parametrize("seqlen_q", [9, 16, 31, 32, 33])
def test_a_chunk_of_queries_against_a_long_cache(isa, dtype, seqlen_q):
    for group in (1, 3):
        q, k, v = (t.detach() for t in make_qkv(1, group, seqlen_q, 600, 40, heads_kv=1, dtype=dtype))
        check_forward_against_reference(q, k, v)
        check_forward_against_reference(q, k, v, causal="lower_right")


@dtypes
@pytest.mark.parametrize("seqlen_q", [33, 40, 48, 55, 56, 57])
def test_a_chunk_that_sees_two_mebibytes_of_keys_and_values(isa, dtype, seqlen_q):
    """AVX2 has up to 56 queries in the decode kernel, and AVX-512 up to 128."""
    seqlen_k = (2 << 20) // (2 * 128 * dtype.itemsize) + seqlen_q  # the causal mask hides keys of the last tiles
    q, k, v = (t.detach() for t in make_qkv(1, 1, seqlen_q, seqlen_k, 128, dtype=dtype))
    for causal in (None, "lower_right"):
        check_forward_against_reference(q, k, v, causal=causal)
        out = flash_attn(q, k, v, causal=causal)
        two = flash_attn(*(t.repeat(1, 2, 1, 1) for t in (q, k, v)), causal=causal)
        assert torch.equal(two, out.repeat(1, 2, 1, 1))


@dtypes
@pytest.mark.parametrize("window", [None, (300, 0), (40, 3), (5000, 0)], ids=str)
def test_long_tiles_beside_tiles_that_the_band_cuts(isa, dtype, window):
    """A tile has up to 512 keys if every query sees them. One shape for each form: rows, blocks of lanes, panels."""
    options = {"causal": "lower_right"} if window is None else {"window": window}
    for heads, heads_kv, seqlen_q, seqlen_k in ((4, 4, 2, 5000), (8, 1, 9, 900), (32, 1, 4, 4200), (2, 2, 33, 1500)):
        q, k, v = (t.detach() for t in make_qkv(1, heads, seqlen_q, seqlen_k, 24, heads_kv=heads_kv, dtype=dtype))
        check_forward_against_reference(q, k, v, **options)
        sees_last = torch.arange(seqlen_q) + (window[1] if window else 0) >= seqlen_q - 1
        clean = flash_attn(q, k, v, enable_gqa=True, **options)
        k[:, :, -1], v[:, :, -1, 3] = torch.nan, torch.nan
        dirty = flash_attn(q, k, v, enable_gqa=True, **options)
        assert torch.equal(dirty[:, :, ~sees_last], clean[:, :, ~sees_last])
        assert dirty[:, :, sees_last].isnan().all()


@dtypes
def test_hidden_values_change_no_bit_of_many_rows(isa, dtype):
    """More than 8 rows read the values of a tile in several steps. Each step has a sum of its own."""
    q, k, v = (t.detach() for t in make_qkv(1, 24, 1, 200, 512, heads_kv=1, dtype=dtype))
    keep = torch.arange(200) != 5
    clean = flash_attn(q, k, v, key_mask=keep[None], enable_gqa=True)
    v[:, :, 5] = torch.nan
    assert torch.equal(flash_attn(q, k, v, key_mask=keep[None], enable_gqa=True), clean)


@dtypes
@pytest.mark.parametrize("head_dim", [5, 33, 34, 36, 40])
def test_nan_that_a_call_leaves_in_scratch_memory_reaches_no_result(isa, dtype, head_dim, threads):
    """Rows of Q and K are padded for each form of the products. The padding is written, not what the last call left."""
    threads(1)
    for rows in (1, 2, 3, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 28, 30, 33, 100):
        nan = [torch.full_like(t, torch.nan) for t in make_qkv(1, rows, 1, 70, 128, heads_kv=1, dtype=dtype)]
        flash_attn(*nan, enable_gqa=True)
        q, k, v = (t.detach() for t in make_qkv(1, rows, 1, 70, head_dim, heads_kv=1, dtype=dtype))
        check_forward_against_reference(q, k, v)


@pytest.mark.parametrize("head_dim", [1, 8, 16, 31, 64, 127, 128, 129, 256, 300, 512])
def test_head_dims_of_one_query(isa, head_dim):
    for dtype in (torch.float32, torch.bfloat16):
        check_against_reference(*make_qkv(1, 4, 1, 100, head_dim, heads_kv=1, dtype=dtype))


@dtypes
@pytest.mark.parametrize("num_splits", [1, 3, 1000])
@pytest.mark.parametrize("unified_max", [None, 0.0, 3.0])
def test_splits_and_unified_max_with_every_option(isa, dtype, num_splits, unified_max):
    """The options force the decode kernel, also for many queries."""
    for seqlen_q in (1, 4, 70):
        inputs = make_qkv(2, 4, seqlen_q, 331, 24, 40, heads_kv=2, dtype=dtype)
        mask = torch.randn(2, 1, seqlen_q, 331, dtype=dtype).masked_fill(torch.rand(331) > 0.8, -torch.inf)
        mask[0, :, 0] = -torch.inf  # a row without a visible key
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=dtype)
        check_against_reference(
            *inputs, mask, alibi_slopes=slopes, causal="lower_right", window=(200, 0), softcap=8.0, scale=0.4,
            dropout_p=0.2, num_splits=num_splits, unified_max=unified_max,
        )  # fmt: skip


@dtypes
@pytest.mark.parametrize("unified_max", [-1e300, -600.0, -400.0, 400.0, 600.0, 1e300])
def test_a_unified_max_far_from_the_scores_is_corrected(isa, dtype, unified_max):
    q, k, v = make_qkv(1, 2, 1, 500, 32, dtype=dtype)
    out, lse = flash_attn(q, k, v, return_lse=True, num_splits=3)
    far_out, far_lse = flash_attn(q, k, v, return_lse=True, num_splits=3, unified_max=unified_max)
    assert torch.equal(out, far_out)  # every split was computed again, as without the option
    assert torch.equal(lse, far_lse)


def test_splits_on_both_sides_of_the_unified_max(isa):
    """Merges three splits: one near the unified maximum, one far above it, one far below it.

    Scores of 170 in fp32 err by up to 7.6e-6, so one row's error is chance, ours and torch's. 32 rows give its size.
    """
    q, k, v = (t.detach() for t in make_qkv(4, 8, 1, 192, 8))
    q.fill_(1.0)
    k[..., :64, :], k[..., 64:128, :], k[..., 128:, :] = 0.0, 60.0, -60.0
    k += torch.randn_like(k) * 0.1
    check_against_reference(*(t.requires_grad_() for t in (q, k, v)), num_splits=3, unified_max=0.0)


@dtypes
@pytest.mark.parametrize("unified_max", [0.0, -20.0, 1e39, -1e39, 1e300])
def test_unified_max_where_a_split_sees_nothing(isa, dtype, unified_max):
    """Splits without a visible key accept any unified maximum. The other splits are computed again before the merge."""
    q, k, v = make_qkv(2, 2, 1, 512, 16, dtype=dtype)
    with torch.no_grad():
        q.fill_(1.0)
        k.fill_(-120.0 / 16)
        k[:, 1] *= -1
    mask = (torch.arange(512) < 128).expand(2, 1, 1, 512).clone()
    mask[1] = False  # rows without a visible key
    check_forward_against_reference(q, k, v, mask, scale=1.0, num_splits=4, unified_max=unified_max)


@pytest.mark.parametrize("unified_max", [None, 0.0])
@pytest.mark.parametrize("num_splits", [0, 1, 4])
def test_nan_reaches_only_queries_that_attend_to_it(isa, num_splits, unified_max):
    q, k, v = (t.detach() for t in make_qkv(2, 4, 2, 300, 24, heads_kv=2))
    options = {"enable_gqa": True, "num_splits": num_splits, "unified_max": unified_max}
    mask = torch.ones(2, 1, 1, 300, dtype=torch.bool)
    mask[1, ..., 200:] = False
    clean = flash_attn(q, k, v, mask, **options)
    k[1, :, 250], v[1, :, 251], v[1, :, 252] = torch.nan, torch.nan, torch.inf  # masked
    assert torch.equal(flash_attn(q, k, v, mask, **options), clean)
    v[1, 0, 10, 3] = torch.nan  # attended to, by the query heads 0 and 1 of batch 1, in one column
    dirty = flash_attn(q, k, v, mask, **options)
    assert dirty[1, :2, :, 3].isnan().all()
    dirty[1, :2, :, 3] = clean[1, :2, :, 3]
    torch.testing.assert_close(dirty, clean)
    k[0, 1, 10] = torch.nan
    assert flash_attn(q, k, v, mask, **options)[0, 2:].isnan().all()


def test_a_batch_of_fully_masked_rows(isa):
    q, k, v = make_qkv(2, 2, 1, 100, 16)
    mask = torch.tensor([True, False])[:, None, None, None]
    for options in ({}, {"num_splits": 2}, {"unified_max": 1.0}):
        out, lse = flash_attn(q, k, v, mask, return_lse=True, **options)
        assert (out[1] == 0).all()
        assert (lse[1] == -torch.inf).all()


@dtypes
def test_bitwise_the_same_for_any_number_of_threads(dtype, threads):
    q, k, v = make_qkv(1, 8, 1, 3000, 64, heads_kv=2, dtype=dtype)
    results = []
    for count in (1, 2, 3, 16):
        threads(count)
        results.append(flash_attn(q, k, v, enable_gqa=True, return_lse=True))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_splits": -1}, r"num_splits: got -1; allowed: 0 \(chosen by the shape\) or more"),
        ({"unified_max": float("inf")}, "unified_max: got inf; allowed: a finite number"),
        ({"unified_max": float("nan")}, "unified_max: got nan; allowed: a finite number"),
    ],
)
def test_bad_options(options, message):
    q, k, v = make_qkv(1, 1, 1, 5, 8)
    with pytest.raises(ValueError, match=message):
        flash_attn(q, k, v, **options)


def test_absurd_numbers_of_splits_are_fine():
    q, k, v = make_qkv(1, 1, 1, 100, 8)
    for num_splits in (2**62, 2**63 - 1):
        torch.testing.assert_close(flash_attn(q, k, v, num_splits=num_splits), flash_attn(q, k, v))


@dtypes
def test_many_equal_keys_are_summed_up_by_tiles(isa, dtype):
    """One long chain of additions would have an error of 1e-3 in float32."""
    n = 1 << 17
    q, k = torch.zeros(1, 1, 1, 8, dtype=dtype), torch.zeros(1, 1, n, 8, dtype=dtype)
    v = torch.full((1, 1, n, 8), 0.1, dtype=dtype)
    out = flash_attn(q, k, v, num_splits=1)
    eps = {torch.float64: 1e-12, torch.float32: 2e-5}.get(dtype, torch.finfo(dtype).eps)
    torch.testing.assert_close(out, v[:, :, :1], rtol=eps, atol=0)


@pytest.mark.parametrize("heads_kv", [1, 3])
def test_other_sequences_in_the_batch_change_no_bit(isa, heads_kv):
    for seqlen_q, dtype in ((1, torch.bfloat16), (5, torch.float32), (70, torch.float32), (70, torch.bfloat16)):
        q, k, v = make_qkv(5, 6, seqlen_q, 1500, 24, heads_kv=heads_kv, dtype=dtype)
        options = {"enable_gqa": True, "return_lse": True}
        both = flash_attn(q, k, v, **options)
        dout = torch.randn_like(both[0])
        grads = torch.autograd.grad(both[0], (q, k, v), dout)
        alone_in = [t[3:4].detach().requires_grad_() for t in (q, k, v)]
        alone = flash_attn(*alone_in, **options)
        for together, single in zip(both, alone, strict=True):
            assert torch.equal(together[3:4], single)
        for together, single in zip(grads, torch.autograd.grad(alone[0], alone_in, dout[3:4]), strict=True):
            assert torch.equal(together[3:4], single)


@pytest.mark.parametrize("options", [{"num_splits": 1000}, {"unified_max": 0.0}])
def test_memory_of_splits_is_linear(options, one_thread):
    q = torch.empty(1, 1, 32768, 64)
    allocates = explain(q, q, q, **options).forward.allocates
    assert allocates["workspace"] <= 8 * allocates["out"]


def test_a_thread_with_a_small_stack():
    """The kernels run in a thread with a stack of 64 KiB. Torch's own attention needs 48 KiB.

    The process ends without Python's and torch's clean-up. torch 2.12.0 with CUDA aborts there, after torch's own
    attention too, in 10 of 12 runs ("terminate called without an active exception").
    """
    script = """
import os, sys, threading, torch
from flash_attn_ext import explain, flash_attn
def run():
    for seqlen in (1, 5, 20):
        q, k, v = (torch.randn(1, 2, seqlen, 16, requires_grad=True) for _ in range(3))
        flash_attn(q, k, v).sum().backward()
    print("done")
torch.set_num_threads(1)
run()
threading.stack_size(65536)
thread = threading.Thread(target=run)
thread.start()
thread.join()
sys.stdout.flush()
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == 2
