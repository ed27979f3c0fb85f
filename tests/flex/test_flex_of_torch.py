"""torch's own flex_attention on CPU while flash_attn_ext is active, and both functions under torch.compile."""

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch._dynamo.backends.common import aot_autograd

from flash_attn_ext import flash_attn, flash_attn_varlen, flash_attn_with_kvcache, flex_attention
from flash_attn_ext.flex import higher_order
from flash_attn_ext.nn import activated, activation_report

Q = torch.linspace(-1, 1, 2 * 64 * 16).view(1, 2, 64, 16)
of_torch = torch_flex.flex_attention  # before any call of activate
MASK = torch_flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 64, 64, "cpu", BLOCK_SIZE=32)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    activation_report(reset=True)
    yield
    activation_report(reset=True)


def gradients(attention, table, mask=MASK):
    q = Q.clone().requires_grad_()

    def score_mod(score, b, h, i, j):
        return score + table[h, i - j + 63]

    out = attention(q * 2, q, q, score_mod, mask)
    return torch.autograd.grad((out + 1).square().sum(), (q, table))


def table():
    return torch.linspace(0, 1, 2 * 127).view(2, 127).requires_grad_()


def test_activate_takes_eager_calls():
    wanted = gradients(flex_attention, table())
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        gradients(of_torch, table())
    with activated():
        assert torch_flex.flex_attention is not of_torch
        torch.testing.assert_close(gradients(torch_flex.flex_attention, table()), wanted)
        assert activation_report(reset=True).taken == {"flex_attention": 1}
        # A caller that holds torch's function from before activate().
        torch.testing.assert_close(gradients(of_torch, table()), wanted, rtol=1e-4, atol=1e-5)
        assert activation_report().taken["flex_attention"] >= 1
    assert torch_flex.flex_attention is of_torch
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        gradients(of_torch, table())


def test_a_call_that_is_left_to_torch_has_a_reason():
    def unknown(score, b, h, i, j):
        return score + torch.lgamma(i + 2.0)

    with torch.no_grad():
        wanted = of_torch(Q, Q, Q, unknown)
        with activated():
            torch.testing.assert_close(torch_flex.flex_attention(Q, Q, Q, unknown), wanted)
    report = activation_report()
    assert not report.taken
    assert any("aten.lgamma" in reason for _, reason in report.left)


def test_lse_of_torch_while_active():
    with torch.no_grad():
        wanted = of_torch(Q, Q, Q, block_mask=MASK, return_aux=torch_flex.AuxRequest(lse=True))
        with activated():
            for attention in (torch_flex.flex_attention, of_torch):
                out, aux = attention(Q, Q, Q, block_mask=MASK, return_aux=torch_flex.AuxRequest(lse=True))
                torch.testing.assert_close((out, aux.lse), (wanted[0], wanted[1].lse), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["ours", "torch"])
def test_compiled_code_has_one_operator(attention):
    wanted = gradients(flex_attention, table())
    graphs = []

    def count(graph, _):
        names = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
        graphs.append([name for name in names if "flash_attn_ext" in name or "flex_attention" in name])
        return graph.forward

    compiled = torch.compile(
        flex_attention if attention == "ours" else of_torch, backend=aot_autograd(fw_compiler=count), fullgraph=True
    )
    with activated():
        torch.testing.assert_close(gradients(compiled, table()), wanted, rtol=1e-4, atol=1e-5)
    assert graphs == [
        ["flash_attn_ext.attention_flex.default"], ["flash_attn_ext.attention_flex_backward.default"]
    ]  # fmt: skip


def dense_call(q, bias):
    slopes, sink = torch.tensor([0.5, 0.1]), bias[:, 0]
    mask = torch.ones(64, 64, dtype=torch.bool).tril(5)
    return flash_attn(
        q, q, q, mask, is_causal=True, softcap=2.0, alibi_slopes=slopes, sink=sink, return_lse=True,
        score_mod=lambda s, b, h, i, j: s + bias[h, i - j], mask_mod=lambda b, h, i, j: (i - j) % 3 != 1,
    )  # fmt: skip


def block_mask_call(q, bias):
    return flash_attn(q, q, q, score_mod=lambda s, b, h, i, j: s + bias[h, i - j], block_mask=MASK)


def packed_call(q, bias):
    q = q[0].transpose(0, 1)
    offsets = torch.tensor([0, 23, 64])
    return flash_attn_varlen(
        q, q, q, offsets, offsets, 41, 41, causal="lower_right", return_lse=True, block_mask=MASK,
        score_mod=lambda s, b, h, i, j: s * (1 + b) + bias[h, i - j],
    )  # fmt: skip


def cached_call(q, bias):
    cache = q.detach().transpose(1, 2)
    new = cache[:, :1]
    return flash_attn_with_kvcache(
        new, cache.clone(), cache.clone(), new, new, cache_seqlens=torch.tensor([40], dtype=torch.int32),
        score_mod=lambda s, b, h, i, j: s + bias.detach()[h, i - j], return_softmax_lse=True,
    )  # fmt: skip


CALLS = {
    dense_call: ["attention_flex", "attention_flex_backward"],
    block_mask_call: ["attention_flex", "attention_flex_backward"],
    packed_call: ["attention_varlen_flex", "attention_varlen_flex_backward"],
    cached_call: ["attention_cache_flex"],  # append_to_cache is inside auto_functionalized
}


@pytest.mark.parametrize("call", CALLS)
def test_compiled_calls_have_no_graph_break(call):
    operators = []

    def note(graph, _):
        operators.extend(n.target.name() for n in graph.graph.nodes if "flash_attn_ext" in str(n.target))
        return graph.forward

    def results_of(attend):
        q, bias = Q.clone().requires_grad_(), table()
        results = attend(q, bias)
        results = results if isinstance(results, tuple) else (results,)
        if not results[0].requires_grad:
            return results
        loss = sum((t + 1).square().sum() for t in results)
        return *results, *torch.autograd.grad(loss, (q, bias))

    compiled = torch.compile(call, backend=aot_autograd(fw_compiler=note), fullgraph=True)
    torch.testing.assert_close(results_of(compiled), results_of(call), rtol=1e-5, atol=1e-5)
    assert operators == [f"flash_attn_ext::{name}" for name in CALLS[call]]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls_in_inference_mode(backend):
    compiled = torch.compile(dense_call, backend=backend, fullgraph=True)
    bias = table().detach()
    with torch.inference_mode():
        torch.testing.assert_close(compiled(Q * 1, bias), dense_call(Q, bias))


def test_a_compiled_call_for_any_length():
    """Lengths are symbols: a second length compiles once more, and a third one does not."""
    compiled = torch.compile(
        lambda q: flash_attn(q, q, q, is_causal=True, score_mod=lambda s, b, h, i, j: s - (i - j).abs() * 0.1),
        backend="aot_eager", fullgraph=True,
    )  # fmt: skip
    with torch._dynamo.config.patch(error_on_recompile=False):
        for length in (64, 48):
            compiled(Q[:, :, :length])
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled(Q[:, :, :31])


def test_another_version_of_torch(monkeypatch):
    """Its operator has no kernels for this: torch's calls stay with torch, and compiled calls say so."""
    monkeypatch.setattr(higher_order, "is_installed", False)
    with activated():
        assert torch_flex.flex_attention is of_torch
    assert any("this version of torch" in reason for _, reason in activation_report().left)
    with pytest.raises(NotImplementedError, match="got one under torch"):
        higher_order.run_in_graph(None, None, None, None)
