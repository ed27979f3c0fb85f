"""`deterministic` reaches the kernels on every way from flash_attn. On CPU, results never depend on it."""

import pytest
import torch
from cuda_host import library
from helpers import make_qkv

from flash_attn_ext import _ops, flash_attn


@pytest.fixture
def flags(built, monkeypatch):
    """Records the option `deterministic` of each backward, which runs in the CUDA kernels' host build."""
    kernels, told = library.Library(built), []
    launch = kernels.launch

    def record(kind, params, *tensors):
        if kind == "backward":
            told.append(params.deterministic)
        launch(kind, params, *tensors)

    monkeypatch.setattr(kernels, "launch", record)
    with library.as_cpu_kernels(kernels):
        yield told


@pytest.fixture
def global_flag():
    """torch's own, as it was afterwards."""
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(False)


def inputs(*shape):
    return [t.detach().requires_grad_() for t in make_qkv(*(shape or (1, 2, 5, 7, 8)))]


def eager(**options):
    flash_attn(*inputs(), **options).sum().backward()


def three_dimensions(**options):
    flash_attn(*(t[0] for t in inputs()), **options).sum().backward()


def compiled(**options):
    torch._dynamo.reset()
    run = torch.compile(lambda *qkv: flash_attn(*qkv, **options), fullgraph=True, backend="aot_eager")
    run(*inputs()).sum().backward()


def gradient(**options):
    torch.func.grad(lambda *qkv: flash_attn(*qkv, **options).sum(), argnums=(0, 1, 2))(*inputs())


def vmapped_gradient(**options):
    batch = [torch.stack([t.detach()] * 2) for t in inputs()]
    torch.vmap(torch.func.grad(lambda *qkv: flash_attn(*qkv, **options).sum()))(*batch)


def vmapped_with_dropout(**options):  # a loop over the mapped dimension
    batch = [torch.stack([t.detach()] * 2) for t in inputs()]
    gradient = torch.func.grad(lambda *qkv: flash_attn(*qkv, dropout_p=0.5, **options).sum())
    torch.vmap(gradient, randomness="same")(*batch)


def checkpointed(**options):
    run = torch.utils.checkpoint.checkpoint(flash_attn, *inputs(), use_reentrant=False, **options)
    run.sum().backward()


def autocast(**options):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash_attn(*inputs(), **options)
    out.sum().backward()


WAYS = [eager, three_dimensions, compiled, gradient, vmapped_gradient, vmapped_with_dropout, checkpointed, autocast]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_flag_reaches_the_backward(flags, way, global_flag):
    way()
    way(deterministic=True)
    global_flag(True)
    way()
    way(deterministic=False)
    per_call = len(flags) // 4
    assert per_call >= 1
    assert flags == [asked for asked in (False, True, True, False) for _ in range(per_call)]


def test_compiled_code_notices_the_global_flag(flags, global_flag):
    torch._dynamo.reset()
    run = torch.compile(flash_attn, fullgraph=True, backend="aot_eager")
    for asked in (False, True, False):
        global_flag(asked)
        run(*inputs()).sum().backward()
    assert flags == [False, True, False]


def test_it_is_decided_when_flash_attn_is_called(flags, global_flag):
    out = flash_attn(*inputs())
    global_flag(True)
    out.sum().backward()
    assert flags == [False]


def test_an_exported_program_keeps_it():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_attn(q, k, v, deterministic=True)

    qkv = [t.detach() for t in inputs()]
    program = torch.export.export(Model(), tuple(qkv))
    (node,) = [n for n in program.graph.nodes if n.target is _ops.attention]
    assert node.kwargs["deterministic"] is True
    assert torch.equal(program.module()(*qkv), flash_attn(*qkv))


@pytest.mark.parametrize("asked", [False, True])
def test_it_is_packed_for_the_kernels(asked):
    """By csrc/ops/dense/pack_params.cpp."""
    tensors = dict(zip(("query", "key", "value"), inputs(), strict=True))
    plan = _ops.plan_attention_backward(tensors, {"deterministic": asked}, [True] * 3 + [False] * 3)
    assert plan.deterministic is asked


@pytest.mark.parametrize("asked", [False, True])
def test_on_cpu_the_bits_are_the_same_for_any_number_of_threads(asked, threads):
    qkv, results = inputs(2, 3, 300, 400, 32), []
    for count in (1, 2, 2):
        threads(count)
        results.append(torch.autograd.grad(flash_attn(*qkv, deterministic=asked).sin().sum(), qkv))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("wrong", [1, 0, "yes", torch.tensor(True), [True]], ids=str)
def test_other_types_are_refused(wrong):
    with pytest.raises(TypeError, match=r"deterministic: got .*; allowed: None, True, False"):
        flash_attn(*inputs(), deterministic=wrong)


def test_opcheck():
    torch.library.opcheck(_ops.attention, inputs(), {"deterministic": True})
