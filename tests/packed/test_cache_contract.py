"""flash_attn_with_kvcache: a failing call writes nothing, no row is written twice, no gradient is lost silently."""

import re

import numpy as np
import pytest
import torch
from cache_helpers import DV, HK, LENGTHS, ROWS, D, H, make
from torch.autograd import forward_ad
from torch.nn.attention.flex_attention import create_block_mask

from flash_attn_ext import flash_attn_interface, flash_attn_with_kvcache

pytestmark = pytest.mark.usefixtures("one_thread")
NEW = dict(k=torch.ones(5, 3, HK, D), v=torch.ones(5, 3, HK, DV))


def blocks(batch, heads, keys=ROWS, size=64):
    return create_block_mask(lambda b, h, i, j: i >= j, batch, heads, keys, keys, "cpu", BLOCK_SIZE=size)


FAILING = {
    "sink": (dict(sink=torch.zeros(H + 1)), ValueError, "sink: got shape"),
    "slopes": (dict(alibi_slopes=torch.zeros(H + 1)), ValueError, "alibi_slopes: got shape"),
    "tree mask": (dict(tree_mask=torch.ones(4, 4, dtype=torch.bool)), ValueError, "tree_mask: got shape"),
    "softcap": (dict(softcap=-1.0), ValueError, "softcap: got -1"),
    "scale": (dict(softmax_scale=float("nan")), ValueError, "softmax_scale: got nan"),
    "splits": (dict(num_splits=-7), ValueError, "num_splits: got -7"),
    "window": (dict(window_size=("a", 1)), TypeError, "window_size: got"),
    "descale": (dict(k_descale=torch.ones(HK)), ValueError, "k_descale: got one with a cache of dtype float32"),
    "splits by index": (
        dict(key_indices=torch.zeros(5, 1, 3, 1, dtype=torch.int64), num_splits=2),
        ValueError, "num_splits: got 2 with key_indices; allowed: 0 and 1",
    ),
    "blocks of other batches": (
        dict(block_mask=blocks(3, None)), ValueError, r"block_mask: got blocks of shape \[3, 1",
    ),
    "blocks of other heads": (
        dict(block_mask=blocks(None, 3)), ValueError, r"block_mask: got blocks of shape \[1, 3",
    ),
    "too few blocks": (
        dict(block_mask=blocks(None, None, 100, (16, ROWS))), ValueError, "block_mask: got one for 100 keys",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILING)
def test_a_failing_call_has_not_appended(case):
    arguments, error, message = FAILING[case]
    _, k_cache, v_cache, _ = make()
    before = k_cache.clone(), v_cache.clone()
    q = torch.randn(5, 3, H, D)
    with pytest.raises(error, match=message):
        flash_attn_with_kvcache(q, k_cache, v_cache, **NEW, cache_seqlens=torch.tensor(LENGTHS), **arguments)
    for cache, old in zip((k_cache, v_cache), before, strict=True):
        assert torch.equal(cache.nan_to_num(7.0), old.nan_to_num(7.0))


@pytest.mark.parametrize("seqlen_q", [1, 8, 9, 50])
@pytest.mark.parametrize("name", ["k_descale", "v_descale"])
def test_factors_belong_to_8_bit_caches(name, seqlen_q):
    q, k_cache, v_cache, _ = make(torch.bfloat16, seqlen_q)
    with pytest.raises(ValueError, match=f"{name}: got one with a cache of dtype bfloat16; allowed with int8"):
        flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=torch.tensor(LENGTHS), **{name: torch.ones(HK)})


def of_caches(build):
    """Returns k_cache, v_cache, k, v and other arguments from a function of two ordinary caches."""
    keys, values = torch.zeros(2, ROWS, HK, D), torch.zeros(2, ROWS, HK, D)
    new = torch.ones(2, 2, HK, D)
    return build(keys, values, new)


OVERLAPS = {
    "expanded": (lambda k, v, new: (k[:1].expand(2, -1, -1, -1), v, new, new, {}), "k_cache: got strides"),
    "one for both": (
        lambda k, v, new: (k, k, new, new, {}),
        "v_cache: got a tensor that shares memory with k_cache",
    ),
    "rows of the cache": (
        lambda k, v, new: (k, v, k[0, 4:8], new.flatten(0, 1), dict(cu_seqlens_k_new=torch.tensor([0, 2, 4]))),
        "k: got a tensor that shares memory with k_cache",
    ),
    "one cache twice": (
        lambda k, v, new: (k, v, new, new, dict(cache_batch_idx=torch.tensor([1, 1]))),
        "cache_batch_idx: got row 10 of 1 for new keys of sequences 0 and 1; allowed: each row written once",
    ),
    "one page twice": (
        lambda k, v, new: (k, v, new, new, dict(block_table=torch.tensor([[0], [0]]))),
        "block_table: got row 10 of 0 for new keys of sequences 0 and 1; allowed: each row written once",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OVERLAPS)
def test_rows_are_written_once(case):
    build, message = OVERLAPS[case]
    k_cache, v_cache, k, v, arguments = of_caches(build)
    before = k_cache.clone()
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_attn_with_kvcache(torch.randn(2, 2, H, D), k_cache, v_cache, k, v, cache_seqlens=10, **arguments)
    assert torch.equal(k_cache, before)


def test_caches_that_share_a_tensor_without_sharing_elements():
    """Keys and values side by side, and two sequences that append to different rows of one cache."""
    both = torch.zeros(2, ROWS, 2, HK, D)
    new = torch.randn(2, 2, HK, D)
    q = torch.randn(2, 2, H, D)
    flash_attn_with_kvcache(q, both[:, :, 0], both[:, :, 1], new, new, cache_seqlens=10)
    assert torch.equal(both[:, 10:12, 0], new)
    assert torch.equal(both[:, 10:12, 1], new)
    flash_attn_with_kvcache(q, both[:, :, 0], both[:, :, 1], new, new, cache_seqlens=torch.tensor([20, 22]),
                            cache_batch_idx=torch.tensor([1, 1]))  # fmt: skip
    assert torch.equal(both[1, 20:24, 0], new.flatten(0, 1))


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v"])
def test_an_input_that_requires_a_gradient_is_refused(name):
    tensors = dict(q=torch.randn(2, 2, H, D), k_cache=torch.zeros(2, ROWS, HK, D), v_cache=torch.zeros(2, ROWS, HK, D),
                   k=torch.randn(2, 2, HK, D), v=torch.randn(2, 2, HK, D))  # fmt: skip
    tensors[name].requires_grad_()
    before = tensors["k_cache"].detach().clone()
    with pytest.raises(NotImplementedError, match=f"{name}: got a tensor that requires a gradient"):
        flash_attn_with_kvcache(**tensors, cache_seqlens=10)
    assert torch.equal(tensors["k_cache"].detach(), before)
    with torch.no_grad():
        out = flash_attn_with_kvcache(**tensors, cache_seqlens=10)
    assert not out.requires_grad


def test_transforms_are_refused():
    q, k_cache, v_cache, _ = make()
    q = q[:, :1]

    def total(q):
        return flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=torch.tensor(LENGTHS)).sum()

    with pytest.raises(NotImplementedError, match="q: got a tensor that requires a gradient"):
        torch.func.grad(total)(q)
    with pytest.raises(NotImplementedError, match="q: got a tensor with a tangent"):
        torch.func.jvp(total, (q,), (q,))


OTHER_TENSORS = {
    "alibi_slopes": torch.zeros(H), "sink": torch.zeros(H), "tree_mask": torch.zeros(2, 2),
    "rotary_cos": torch.ones(ROWS, D // 2), "rotary_sin": torch.zeros(ROWS, D // 2), "score_mod": torch.zeros(H),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_TENSORS)
def test_a_tangent_is_refused_before_a_row_is_written(name):
    q, k_cache, v_cache = torch.randn(2, 2, H, D), torch.zeros(2, ROWS, HK, D), torch.zeros(2, ROWS, HK, D)
    new = torch.randn(2, 2, HK, D)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(OTHER_TENSORS[name], torch.ones_like(OTHER_TENSORS[name]))
        given = {"score_mod": lambda s, b, h, i, j: s + dual[h]} if name == "score_mod" else {name: dual}
        if "rotary" in name:
            given = {n: OTHER_TENSORS[n] for n in ("rotary_cos", "rotary_sin")} | given
        with pytest.raises(NotImplementedError, match=f"{name}: got a tensor with a tangent"):
            flash_attn_with_kvcache(q, k_cache, v_cache, new, new, cache_seqlens=10, **given)
    assert not k_cache.any()


@pytest.mark.parametrize("name", ["mask_mod", "block_mask"])
def test_a_tangent_belongs_to_the_function_that_captures_it(name):
    q, caches = torch.randn(2, 2, H, D), torch.zeros(2, 2, ROWS, HK, D)
    slopes = torch.ones(H)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.zeros(ROWS), torch.ones(ROWS))

        def mask_mod(b, h, i, j):
            return dual[j] >= 0

        mask = mask_mod
        if name == "block_mask":
            mask = blocks(None, None)
            mask.mask_mod = mask_mod
        given = {"score_mod": lambda s, b, h, i, j: s * slopes[h], name: mask}
        with pytest.raises(NotImplementedError, match=f"{name}: got a tensor with a tangent"):
            flash_attn_with_kvcache(q, *caches, cache_seqlens=10, **given)


def test_packed_queries_on_pages_compute_and_refuse_their_gradient():
    """flash-attention computes the forward of a call with a cache, even if an input requires a gradient."""
    pages = torch.randn(2, 4, 16, HK, D)
    q = torch.randn(5, H, D, requires_grad=True)
    offsets, table = torch.tensor([0, 5]), torch.tensor([[2, 0]])
    arguments = (*pages, offsets, torch.tensor([0, 20]), 5, 20)
    out = flash_attn_interface.flash_attn_varlen_func(q, *arguments, block_table=table)
    with torch.no_grad():
        assert torch.equal(out, flash_attn_interface.flash_attn_varlen_func(q, *arguments, block_table=table))
    with pytest.raises(RuntimeError, match=r"derivative for flash_attn_ext::attention_cache is not implemented"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_8_bits_are_as_exact_with_many_queries(isa, dtype, cache_dtype):
    """The products of 8-bit keys and their factors are not rounded to the queries' dtype."""
    rows, seqlen_q, head_dim = 200, 33, 40
    q = torch.randn(1, seqlen_q, 2, head_dim).to(dtype)
    coded = [(30 * torch.randn(1, rows, 1, head_dim)).clamp(-127, 127).to(cache_dtype) for _ in range(2)]
    scales = [torch.rand(1, rows, 1) / 20 + 0.01 for _ in range(2)]
    k, v = ((t.double() * s.double()[..., None]).transpose(1, 2) for t, s in zip(coded, scales, strict=True))
    scores = q.double().transpose(1, 2) @ k.transpose(-1, -2) / head_dim**0.5
    exact, exact_lse = (scores.softmax(-1) @ v).transpose(1, 2), scores.logsumexp(-1)
    out, lse = flash_attn_with_kvcache(q, *coded, k_descale=scales[0], v_descale=scales[1], return_softmax_lse=True)
    largest = exact_lse.abs().max()
    assert (lse - exact_lse).abs().max() <= (1e-13 if dtype is torch.float64 else 2e-6) * largest
    tolerance = {torch.float64: 1e-13, torch.float32: 2e-6}.get(dtype, 2 * torch.finfo(dtype).eps)
    assert (out - exact).abs().max() <= tolerance * exact.abs().max()


WRONG = {
    "q": ([[1.0]], None, torch.zeros(2, 2, H)),
    "k_cache": (None, torch.zeros(2, ROWS, D)),
    "v_cache": (5, torch.zeros(2, ROWS, HK, D).double()),
    "k": ([1], torch.zeros(2, 2, HK + 1, D), torch.zeros(2, 2, HK, D).bfloat16(), torch.zeros(3, 2, HK, D)),
    "v": (np.zeros(3), torch.zeros(2, 3, HK, D), torch.zeros(2, 2, HK, D).double()),
    "rotary_cos": (torch.ones(ROWS, 4), 1.0),
    "rotary_sin": (torch.ones(ROWS, 4), [1.0]),
    "cache_seqlens": (
        2.5, "a", [1, 2], np.array([1, 2]), torch.tensor([1.0, 2.0]), torch.tensor(2.5), torch.zeros(3).int(), 2**70,
        -1, True,
    ),
    "cache_batch_idx": (1, [0, 1], torch.tensor([0.0, 1.0]), torch.tensor([0])),
    "cache_leftpad": (1, [0, 1], torch.tensor([0.0, 1.0]), torch.tensor([0])),
    "block_table": ([[0], [1]], torch.tensor(0), torch.tensor([[0.0], [1.0]]), torch.tensor([0, 1])),
    "page_table": ([[0], [1]], 3, "a"),
    "softmax_scale": ("a", [1.0]),
    "causal": ("a", [True], None, 2, torch.ones(2), np.array([True, False])),
    "window_size": (
        5, (1, 2, 3), [[1], [2]], (None,), ("a", 1), (1.5, 0), torch.ones(2), torch.ones(3), {}, np.array([0.5, 1.0]),
        torch.ones(2, device="meta"),
    ),
    "softcap": ("a", [1.0], -1.0),
    "rotary_interleaved": ("a", 2.5, torch.ones(3)),
    "alibi_slopes": (0.5, torch.ones(H + 1), torch.ones(H).int()),
    "num_splits": ("a", 2.5, [2], -1, np.array([1, 2])),
    "return_softmax_lse": ("a", [], torch.ones(3), np.array([True, False])),
    "max_seqlen_q": ("a", 2.5, -1, np.array([1, 2])),
    "rotary_seqlens": ([1, 2], 3),
    "k_descale": (1.0, [1.0], torch.ones(HK)),
    "v_descale": (1.0, torch.ones(3, 3, 3, 3), torch.ones(0)),
    "tree_mask": ([[True]], torch.tensor(True), torch.ones(2, 3).bool()),
    "sink": (1.0, [1.0], torch.ones(H + 1)),
    "learnable_sink": (1.0, [1.0], "a"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_type_is_reported_under_the_callers_name(name):
    """Each wrong value raises a TypeError or ValueError before anything is written."""
    k_cache, v_cache = torch.zeros(2, 2, ROWS, HK, D)
    right = dict(q=torch.randn(2, 2, H, D), k_cache=k_cache, v_cache=v_cache, k=torch.ones(2, 2, HK, D),
                 v=torch.ones(2, 2, HK, D), cache_seqlens=torch.tensor([5, 6]))  # fmt: skip
    for wrong in WRONG[name]:
        with pytest.raises((TypeError, ValueError), match=f"^{name}: got ") as caught:
            flash_attn_with_kvcache(**right | {name: wrong})
        assert "seqused" not in str(caught.value)
        assert not k_cache.any(), wrong


def test_ints_and_bools_of_other_libraries_are_taken():
    k_cache, v_cache = torch.randn(2, 2, ROWS, HK, D)
    q = torch.randn(2, 2, H, D)
    expected = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=9, causal=True, window_size=(3, 0))
    for integer, boolean, window in (
        (np.int64(9), np.bool_(True), np.array([3, 0])),
        (torch.tensor(9), torch.tensor(True), torch.tensor([3, 0])),
        (torch.tensor([9, 9]), 1, [np.int32(3), torch.tensor(0)]),
    ):
        out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=integer, causal=boolean, window_size=window)
        assert torch.equal(out, expected)
