"""flash_attn on DTensors.

The placement of ``query`` on each dimension of the mesh decides how the processes share the work. The other tensors are
redistributed to match. Batches and heads need no communication. A sharded sequence needs context parallel attention.
"""

from dataclasses import replace

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from .._attend import attend_locally
from .._call import Call
from ._group import resolve_group
from ._work import BATCH, HEADS, SEQUENCE, Work, check_heads, mesh_of
from .attention import attend_over_processes

_DIMS = {BATCH: 0, HEADS: 1, SEQUENCE: 2}


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Computes a call of :func:`flash_attn` with DTensors (B, H, S, D). out and lse have query's placements."""
    query, key, value, mask = (call.tensors[name] for name in ("query", "key", "value", "attn_mask"))
    work = _work(query, key, value, call.enable_gqa)
    batch, heads, _, _ = query.shape
    one_key_head = key.shape[1] == 1 != heads
    of_keys = {BATCH: 0, SEQUENCE: 2} if one_key_head else _DIMS
    q, dropout_p = work.local(query, _DIMS), call.options["dropout_p"]
    rng_state = work.rng_state(call.tensors["rng_state"], batch, heads, q.device) if dropout_p != 0.0 else None
    local = replace(call, enable_gqa=call.enable_gqa or one_key_head, return_lse=True).with_tensors(
        query=q,
        key=work.local(key, of_keys),
        value=work.local(value, of_keys),
        attn_mask=_local_mask(work, mask),
        alibi_slopes=work.local_per_head(call.tensors["alibi_slopes"]),
        sink=work.local_per_head(call.tensors["sink"]),
        rng_state=rng_state,
        key_mask=work.local_if_given(call.tensors["key_mask"], {BATCH: 0}),
    )
    over_sequence = work.mesh_dims(SEQUENCE)
    if over_sequence:
        processes = resolve_group(work.mesh.get_group(over_sequence[0]), None)
        out, lse = attend_over_processes(lambda: local, local.tensors["query"], processes, balanced=False)
    else:
        out, lse = attend_locally(local)
    lse_shape = query.shape[:3]
    return work.assemble(out, _DIMS, (*lse_shape, value.shape[3])), work.assemble(lse, _DIMS, lse_shape)


def _local_mask(work: Work, mask: Tensor | None) -> Tensor | None:
    if mask is None:
        return None
    if mask.dim() > 4:
        raise ValueError(f"attn_mask: got {mask.dim()} dimensions; allowed: at most 4")
    mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
    return work.local(mask, {kind: dim for kind, dim in _DIMS.items() if mask.shape[dim] != 1})


def _work(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> Work:
    """Checks the DTensors, and returns how the processes share the work."""
    named = {"query": query, "key": key, "value": value}
    mesh = mesh_of(named)
    for name, t in named.items():
        if t.dim() != 4:
            raise ValueError(f"{name}: got a DTensor of shape {list(t.shape)}; allowed: (B, heads, S, head_dim)")
    if key.shape[0] != query.shape[0] or value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"key, value: got {list(key.shape)} and {list(value.shape)} for a query of {list(query.shape)}; allowed "
            "for DTensors: the same batch, and key's heads and rows"
        )
    placements = [t.placements for t in named.values() if isinstance(t, DTensor)]
    work = Work(mesh, tuple(_shared_dimension(*of_dimension) for of_dimension in zip(*placements, strict=True)))
    sequence = work.mesh_dims(SEQUENCE)
    if len(sequence) > 1:
        raise ValueError(f"query: got a sequence sharded over {len(sequence)} dimensions of the mesh; allowed: one")
    for name in ("query", "key"):
        rows, parts = named[name].shape[2], work.num_parts(SEQUENCE)
        if rows % parts:
            raise ValueError(f"{name}: got {rows} rows sharded over {parts} processes; allowed: a multiple")
    heads, heads_kv = query.shape[1], key.shape[1]
    if not enable_gqa and heads_kv not in (1, heads):
        raise ValueError(f"key: got {heads_kv} heads for {heads} query heads; allowed: the same, 1, or enable_gqa=True")
    check_heads("key", heads, heads_kv, work.num_parts(HEADS))
    return work


def _shared_dimension(query, *key_and_value) -> str | None:
    """Returns the kind of dimension that is sharded in query, or, if query is not sharded, in key or value."""
    names = {dim: kind for kind, dim in _DIMS.items()}
    if isinstance(query, Shard):
        return names.get(query.dim)
    for placement in key_and_value:
        if isinstance(placement, Shard) and names.get(placement.dim) in (BATCH, HEADS):
            return names[placement.dim]
    return None
