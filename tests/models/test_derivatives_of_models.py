"""Second derivatives and forward mode of whole models on our kernels, compared with torch's math backend."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_attn_ext import activated, flash_attn, replace_attention


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(24, 3, 40, dropout=0.0, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()


def inputs():
    x = torch.randn(2, 7, 24, dtype=torch.float64, requires_grad=True)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 5:] = True
    return x, padding


def gradient_penalty(model, x, padding):
    """The gradient of (|d out / d x| - 1)^2, the penalty of WGAN-GP, with respect to the parameters."""
    out = model(x, src_key_padding_mask=padding)[:, 0].sin().sum()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    penalty = (grad.flatten(1).norm(dim=1) - 1).square().mean()
    return torch.autograd.grad(penalty, list(model.parameters()), allow_unused=True)


def hessian_vector_product(model, x, padding):
    """The Hessian of the loss with respect to all parameters, times a vector: forward mode over reverse mode."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    direction = {name: torch.randn(p.shape, generator=generator, dtype=torch.float64) for name, p in parameters.items()}

    def loss(parameters):
        out = torch.func.functional_call(model, parameters, (x.detach(),), {"src_key_padding_mask": padding})
        return out.sin().sum()

    return list(torch.func.jvp(torch.func.grad(loss), (parameters,), (direction,))[1].values())


def tangent_of_output(model, x, padding):
    def run(x):
        return model(x, src_key_padding_mask=padding)

    return list(torch.func.jvp(run, (x.detach(),), (x.detach().cos(),)))


@pytest.mark.parametrize("derivative", [gradient_penalty, hessian_vector_product, tangent_of_output])
def test_replaced_modules(derivative):
    model, (x, padding) = encoder(), inputs()
    ours = copy.deepcopy(model)
    assert len(replace_attention(ours).replaced) == 2
    got = derivative(ours, x, padding)
    with sdpa_kernel(SDPBackend.MATH):
        expected = derivative(model, x, padding)
    for a, b in zip(got, expected, strict=True):
        if b is None:
            assert a is None
        else:
            torch.testing.assert_close(a, b)


def test_activated_models():
    """The unchanged model: its scaled_dot_product_attention runs our kernels, differentiated twice."""
    model, (x, padding) = encoder(), inputs()
    with activated():
        got = gradient_penalty(model, x, padding)
    with sdpa_kernel(SDPBackend.MATH):
        expected = gradient_penalty(model, x, padding)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_compiled():
    """torch.compile compiles a function that computes a tangent."""
    q, k, v = (torch.randn(1, 2, 20, 8, dtype=torch.float64) for _ in range(3))

    def tangent(q, k, v):
        return torch.func.jvp(lambda q: flash_attn(q, k, v, is_causal=True), (q,), (q.cos(),))[1]

    compiled = torch.compile(tangent, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), tangent(q, k, v))
