"""activate: torch's own attention calls run our kernels, give what torch gives, and are torch's again afterwards."""

import os
import subprocess
import sys
import threading

import pytest
import reference
import torch
import torch.nn.functional as F
from helpers import leaves
from tolerances import assert_as_exact_as_torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn_ext
from flash_attn_ext import activate, activated, activation_report, deactivate, flash_attn, is_active

pytestmark = pytest.mark.usefixtures("one_thread")

SDPA = "scaled_dot_product_attention"
FOR_CPU = "_scaled_dot_product_flash_attention_for_cpu"
NATIVE_MHA = "_native_multi_head_attention"
OVERRIDDEN = (SDPA, FOR_CPU, FOR_CPU + "_backward", NATIVE_MHA)


@pytest.fixture(autouse=True)
def torch_again():
    """Leaves torch as it was, also where a test fails."""
    deactivate()
    activation_report(reset=True)
    yield
    deactivate()
    activation_report(reset=True)


def make(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def run(call, inputs):
    """What `call` returns for fresh leaves of `inputs`, and the gradients of a fixed sum of it."""
    inputs = leaves(inputs)
    out = call(*inputs)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    return out.detach(), *torch.autograd.grad(out, wanted, weights)


def assert_same_as_torch(call, inputs, taken):
    """`call` gives what torch gives, as exactly as torch, and ran on our kernels at each of the operators `taken`."""
    theirs = run(call, inputs)
    exact = run(
        call,
        [
            t if t is None or not t.is_floating_point() else t.double().detach().requires_grad_(t.requires_grad)
            for t in inputs
        ],
    )
    with activated():
        activation_report(reset=True)
        ours = run(call, inputs)
        report = activation_report()
    assert set(report.taken) == set(taken), report
    for n, (a, b, c) in enumerate(zip(ours, theirs, exact, strict=True)):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert_as_exact_as_torch(f"result {n}", a, b, c, 3, slack=1e-2 if a.dtype.itemsize == 2 else 0.0)


MASK_BOOL = torch.rand(2, 1, 33, 40, generator=torch.Generator().manual_seed(0)) > 0.3

CALLS = {
    "plain": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v), (2, 4, 33, 16), (2, 4, 40, 16), (2, 4, 40, 16)),
    "causal": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),) + ((2, 4, 33, 16),) * 3,
    "causal_longer_keys": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (1, 2, 5, 16), (1, 2, 9, 16), (1, 2, 9, 16),
    ),
    "bool_mask": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=MASK_BOOL),
        (2, 4, 33, 16), (2, 4, 40, 16), (2, 4, 40, 16),
    ),
    "mask_with_gradient": (
        lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        (2, 4, 33, 16), (2, 4, 40, 16), (2, 4, 40, 16), (4, 33, 40),
    ),
    "scale": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.5),) + ((2, 4, 33, 16),) * 3,
    "grouped_heads": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (2, 6, 33, 16), (2, 2, 40, 16), (2, 2, 40, 16),
    ),
    "value_head_dim": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (2, 4, 33, 24), (2, 4, 33, 24), (2, 4, 33, 16),
    ),
    "three_dimensions": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=MASK_BOOL[:, 0]),
        (2, 33, 16), (2, 40, 16), (2, 40, 16),
    ),
    "five_dimensions": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=MASK_BOOL[0, 0]),
        (2, 2, 3, 33, 16), (2, 2, 3, 40, 16), (2, 2, 3, 40, 16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_scaled_dot_product_attention(name):
    call, *shapes = CALLS[name]
    assert_same_as_torch(call, [make(*shape) for shape in shapes], {SDPA})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    inputs = [make(1, 2, 40, 16, dtype=dtype) for _ in range(3)]
    assert_same_as_torch(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), inputs, {SDPA})


def test_inference_mode():
    q = torch.randn(2, 2, 20, 8)
    v = torch.randn(2, 2, 20, 4)
    expected = F.scaled_dot_product_attention(q, q, v)
    with activated(), torch.inference_mode():
        torch.testing.assert_close(F.scaled_dot_product_attention(q, q, v), expected)
    assert activation_report().taken == {SDPA: 1}


def test_dropout_is_that_of_flash_attn_with_the_same_seed():
    q, k, v = (make(2, 2, 40, 16) for _ in range(3))
    torch.manual_seed(3)
    expected = run(lambda q, k, v: flash_attn(q, k, v, dropout_p=0.25), [q, k, v])
    with activated():
        torch.manual_seed(3)
        got = run(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.25), [q, k, v])
    assert activation_report().taken == {SDPA: 1}
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_autocast():
    q, k, v = (make(1, 2, 40, 16) for _ in range(3))
    mask = torch.randn(40, 40)

    def call(q, k, v):
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    expected = run(call, [q, k, v])
    with activated():
        got = run(call, [q, k, v])
    assert activation_report().taken == {SDPA: 1}
    assert got[0].dtype == torch.bfloat16
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=2e-2, rtol=2e-2)


def test_rows_without_keys_are_zero_with_zero_gradients():
    q, k, v = (make(1, 2, 8, 16) for _ in range(3))
    mask = torch.ones(8, 8, dtype=torch.bool)
    mask[3] = False
    with activated():
        out, dq, dk, dv = run(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask), [q, k, v])
    assert not any(t.isnan().any() for t in (out, dq, dk, dv))
    assert out[:, :, 3].eq(0).all()
    assert dq[:, :, 3].eq(0).all()


LEFT = {
    "the head dimension is above 512": lambda q: F.scaled_dot_product_attention(*[q.repeat(1, 1, 1, 65)] * 3),
    "the flash backend is turned off (torch.nn.attention.sdpa_kernel)": lambda q: math_only(q),
    "the batches of query, key and value differ": lambda q: F.scaled_dot_product_attention(q, q[:1], q[:1]),
}


def math_only(q):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("reason", LEFT)
def test_what_is_left_to_torch_is_torchs_to_the_bit_and_counted(reason):
    q = torch.randn(2, 2, 12, 8)
    expected = LEFT[reason](q)
    with activated():
        got = LEFT[reason](q)
    report = activation_report()
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert not report.taken
    assert (SDPA, reason) in report.left
    assert reason in str(report)


def test_forward_mode_autograd():
    """torch has it in its math backend alone."""
    q, k, v, mask = (torch.randn(shape) for shape in ((1, 2, 12, 8), (1, 2, 9, 8), (1, 2, 9, 8), (12, 9)))

    def tangent(*directions):
        with torch.autograd.forward_ad.dual_level():
            inputs = [
                torch.autograd.forward_ad.make_dual(t, d) for t, d in zip((q, k, v, mask), directions, strict=True)
            ]
            return torch.autograd.forward_ad.unpack_dual(F.scaled_dot_product_attention(*inputs)).tangent

    directions = [torch.randn_like(t) for t in (q, k, v, mask)]
    with sdpa_kernel(SDPBackend.MATH):
        expected = tangent(*directions)
    with activated():
        torch.testing.assert_close(tangent(*directions), expected, atol=1e-5, rtol=1e-5)
        assert activation_report().taken == {SDPA: 1}


def test_forward_mode_autograd_that_torch_lacks_raises():
    """torch.func comes to an operator of torch's, which has no forward-mode derivative."""
    x = torch.randn(1, 2, 6, 8)
    with activated(), pytest.raises(NotImplementedError, match="forward"):
        torch.func.jvp(lambda t: F.scaled_dot_product_attention(t, x, x), (x,), (x,))


def test_explain_sdpa():
    q = torch.randn(2, 2, 12, 8)
    for call in LEFT.values():
        with activated():
            call(q)
    left = dict(activation_report(reset=True).left)
    explained = flash_attn_ext.explain_sdpa(q, q, q, is_causal=True)
    assert explained.taken
    assert str(explained).startswith("taken by flash_attn_ext\nflash_attn of query (2, 2, 12, 8)")
    assert explained.call.forward.kernel == flash_attn_ext.active_kernel()
    wide = q.repeat(1, 1, 1, 65)
    for got in (
        flash_attn_ext.explain_sdpa(wide, wide, wide),
        flash_attn_ext.explain_sdpa(q, q[:1], q[:1]),
    ):
        assert not got.taken
        assert (SDPA, got.why_not) in left
        assert str(got) == f"left to torch: {got.why_not}"
    with sdpa_kernel(SDPBackend.MATH):
        assert "the flash backend is turned off" in flash_attn_ext.explain_sdpa(q, q, q).why_not
    assert "on meta" in flash_attn_ext.explain_sdpa(*[q.to("meta")] * 3).why_not
    assert not activation_report().left


CUDA_HOOKS = (
    "_flash_attention_forward", "_flash_attention_backward", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
)  # fmt: skip


@pytest.mark.parametrize("operator", CUDA_HOOKS)
def test_hooks_of_cuda_are_registered(operator):
    """Where FlashAttention-3 is let in. They are not run here."""

    before = torch._C._dispatch_dump(f"aten::{operator}")
    activate()
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{operator}", "CUDA")
    assert torch._C._dispatch_dump(f"aten::{operator}") != before
    deactivate()
    assert torch._C._dispatch_dump(f"aten::{operator}") == before


def test_varlen_attn_out():
    """The same call into a given tensor."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    if not hasattr(varlen, "varlen_attn_out"):
        pytest.skip("this torch has no varlen_attn_out")
    q, offsets = torch.randn(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    out = torch.empty_like(q)
    with activated():
        expected = varlen.varlen_attn(q, q, q, offsets, offsets, 4, 4)
        varlen.varlen_attn_out(out, q, q, q, offsets, offsets, 4, 4)
    assert torch.equal(out, expected)
    assert activation_report().taken == {
        "_flash_attention_forward": 1, "_flash_attention_forward_no_dropout_inplace": 1,
    }  # fmt: skip


def test_torchs_errors_stay():
    q, mask = torch.randn(1, 2, 12, 8), torch.ones(12, 12, dtype=torch.bool)
    for bad in (
        lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=True, dropout_p=0.1),
        lambda: F.scaled_dot_product_attention(q, q[:, :1].repeat(1, 3, 1, 1), q),
        lambda: F.scaled_dot_product_attention(q, q.double(), q),
        lambda: F.scaled_dot_product_attention(q, q, q, attn_mask=mask[:5]),
    ):
        with pytest.raises(RuntimeError) as theirs:
            bad()
        with activated(), pytest.raises(RuntimeError) as ours:
            bad()
        assert str(ours.value) == str(theirs.value)


def tables():
    return [torch._C._dispatch_dump_table(f"aten::{operator}") for operator in OVERRIDDEN]


def test_deactivate_restores_torch_exactly():
    q = torch.randn(2, 4, 100, 32)
    expected, before = F.scaled_dot_product_attention(q, q, q), tables()
    activate()
    assert is_active()
    assert tables() != before
    deactivate()
    assert not is_active()
    assert tables() == before
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), expected)
    assert not activation_report().taken


def test_twice_is_once_and_contexts_nest():
    before = tables()
    activate()
    activate()
    with activated():
        pass
    assert is_active()
    deactivate()
    deactivate()
    assert tables() == before
    with activated(), activated():
        assert is_active()
    assert tables() == before
    with pytest.raises(KeyError), activated():
        raise KeyError
    assert not is_active()


def test_through_torchs_own_interface():
    assert flash_attn_ext.activate.__module__ == "flash_attn_ext._activate"
    assert "flash_attn_ext" in torch.nn.attention.list_flash_attention_impls()
    torch.nn.attention.activate_flash_attention_impl("flash_attn_ext")
    assert is_active()
    assert torch.nn.attention.current_flash_attention_impl() == "flash_attn_ext"
    torch.nn.attention.restore_flash_attention_impl()
    assert not is_active()


@pytest.mark.parametrize(
    ("value", "expected"), [("1", "True"), ("0", "False"), ("yes", "FLASH_ATTN_EXT_ACTIVATE: got 'yes'; allowed: 0, 1")]
)
def test_environment(value, expected):
    program = "import flash_attn_ext; print(flash_attn_ext.is_active())"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "FLASH_ATTN_EXT_ACTIVATE": value, "PYTHONPATH": "."},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert expected in done.stdout + done.stderr


def test_threads_may_switch_while_others_compute():
    q = torch.randn(1, 2, 40, 16)
    expected = F.scaled_dot_product_attention(q, q, q)
    wrong, stop = [], threading.Event()

    def compute():
        while not stop.is_set():
            leaf = q.clone().requires_grad_()
            out = F.scaled_dot_product_attention(leaf, q, q)
            out.sum().backward()
            if not torch.allclose(out, expected, atol=1e-5):
                wrong.append(out)

    def switch():
        for _ in range(300):
            activate()
            deactivate()

    workers = [threading.Thread(target=compute) for _ in range(2)]
    switchers = [threading.Thread(target=switch) for _ in range(2)]
    for thread in workers + switchers:
        thread.start()
    for thread in switchers:
        thread.join()
    stop.set()
    for thread in workers:
        thread.join()
    assert not wrong
    assert not is_active()


# Compiled graphs, torch.func, and the operator that they come to.

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
    """Compiled code relies on the strides of what this operator returns; both kernels give the same in each."""
    forward, backward = (getattr(torch.ops.aten, name) for name in (FOR_CPU, FOR_CPU + "_backward"))
    q, k, v = (ORDERS[order]() for _ in range(3))
    mask = torch.zeros(16, 16)
    mask[4] = -torch.inf  # a row without keys
    mask = mask if masked else None
    out, lse = forward(q, k, v, attn_mask=mask)
    theirs = out, lse, *backward(torch.ones_like(out), q, k, v, out, lse, 0.0, False, attn_mask=mask)
    with activated():
        ours = forward(q, k, v, attn_mask=mask)
        # The backward of a call that torch's kernel began.
        ours += backward(torch.ones_like(out), q, k, v, out, lse, 0.0, False, attn_mask=mask)
    mixed = backward(torch.ones_like(out), q, k, v, *ours[:2], 0.0, False, attn_mask=mask)
    assert activation_report().taken == {FOR_CPU: 1, FOR_CPU + "_backward": 1}
    for a, b in zip((*ours, *mixed), (*theirs, *theirs[2:]), strict=True):
        assert a.stride() == b.stride()
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_follows_activate_and_deactivate(backend):
    compiled = torch.compile(
        lambda x, y: F.scaled_dot_product_attention(x.sin(), y, y, is_causal=True), backend=backend
    )
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


def test_what_is_compiled_while_active_holds_torchs_operators_alone():
    """Such graphs outlive deactivate(), in torch's caches on disk even the process."""
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


def test_a_traced_script_follows_too():
    x = torch.randn(1, 2, 12, 8)
    script = torch.jit.trace(lambda x: F.scaled_dot_product_attention(x, x.sin(), x), x)
    with activated():
        torch.testing.assert_close(script(x), F.scaled_dot_product_attention(x, x.sin(), x))
    assert activation_report().taken == {SDPA: 2}


# Modules.


def assert_module_is_same(module, operators, *args, **kwargs):
    def call(x):
        got = module(x, *args, **kwargs)
        return got[0] if isinstance(got, tuple) else got

    x = torch.randn(2, 20, 32)
    expected = call(x)
    with activated():
        got = call(x)
    report = activation_report(reset=True)
    assert set(report.taken) == operators, report
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def padding(*lengths, longest=20):
    return torch.arange(longest) >= torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"key_padding_mask": padding(20, 7)},
        {"attn_mask": nn.Transformer.generate_square_subsequent_mask(20), "is_causal": True},
        {"attn_mask": torch.ones(20, 20, dtype=torch.bool).triu(1)},
        {"attn_mask": torch.ones(20, 20, dtype=torch.bool).triu(1), "key_padding_mask": padding(20, 7)},
        {"attn_mask": torch.ones(8, 20, 20, dtype=torch.bool).triu(1)},
    ],
    ids=["plain", "padding", "hint", "causal", "both", "per_head"],
)
def test_multihead_attention(masks, training):
    module = nn.MultiheadAttention(32, 4, batch_first=True).train(training)
    with torch.set_grad_enabled(training):
        assert_module_is_same(
            lambda x: module(x, x, x, need_weights=False, **masks),
            # With the hint torch does not take its fused path.
            {SDPA} if training or "is_causal" in masks else {NATIVE_MHA},
        )


def test_multihead_attention_with_weights_is_left_to_torch():
    module = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(2, 20, 32)
    with torch.no_grad():
        expected = module(x, x, x)
        with activated():
            got = module(x, x, x)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert activation_report().left == {(NATIVE_MHA, "the attention weights are asked for (need_weights)"): 1}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_encoder_in_its_fused_inference_path(padded, norm_first):
    """With padding torch runs nested tensors here (unless norm_first), and so do we."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    with torch.no_grad():
        masks = {"src_key_padding_mask": padding(20, 7)} if padded else {}
        assert_module_is_same(encoder, {NATIVE_MHA}, **masks)


def test_encoder_training():
    torch.manual_seed(1)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 1)
    x = make(2, 20, 32)
    assert_same = []
    for active in (False, True):
        if active:
            activate()
        encoder.zero_grad()
        encoder(x, src_key_padding_mask=padding(20, 7)).square().sum().backward()
        assert_same.append([p.grad.clone() for p in encoder.parameters()])
    for a, b in zip(*assert_same, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert activation_report().taken == {SDPA: 1}


def test_fused_inference_path_gives_zero_where_torch_gives_nan():
    module = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(1, 20, 32)
    mask = torch.zeros(20, 20, dtype=torch.bool)
    mask[5] = True
    with activated(), torch.no_grad():
        out, _ = module(x, x, x, attn_mask=mask, need_weights=False)
    assert activation_report().taken == {NATIVE_MHA: 1}
    torch.testing.assert_close(out[0, 5], module.out_proj.bias)
    exact, _ = reference.attention(*[t.unflatten(-1, (4, 8)).transpose(1, 2) for t in module_qkv(module, x)], ~mask)
    torch.testing.assert_close(out, module.out_proj(exact.transpose(1, 2).flatten(2)), atol=1e-5, rtol=1e-5)


def module_qkv(module, x):
    return F.linear(x, module.in_proj_weight, module.in_proj_bias).detach().chunk(3, -1)


# torch.nn.attention.varlen, for which torch has no kernel on CPU.


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (5, 0), (4, 3)])
def test_packed_sequences(window):
    """As each sequence alone: of different lengths, one without queries, one without keys."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    lengths_q, lengths_k = [7, 0, 12, 4, 1], [9, 3, 12, 0, 5]
    q, k, v = make(sum(lengths_q), 4, 8), make(sum(lengths_k), 4, 8), make(sum(lengths_k), 4, 8)
    offsets = [torch.tensor([0, *n], dtype=torch.int32).cumsum(0, dtype=torch.int32) for n in (lengths_q, lengths_k)]

    def packed(q, k, v):
        return varlen.varlen_attn(q, k, v, *offsets, max(lengths_q), max(lengths_k), window_size=window)

    def alone(q, k, v):
        parts = []
        for q1, k1, v1 in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True):
            if not len(k1):
                parts.append(torch.zeros_like(q1) + 0 * q1)
                continue
            heads_first = (t.transpose(0, 1)[None] for t in (q1, k1, v1))
            causal = "lower_right" if window == (-1, 0) else None
            out, _ = reference.attention(*heads_first, causal=causal, window=window)
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    with pytest.raises(NotImplementedError):
        packed(q, k, v)
    expected = run(alone, [q, k, v])
    with activated():
        got = run(packed, [q, k, v])
    assert activation_report().taken == {"_flash_attention_forward": 1, "_flash_attention_backward": 1}
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_packed_sequences_with_lengths_and_pages():
    """What torch's serving interface passes: how many keys are in use, and in which pages they lie."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    offsets = torch.tensor([0, 2, 6], dtype=torch.int32)
    used, table = torch.tensor([5, 7], dtype=torch.int32), torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    q, k, v = torch.randn(6, 4, 8), torch.randn(4, 4, 2, 8), torch.randn(4, 4, 2, 8)
    with activated():
        in_pages = varlen.varlen_attn(
            q, k, v, offsets, None, 4, 8, window_size=[-1, 0], enable_gqa=True, seqused_k=used, block_table=table
        )
        rows_k, rows_v = (t[table].flatten(1, 2).flatten(0, 1) for t in (k, v))
        in_rows = varlen.varlen_attn(
            q, rows_k, rows_v, offsets, torch.tensor([0, 8, 16], dtype=torch.int32), 4, 8, window_size=[-1, 0],
            enable_gqa=True, seqused_k=used,
        )  # fmt: skip
    torch.testing.assert_close(in_pages, in_rows)
    for b in range(2):
        own = [t.transpose(0, 1)[None] for t in (q[offsets[b] : offsets[b + 1]], rows_k[8 * b :], rows_v[8 * b :])]
        exact, _ = reference.attention(own[0], *(t[:, :, : used[b]] for t in own[1:]), causal="lower_right")
        torch.testing.assert_close(in_rows[offsets[b] : offsets[b + 1]], exact[0].transpose(0, 1))


def test_packed_sequences_that_are_refused():
    forward = torch.ops.aten._flash_attention_forward
    q, offsets = torch.randn(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    with activated():
        with pytest.raises(
            NotImplementedError, match=r"_flash_attention_forward: torch has no kernel for CPU.*dropout"
        ):
            forward(q, q, q, offsets, offsets, 4, 4, 0.1, False, False)
        for bad in ([0, 9], [0, 4, 2], [-1, 6]):
            with pytest.raises(ValueError, match=r"cu_seqlens_k: got .*; allowed"):
                forward(q, q, q, offsets, torch.tensor(bad, dtype=torch.int32), 4, 4, 0.0, False, False)
    assert activation_report().left == {("_flash_attention_forward", "dropout"): 1}


def test_dense_flash_attention_operator():
    forward, backward = torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 2, 8)
    leaf = [t.double().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    exact, exact_lse = reference.attention(*leaf, causal="lower_right")
    grads = torch.autograd.grad(exact, leaf, torch.ones_like(exact))
    with activated():
        out, lse, state, unused, _ = forward(q, k, v, None, None, 5, 9, 0.0, True, False)
        ours = backward(torch.ones_like(out), q, k, v, out, lse, None, None, 5, 9, 0.0, True, state, unused)
    for a, b in zip((out, *ours), (exact, *grads), strict=True):
        torch.testing.assert_close(a.transpose(1, 2).double(), b, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-5)
