"""FlopCounterMode counts our operators as it counts torch's own attention."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from flash_attn_ext import MultiheadAttention, flash_attn, flash_attn_varlen, flash_attn_with_kvcache

aten = torch.ops.aten
SHAPES = {
    "self-attention": ((2, 4, 16, 8), (2, 4, 16, 8), (2, 4, 16, 8)),
    "other lengths, D_v": ((2, 4, 5, 8), (2, 4, 16, 8), (2, 4, 16, 6)),
    "grouped heads": ((2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8)),
    "decoding": ((3, 4, 1, 8), (3, 4, 70, 8), (3, 4, 70, 8)),
    "empty": ((2, 4, 0, 8), (2, 4, 16, 8), (2, 4, 16, 8)),
}


def count(function):
    with FlopCounterMode(display=False) as mode:
        function()
    return {str(op): flops for op, flops in mode.get_flop_counts().get("Global", {}).items()}


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"window": 2}, {"dropout_p": 0.2}], ids=str)
@pytest.mark.parametrize("shapes", SHAPES)
def test_as_torch_counts_its_own(shapes, options):
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in SHAPES[shapes])
    dout = torch.randn(*q.shape[:3], v.shape[3])
    counts = count(lambda: flash_attn(q, k, v, enable_gqa=True, **options).backward(dout))
    torchs = {
        "attention": flop_registry[aten._scaled_dot_product_flash_attention](q, k, v),
        "attention_backward": flop_registry[aten._scaled_dot_product_flash_attention_backward](dout, q, k, v),
    }
    assert counts == {f"flash_attn_ext.{name}": flops for name, flops in torchs.items()}


def test_the_forward_counts_as_its_two_products():
    """The count of torch for attention as two matrix products."""
    q, k, v = (torch.randn(2, 4, s, 8) for s in (5, 16, 16))
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        products = count(lambda: scaled_dot_product_attention(q, k, v))
    assert count(lambda: flash_attn(q, k, v)) == {"flash_attn_ext.attention": products["aten.bmm"]}


def test_forward_mode_and_double_backward_count_their_products():
    q, k, v = (torch.randn(2, 4, s, 8, requires_grad=True) for s in (5, 16, 16))
    product = count(lambda: flash_attn(q, k, v))["flash_attn_ext.attention"] // 2
    x = tuple(t.detach() for t in (q, k, v))
    counts = count(lambda: torch.func.jvp(flash_attn, x, x))
    assert counts == {"flash_attn_ext.attention_jvp": 6 * product}

    def gradient_penalty():
        grads = torch.autograd.grad(flash_attn(q, k, v).sum(), (q, k, v), create_graph=True)
        sum(g.square().sum() for g in grads).backward()

    counts = count(gradient_penalty)
    assert counts["flash_attn_ext.attention_double_backward"] == 10 * product


def test_every_route_to_the_operators_is_counted():
    q = torch.randn(1, 2, 8, 4)
    once = count(lambda: flash_attn(q, q, q))
    assert once
    assert count(lambda: flash_attn(q[0], q[0], q[0])) == once
    both = count(lambda: torch.func.grad(lambda x: flash_attn(x, q, q).sum())(q))
    assert both["flash_attn_ext.attention"] == once["flash_attn_ext.attention"]
    assert both["flash_attn_ext.attention_backward"] > 0
    assert count(lambda: torch.compile(flash_attn, backend="aot_eager")(q, q, q)) == once
    module = MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 8, 8)
    assert count(lambda: module(x, x, x, need_weights=False)).items() >= once.items()


def test_meta_tensors_are_counted():
    q = torch.empty(1, 2, 1 << 20, 64, device="meta")
    assert count(lambda: flash_attn(q, q, q)) == {"flash_attn_ext.attention": 2 * 2 * (1 << 40) * 128}


LENGTHS = [(5, 9), (0, 4), (3, 0), (1, 8)]
PAIRS = 5 * 9 + 1 * 8


def packed_call(**options):
    (total_q, total_k), heads = map(sum, zip(*LENGTHS, strict=True)), 4
    q = torch.randn(total_q, heads, 8, requires_grad=True)
    k, v = torch.randn(total_k, 2, 8), torch.randn(total_k, 2, 6)
    cu_seqlens = [torch.tensor([0, *n]).cumsum(0) for n in zip(*LENGTHS, strict=True)]
    return flash_attn_varlen(q, k, v, *cu_seqlens, enable_gqa=True, **options)


def test_packed_sequences_count_with_their_own_lengths():
    pairs = 4 * PAIRS
    counts = count(lambda: packed_call(max_seqlen_q=100, max_seqlen_k=100).sum().backward())
    assert counts == {
        "flash_attn_ext.attention_varlen": 2 * pairs * (8 + 6),
        "flash_attn_ext.attention_varlen_backward": 2 * pairs * (3 * 8 + 2 * 6),
    }
    used = count(lambda: packed_call(seqused_q=torch.tensor([2, 0, 0, 1]), seqused_k=torch.tensor([9, 4, 0, 3])))
    assert used == {"flash_attn_ext.attention_varlen": 2 * 4 * (2 * 9 + 1 * 3) * (8 + 6)}


def test_packed_sequences_without_numbers_count_an_upper_bound():
    q, k = torch.empty(20, 4, 8, device="meta"), torch.empty(30, 4, 8, device="meta")
    cu_seqlens = torch.empty(4, dtype=torch.int64, device="meta")
    for options, pairs in (
        ({}, 20 * 30),
        ({"max_seqlen_k": 12}, 20 * 12),
        ({"max_seqlen_q": 7, "max_seqlen_k": 12}, 210),
    ):
        counts = count(lambda options=options: flash_attn_varlen(q, k, k, cu_seqlens, cu_seqlens, **options))
        assert counts == {"flash_attn_ext.attention_varlen": 2 * 4 * pairs * 16}


def test_caches_count_with_their_own_lengths():
    q, k_cache, v_cache = torch.randn(2, 3, 4, 8), torch.randn(2, 50, 2, 8), torch.randn(2, 50, 2, 6)
    new = torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2, 6)
    lengths, pad = torch.tensor([10, 40], dtype=torch.int32), torch.tensor([1, 5], dtype=torch.int32)
    name, columns = "flash_attn_ext.attention_cache", 2 * 4 * 3 * (8 + 6)
    counts = count(lambda: flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths))
    assert counts[name] == columns * 50
    counts = count(lambda: flash_attn_with_kvcache(q, k_cache, v_cache, *new, cache_seqlens=lengths, cache_leftpad=pad))
    assert counts[name] == columns * (50 + 2 * 3 - 6)
    pages = torch.arange(10).reshape(2, 5)
    paged = [cache.reshape(10, 10, *cache.shape[2:]) for cache in (k_cache, v_cache)]
    counts = count(lambda: flash_attn_with_kvcache(q, *paged, cache_seqlens=lengths, block_table=pages))
    assert counts[name] == columns * 50


def test_functions_of_the_user_count_as_calls_without():
    q, k, v = (torch.randn(7, 2, 8, requires_grad=True) for _ in range(3))
    offsets = torch.tensor([0, 3, 7])
    cache = torch.randn(2, 16, 2, 8)
    new = torch.randn(2, 1, 2, 8)
    calls = {
        "attention": lambda **f: flash_attn(q, k, v, **f).sum().backward(),
        "attention_varlen": lambda **f: flash_attn_varlen(q, k, v, offsets, offsets, **f).sum().backward(),
        "attention_cache": lambda **f: flash_attn_with_kvcache(
            new, cache, cache, cache_seqlens=torch.tensor([5, 16]), **f
        ),
    }
    for name, call in calls.items():
        plain, ours = count(call), count(lambda call=call: call(score_mod=lambda s, *_: s * 2))
        assert plain
        assert ours == {f"{op}_flex".replace("_backward_flex", "_flex_backward"): n for op, n in plain.items()}, name
