"""torch.func transforms (grad, jacrev, vmap of grad, ...) cannot pass a C++ autograd function: the same in Python.

It calls the same two operators as csrc/ops/autograd.cpp, and is used only while a transform is active. Calls without a
transform do not come here: a Python autograd function takes 30 us more.
"""

import torch
from torch._C._functorch import TransformType, get_interpreter_stack

from . import _ops

GRADIENTS = len(_ops.DIFFERENTIABLE)


class _Attention(torch.autograd.Function):
    generate_vmap_rule = True  # from the rules of the two operators, _vmap.py

    @staticmethod
    def forward(options, *tensors):
        return _ops.attention(*tensors, **options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        options = {**ctx.options, "grad_mask": list(ctx.needs_input_grad[1 : 1 + GRADIENTS])}
        grads = _AttentionBackward.apply(options, grad_out, grad_lse, *ctx.saved_tensors)
        return (None, *grads, *[None] * (len(_ops.TENSORS) - GRADIENTS))

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError("flash_attn: forward-mode AD (jvp, jacfwd, hessian) is not implemented")


class _AttentionBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(options, *tensors):
        return _ops.attention_backward(*tensors, **options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("flash_attn: double backward (a gradient of its gradients) is not implemented")

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError("flash_attn: forward-mode AD of its gradients (hessian) is not implemented")


def attention(*tensors, **options):
    """``_ops.attention`` under a torch.func transform."""
    stack = get_interpreter_stack()
    # functionalize alone has nothing to differentiate, and cannot see into an autograd function.
    if all(interpreter.key() == TransformType.Functionalize for interpreter in stack):
        return _ops.attention(*tensors, **options)
    if torch.is_autocast_enabled(tensors[0].device.type):
        tensors = [_autocast(t, rule.autocast) for t, rule in zip(tensors, _ops.TENSORS, strict=True)]
    return _Attention.apply(options, *tensors)


def autocast_forms(*tensors):
    """What the autocast of attention's tensors makes, without its values: for _explain.py."""

    def form(t, rule):
        if t is None:
            return None
        dtype = _autocast(t.new_empty(0), rule.autocast).dtype
        return t if dtype == t.dtype else torch.empty_like(t, dtype=dtype)

    return tuple(form(t, rule) for t, rule in zip(tensors, _ops.TENSORS, strict=True))


def _autocast(t, rule):
    """What csrc/ops/autocast.cpp does, whose dispatch key this path does not pass: floats, but not float64."""
    if t is None or rule == "keep" or not t.is_floating_point() or t.dtype == torch.float64:
        return t
    if rule == "unless_float32" and t.dtype == torch.float32:
        return t
    return t.to(torch.get_autocast_dtype(t.device.type))


# Whether a torch.func transform is being evaluated.
active = torch._C._are_functorch_transforms_active
