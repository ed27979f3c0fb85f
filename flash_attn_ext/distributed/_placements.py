"""The raw operators, torch.ops.flash_attn_ext, on DTensors. Processes share batches and heads.

This file uses register_torch_dispatch, not register_sharding. With register_sharding, torch caches a strategy by the
tensors of a call. But here the results also depend on options, for example on the wanted gradients.
"""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from .. import _ops
from ._sharded_call import rng_state_at
from ._work import BATCH, HEADS, Work, check_heads, mesh_of


def _dense(name: str, t: Tensor) -> Mapping[str, int]:
    """Returns the dimensions of batches and heads in a tensor of ``attention``."""
    if name == "rng_state":
        return {}
    if name == "key_mask":
        return {BATCH: 0}
    return _per_head(t) if name in ("alibi_slopes", "sink") else {BATCH: 0, HEADS: 1}


def _packed(name: str, t: Tensor) -> Mapping[str, int]:
    """Returns the dimension of heads in a tensor of ``attention_varlen``. Processes do not share sequences."""
    if name in ("query", "key", "value", "out", "grad_out"):
        return {HEADS: 1}
    if name in ("lse", "grad_lse"):
        return {HEADS: 0}
    if name == "attn_mask":
        return {HEADS: t.dim() - 3}
    return {HEADS: _per_head(t)[HEADS]} if name in ("alibi_slopes", "sink") else {}


def _per_head(t: Tensor) -> Mapping[str, int]:
    return {HEADS: 0} if t.dim() == 1 else {BATCH: 0, HEADS: 1}


def _run(op, dims_of, _class, func, _types, args, kwargs):
    """Runs the operator on this process's parts."""
    names = [a.name for a in op._schema.arguments if not a.kwarg_only]
    given = {name: t for name, t in zip(names, args, strict=False) if t is not None}
    query = given["query"]
    sizes = {kind: query.shape[dim] for kind, dim in dims_of("query", query).items()}
    dims = {  # without broadcast dimensions
        name: {kind: dim for kind, dim in dims_of(name, t).items() if t.shape[dim] != 1 or sizes[kind] == 1}
        for name, t in given.items()
    }
    work = _work(given, dims["query"])
    batch, heads = sizes.get(BATCH, 1), sizes[HEADS]
    with torch.no_grad():
        local = {name: work.local(t, dims[name]) for name, t in given.items()}
        if "rng_state" in given and (work.mesh_dims(BATCH) or work.mesh_dims(HEADS)):
            first = work.first_index(BATCH, batch) * heads + work.first_index(HEADS, heads)
            local["rng_state"] = rng_state_at(local["rng_state"], 0, 0, first, heads)
        results = func(*(local.get(name) for name in names), **(kwargs or {}))
        if len(results) == len(_ops.DIFFERENTIABLE):
            return tuple(
                None if t is None else work.assemble_gradient(t, dims[name], given[name].shape)
                for name, t in zip(_ops.DIFFERENTIABLE, results, strict=True)
            )
        out, lse = results
        out_shape = (*query.shape[:-1], given["value"].shape[-1])
        lse_shape = query.shape[:3] if out.dim() == 4 else (heads, out_shape[0])
        return work.assemble(out, dims_of("out", out), out_shape), work.assemble(lse, dims_of("lse", lse), lse_shape)


def _work(given: Mapping[str, Tensor], query_dims: Mapping[str, int]) -> Work:
    mesh = mesh_of({name: given[name] for name in ("query", "key", "value")})
    query, key = given["query"], given["key"]
    assert isinstance(query, DTensor)
    kinds = {dim: kind for kind, dim in query_dims.items()}
    for placement in query.placements:
        if isinstance(placement, Partial) or (isinstance(placement, Shard) and placement.dim not in kinds):
            allowed = ", ".join(f"Shard({dim})" for dim in kinds)
            raise ValueError(
                f"query: got placements {query.placements}; allowed: Replicate(), {allowed}; flash_attn_ext.flash_attn "
                "takes sharded sequences"
            )
    work = Work(mesh, tuple(kinds[p.dim] if isinstance(p, Shard) else None for p in query.placements))
    check_heads("key", query.shape[1], key.shape[1], work.num_parts(HEADS))
    return work


def _refuse(op, *_):
    raise NotImplementedError(
        f"{op.name()}: got DTensors; allowed: ordinary tensors. flash_attn, flash_attn_varlen and "
        "flash_attn_with_kvcache take DTensors"
    )


for _op, _dims in (
    (_ops.attention, _dense), (_ops.attention_backward, _dense),
    (_ops.attention_varlen, _packed), (_ops.attention_varlen_backward, _packed),
):  # fmt: skip
    torch.library.register_torch_dispatch(_op, DTensor, partial(_run, _op, _dims))

for _op in (
    _ops.attention_jvp, _ops.attention_double_backward, _ops.attention_varlen_jvp,
    _ops.attention_varlen_double_backward, _ops.attention_cache, _ops.append_to_cache, _ops.attention_merge_,
    _ops.attention_weights, _ops.attention_weights_backward, _ops.attention_int8,
):  # fmt: skip
    torch.library.register_torch_dispatch(_op, DTensor, partial(_refuse, _op))
