"""The function on DTensors, and the module under torch's ways to train on several processes: two real ones."""

import pytest
import torch
import torch.distributed as dist
from process_group import Processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from flash_attn_ext import MultiheadAttention, flash_attn, replace_attention
from flash_attn_ext.distributed import HeadParallel


@pytest.fixture(scope="module")
def processes():
    started = Processes(2)
    yield started
    started.close()


def on_dtensors(placement, heads_kv, options):
    mesh = init_device_mesh("cpu", (2,))
    q = torch.randn(2, 4, 12, 8, dtype=torch.float64)
    k, v = (torch.randn(2, heads_kv, 12, 8, dtype=torch.float64) for _ in range(2))
    slopes, mask = torch.rand(4, dtype=torch.float64), torch.randn(2, 1, 12, 12, dtype=torch.float64)
    upstream = torch.randn(2, 4, 12, 8, dtype=torch.float64)
    options = options | dict(enable_gqa=True, rng_state=torch.tensor([3, 4]), return_lse=True)
    one = torch.ones((), dtype=torch.float64)
    plain = [t.clone().requires_grad_() for t in (q, k, v, slopes, mask)]
    out, lse = flash_attn(*plain[:3], plain[4], alibi_slopes=plain[3], **options)
    expected = torch.autograd.grad((out, lse.sum()), plain, (upstream, one))

    key_placement = Replicate() if placement == Shard(1) and heads_kv == 1 else placement
    places = [[placement], [key_placement], [key_placement], [Replicate()], [Replicate()]]
    own = [distribute_tensor(t, mesh, p).requires_grad_() for t, p in zip((q, k, v, slopes, mask), places, strict=True)]
    own_out, own_lse = flash_attn(*own[:3], own[4], alibi_slopes=own[3], **options)
    assert own_out.placements == own_lse.placements == (placement,)
    assert own_out.shape == out.shape
    grads = torch.autograd.grad(
        (own_out, own_lse.sum()),
        own,
        (distribute_tensor(upstream, mesh, [placement]), distribute_tensor(one, mesh, [Replicate()])),
    )
    torch.testing.assert_close(own_out.full_tensor(), out)
    torch.testing.assert_close(own_lse.full_tensor(), lse)
    for grad, e in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.full_tensor(), e)


@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(2), Replicate()], ids=str)
def test_flash_attn_on_dtensors(processes, placement, heads_kv):
    processes.run(on_dtensors, placement, heads_kv, dict(is_causal=True, dropout_p=0.3))


def dtensor_errors():
    mesh = init_device_mesh("cpu", (2,))
    q, odd = (distribute_tensor(torch.randn(1, 4, s, 8), mesh, [Shard(2)]) for s in (8, 7))
    with pytest.raises(ValueError, match="query: got 7 rows sharded over 2 processes; allowed: a multiple"):
        flash_attn(odd, odd, odd)
    with pytest.raises(TypeError, match="key: got a Tensor beside DTensors"):
        flash_attn(q, torch.randn(1, 4, 8, 8), q)
    q = distribute_tensor(torch.randn(1, 6, 8, 8), mesh, [Shard(1)])
    k = distribute_tensor(torch.randn(1, 3, 8, 8), mesh, [Shard(1)])
    with pytest.raises(ValueError, match="key: got 3 heads sharded over 2 processes; allowed: a multiple, or 1"):
        flash_attn(q, k, k, enable_gqa=True)


def test_errors_of_dtensors(processes):
    processes.run(dtensor_errors)


def make_layer(same=True):
    torch.manual_seed(1)
    return MultiheadAttention(16, 4, batch_first=True, **({} if same else dict(kdim=12, vdim=8)))


def head_parallel(same):
    mesh = init_device_mesh("cpu", (2,))
    alone, layer = make_layer(same), parallelize_module(make_layer(same), mesh, HeadParallel())
    for (name, a), (own_name, b) in zip(alone.named_parameters(), layer.named_parameters(), strict=True):
        assert name == own_name
        assert isinstance(b, DTensor)
        torch.testing.assert_close(b.full_tensor(), a)
    x = torch.randn(2, 6, 16, requires_grad=True)
    k, v = (x, x) if same else (torch.randn(2, 6, 12), torch.randn(2, 6, 8))
    mask = torch.ones(6, 6).triu(1).bool()
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    results = []
    for module in (alone, layer):
        out, weights = module(x, k, v, key_padding_mask=padding, attn_mask=mask, need_weights=False)
        assert weights is None
        x.grad = None
        out.square().sum().backward()
        results.append([out.detach(), x.grad.clone()])
    torch.testing.assert_close(*results)
    for a, b in zip(alone.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(b.grad.full_tensor(), a.grad)
    with pytest.raises(ValueError, match="need_weights: got True"):
        layer(x, k, v)


@pytest.mark.parametrize("same", [True, False])
def test_heads_in_parallel(processes, same):
    processes.run(head_parallel, same)


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
        for part in (model,) if recompute else (model.attention, model):  # what is recomputed lies inside one unit
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
        ("DDP", True, True),
        ("FSDP2", False, False),
        ("FSDP2", True, False),
        ("FSDP1", False, False),
    ],
)
def test_the_module_in_data_parallel_training(processes, way, recompute, compiled):
    processes.run(data_parallel, way, recompute, compiled)
