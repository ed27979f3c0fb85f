"""vmap rules of the operators: fold the mapped dimension into the batch, or, if the batch index matters, loop over it.

The row of each tensor in csrc/ops declares which of the two it needs.
"""

import torch
from torch import Tensor

from . import _ops


def _fold(t: Tensor | None, dim: int | None, n: int) -> Tensor | None:
    """Returns (n, B, ...) as (n * B, ...). An unmapped tensor is repeated."""
    if t is None:
        return None
    t = t.unsqueeze(0).expand(n, *t.shape) if dim is None else t.movedim(dim, 0)
    return t.reshape(n * t.shape[1], *t.shape[2:])


def _fold_batch_of_one(t: Tensor | None, dim: int | None, n: int, batch: int) -> Tensor | None:
    """Folds a tensor with a batch of 1 or B. An unmapped tensor with a batch of 1 does not change."""
    if t is None or (dim is None and t.shape[0] == 1):
        return t
    t = t.unsqueeze(0).expand(n, *t.shape) if dim is None else t.movedim(dim, 0)
    return t.expand(n, batch, *t.shape[2:]).reshape(n * batch, *t.shape[2:])


def _fold_per_head(t: Tensor | None, dim: int | None, n: int, batch: int) -> Tensor | None:
    """Folds a tensor (H) or (B, H), plus the mapped dimension."""
    if t is None:
        return None
    if t.dim() - (dim is not None) == 1:  # (H): one row for all batch elements
        if dim is None:
            return t
        t, dim = t.movedim(dim, 0).unsqueeze(1), 0
    return _fold_batch_of_one(t, dim, n, batch)


def _fold_as_declared(declared: str, t: Tensor | None, dim: int | None, n: int, batch: int) -> Tensor | None:
    if declared == "batch":
        return _fold(t, dim, n)
    if declared == "batch_or_one":
        return _fold_batch_of_one(t, dim, n, batch)
    if declared == "per_head":
        return _fold_per_head(t, dim, n, batch)
    return None  # "loop": this call does not use the tensor, otherwise it would run in a loop


def _loop(op, n: int, in_dims: tuple, args: tuple, kwargs: dict) -> tuple:
    def pick(arg, dim, i):
        return arg if dim is None else arg.select(dim, i)

    results = [op(*(pick(a, d, i) for a, d in zip(args, in_dims, strict=True)), **kwargs) for i in range(n)]
    stacked = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, tuple(None if t is None else 0 for t in stacked)


def _unfold(results: tuple, n: int) -> tuple:
    unfolded = tuple(None if t is None else t.reshape(n, t.shape[0] // n, *t.shape[1:]) for t in results)
    return unfolded, tuple(None if t is None else 0 for t in unfolded)


def _folding_rule(op):
    rows = _ops.rows_of(op)
    shared = {row.name for row in rows if row.vmap != "batch"}  # shared by elements of the batch

    def vmap(info, in_dims, *args, **kwargs):
        in_dims, n = tuple(in_dims[: len(args)]), info.batch_size
        args, in_dims = (tuple(x) + (None,) * (len(rows) - len(x)) for x in (args, in_dims))
        # Dropout depends on the batch index. The gradient of a shared tensor differs for each mapped element.
        wanted = zip(_ops.DIFFERENTIABLE, kwargs.get("grad_mask", ()), strict=False)
        if kwargs.get("dropout_p", 0.0) > 0.0 or any(want and name in shared for name, want in wanted):
            return _loop(op, n, in_dims, args, kwargs)
        query = [row.name for row in rows].index("query")
        query_shape, dim = list(args[query].shape), in_dims[query]
        if dim is not None:
            del query_shape[dim]
        folded = [
            _fold_as_declared(row.vmap, t, dim, n, query_shape[0])
            for row, t, dim in zip(rows, args, in_dims, strict=True)
        ]
        return _unfold(op(*folded, **kwargs), n)

    return vmap


def _looping_rule(op):
    """Makes a rule that calls the operator once for each mapped element, because offsets may differ."""

    def vmap(info, in_dims, *args, **kwargs):
        return _loop(op, info.batch_size, tuple(in_dims[: len(args)]), args, kwargs)

    return vmap


# Functions of the user read the batch index, so each mapped element is a separate call.
for _operator, _rule in (
    (_ops.DENSE, _folding_rule), (_ops.VARLEN, _looping_rule), (_ops.FLEX, _looping_rule),
    (_ops.VARLEN_FLEX, _looping_rule),
):  # fmt: skip
    for _op in (_operator.forward, _operator.backward, _operator.jvp, _operator.double_backward):
        torch.library.register_vmap(_op.name(), _rule(_op))
