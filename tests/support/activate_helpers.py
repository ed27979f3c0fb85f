"""Calls of torch's attention, as torch runs them and while flash_attn_ext is active."""

import torch
from helpers import leaves
from tolerances import assert_as_exact_as_torch

from flash_attn_ext import activated, activation_report

SDPA = "scaled_dot_product_attention"
FOR_CPU = "_scaled_dot_product_flash_attention_for_cpu"
NATIVE_MHA = "_native_multi_head_attention"


def make(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def run(call, inputs):
    """Returns the result of `call` for fresh leaves of `inputs`, and the gradients of a fixed sum of the result."""
    inputs = leaves(inputs)
    out = call(*inputs)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    return out.detach(), *torch.autograd.grad(out, wanted, weights)


def assert_same_as_torch(call, inputs, taken):
    """The result of `call` is as exact as torch's, and our kernels ran each of the operators `taken`."""
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
