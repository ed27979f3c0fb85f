"""The node of a differentiated call in torch's graph (csrc/ops/autograd/record.h) behaves as torch's own nodes."""

import threading

import pytest
import torch
from helpers import make_qkv
from torch._dynamo import compiled_autograd

from flash_attn_ext import _ops, flash_attn


def test_name_is_readable():
    """torch's default would demangle the name of a C++ class in each backward."""
    out, lse = flash_attn(*make_qkv(1, 2, 5, 7, 8), return_lse=True)
    assert out.grad_fn.name() == lse.grad_fn.name() == "FlashAttnExtBackward"
    assert out.grad_fn is lse.grad_fn


def test_edges_lead_to_the_inputs():
    q, k, v = make_qkv(1, 2, 5, 7, 8)
    mask = torch.zeros(5, 7)
    out = flash_attn(q, k.detach(), v, mask)
    edges = [edge and edge.variable for edge, _ in out.grad_fn.next_functions]
    assert [edge is t for edge, t in zip(edges, (q, None, v, None), strict=True)] == [True] * 4


def test_second_backward_raises_unless_the_graph_is_kept():
    q, k, v = make_qkv(1, 2, 5, 7, 8)
    out = flash_attn(q, k, v).sum()
    first = torch.autograd.grad(out, (q, k, v), retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(out, (q, k, v)), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, (q, k, v))


def test_changed_tensors_raise():
    q, k, v = make_qkv(1, 2, 5, 7, 8)
    x = q * 1
    out = flash_attn(x, k, v)
    x.zero_()
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()
    out = flash_attn(q, k, v)
    out.zero_()  # saved, too
    with pytest.raises(RuntimeError, match="inplace operation"):
        out.sum().backward()


def test_undefined_tensors_between_defined_tensors():
    """The node saves defined tensors only. The sink follows two tensors that are not given."""
    q, k, v = make_qkv(1, 2, 5, 7, 8)
    sink = torch.randn(2, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        out = flash_attn(q, k, v, sink=sink)
    assert len(saved) == 6  # with out and lse
    got = torch.autograd.grad(out.square().sum(), (q, k, v, sink))
    scores = torch.cat([q @ k.mT * 8**-0.5, sink[None, :, None, None].expand(1, 2, 5, 1)], -1)
    wanted = torch.autograd.grad((scores.softmax(-1)[..., :-1] @ v).square().sum(), (q, k, v, sink))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_only_wanted_gradients_and_hooks():
    q, k, v = make_qkv(1, 2, 5, 7, 8)
    out = flash_attn(q, k, v)
    seen = []
    out.grad_fn.register_hook(lambda gradients, of_outputs: seen.append([g is not None for g in gradients]))
    torch.autograd.grad(out.sum(), k)
    assert seen == [[False, True, False]]


def test_compiled_autograd():
    q, k, v = make_qkv(1, 2, 5, 7, 8)
    wanted = torch.autograd.grad(flash_attn(q, k, v, is_causal=True).sum(), (q, k, v))
    with compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
        flash_attn(q, k, v, is_causal=True).sum().backward()
    for t, gradient in zip((q, k, v), wanted, strict=True):
        assert torch.equal(t.grad, gradient)


def test_cpp_nodes_are_refused_inside_torch_func():
    """The operator alone has no rule for torch.func; flash_attn uses another path there."""
    q, k, v = (t.detach() for t in make_qkv(1, 2, 5, 7, 8))
    with pytest.raises(RuntimeError, match="autograd::Function"):
        torch.func.grad(lambda q: _ops.attention(q, k, v)[0].sum())(q)
    assert torch.func.grad(lambda q: flash_attn(q, k, v).sum())(q).shape == q.shape


def test_backward_from_several_threads():
    q, k, v = make_qkv(1, 2, 5, 7, 8)
    loss = flash_attn(q, k, v).sum()
    wanted = torch.autograd.grad(loss, (q, k, v), retain_graph=True)
    got = []

    def run():
        got.append(torch.autograd.grad(loss, (q, k, v), retain_graph=True))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4
    for gradients in got:
        for a, b in zip(gradients, wanted, strict=True):
            assert torch.equal(a, b)
