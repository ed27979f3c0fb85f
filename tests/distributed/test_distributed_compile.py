"""torch.compile of calls on several processes: no graph break, and the results of eager mode."""

import pytest
import torch
import torch.distributed as dist
from process_group import shared
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

from flash_attn_ext import MultiheadAttention, _ops, flash_attn
from flash_attn_ext.distributed import (
    HeadParallel,
    _exchange,
    _operator,
    _ulysses,
    context_parallel_attn,
    shard_sequence,
    unshard_sequence,
)  # fmt: skip


@pytest.fixture
def processes():
    return shared(2)


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


def compare(function, *tensors, dynamic=None):
    """Compares forward and backward bitwise. ``fullgraph`` raises at a graph break."""
    torch.compiler.reset()
    results = []
    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)):
        inputs = [t.detach().requires_grad_() for t in tensors]
        out = local(call(*inputs))
        out.square().sum().backward()
        results.append([out.detach(), *(local(t.grad) for t in inputs)])
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


STATE = torch.tensor([3, 4])
OPTIONS = {
    "ring": dict(is_causal=True, dropout_p=0.4, rng_state=STATE),
    "all_gather": dict(window=(3, 0), softcap=2.0),
    "ulysses": dict(key_mask=torch.arange(16)[None] < 13, dropout_p=0.4, rng_state=STATE),
}


def context_parallel(method, options, dynamic):
    q, k, v = (torch.randn(1, 8, 4, 8).transpose(1, 2) for _ in range(3))  # strides as in models
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    compare(
        lambda q, k, v: context_parallel_attn(q, k, v, method=method, mesh=mesh["cp"], **options), q, k, v,
        dynamic=dynamic,
    )  # fmt: skip


@pytest.mark.parametrize("method", OPTIONS)
def test_context_parallel_attn(processes, method):
    """Graphs of a fixed length for all_gather, and of any length for ring and ulysses."""
    processes.run(context_parallel, method, OPTIONS[method], method != "all_gather")


def from_whole_to_whole():
    def attend(x):
        own = shard_sequence(x, 2)
        return unshard_sequence(context_parallel_attn(own, own, own, is_causal=True), 2)

    compare(attend, torch.randn(1, 2, 16, 8))


def test_sharding_and_unsharding(processes):
    processes.run(from_whole_to_whole)


def drawn_dropout():
    """The default group, with a dropout state that the graph draws. All processes drop the same elements."""
    torch.compiler.reset()
    values = torch.eye(8).expand(1, 2, 8, 8)
    attend = torch.compile(context_parallel_attn, backend="aot_eager", fullgraph=True)
    out = attend(torch.ones(1, 2, 8, 8), torch.ones(1, 2, 8, 8), values, dropout_p=0.5)
    assert 0.2 < (out == 0).float().mean() < 0.8


def test_dropout_that_is_drawn(processes):
    processes.run(drawn_dropout)


def dtensors(placement):
    mesh = init_device_mesh("cpu", (2,))
    q, k, v = (distribute_tensor(torch.randn(2, 4, 8, 8), mesh, [placement]) for _ in range(3))
    compare(lambda q, k, v: flash_attn(q, k, v, is_causal=True, dropout_p=0.4, rng_state=STATE), q, k, v)


@pytest.mark.parametrize("placement", [Shard(1), Shard(2)], ids=str)
def test_flash_attn_on_dtensors(processes, placement):
    processes.run(dtensors, placement)


def head_parallel():
    torch.manual_seed(1)
    layer = MultiheadAttention(16, 4, batch_first=True)
    layer = parallelize_module(layer, init_device_mesh("cpu", (2,)), HeadParallel())
    compare(lambda x: torch.cat(layer(x, x, x), -1), torch.randn(2, 6, 16))  # the output, and the weights


def test_heads_in_parallel(processes):
    processes.run(head_parallel)


def traced_operators():
    """The operators have the shapes and strides that tracing assumes, and results share no memory."""
    group = dist.group.WORLD.group_name
    q, k, v = (torch.randn(1, 8, 4, 8).transpose(1, 2).requires_grad_() for _ in range(3))
    slopes, sink, mask = torch.rand(4), torch.rand(2, 4).T.contiguous().T[:1], torch.randn(8, 16).T.contiguous().T
    inputs = (q, k, v, mask[None, None].requires_grad_(), slopes.requires_grad_(), sink.requires_grad_(), STATE, None)
    options = _ops.DENSE.option_defaults | {"dropout_p": 0.3, "causal": True}
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    for method in ("ring", "all_gather"):
        arguments = (*inputs, method, group, True, None, None, None)
        torch.library.opcheck(_operator.context_parallel, arguments, options, test_utils=utilities)
        out, lse = (t.detach() for t in _operator.context_parallel(*arguments, **options))
        torch.library.opcheck(
            _operator.context_parallel_backward, (out, lse, *inputs, out, lse, *arguments[8:]),
            options | {"wanted": [True] * 6}, test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip
    exchanged = ([q, k], group, True, [16, 16])
    torch.library.opcheck(_ulysses.heads_for_sequence, exchanged, test_utils=utilities)
    wholes = [torch.randn(1, 16, 2, 8).transpose(1, 2).requires_grad_() for _ in range(2)]
    torch.library.opcheck(_ulysses.sequence_for_heads, (wholes, *exchanged[1:]), test_utils=utilities)
    torch.library.opcheck(_exchange.broadcast_first, (STATE, group), test_utils=("test_schema", "test_faketensor"))


def test_tracing_knows_the_operators_results(processes):
    processes.run(traced_operators)


def breaks_of_documents():
    """The values of cu_seqlens decide which process computes which tiles, so the host must read them."""
    torch.compiler.reset()
    q, offsets = torch.randn(1, 2, 8, 8), torch.tensor([0, 5, 16])
    expected = context_parallel_attn(q, q, q, cu_seqlens=offsets)
    assert torch.equal(torch.compile(context_parallel_attn, backend="eager")(q, q, q, cu_seqlens=offsets), expected)
    torch.compiler.reset()
    with pytest.raises(Exception, match="data-dependent"):
        torch.compile(context_parallel_attn, backend="eager", fullgraph=True)(q, q, q, cu_seqlens=offsets)


def test_documents_break_the_graph(processes):
    processes.run(breaks_of_documents)


def error_in_a_graph():
    torch.compiler.reset()
    q = torch.randn(1, 2, 7, 8)
    with pytest.raises(Exception, match="and 2 x 7 rows do not divide into 4"):
        torch.compile(context_parallel_attn, backend="eager", fullgraph=True)(q, q, q)


def test_errors_name_the_argument(processes):
    processes.run(error_in_a_graph)
