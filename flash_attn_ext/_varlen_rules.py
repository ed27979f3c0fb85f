"""The operators on packed sequences under torch.func transforms: as _functorch.py and _vmap.py for the dense ones."""

import torch

from . import _functorch, _ops, _vmap

_AUTOCAST = ("cast",) * 3 + ("unless_float32",) * 3 + ("keep",) * 5  # csrc/ops/varlen.h, in the order of its tensors


class _AttentionVarlen(torch.autograd.Function):
    generate_vmap_rule = True  # from the rules of the two operators, below

    @staticmethod
    def forward(options, *tensors):
        return _ops.attention_varlen(*tensors, **options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.options, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx, grad_out, grad_lse):
        wanted = list(ctx.needs_input_grad[1 : 1 + _functorch.GRADIENTS])
        options = {**ctx.options, "grad_mask": wanted}
        grads = _AttentionVarlenBackward.apply(options, grad_out, grad_lse, *ctx.saved_tensors)
        return (None, *grads, *[None] * (len(_AUTOCAST) - len(wanted)))

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError("flash_attn_varlen: forward-mode AD (jvp, jacfwd, hessian) is not implemented")


class _AttentionVarlenBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(options, *tensors):
        return _ops.attention_varlen_backward(*tensors, **options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("flash_attn_varlen: double backward (a gradient of its gradients) is not implemented")

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError("flash_attn_varlen: forward-mode AD of its gradients (hessian) is not implemented")


def attention_varlen(*tensors, **options):
    """``_ops.attention_varlen``, also under a torch.func transform."""
    if torch.compiler.is_compiling() or not _functorch.active():
        return _ops.attention_varlen(*tensors, **options)
    if torch.is_autocast_enabled(tensors[0].device.type):
        tensors = [_functorch._autocast(t, rule) for t, rule in zip(tensors, _AUTOCAST, strict=True)]
    return _AttentionVarlen.apply(options, *tensors)


def _loop(op):
    """Packs of a mapped dimension share no offsets: the operator is called once for each."""

    def vmap(info, in_dims, *args, **kwargs):
        return _vmap._loop(op, info.batch_size, tuple(in_dims[: len(args)]), args, kwargs)

    return vmap


for _op in (_ops.attention_varlen, _ops.attention_varlen_backward):
    torch.library.register_vmap(_op.name(), _loop(_op))
