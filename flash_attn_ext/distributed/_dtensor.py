"""flash_attn on DTensors: each process computes the batches, heads or rows that it holds.

The placement of ``query`` on each dimension of the mesh decides how the work is shared there; the other tensors are
brought to what fits. Batches and heads need no communication, the sequence is context parallel attention.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..functional import flash_attn, new_rng_state
from ._exchange import broadcast
from ._group import resolve_group
from ._plan import rng_state_at
from .attention import context_parallel_attn

BATCH, HEADS, SEQUENCE = 0, 1, 2


class _Work(NamedTuple):
    """Over which dimension of query the work is shared on each dimension of the mesh; None: not at all."""

    mesh: DeviceMesh
    shared: tuple[int | None, ...]

    def over(self, dim: int) -> list[int]:
        """The dimensions of the mesh that share this one."""
        return [n for n, shared in enumerate(self.shared) if shared == dim]

    def placements(self, dims: dict[int, int]) -> list[Placement]:
        """Those of a tensor that has dimension ``dims[d]`` where query has dimension d; others are replicated."""
        return [Replicate() if d not in dims else Shard(dims[d]) for d in self.shared]

    def local(self, t: Tensor | None, dims: dict[int, int]) -> Tensor | None:
        """This process's part of a tensor; its gradient is summed over the processes that share its work."""
        if t is None:
            return None
        if not isinstance(t, DTensor):
            t = DTensor.from_local(t, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        wanted = self.placements(dims)
        grads = [
            Partial() if shared is not None and isinstance(placement, Replicate) else placement
            for shared, placement in zip(self.shared, wanted, strict=True)
        ]
        return t.redistribute(self.mesh, wanted).to_local(grad_placements=grads)

    def first(self, dim: int, size: int) -> int:
        """The first element of a dimension of query that this process has."""
        first = 0
        coordinate = self.mesh.get_coordinate()
        for n in self.over(dim):  # torch.chunk's pieces, one dimension of the mesh after the other
            chunk = math.ceil(size / self.mesh.size(n))
            begin = min(coordinate[n] * chunk, size)
            first, size = first + begin, max(min(chunk, size - begin), 0)
        return first


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    rng_state: Tensor | None,
    key_mask: Tensor | None,
    *,
    dropout_p: float,
    return_lse: bool,
    enable_gqa: bool,
    **options,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_attn` of DTensors, (B, H, S, D) each; results are DTensors, placed as query is."""
    if key_mask is not None:
        raise NotImplementedError(
            "key_mask: got a tensor beside DTensors; allowed: None, and an attn_mask (B, 1, 1, S_k)"
        )
    work = _work(query, key, value, enable_gqa)
    mesh = work.mesh
    batch, heads, _, _ = query.shape
    key_dims = {BATCH: 0, SEQUENCE: 2} if key.shape[1] == 1 != heads else {BATCH: 0, HEADS: 1, SEQUENCE: 2}
    q = work.local(query, {BATCH: 0, HEADS: 1, SEQUENCE: 2})
    k, v = (work.local(t, key_dims) for t in (key, value))
    if attn_mask is not None:
        if attn_mask.dim() > 4:
            raise ValueError(f"attn_mask: got {attn_mask.dim()} dimensions; allowed: at most 4")
        attn_mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape))
        attn_mask = work.local(attn_mask, {d: d for d in (BATCH, HEADS, SEQUENCE) if attn_mask.shape[d] != 1})
    slopes, sink = (
        work.local(t, {} if t is None else {HEADS: t.dim() - 1} | ({BATCH: 0} if t.dim() == 2 else {}))
        for t in (alibi_slopes, sink)
    )
    if dropout_p != 0.0:
        rng_state = _shared_rng_state(rng_state, work, q.device)
        head = work.first(BATCH, batch) * heads + work.first(HEADS, heads)
        if work.over(BATCH) or work.over(HEADS):
            rng_state = rng_state_at(rng_state, 0, 0, head, heads)
    arguments = dict(
        alibi_slopes=slopes, sink=sink, rng_state=rng_state, dropout_p=dropout_p, return_lse=True,
        enable_gqa=enable_gqa or key.shape[1] == 1, **options,
    )  # fmt: skip
    over_sequence = work.over(SEQUENCE)
    if over_sequence:
        names = mesh.mesh_dim_names
        group = mesh.get_group(over_sequence[0]) if mesh.ndim > 1 or names else mesh.get_group()
        for name in ("num_splits", "unified_max"):
            arguments.pop(name, None)
        out, lse = context_parallel_attn(q, k, v, attn_mask, group=group, balanced=False, **arguments)
    else:
        out, lse = flash_attn(q, k, v, attn_mask, **arguments)
    results = [_as_dtensor(work, t, (*query.shape[:3], *tail)) for t, tail in ((out, value.shape[3:]), (lse, ()))]
    return (results[0], results[1]) if return_lse else results[0]


def _work(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> _Work:
    """How the work is shared; errors name the argument."""
    named = {"query": query, "key": key, "value": value}
    meshes = {t.device_mesh for t in named.values() if isinstance(t, DTensor)}
    for name, t in named.items():
        if not isinstance(t, DTensor):
            raise TypeError(
                f"{name}: got a {type(t).__name__} beside DTensors; allowed: query, key and value as DTensors"
            )
        if t.dim() != 4:
            raise ValueError(f"{name}: got a DTensor of shape {list(t.shape)}; allowed: (B, heads, S, head_dim)")
    if len(meshes) != 1:
        raise ValueError("key, value: got a mesh other than query's; allowed: the same")
    if key.shape[0] != query.shape[0] or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"key, value: got {list(key.shape)} and {list(value.shape)} for a query of {list(query.shape)}; allowed "
            "for DTensors: the same batch, and key's heads and rows"
        )
    mesh = meshes.pop()
    placements = [
        next((p.dim for p in those if isinstance(p, Shard) and p.dim in (BATCH, HEADS)), None)
        if not isinstance(those[0], Shard)
        else those[0].dim
        for those in zip(*(t.placements for t in (query, key, value)), strict=True)
    ]
    work = _Work(mesh, tuple(None if dim == 3 else dim for dim in placements))
    sequence = work.over(SEQUENCE)
    if len(sequence) > 1:
        raise ValueError(f"query: got a sequence sharded over {len(sequence)} dimensions of the mesh; allowed: one")
    for name, t in (("query", query), ("key", key)):
        if sequence and t.shape[2] % mesh.size(sequence[0]):
            raise ValueError(
                f"{name}: got {t.shape[2]} rows sharded over {mesh.size(sequence[0])} processes; allowed: a multiple"
            )
    heads, heads_kv, parts = query.shape[1], key.shape[1], math.prod(mesh.size(n) for n in work.over(HEADS))
    if not enable_gqa and heads != heads_kv and heads_kv != 1:
        raise ValueError(f"key: got {heads_kv} heads for {heads} query heads; allowed: the same, 1, or enable_gqa=True")
    if heads != heads_kv and heads_kv != 1 and heads_kv % parts:
        raise ValueError(f"key: got {heads_kv} heads sharded over {parts} processes; allowed: a multiple, or 1")
    return work


def _shared_rng_state(rng_state: Tensor | None, work: _Work, device: torch.device) -> Tensor:
    """A dropout state that all processes of the mesh have: that of the first one."""
    if isinstance(rng_state, DTensor):
        return rng_state.full_tensor()
    rng_state = new_rng_state(device) if rng_state is None else rng_state.clone()
    for n in range(work.mesh.ndim):
        broadcast(resolve_group(work.mesh.get_group(n), None), rng_state)
    return rng_state


def _as_dtensor(work: _Work, t: Tensor, shape: tuple[int, ...]) -> DTensor:
    stride, strides = 1, []
    for size in reversed(shape):
        strides.insert(0, stride)
        stride *= max(size, 1)
    placements = work.placements({BATCH: 0, HEADS: 1, SEQUENCE: 2})
    return DTensor.from_local(t, work.mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides))
