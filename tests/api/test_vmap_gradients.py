"""Derivatives of torch.vmap, against the same calls one by one."""

import pytest
import torch

from flash_attn_ext import MultiheadAttention, flash_attn, flash_attn_varlen

OFFSETS = torch.tensor([0, 5, 8])


def dense(q, k, v):
    return flash_attn(q, k, v, is_causal=True)


def packed(q, k, v):
    return flash_attn_varlen(*(t.flatten(0, 1) for t in (q, k, v)), OFFSETS, OFFSETS)


CALLS = {"dense": (dense, (2, 3, 6, 8)), "packed": (packed, (4, 2, 3, 8))}


@pytest.fixture(params=CALLS)
def call(request):
    """A function of q, k, v, and these with a dimension to be mapped."""
    function, shape = CALLS[request.param]
    return function, [torch.randn(3, *shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def one_by_one(function):
    return lambda *tensors: torch.stack([function(*each) for each in zip(*tensors, strict=True)])


def test_gradient_of_vmap(call):
    function, tensors = call
    for mapped in (torch.vmap(function), torch.func.vmap(function)):
        got = torch.autograd.grad(mapped(*tensors).square().sum(), tensors)
        expected = torch.autograd.grad(one_by_one(function)(*tensors).square().sum(), tensors)
        torch.testing.assert_close(got, expected)


def test_func_grad_and_jvp_of_vmap(call):
    function, tensors = call
    tensors = [t.detach() for t in tensors]
    directions = [torch.randn_like(t) for t in tensors]

    def total(run):
        return lambda *inputs: run(*inputs).square().sum()

    got = torch.func.grad(total(torch.vmap(function)), (0, 1, 2))(*tensors)
    expected = torch.func.grad(total(one_by_one(function)), (0, 1, 2))(*tensors)
    torch.testing.assert_close(got, expected)
    got = torch.func.jvp(torch.vmap(function), tuple(tensors), tuple(directions))
    expected = torch.func.jvp(one_by_one(function), tuple(tensors), tuple(directions))
    torch.testing.assert_close(got, expected)


def test_vmap_of_grad_of_vmap():
    """Two mapped dimensions, differentiated between them."""
    q, k, v = torch.randn(3, 2, 3, 1, 2, 5, 8, dtype=torch.float64).unbind()

    def gradient(q, k, v):
        return torch.func.grad(lambda q: torch.vmap(dense)(q, k, v).square().sum())(q)

    got = torch.vmap(gradient)(q, k, v)
    expected = torch.stack([gradient(*each) for each in zip(q, k, v, strict=True)])
    torch.testing.assert_close(got, expected)


def test_second_derivatives_of_vmap():
    q, k, v = torch.randn(3, 3, 1, 2, 5, 8, dtype=torch.float64).unbind()

    def along(run):
        return lambda s: run(q * s, k, v).square().sum()

    one = torch.ones((), dtype=torch.float64)
    got, expected = (torch.func.hessian(along(run))(one) for run in (torch.vmap(dense), one_by_one(dense)))
    torch.testing.assert_close(got, expected)


def test_gradient_of_vmap_of_the_module():
    module = MultiheadAttention(8, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(3, 2, 5, 8, dtype=torch.float64, requires_grad=True)

    def run(x):
        return module(x, x, x, need_weights=False)[0]

    got = torch.autograd.grad(torch.vmap(run)(x).square().sum(), [x, *module.parameters()])
    expected = torch.autograd.grad(one_by_one(run)(x).square().sum(), [x, *module.parameters()])
    torch.testing.assert_close(got, expected)
