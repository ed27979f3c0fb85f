"""Backward of query heads that share a key head: dK and dV are sums of parts of a group (backward_workspace-inl.h)."""

import pytest
import torch
from tolerances import assert_as_exact_as_torch

from flash_attn_ext import explain, flash_attn

# (H, H_kv, S_q, S_k): 128 key blocks, so one part; two parts of 3 and 2 heads; a part for each head.
SHAPES = {"one part": (5, 1, 3, 8200), "two parts": (5, 1, 70, 4100), "a part for each head": (6, 2, 70, 130)}


def gradients(attention, inputs, grad, dtype=torch.float32):
    inputs = [t.detach().to(dtype).requires_grad_() for t in inputs]
    return torch.autograd.grad(attention(*inputs), inputs, grad.to(dtype))


@pytest.mark.parametrize("name", SHAPES)
def test_gradients_of_a_group(isa, threads, name):
    heads, heads_kv, seqlen_q, seqlen_k = SHAPES[name]
    q = torch.randn(1, heads, seqlen_q, 24)
    k, v = (torch.randn(1, heads_kv, seqlen_k, 24) for _ in range(2))
    grad = torch.randn_like(q)

    def ours(q, k, v):
        return flash_attn(q, k, v, enable_gqa=True)

    def sdpa(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    found = []
    for count in (1, 2, 4):
        threads(count)
        found.append(gradients(ours, (q, k, v), grad))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    expected, exact = (gradients(sdpa, (q, k, v), grad, dtype) for dtype in (torch.float32, torch.float64))
    for n, (a, b, c) in enumerate(zip(found[0], expected, exact, strict=True)):
        assert_as_exact_as_torch(f"gradient {n}", a, b, c, 3)


def test_few_queries_of_a_group_need_no_memory_for_each_head(one_thread):
    q, k = torch.randn(1, 16, 1, 64), torch.randn(1, 1, 8192, 64)
    workspace = explain(q, k, k).backward.allocates["workspace"]
    assert workspace < k.numel() * k.element_size()
