"""torch.func transforms (grad, jacrev, vmap of grad, ...) cannot pass a C++ autograd function: the same in Python.

It calls the same two operators as csrc/ops/autograd.cpp, and is used only while a transform is active.
"""

import torch

from . import _ops


class _Attention(torch.autograd.Function):
    generate_vmap_rule = True  # from the rules of the two operators, _vmap.py

    @staticmethod
    def forward(query, key, value, attn_mask, alibi_slopes, rng_state, options):
        return _ops.attention(query, key, value, attn_mask, alibi_slopes, rng_state, **options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.options = inputs
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        options = {**ctx.options, "grad_mask": list(ctx.needs_input_grad[:5])}
        grads = _AttentionBackward.apply(grad_out, grad_lse, *ctx.saved_tensors, options)
        return (*grads, None, None)


class _AttentionBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*args):
        *tensors, options = args
        return _ops.attention_backward(*tensors, **options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("flash_attn: double backward (a gradient of its gradients) is not implemented")


def attention(query, key, value, attn_mask, alibi_slopes, rng_state, **options):
    """``_ops.attention`` under a torch.func transform."""
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (_autocast(t) for t in (query, key, value))
        attn_mask, alibi_slopes = (
            t if t is None or t.dtype == torch.float32 else _autocast(t) for t in (attn_mask, alibi_slopes)
        )
    return _Attention.apply(query, key, value, attn_mask, alibi_slopes, rng_state, options)


def autocast_forms(query, key, value, attn_mask, alibi_slopes, rng_state):
    """What the autocast of these makes, without its values: for explain.py."""

    def form(t):
        dtype = _autocast(t.new_empty(0)).dtype
        return t if dtype == t.dtype else torch.empty_like(t, dtype=dtype)

    def form_unless_float32(t):
        return t if t is None or t.dtype == torch.float32 else form(t)

    return (*map(form, (query, key, value)), *map(form_unless_float32, (attn_mask, alibi_slopes)), rng_state)


def _autocast(t):
    """The rule of csrc/ops/autocast.cpp, whose dispatch key this path does not pass: floats, but not float64."""
    if not t.is_floating_point() or t.dtype == torch.float64:
        return t
    return t.to(torch.get_autocast_dtype(t.device.type))


# Whether a torch.func transform is being evaluated.
active = torch._C._are_functorch_transforms_active
