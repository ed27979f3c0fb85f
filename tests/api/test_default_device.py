"""torch's default device has no effect on a call: its tensors are on the device of the inputs, or on CPU.

The default device of these tests is "meta". A tensor on it has no values, so a call that uses one raises an error. Some
functions make a tensor on the default device by definition, so they are not tested: ``new_rng_state()``, constructors
of modules, and ``random_signs`` and ``with_outliers`` of ``flash_attn_ext.reference.float8`` without a generator.
"""

import ast

import other_small_calls
import pytest
import small_calls
import torch
from paths import ROOT
from torch.autograd import forward_ad
from torch.utils._device import _device_constructors

from flash_attn_ext import flash_attn

pytestmark = pytest.mark.usefixtures("one_thread")
CALLS = small_calls.CALLS | other_small_calls.CALLS


def listed(results):
    return [results] if isinstance(results, torch.Tensor) else [t for t in results if t is not None]


def loss_of(results):
    return sum(torch.where(t.isfinite(), t, 0.0).square().sum() for t in listed(results) if t.requires_grad)


def results_of(call):
    """The results of the call, and of its derivatives."""
    run, tensors, derivatives = call
    results = listed(run(*tensors))
    second = "double backward" in derivatives
    if "gradients" in derivatives:
        leaves = [t.detach().requires_grad_() for t in tensors]
        first = torch.autograd.grad(loss_of(run(*leaves)), leaves, create_graph=second)
        results += first
        if second:
            results += torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
    directions = [torch.ones_like(t) for t in tensors]
    if "jvp" in derivatives:
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(t, d) for t, d in zip(tensors, directions, strict=True)]
            results += listed([forward_ad.unpack_dual(t).tangent for t in listed(run(*duals))])
    if "torch.func" in derivatives:
        results += torch.func.jvp(lambda *x: tuple(listed(run(*x))), tensors, tuple(directions))[1]
    return [t.detach() for t in results]


@pytest.mark.parametrize("name", CALLS)
def test_the_default_device_has_no_effect(name):
    call = CALLS[name]()
    # First on meta: a later run would find what the first run stored, such as the traced functions of the user.
    torch.manual_seed(1)
    with torch.device("meta"):
        results = results_of(call)
    torch.manual_seed(1)
    expected = results_of(call)
    assert len(results) == len(expected)
    for ours, other in zip(results, expected, strict=True):
        assert ours.device == other.device
        torch.testing.assert_close(ours, other, rtol=0, atol=0, equal_nan=True)


def test_compiled_functions_of_the_user():
    """The traced function is a constant of the graph."""
    q, table = torch.randn(1, 2, 9, 8), torch.randn(2)
    results = []
    for device in ("meta", "cpu"):
        compiled = torch.compile(
            lambda x: flash_attn(x, x, x, score_mod=lambda s, b, h, i, j: s + table[h]), backend="eager", fullgraph=True
        )
        with torch.device(device):
            results.append(compiled(q))
    assert torch.equal(*results)


def test_calls_of_torch_name_a_device():
    """Some calls run only on CUDA, or inside an operator, where the other tests do not reach them."""
    names = {function.__name__ for function in _device_constructors()}
    unnamed = []
    for path in sorted((ROOT / "flash_attn_ext").rglob("*.py")):
        if path.name == "__main__.py":  # a command, in its own process
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in names:
                is_named = any(keyword.arg in ("device", None) for keyword in node.keywords)  # None: **options
                if ast.unparse(node.func).startswith("torch.") and not is_named:
                    unnamed.append(f"{path.name}:{node.lineno}")
    assert not unnamed


@pytest.mark.any_device
def test_functions_of_the_user_on_any_device(device):
    """Programs are on CPU, and all other tensors of the call are on the device of the inputs."""
    q, k, v = (torch.randn(1, 2, 70, 16).requires_grad_() for _ in range(3))
    table, documents = torch.randn(2, 140).requires_grad_(), torch.arange(70) // 30
    assert q.device.type == device.type

    def run():
        out = flash_attn(
            q,
            k,
            v,
            score_mod=lambda s, b, h, i, j: torch.tanh(s) + table[h, i - j + 70],
            mask_mod=lambda b, h, i, j: documents[i] == documents[j],
        )
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v, table))

    for default in ("meta", "cpu"):
        with torch.device(default):
            results = run()
        torch.testing.assert_close(results, run())
