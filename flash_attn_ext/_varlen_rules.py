"""The operators on packed sequences under torch.func transforms and torch.vmap."""

import torch

from . import _functorch, _ops, _vmap


def attention_varlen(*tensors, **options):
    """``_ops.attention_varlen``, also under a torch.func transform."""
    if torch.compiler.is_compiling() or not _functorch.active():
        return _ops.attention_varlen(*tensors, **options)
    return _functorch.attention(*tensors, family=_functorch.VARLEN, **options)


def _loop(op):
    """Calls the operator once for each element of the mapped dimension, because each may have other offsets."""

    def vmap(info, in_dims, *args, **kwargs):
        return _vmap._loop(op, info.batch_size, tuple(in_dims[: len(args)]), args, kwargs)

    return vmap


for _op in _functorch.VARLEN[1:5]:
    torch.library.register_vmap(_op.name(), _loop(_op))
