"""activate: torch's attention calls run on our kernels with torch's results; deactivate restores torch."""

import importlib.util
import threading

import pytest
import torch
import torch.nn.functional as F
from activate_helpers import FOR_CPU, NATIVE_MHA, SDPA, assert_same_as_torch, make, run
from torch.nn.attention import SDPBackend, sdpa_kernel

import flash_attn_ext
from flash_attn_ext import activate, activated, activation_report, deactivate, flash_attn, is_active
from flash_attn_ext.nn import torch_overrides

pytestmark = pytest.mark.usefixtures("one_thread", "torch_again")

OVERRIDDEN = (SDPA, FOR_CPU, FOR_CPU + "_backward", NATIVE_MHA)

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
    "one_key_head_without_enable_gqa": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
        (2, 6, 33, 16), (2, 1, 40, 16), (2, 1, 40, 16),
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


def test_dropout_equals_flash_attn_with_the_same_seed():
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
    "the head dimension is above 1024": lambda q: F.scaled_dot_product_attention(*[q.repeat(1, 1, 1, 129)] * 3),
    "the flash backend is turned off (torch.nn.attention.sdpa_kernel)": lambda q: math_only(q),
    "the batches of query, key and value differ": lambda q: F.scaled_dot_product_attention(q, q[:1], q[:1]),
}


def math_only(q):
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("reason", LEFT)
def test_calls_left_to_torch_return_torchs_bits_and_are_counted(reason):
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
    """torch supports it only in its math backend."""
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
    """torch.func calls an operator of torch that has no forward-mode derivative."""
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
    wide = q.repeat(1, 1, 1, 129)
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


def test_errors_are_torchs():
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


def test_a_second_activate_changes_nothing():
    before = tables()
    activate()
    activate()
    with activated():
        pass
    assert is_active()
    deactivate()
    deactivate()
    assert tables() == before


def test_blocks_nest_and_an_exception_ends_one():
    before = tables()
    with activated():
        with activated():
            pass
        assert is_active()
        with pytest.raises(KeyError), activated():
            raise KeyError
        assert is_active()
    assert tables() == before


def test_blocks_may_end_in_the_order_in_which_they_began():
    first, second = activated(), activated()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert is_active()
    second.__exit__(None, None, None)
    assert not is_active()


def test_an_open_block_outlives_deactivate_and_ends_before_activate():
    with activated():
        deactivate()
        assert is_active()
        activate()
    assert is_active()
    deactivate()
    assert not is_active()


def test_a_block_stays_active_when_an_earlier_block_of_another_thread_ends():
    opened, close = threading.Event(), threading.Event()

    def other():
        with activated():
            opened.set()
            close.wait()

    thread = threading.Thread(target=other)
    thread.start()
    opened.wait()
    with activated():
        close.set()
        thread.join()
        assert is_active()
    assert not is_active()


def test_through_torchs_own_interface():
    assert flash_attn_ext.activate.__module__ == "flash_attn_ext.nn.torch_overrides"
    assert "flash_attn_ext" in torch.nn.attention.list_flash_attention_impls()
    torch.nn.attention.activate_flash_attention_impl("flash_attn_ext")
    assert is_active()
    assert torch.nn.attention.current_flash_attention_impl() == "flash_attn_ext"
    torch.nn.attention.restore_flash_attention_impl()
    assert not is_active()


def test_the_environment_activates_at_the_import(monkeypatch):
    """The module's code runs again in this process, as a second module."""
    spec = importlib.util.find_spec("flash_attn_ext.nn.torch_overrides")
    for value, active in (("", False), ("0", False), ("1", True)):
        monkeypatch.setenv("FLASH_ATTN_EXT_ACTIVATE", value)
        second = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(second)
        assert is_active() == active
        second.deactivate()
    monkeypatch.setenv("FLASH_ATTN_EXT_ACTIVATE", "yes")
    with pytest.raises(ImportError, match="FLASH_ATTN_EXT_ACTIVATE: got 'yes'; allowed: 0, 1"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
    torch.nn.attention.register_flash_attention_impl("flash_attn_ext", register_fn=torch_overrides._activate_for_torch)


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
