"""A dense call: converts tensors of 2 to N dimensions to the operator's form, and runs the operator."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import _functorch
from ._call import Call
from ._tensor_checks import check_are_dense, check_is_dense


def attend(call: Call, run: Callable[[Call], tuple[Tensor, Tensor]] = _functorch.run) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) in the shapes of the caller's tensors. ``run`` receives the call in the operator's form."""
    value = call.tensors["value"]
    call, shape = to_operator_form(call)
    out, lse = run(call)
    if out.shape[3] != value.shape[-1]:  # a head_dim_v of 0 was padded
        out = out[..., : value.shape[-1]]
    if shape.dims != 4:
        out, lse = shape.restore(out), shape.restore(lse)
    return out, lse


class BatchShape(NamedTuple):
    """The leading dimensions that were flattened to the operator's batch."""

    dims: int  # the largest number of dimensions of query, key and value
    batch: torch.Size

    def restore(self, t: Tensor) -> Tensor:
        """Returns out (B, H, S_q, D_v) or lse (B, H, S_q) with the caller's dimensions."""
        if self.dims > 4:
            return t.reshape(self.batch + t.shape[1:])
        for _ in range(4 - self.dims):
            t = t.squeeze(0)
        return t


def to_operator_form(call: Call) -> tuple[Call, BatchShape]:
    """Returns the call with the schema's tensors: 4-D, broadcast, head_dim at least 1."""
    check_are_dense({name: t for name, t in call.tensors.items() if name != "attn_mask"}, ("query", "key", "value"))
    if not isinstance(call.enable_gqa, (bool, int)):
        raise TypeError(f"enable_gqa: got {call.enable_gqa!r}; allowed: True, False")
    query, key, value, mask, key_mask = (
        call.tensors[name] for name in ("query", "key", "value", "attn_mask", "key_mask")
    )
    dims = max(query.dim(), key.dim(), value.dim())
    q, k, v, batch_shape = _as_4d(query, key, value, call.enable_gqa)
    if q.shape[3] == 0 and k.shape[3] == 0:  # all scores are 0, as with a column of zeros
        q, k = (torch.nn.functional.pad(t, (0, 1)) for t in (q, k))
    if v.shape[3] == 0:
        v = torch.nn.functional.pad(v, (0, 1))
    if mask is not None:
        mask = _mask_as_4d(mask, dims, batch_shape, (q.shape[1], q.shape[2], k.shape[2]))
    if key_mask is not None and dims != 4 and key_mask.shape == (*batch_shape[: dims - 3], k.shape[2]):
        key_mask = key_mask.reshape(-1, key_mask.shape[-1])
    call = call.with_tensors(query=q, key=k, value=v, attn_mask=mask, key_mask=key_mask)
    return call, BatchShape(dims, batch_shape)


def _as_4d(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor, torch.Size]:
    """Returns q, k, v as (B, heads, S, D), and the shape of the leading dimensions that B replaces."""
    tensors = [query, key, value]
    if any(t.dim() != 4 for t in tensors):
        for name, t in zip(("query", "key", "value"), tensors, strict=True):
            if t.dim() < 2:
                raise ValueError(
                    f"{name}: got shape {list(t.shape)}; allowed: at least 2 dimensions, (sequence, head_dim)"
                )
        dims = max(t.dim() for t in tensors)
        tensors = [t.reshape((1,) * (max(dims, 4) - t.dim()) + t.shape) for t in tensors]
    q, k, v = tensors
    batch_shape = q.shape[:-3]
    if k.shape[:-3] != batch_shape or v.shape[:-3] != batch_shape:
        batch_shape = _broadcast("batch", batch_shape, k.shape[:-3], v.shape[:-3])
        q, k, v = (t.expand(batch_shape + t.shape[-3:]) for t in (q, k, v))
    heads = q.shape[-3]
    # One key head is a group of all query heads, also without enable_gqa: the kernels read it once for the group.
    is_shared = k.shape[-3] == v.shape[-3] == 1
    if not enable_gqa and not is_shared and (k.shape[-3] != heads or v.shape[-3] != heads):
        if 1 not in (heads, k.shape[-3], v.shape[-3]):
            raise ValueError(
                f"key, value: got {k.shape[-3]} and {v.shape[-3]} heads for {heads} query heads; allowed: the same "
                "number, or 1, or a divisor with enable_gqa=True"
            )
        (heads,) = _broadcast("heads", *(t.shape[-3:-2] for t in (q, k, v)))
        q, k, v = (t.expand((*t.shape[:-3], heads, *t.shape[-2:])) for t in (q, k, v))
    if len(batch_shape) != 1:
        q, k, v = (_flatten_batch(t) for t in (q, k, v))
    return q, k, v, batch_shape


def _flatten_batch(t: Tensor) -> Tensor:
    """Reshapes (..., heads, S, D) to (B, heads, S, D).

    torch cannot infer a size of -1 without elements, so B is computed.
    """
    return t.reshape(math.prod(t.shape[:-3]), *t.shape[-3:])


def _broadcast(kind: str, *shapes: torch.Size) -> torch.Size:
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError as error:
        got = ", ".join(str(list(shape)) for shape in shapes)
        raise ValueError(
            f"query, key, value: got {kind} dimensions {got}; allowed: dimensions that broadcast together"
        ) from error


def _mask_as_4d(mask: Tensor, dims: int, batch_shape: torch.Size, scores: tuple[int, int, int]) -> Tensor:
    """Returns ``mask`` with 4 dimensions; broadcast dimensions have size 1. ``scores``: heads, seqlen_q and seqlen_k.

    The result is a view, unless some but not all of several batch dimensions are broadcast.
    """
    check_is_dense("attn_mask", mask)
    if mask.dim() > max(dims, 2):
        raise ValueError(
            f"attn_mask: got shape {list(mask.shape)}; allowed: at most the {dims} dimensions of the inputs"
        )
    full = (*batch_shape, *scores)
    _check_broadcast(mask, full)
    mask = mask.reshape((1,) * (len(full) - mask.dim()) + mask.shape)
    if len(batch_shape) == 1:
        return mask
    if all(size == 1 for size in mask.shape[:-3]):
        return mask.reshape(1, *mask.shape[-3:])
    return _flatten_batch(mask.expand(batch_shape + mask.shape[-3:]))


def _check_broadcast(mask: Tensor, full: tuple[int, ...]) -> None:
    """Checks the mask with the caller's shape. An error of csrc/ops/checks would show the 4-D shape."""
    names = ("key's seqlen_k", "query's seqlen_q", "query's heads") + ("batch",) * (len(full) - 3)
    for n, (size, allowed, name) in enumerate(zip(reversed(mask.shape), reversed(full), names, strict=False)):
        if size not in (1, allowed):
            raise ValueError(
                f"attn_mask: got shape {list(mask.shape)}, with size {size} in dimension {mask.dim() - 1 - n}; allowed "
                f"there: 1 or {allowed} ({name})"
            )
