"""shard_sequence and unshard_sequence: convert the whole sequence to this process's rows, and back."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ._agreement import checked_everywhere, shape_of
from ._exchange import all_gather, reduce_scatter_in_order
from ._group import Group, check_device, resolve_group
from ._layout import Layout, layout_of


def shard_sequence(
    x: Tensor,
    dim: int,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    balanced: bool = True,
    uneven: bool = False,
) -> Tensor:
    """Returns this process's rows of ``x`` along ``dim``. Every process holds the whole ``x``, and nothing is sent.

    Shard tensors, position ids and labels in the same way. Pass explicit position ids to the model, because the rows of
    a process are not consecutive.

    Args:
        x: any tensor, the same on every process of the group.
        dim: the sequence's dimension.
        group: a ProcessGroup. None, without ``mesh``: the default group.
        mesh: a DeviceMesh of one dimension, in place of ``group``.
        balanced: True: cuts the sequence into 2 n chunks for n processes. Process r gets the chunks r and 2 n - 1 - r
            ("zigzag"), so that all processes have the same work in a causal attention. False: n chunks; process r gets
            chunk r, which is better with short windows.
        uneven: allows a length that the number of chunks does not divide. The first chunks then have one row more, and
            :func:`context_parallel_attn` and :func:`unshard_sequence` need ``seqlen=``.

    Returns:
        A contiguous tensor, (..., rows, ...). Differentiable. The gradient of ``x`` is 0 in the rows of other
        processes.

    Raises:
        ValueError: the number of chunks does not divide the length, without ``uneven``; a group without this process.
    """
    where = resolve_group(group, mesh)
    dim = _checked_dim(x, dim)
    layout = Layout(x.shape[dim], where.size, balanced)
    if layout.seqlen % layout.chunks and not uneven:
        raise ValueError(
            f"x: got {layout.seqlen} rows in dimension {dim} for {layout.chunks} chunks ({where.size} processes"
            f"{', balanced' if balanced else ''}); allowed: a multiple, or uneven=True"
        )
    pieces = [x.narrow(dim, begin, end - begin) for begin, end, _ in layout.pieces(where.rank)]
    return torch.cat(pieces, dim)


def unshard_sequence(
    x: Tensor,
    dim: int,
    *,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    balanced: bool = True,
    seqlen: int | None = None,
) -> Tensor:
    """Returns the whole sequence on every process: the inverse of :func:`shard_sequence`. One all-gather.

    Args:
        x: this process's rows.
        dim: the sequence's dimension.
        group, mesh, balanced: as for :func:`shard_sequence`.
        seqlen: the length of the whole sequence. Needed for unequal shards. None: rows times processes.

    Returns:
        (..., seqlen, ...). Differentiable: the gradients of all processes are added, in the order of the processes.

    Raises:
        ValueError: ``x`` has a wrong number of rows; the shards of the processes do not match; a group without this
        process.
    """
    where = resolve_group(group, mesh)

    def check() -> tuple[int, Layout]:
        own_dim = _checked_dim(x, dim)
        check_device(where, "x", x.device)
        return own_dim, layout_of("x", x.shape[own_dim], seqlen, where.rank, where.size, balanced)

    def describe(checked: tuple[int, Layout]) -> dict[str, object]:
        shape = shape_of(x, None if seqlen is None else checked[0])
        return {"x": shape, "x.dtype": str(x.dtype), "dim": checked[0], "balanced": bool(balanced), "seqlen": seqlen}

    dim, layout = checked_everywhere(where, x, check, describe)
    return _Unshard.apply(x, dim, where, layout)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim: int, group: Group, layout: Layout) -> Tensor:
        ctx.dim, ctx.group, ctx.layout = dim, group, layout
        rows_first = x.movedim(dim, 0)
        shards = all_gather(group, _padded(rows_first, layout.max_rows()))
        whole = torch.cat([shards[rank, begin:end] for rank, begin, end in layout.in_order()])
        return whole.movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx, grad: Tensor):
        rows_first = grad.movedim(ctx.dim, 0)
        shares = []
        for rank in range(ctx.group.size):
            rows = torch.cat([rows_first[begin:end] for begin, end, _ in ctx.layout.pieces(rank)])
            shares.append(_padded(rows, ctx.layout.max_rows()))
        own = reduce_scatter_in_order(ctx.group, torch.stack(shares))[: ctx.layout.rows(ctx.group.rank)]
        return own.movedim(0, ctx.dim), None, None, None


def _padded(t: Tensor, rows: int) -> Tensor:
    """Pads the first dimension of ``t`` with zeros to ``rows``."""
    if t.shape[0] == rows:
        return t.contiguous()
    return torch.cat([t, t.new_zeros(rows - t.shape[0], *t.shape[1:])])


def _checked_dim(x: Tensor, dim: int) -> int:
    if not isinstance(x, Tensor):
        raise TypeError(f"x: got {type(x).__name__}; allowed: a torch.Tensor")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim: got {dim} for a tensor of {x.dim()} dimensions; allowed: {-x.dim()} to {x.dim() - 1}")
    return dim % x.dim()
