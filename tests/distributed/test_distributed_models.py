"""MultiheadAttention with HeadParallel, DDP, FSDP and FSDP2 on two real processes."""

import pytest
import torch
import torch.distributed as dist
from process_group import shared
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from flash_attn_ext import MultiheadAttention, replace_attention
from flash_attn_ext.distributed import HeadParallel


@pytest.fixture
def processes():
    return shared(2)


def make_layer(same=True):
    torch.manual_seed(1)
    return MultiheadAttention(16, 4, batch_first=True, **({} if same else dict(kdim=12, vdim=8)))


def head_parallel(same, **options):
    mesh = init_device_mesh("cpu", (2,))
    alone, layer = make_layer(same), parallelize_module(make_layer(same), mesh, HeadParallel())
    for (name, a), (own_name, b) in zip(alone.named_parameters(), layer.named_parameters(), strict=True):
        assert name == own_name
        assert isinstance(b, DTensor)
        torch.testing.assert_close(b.full_tensor(), a)
    x = torch.randn(2, 6, 16, requires_grad=True)
    k, v = (x, x) if same else (torch.randn(2, 6, 12), torch.randn(2, 6, 8))
    mask = torch.ones(8, 6, 6).triu(1).bool()  # (B * H, S_q, S_k)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    results = []
    for module in (alone, layer):
        out, weights = module(x, k, v, key_padding_mask=padding, attn_mask=mask, **options)
        parts = weights if isinstance(weights, tuple) else () if weights is None else (weights,)
        x.grad = None
        sum(t.square().sum() for t in (out, *parts) if t.is_floating_point()).backward()
        results.append([out.detach(), *parts, x.grad.clone()])
    torch.testing.assert_close(*results)
    for a, b in zip(alone.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(b.grad.full_tensor(), a.grad)


@pytest.mark.parametrize("same", [True, False])
def test_heads_in_parallel(processes, same):
    processes.run(head_parallel, same, need_weights=False)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("top_k", [None, 3])
def test_heads_in_parallel_with_weights(processes, average, top_k):
    processes.run(head_parallel, True, need_weights=True, average_attn_weights=average, top_k=top_k)


def dropped_weights():
    """The output equals the returned weights times value, with dropout."""
    layer = parallelize_module(make_layer(), init_device_mesh("cpu", (2,)), HeadParallel())
    layer.dropout = 0.5
    x = torch.randn(6, 16)
    out, weights = layer(x, x, x, average_attn_weights=False)
    assert 0.2 < (weights == 0).float().mean() < 0.8
    alone = make_layer()
    v = F.linear(x, alone.in_proj_weight.chunk(3)[2], alone.in_proj_bias.chunk(3)[2]).view(6, 4, 4)
    torch.testing.assert_close(out, alone.out_proj(torch.einsum("hqk,khd->qhd", weights, v).flatten(1)))
    return weights.tolist()


def test_heads_in_parallel_drop_the_same_elements_on_every_process(processes):
    first, second = processes.run(dropped_weights)
    assert first == second


def in_a_transformer():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(1)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True), 2)
    x = torch.randn(2, 6, 16)
    expected = model(x)
    replace_attention(model)
    plan = {f"layers.{n}.self_attn": HeadParallel() for n in range(2)}
    parallelize_module(model, mesh["tp"], plan)
    torch.testing.assert_close(model(x), expected)
    with pytest.raises(TypeError, match=r"module: got MultiheadAttention; allowed: flash_attn_ext\.Multi"):
        parallelize_module(nn.MultiheadAttention(16, 4), mesh, HeadParallel())
    with pytest.raises(ValueError, match="module: got 3 heads for 2 processes"):
        parallelize_module(MultiheadAttention(12, 3), mesh, HeadParallel())


def test_heads_in_parallel_in_a_transformer(processes):
    processes.run(in_a_transformer)


class Model(nn.Module):
    """Attention between two layers, with or without checkpointing."""

    def __init__(self, recompute):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.attention, self.last = nn.Linear(16, 16), make_layer(), nn.Linear(16, 1)
        self.recompute = recompute

    def attend(self, x):
        return self.attention(x, x, x, need_weights=False)[0]

    def forward(self, x):
        x = self.first(x)
        x = checkpoint(self.attend, x, use_reentrant=False) if self.recompute else self.attend(x)
        return self.last(x)


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def data_parallel(way, recompute, compiled):
    x = torch.randn(4, 6, 16)
    alone, model = Model(False), Model(recompute)
    if way == "DDP":
        model = DistributedDataParallel(model)
    elif way == "FSDP2":
        mesh = init_device_mesh("cpu", (2,))
        for part in (model,) if recompute else (model.attention, model):  # a recomputed part is inside one unit
            fully_shard(part, mesh=mesh)
    else:
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    run = torch.compile(model, backend="aot_eager") if compiled else model
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (alone, model)]
    for _ in range(2):
        losses = []
        for m, optimizer, batch in zip((alone, run), optimizers, (x, x[2 * dist.get_rank() :][:2]), strict=True):
            loss = m(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        dist.all_reduce(losses[1])
        torch.testing.assert_close(losses[1] / 2, losses[0])
    if way != "FSDP1":
        for a, b in zip(alone.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(full(b).detach(), a.detach())


@pytest.mark.parametrize(
    ("way", "recompute", "compiled"),
    [
        ("DDP", False, False),
        ("FSDP1", True, False),
        ("FSDP2", True, True),
    ],
)
def test_the_module_in_data_parallel_training(processes, way, recompute, compiled):
    processes.run(data_parallel, way, recompute, compiled)
