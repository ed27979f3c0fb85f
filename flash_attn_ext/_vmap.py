"""torch.vmap rules: the mapped dimension joins the batch, or, where that would change the meaning, is looped over."""

import torch
from torch import Tensor

from . import _ops


def _fold(t: Tensor | None, dim: int | None, n: int) -> Tensor | None:
    """(n, B, ...) as (n * B, ...); what is not mapped is repeated."""
    if t is None:
        return None
    t = t.unsqueeze(0).expand(n, *t.shape) if dim is None else t.movedim(dim, 0)
    return t.reshape(n * t.shape[1], *t.shape[2:])


def _fold_batch_of_one(t: Tensor | None, dim: int | None, n: int, batch: int) -> Tensor | None:
    """A mask, or slopes of two dimensions, whose batch may be 1; left alone if it is and nothing maps it."""
    if t is None or (dim is None and t.shape[0] == 1):
        return t
    t = t.unsqueeze(0).expand(n, *t.shape) if dim is None else t.movedim(dim, 0)
    return t.expand(n, batch, *t.shape[2:]).reshape(n * batch, *t.shape[2:])


def _fold_slopes(slopes: Tensor | None, dim: int | None, n: int, batch: int) -> Tensor | None:
    if slopes is None:
        return None
    if slopes.dim() - (dim is not None) == 1:  # (H): one row, whatever the batch
        if dim is None:
            return slopes
        slopes, dim = slopes.movedim(dim, 0).unsqueeze(1), 0
    return _fold_batch_of_one(slopes, dim, n, batch)


def _loop(op, n: int, in_dims: tuple, args: tuple, kwargs: dict) -> tuple:
    def pick(arg, dim, i):
        return arg if dim is None else arg.select(dim, i)

    results = [op(*(pick(a, d, i) for a, d in zip(args, in_dims, strict=True)), **kwargs) for i in range(n)]
    stacked = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, tuple(None if t is None else 0 for t in stacked)


def _unfold(results: tuple, n: int) -> tuple:
    unfolded = tuple(None if t is None else t.reshape(n, t.shape[0] // n, *t.shape[1:]) for t in results)
    return unfolded, tuple(None if t is None else 0 for t in unfolded)


def _attention_vmap(info, in_dims, *args, **kwargs):
    in_dims = tuple(in_dims[: len(args)])
    n = info.batch_size
    # Dropout depends on the batch index, so folding would draw other masks than the mapped function says.
    if kwargs.get("dropout_p", 0.0) > 0.0:
        return _loop(_ops.attention, n, in_dims, args, kwargs)
    q, k, v, mask, slopes, _ = (*args, *[None] * (6 - len(args)))
    dims = (*in_dims, *[None] * (6 - len(in_dims)))
    batch = q.shape[0] if dims[0] is None else q.movedim(dims[0], 0).shape[1]
    folded = [_fold(t, d, n) for t, d in zip((q, k, v), dims, strict=False)]
    mask = _fold_batch_of_one(mask, dims[3], n, batch)
    return _unfold(_ops.attention(*folded, mask, _fold_slopes(slopes, dims[4], n, batch), None, **kwargs), n)


def _attention_backward_vmap(info, in_dims, *args, **kwargs):
    in_dims = tuple(in_dims[: len(args)])
    n = info.batch_size
    *_, mask_grad, slopes_grad = kwargs["grad_mask"]
    if kwargs.get("dropout_p", 0.0) > 0.0 or mask_grad or slopes_grad:  # those gradients are per mapped element
        return _loop(_ops.attention_backward, n, in_dims, args, kwargs)
    dout, dlse, q, k, v, mask, slopes, _, out, lse = args
    dims = in_dims
    batch = q.shape[0] if dims[2] is None else q.movedim(dims[2], 0).shape[1]
    fold = [_fold(t, d, n) for t, d in zip((dout, dlse, q, k, v), dims, strict=False)]
    mask = _fold_batch_of_one(mask, dims[5], n, batch)
    slopes = _fold_slopes(slopes, dims[6], n, batch)
    out, lse = _fold(out, dims[8], n), _fold(lse, dims[9], n).contiguous()
    return _unfold(_ops.attention_backward(*fold, mask, slopes, None, out, lse, **kwargs), n)


torch.library.register_vmap("flash_attn_ext::attention", _attention_vmap)
torch.library.register_vmap("flash_attn_ext::attention_backward", _attention_backward_vmap)
