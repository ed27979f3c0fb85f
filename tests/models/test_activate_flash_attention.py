"""activate: the operators of torch.nn.attention.varlen, for which torch has no CPU kernel; the hooks for CUDA."""

import inspect

import pytest
import reference
import torch
from activate_helpers import make, run

from flash_attn_ext import activate, activated, activation_report, deactivate

pytestmark = pytest.mark.usefixtures("one_thread", "torch_again")


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (4, 3)])
def test_packed_sequences(window):
    """The result equals the result of each sequence alone. One sequence has no queries, one has no keys."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    lengths_q, lengths_k = [7, 0, 12, 4, 1], [9, 3, 12, 0, 5]
    q, k, v = make(sum(lengths_q), 4, 8), make(sum(lengths_k), 4, 8), make(sum(lengths_k), 4, 8)
    offsets = [torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32) for n in (lengths_q, lengths_k)]

    def packed(q, k, v):
        return varlen.varlen_attn(q, k, v, *offsets, max(lengths_q), max(lengths_k), window_size=window)

    def alone(q, k, v):
        parts = []
        for q1, k1, v1 in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True):
            if not len(k1):
                parts.append(torch.zeros_like(q1) + 0 * q1)
                continue
            heads_first = (t.transpose(0, 1)[None] for t in (q1, k1, v1))
            causal = "lower_right" if window == (-1, 0) else None
            out, _ = reference.attention(*heads_first, causal=causal, window=window)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    with pytest.raises(NotImplementedError):
        packed(q, k, v)
    expected = run(alone, [q, k, v])
    with activated():
        got = run(packed, [q, k, v])
    assert activation_report().taken == {"_flash_attention_forward": 1, "_flash_attention_backward": 1}
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_packed_sequences_with_lengths_and_pages():
    """The arguments of torch's serving interface: the number of keys in use, and their pages."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip("this torch's varlen_attn has no block_table")
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    used, table = torch.tensor([5, 7], dtype=torch.int32), torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    q, k, v = torch.randn(6, 4, 8), torch.randn(4, 4, 2, 8), torch.randn(4, 4, 2, 8)
    with activated():
        in_pages = varlen.varlen_attn(
            q, k, v, offsets, None, 4, 8, window_size=[-1, 0], enable_gqa=True, seqused_k=used, block_table=table
        )
        rows_k, rows_v = (t[table].flatten(1, 2).flatten(0, 1) for t in (k, v))
        in_rows = varlen.varlen_attn(
            q, rows_k, rows_v, offsets, torch.tensor([0, 8, 16], dtype=torch.int32), 4, 8, window_size=[-1, 0],
            enable_gqa=True, seqused_k=used,
        )  # fmt: skip
    torch.testing.assert_close(in_pages, in_rows)
    for b in range(2):
        own = [t.transpose(0, 1)[None] for t in (q[offsets[b] : offsets[b + 1]], rows_k[8 * b :], rows_v[8 * b :])]
        exact, _ = reference.attention(own[0], *(t[:, :, : used[b]] for t in own[1:]), causal="lower_right")
        torch.testing.assert_close(in_rows[offsets[b] : offsets[b + 1]], exact[0].transpose(0, 1))


def test_packed_sequences_without_a_kernel_raise():
    forward = torch.ops.aten._flash_attention_forward
    q, offsets = torch.randn(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    with activated():
        with pytest.raises(
            NotImplementedError, match=r"_flash_attention_forward: torch has no kernel for CPU.*dropout"
        ):
            forward(q, q, q, offsets, offsets, 4, 4, 0.1, False, False)
        for bad in ([0, 9], [0, 4, 2], [-1, 6]):
            with pytest.raises(ValueError, match=r"cu_seqlens_k: got .*; allowed"):
                forward(q, q, q, offsets, torch.tensor(bad, dtype=torch.int32), 4, 4, 0.0, False, False)
    assert activation_report().left == {("_flash_attention_forward", "dropout"): 1}


def test_dense_flash_attention_operator():
    forward, backward = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    leaf = [t.double().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    exact, exact_lse = reference.attention(*leaf, causal="lower_right")
    grads = torch.autograd.grad(exact, leaf, torch.ones_like(exact))
    with activated():
        out, lse, state, unused, _ = forward(q, k, v, None, None, 5, 9, 0.0, True, False)
        ours = backward(torch.ones_like(out), q, k, v, out, lse, None, None, 5, 9, 0.0, True, state, unused)
    for a, b in zip((out, *ours), (exact, *grads), strict=True):
        torch.testing.assert_close(a.transpose(1, 2).double(), b, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-5)


CUDA_HOOKS = (
    "_flash_attention_forward", "_flash_attention_backward", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
)  # fmt: skip


@pytest.mark.parametrize("operator", CUDA_HOOKS)
def test_hooks_of_cuda_are_registered(operator):
    """At the operators that torch lets FlashAttention-3 replace. This test does not run them."""
    before = torch._C._dispatch_dump(f"aten::{operator}")
    activate()
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", "CUDA")
    assert torch._C._dispatch_dump(f"aten::{operator}") != before
    deactivate()
    assert torch._C._dispatch_dump(f"aten::{operator}") == before


def test_varlen_attn_out():
    """The same call into a given tensor."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("this torch has no varlen_attn_out")
    q, offsets = torch.randn(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    out = torch.empty_like(q)
    with activated():
        expected = varlen.varlen_attn(q, q, q, offsets, offsets, 4, 4)
        varlen.varlen_attn_out(out, q, q, q, offsets, offsets, 4, 4)
    assert torch.equal(out, expected)
    assert activation_report().taken == {
        "_flash_attention_forward": 1, "_flash_attention_forward_no_dropout_inplace": 1,
    }  # fmt: skip
