"""activate: compiled graphs, torch.func and traced scripts, and the operator that they call."""

import pytest
import torch
import torch.nn.functional as F
from activate_helpers import FOR_CPU, SDPA, make, run

from flash_attn_ext import activated, activation_report

pytestmark = pytest.mark.usefixtures("one_thread", "torch_again")


ORDERS = {
    "contiguous": lambda: torch.randn(2, 3, 16, 8),
    "heads_after_sequence": lambda: torch.randn(2, 16, 3, 8).transpose(1, 2),
    "sequence_first": lambda: torch.randn(16, 2, 3, 8).permute(1, 2, 0, 3),
    "projected_together": lambda: torch.randn(2, 16, 3, 3, 8)[:, :, 0].transpose(1, 2),
    "broadcast": lambda: torch.randn(1, 3, 16, 8).expand(2, 3, 16, 8),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("masked", [False, True])
def test_memory_order_is_torchs(order, masked):
    """Compiled code relies on the strides of this operator's results: both kernels return the same strides."""
    forward, backward = (getattr(torch.ops.aten, name) for name in (FOR_CPU, FOR_CPU + "_backward"))
    q, k, v = (ORDERS[order]() for _ in range(3))
    mask = torch.zeros(16, 16)
    mask[4] = -torch.inf  # a row without keys
    mask = mask if masked else None
    out, lse = forward(q, k, v, attn_mask=mask)
    theirs = out, lse, *backward(torch.ones_like(out), q, k, v, out, lse, 0.0, False, attn_mask=mask)
    with activated():
        ours = forward(q, k, v, attn_mask=mask)
        # The backward of a call for which torch's kernel ran the forward.
        ours += backward(torch.ones_like(out), q, k, v, out, lse, 0.0, False, attn_mask=mask)
    mixed = backward(torch.ones_like(out), q, k, v, *ours[:2], 0.0, False, attn_mask=mask)
    assert activation_report().taken == {FOR_CPU: 1, FOR_CPU + "_backward": 1}
    for a, b in zip((*ours, *mixed), (*theirs, *theirs[2:]), strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_compiled_code_follows_activate_and_deactivate():
    compiled = torch.compile(lambda x, y: F.scaled_dot_product_attention(x.sin(), y, y, is_causal=True))
    x, y = make(1, 2, 40, 16), make(1, 2, 40, 16)
    expected = run(compiled, [x, y])
    assert not activation_report().taken
    with activated():
        got = run(compiled, [x, y])
    assert activation_report().taken == {FOR_CPU: 1, FOR_CPU + "_backward": 1}
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    activation_report(reset=True)
    assert all(torch.equal(a, b) for a, b in zip(run(compiled, [x, y]), expected, strict=True))
    assert not activation_report().taken


def test_a_graph_compiled_while_active_has_only_torchs_operators():
    """Graphs outlive deactivate(), and in torch's caches on disk even the process."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    call = torch.compile(
        lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.1), backend=aot_autograd(fw_compiler=backend)
    )
    with activated():
        call(torch.randn(1, 2, 8, 8))
    targets = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert not any("flash_attn_ext" in target for target in targets), targets
    assert (SDPA, "traced by torch.compile or torch.func, with dropout") in activation_report().left


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_torch_func():
    q = torch.randn(3, 1, 2, 12, 8)

    def loss(x):
        return F.scaled_dot_product_attention(x, x.sin(), x).square().sum()

    expected = torch.func.vmap(torch.func.grad(loss))(q)
    with activated():
        got = torch.func.vmap(torch.func.grad(loss))(q)
    assert set(activation_report().taken) == {FOR_CPU, FOR_CPU + "_backward"}
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_a_traced_script_follows_activate():
    x = torch.randn(1, 2, 12, 8)
    script = torch.jit.trace(lambda x: F.scaled_dot_product_attention(x, x.sin(), x), x)
    with activated():
        torch.testing.assert_close(script(x), F.scaled_dot_product_attention(x, x.sin(), x))
    assert activation_report().taken == {SDPA: 2}
