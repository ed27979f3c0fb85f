"""torch's own flex_attention on CPU while active, and both functions under torch.compile."""

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from torch._dynamo.backends.common import aot_autograd

from flash_attn_ext import flash_attn, flex_attention
from flash_attn_ext.nn import activated, activation_report

Q = torch.linspace(-1, 1, 2 * 64 * 16).view(1, 2, 64, 16)
of_torch = torch_flex.flex_attention  # before anybody activates
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
        # A caller that holds torch's function since before.
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


def test_compiled_code_with_the_other_options_breaks_the_graph():
    def model(q):
        return flash_attn(q * 2, q, q, is_causal=True, score_mod=lambda s, *_: s * 2) + 1

    torch.testing.assert_close(torch.compile(model, backend="eager")(Q), model(Q))
