"""The rest of torch: opcheck, compile, export, autocast, vmap and torch.func, checkpointing, pickling."""

import pytest
import torch
from helpers import make_qkv
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend
from torch.nn.functional import scaled_dot_product_attention as sdpa
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn_ext import _ops, dropout_mask, flash_attn, new_rng_state
from flash_attn_ext._options import checked_options, operator_options

OPTIONS = {
    "plain": {},
    "causal window": {"causal": True, "lower_right": True, "window_left": 5},
    "softcap": {"softcap": 3.0, "scale": 0.3},
    "dropout": {"dropout_p": 0.3},
}


def operator_arguments(name, requires_grad=True, transposed=False):
    options = OPTIONS[name]
    q, k, v = (t.detach().requires_grad_(requires_grad) for t in make_qkv(2, 4, 5, 9, 8, 4, heads_kv=2))
    if transposed:
        q, k, v = (
            t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(requires_grad) for t in (q, k, v)
        )
    mask = torch.randn(2, 1, 1, 9, requires_grad=requires_grad)
    slopes = torch.rand(4, requires_grad=requires_grad)
    sink = torch.rand(2, 4, requires_grad=requires_grad)
    key_mask = torch.rand(2, 9) > 0.2
    return (q, k, v, mask, slopes, sink, new_rng_state() if "dropout_p" in options else None, key_mask), options


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("transposed", [False, True])
def test_opcheck_attention(name, transposed):
    arguments, options = operator_arguments(name, transposed=transposed)
    torch.library.opcheck(_ops.attention, arguments, options)


def test_opcheck_attention_without_optional_arguments():
    torch.library.opcheck(_ops.attention, make_qkv(2, 2, 5, 9, 8, dtype=torch.bfloat16))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("grad_mask", [[True] * 6, [True, False, True, False, False, True]])
def test_opcheck_attention_backward(name, grad_mask):
    arguments, options = operator_arguments(name, requires_grad=False)
    out, lse = _ops.attention(*arguments, **options)
    backward = (torch.randn_like(out), torch.randn_like(lse), *arguments, out, lse)
    torch.library.opcheck(_ops.attention_backward, backward, {**options, "grad_mask": grad_mask})


def test_opcheck_dropout_mask():
    torch.library.opcheck(_ops.dropout_mask, (new_rng_state(), 2, 3, 5, 7, 0.5))


def test_an_exported_window_stays_dynamic():
    class Model(torch.nn.Module):
        def forward(self, q, left):
            return flash_attn(q, q, q, window=(left, 0))

    q = torch.randn(1, 1, 30, 8)
    program = torch.export.export(Model(), (q, 3), dynamic_shapes={"q": None, "left": torch.export.Dim.DYNAMIC})
    for left in (2, 20):
        assert torch.equal(program.module()(q, left), flash_attn(q, q, q, window=(left, 0)))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_fullgraph(backend, dynamic):
    def step(q, k, v, mask, slopes):
        out, lse = flash_attn(
            q, k, v, mask, causal="lower_right", window=(40, 0), softcap=5.0, alibi_slopes=slopes, return_lse=True
        )
        return (out * 2).sum() + lse.cos().sum()

    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=dynamic)
    for length in (33, 57):
        inputs = [*make_qkv(2, 3, length, length + 5, 16), torch.randn(length, length + 5), torch.rand(3)]
        inputs = [t.detach().requires_grad_() for t in inputs]
        expected = torch.autograd.grad(step(*inputs), inputs)
        for a, b in zip(torch.autograd.grad(compiled(*inputs), inputs), expected, strict=True):
            torch.testing.assert_close(a, b)


def test_compile_with_dropout_is_governed_by_the_seed():
    compiled = torch.compile(lambda q, k, v: flash_attn(q, k, v, dropout_p=0.5), fullgraph=True)
    q, k, v = make_qkv(1, 2, 30, 30, 8)
    torch.manual_seed(3)
    first, second = compiled(q, k, v), compiled(q, k, v)
    torch.manual_seed(3)
    assert torch.equal(compiled(q, k, v), first)
    assert not torch.equal(first, second)


def test_compile_2d_3d_gqa_and_broadcast():
    for shapes, gqa in (
        ([(20, 8), (30, 8), (30, 8)], False),
        ([(3, 20, 8), (3, 30, 8), (3, 30, 8)], False),
        ([(2, 8, 20, 8), (2, 2, 30, 8), (2, 2, 30, 8)], True),
        ([(2, 4, 20, 8), (1, 1, 30, 8), (2, 4, 30, 8)], False),
        ([(2, 3, 4, 20, 8), (2, 3, 4, 30, 8), (2, 3, 4, 30, 8)], False),
    ):
        inputs = [torch.randn(s) for s in shapes]
        compiled = torch.compile(flash_attn, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(*inputs, enable_gqa=gqa), flash_attn(*inputs, enable_gqa=gqa))


INTEGERS = {
    "window": lambda n: {"window": n},
    "window, left": lambda n: {"window": (n, 0)},
    "window, both sides": lambda n: {"window": (n, 2 * n)},
    "diagonal": lambda n: {"is_causal": True, "diagonal": n},
    "num_splits": lambda n: {"num_splits": n},
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_do_not_compile_anew(name):
    """The second value makes the integer dynamic: ten values would reach dynamo's limit of recompilations."""
    torch._dynamo.reset()
    q, k, v = make_qkv(1, 2, 20, 30, 8)
    counter = CompileCounterWithBackend("aot_eager")

    def run(q, k, v, n):
        return flash_attn(q, k, v, **INTEGERS[name](n))

    compiled = torch.compile(run, backend=counter, fullgraph=True)
    for n in range(2, 14):
        out, expected = compiled(q, k, v, n), run(q, k, v, n)
        assert torch.equal(out, expected)
        grads = (torch.autograd.grad(t.sum(), (q, k, v)) for t in (out, expected))
        assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))
    assert counter.frame_count <= 2


def test_options_keep_integers_dynamic():
    def run(x, n):
        options = operator_options(window=(n, n + 1), diagonal=n, num_splits=n, scale=0.5, is_causal=True)
        options = checked_options(_ops.DENSE.option_types, options)
        return x * sum(options[name] for name in ("window_left", "window_right", "diagonal", "num_splits"))

    counter = CompileCounter()
    compiled = torch.compile(run, backend=counter, fullgraph=True)
    for n in range(2, 14):
        assert compiled(torch.ones(()), n).item() == 4 * n + 1
    assert counter.frame_count <= 2


def test_export_with_a_dynamic_length():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_attn(q, k, v, is_causal=True)

    length = torch.export.Dim("length", min=2, max=4096)
    q, k, v = (t.detach() for t in make_qkv(2, 3, 20, 20, 8))
    program = torch.export.export(Model(), (q, k, v), dynamic_shapes=[{2: length}] * 3)
    assert "flash_attn_ext.attention.default" in str(program.graph)
    inputs = [t.detach() for t in make_qkv(2, 3, 77, 77, 8)]
    torch.testing.assert_close(program.module()(*inputs), flash_attn(*inputs, is_causal=True))


def test_no_graph_break_and_no_dense_scores_in_the_graph():
    """The compiled backward is our operator: nothing of size S_q x S_k appears."""
    graphs = []

    def record(gm, _):
        graphs.append(gm)
        return gm.forward

    from torch._dynamo.backends.common import aot_autograd

    compiled = torch.compile(flash_attn, fullgraph=True, backend=aot_autograd(fw_compiler=record, bw_compiler=record))
    compiled(*make_qkv(1, 2, 300, 400, 8)).sum().backward()
    assert len(graphs) == 2
    for graph in graphs:
        values = [n.meta.get("val") for n in graph.graph.nodes]
        for value in (v for val in values for v in (val if isinstance(val, (tuple, list)) else [val])):
            assert not isinstance(value, torch.Tensor) or value.numel() < 300 * 400


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    q, k, v = make_qkv(2, 3, 40, 50, 16)
    mask, slopes = torch.randn(40, 50, requires_grad=True), torch.rand(3, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype):
        out = flash_attn(q, k, v, mask, alibi_slopes=slopes)
        assert out.dtype == sdpa(q, k, v, mask).dtype == dtype
    halves = [t.detach().to(dtype).requires_grad_() for t in (q, k, v)]
    expected = flash_attn(*halves, mask, alibi_slopes=slopes)
    assert torch.equal(out, expected)
    grad = torch.randn_like(out)
    wanted = torch.autograd.grad(expected, (*halves, mask, slopes), grad)
    for a, b in zip(torch.autograd.grad(out, (q, k, v, mask, slopes), grad), wanted, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b.float())


def test_autocast_leaves_float64_alone():
    q, k, v = make_qkv(1, 2, 4, 4, 8, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_attn(q, k, v).dtype == torch.float64


VMAP_CASES = {
    "all": (0, 0, 0, 0, 0),
    "query only": (0, None, None, None, None),
    "keys only": (None, 0, 0, None, None),
    "other dimensions": (2, 1, 3, None, None),
    "mask only": (None, None, None, 0, None),
    "slopes only": (None, None, None, None, 0),
    "all but the mask": (0, 0, 0, None, 0),
}


@pytest.mark.parametrize("name", VMAP_CASES)
@pytest.mark.parametrize("mask_batch", [1, 2])
@pytest.mark.parametrize("per_batch_slopes", [False, True])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_vmap(name, mask_batch, per_batch_slopes, dropout_p):
    dims = VMAP_CASES[name]
    one = [t.detach() for t in make_qkv(2, 3, 5, 7, 4)]
    one += [torch.randn(mask_batch, 1, 5, 7), torch.rand((2, 3) if per_batch_slopes else (3,))]
    arguments = [
        torch.stack([t * n for n in range(1, 5)], d) if d is not None else t for t, d in zip(one, dims, strict=True)
    ]
    rng_state = new_rng_state()

    def run(q, k, v, mask, slopes):
        return flash_attn(q, k, v, mask, alibi_slopes=slopes, dropout_p=dropout_p, rng_state=rng_state, return_lse=True)

    mapped = torch.vmap(run, in_dims=dims)(*arguments)
    for n in range(4):
        picked = [t.select(d, n) if d is not None else t for t, d in zip(arguments, dims, strict=True)]
        for a, b in zip(mapped, run(*picked), strict=True):
            torch.testing.assert_close(a[n], b)


@pytest.mark.parametrize("mask_batch", [1, 2])
@pytest.mark.parametrize("dropout_p", [0.0, 0.4])
def test_per_sample_gradients(mask_batch, dropout_p):
    """vmap of grad: per-sample gradients of every input, the shared mask and slopes included."""
    q, k, v = (torch.randn(4, 2, 3, 5, 8, dtype=torch.float64) for _ in range(3))
    mask = torch.randn(mask_batch, 1, 5, 5, dtype=torch.float64)
    slopes = torch.rand(3, dtype=torch.float64)
    rng_state = new_rng_state()

    def loss(q, k, v, mask, slopes):
        out = flash_attn(q, k, v, mask, alibi_slopes=slopes, dropout_p=dropout_p, rng_state=rng_state)
        return out.sin().sum()

    gradient = torch.func.grad(loss, argnums=(0, 1, 2, 3, 4))
    mapped = torch.vmap(gradient, in_dims=(0, 0, 0, None, None))(q, k, v, mask, slopes)
    for n in range(4):
        inputs = [t.detach().requires_grad_() for t in (q[n], k[n], v[n], mask, slopes)]
        for a, b in zip(mapped, torch.autograd.grad(loss(*inputs), inputs), strict=True):
            torch.testing.assert_close(a[n], b)


def test_func_grad_under_autocast():
    q, k, v = (t.detach() for t in make_qkv(1, 2, 6, 6, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = torch.func.grad(lambda q: flash_attn(q, k, v).float().sum())(q)
        theirs = torch.func.grad(lambda q: sdpa(q, k, v).float().sum())(q)
    torch.testing.assert_close(ours, theirs, rtol=0.1, atol=0.02)


@pytest.mark.parametrize(
    ("dtype", "mask_dtype"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.float32, torch.float16)],
)
def test_func_grad_under_autocast_casts_as_the_operator_does(dtype, mask_dtype):
    q, k, v = (t.detach() for t in make_qkv(1, 2, 6, 6, 8, dtype=dtype))
    mask = torch.randn(6, 6, dtype=mask_dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = torch.func.grad(lambda q: flash_attn(q, k, v, mask).double().sum())(q)
        leaf = q.clone().requires_grad_()
        (expected,) = torch.autograd.grad(flash_attn(leaf, k, v, mask).double().sum(), leaf)
    assert torch.equal(ours, expected)


def test_checkpointing_replays_dropout():
    q, k, v = make_qkv(1, 2, 30, 30, 8)

    def run(q, k, v):
        return flash_attn(q, k, v, dropout_p=0.5)

    torch.manual_seed(5)
    expected = torch.autograd.grad(run(q, k, v).sin().sum(), (q, k, v))
    torch.manual_seed(5)
    out = torch.utils.checkpoint.checkpoint(run, q, k, v, use_reentrant=False)
    for a, b in zip(torch.autograd.grad(out.sin().sum(), (q, k, v)), expected, strict=True):
        assert torch.equal(a, b)


def test_saves_only_inputs_out_and_lse():
    """Autograd saves no tensor of size S_q x S_k for the backward."""
    saved = []
    q, k, v = make_qkv(1, 2, 300, 200, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        flash_attn(q, k, v, dropout_p=0.1)
    expected = [(1, 2, 300, 8), (1, 2, 200, 8), (1, 2, 200, 8), (2,), (1, 2, 300, 8), (1, 2, 300)]
    assert sorted(saved) == sorted(expected)


def test_meta_tensors_give_shapes_without_data():
    q, k, v = (torch.empty(2, 4, 1 << 20, 64, device="meta") for _ in range(3))
    out, lse = flash_attn(q, k, v, return_lse=True)
    assert (out.device.type, out.shape, lse.shape) == ("meta", q.shape, q.shape[:3])
    assert dropout_mask(torch.empty(2, dtype=torch.int64, device="meta"), 1, 2, 3, 4, 0.5).shape == (1, 2, 3, 4)


def test_inference_mode_and_no_grad():
    q, k, v = make_qkv(1, 2, 6, 6, 8)
    with torch.inference_mode():
        first = flash_attn(q, k, v)
    with torch.no_grad():
        second = flash_attn(q, k, v)
    assert not second.requires_grad
    assert torch.equal(first, second)


def test_many_threads_of_the_caller():
    """Data loaders and servers call from several threads at once."""
    from concurrent.futures import ThreadPoolExecutor

    inputs = [[t.detach() for t in make_qkv(1, 2, 200, 200, 32)] for _ in range(8)]
    expected = [flash_attn(*i, is_causal=True) for i in inputs]
    with ThreadPoolExecutor(4) as pool:
        for ours, wanted in zip(pool.map(lambda i: flash_attn(*i, is_causal=True), inputs), expected, strict=True):
            assert torch.equal(ours, wanted)


def test_modes_and_subclasses_see_the_call():
    """The direct call (csrc/ops/keys/eager.cpp) must not hide a call from modes, hooks and profilers."""
    q, k, v = make_qkv(1, 2, 5, 7, 8)

    class Functions(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):
            Functions.seen += function is flash_attn
            return function(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            Dispatches.seen += function is _ops.attention
            return function(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        seen = 0

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            Subclass.seen += function is flash_attn
            return super().__torch_function__(function, types, args, kwargs)

    with Functions():
        flash_attn(q, k, v)
    with Dispatches():
        flash_attn(q, k, v)
    flash_attn(q.as_subclass(Subclass), k, v)
    assert (Functions.seen, Dispatches.seen, Subclass.seen) == (1, 1, 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning", "ignore:Converting a tensor")
def test_jit_trace_records_the_operator():
    q, k, v = make_qkv(1, 2, 5, 7, 8)
    traced = torch.jit.trace(lambda q, k, v: flash_attn(q, k, v, is_causal=True), (q, k, v))
    assert "flash_attn_ext::attention" in str(traced.graph)
    q, k, v = make_qkv(1, 2, 5, 7, 8)
    torch.testing.assert_close(traced(q, k, v), flash_attn(q, k, v, is_causal=True))
