"""context_parallel_sdpa: models that call torch's attention, over two real processes, with torch's own context."""

from contextlib import ExitStack

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from process_group import shared
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

from flash_attn_ext.distributed import context_parallel_sdpa, shard_sequence, unshard_sequence


@pytest.fixture
def processes():
    return shared(2)


class Model(nn.Module):
    """Calls torch's attention by its function and by its module."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.qkv = nn.Linear(16, 48)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)

    def forward(self, x, causal):
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)
        return self.layer(x)


def with_torchs_context(torch_first, rows, causal, method, compiled):
    mesh = init_device_mesh("cpu", (2,))
    model, x = Model(), torch.randn(2, rows, 16)
    expected = model(x, causal)
    expected.square().sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    contexts = [lambda: context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]),
                lambda: context_parallel_sdpa(mesh=mesh, method=method)]  # fmt: skip
    torch.compiler.reset()
    run = torch.compile(model, backend="aot_eager") if compiled else model
    before = F.scaled_dot_product_attention
    with ExitStack() as stack:
        for context in contexts if torch_first else reversed(contexts):
            stack.enter_context(context())
        assert x.shape[1] == rows // 2
        out = run(x, causal)
        out.square().sum().backward()
        (whole,) = context_parallel_unshard(mesh, [out], [1])
    assert F.scaled_dot_product_attention is before
    torch.testing.assert_close(whole, expected)
    for parameter, grad in zip(model.parameters(), wanted, strict=True):
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("torch_first", "rows", "causal", "method", "compiled"),
    [
        (True, 16, True, None, False),
        (False, 16, True, "all_gather", False),
        (True, 18, False, "ulysses", False),  # an odd number of rows each: torch's context does not balance them
        (True, 16, True, None, True),
    ],
)
def test_in_torchs_context(processes, torch_first, rows, causal, method, compiled):
    processes.run(with_torchs_context, torch_first, rows, causal, method, compiled)


def without_torchs_context():
    q, k, v = (torch.randn(2, 2, 16, 8) for _ in range(3))
    mask = torch.rand(16, 16) > 0.3
    expected = F.scaled_dot_product_attention(q, k, v, mask, scale=0.5)
    own = [shard_sequence(t, 2) for t in (q, k, v)]
    before = F.scaled_dot_product_attention
    with context_parallel_sdpa(balanced=True):
        out = F.scaled_dot_product_attention(*own, shard_sequence(mask, 0), scale=0.5)
        whole = distribute_tensor(q, init_device_mesh("cpu", (2,)), [Replicate()])
        with pytest.raises(ValueError, match=r"query: got placements \(Replicate\(\),\); allowed: \(Shard\(2\),\)"):
            F.scaled_dot_product_attention(whole, whole, whole)
    assert F.scaled_dot_product_attention is before
    torch.testing.assert_close(unshard_sequence(out, 2), expected)


def test_without_torchs_context(processes):
    processes.run(without_torchs_context)


def test_without_a_group():
    with pytest.raises(ValueError, match="group, mesh: got neither"), context_parallel_sdpa():
        pass
