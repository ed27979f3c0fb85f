"""flash_attn_varlen and flash_attn_with_kvcache on DTensors. Processes share the heads and no other dimension."""

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from .. import _cache
from .._attend import attend_locally
from .._call import Call
from ._work import HEADS, Work, check_heads, mesh_of


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Computes a call of :func:`flash_attn_varlen` with DTensors (T, H, D). out and lse have query's placements."""
    given = call.tensors
    query, key, value, mask = (given[name] for name in ("query", "key", "value", "attn_mask"))
    work = _work({"query": query, "key": key, "value": value}, {"query": 1, "key": 1, "value": 1})
    heads = query.shape[1]
    one_key_head = key.shape[1] == 1 != heads
    dims = {name: {} if one_key_head and name != "query" else {HEADS: 1} for name in ("query", "key", "value")}
    if mask is not None and mask.dim() > 2:
        dim = mask.dim() - 3  # (H, T_q, max_seqlen_k), or (B, H, max_seqlen_q, max_seqlen_k)
        dims["attn_mask"] = {HEADS: dim} if mask.shape[dim] != 1 else {}
    local = {name: work.local_if_given(t, dims.get(name, {})) for name, t in given.items() if name != "rng_state"}
    local |= {name: work.local_per_head(given[name]) for name in ("alibi_slopes", "sink")}
    dropped = call.options["dropout_p"] != 0.0
    local["rng_state"] = work.rng_state(given["rng_state"], 1, heads, local["query"].device) if dropped else None
    out, lse = attend_locally(replace(call, tensors=local, enable_gqa=call.enable_gqa or one_key_head))
    out = work.assemble(out, {HEADS: 1}, (*query.shape[:2], value.shape[2]))
    return out, work.assemble(lse, {HEADS: 0}, (heads, query.shape[0]))


def attend_to_cache(call: _cache.CacheCall) -> tuple[Tensor, Tensor]:
    """Computes a call of :func:`flash_attn_with_kvcache` with DTensors.

    out and lse are DTensors with q's placements.
    """
    given = call.tensors
    q, k, v, tree_mask = (given[name] for name in ("q", "k", "v", "tree_mask"))
    for name in ("qv", "k_scales", "v_scales"):
        if given[name] is not None:
            raise NotImplementedError(f"{name}: got a tensor together with DTensors; allowed there: None")
    of_q = q.dim() - 2  # (B, S_q, H, D), or packed (T_q, H, D)
    of_new = 0 if k is None else k.dim() - 2
    caches = {name: given[name] for name in ("k_cache", "v_cache")}
    named = {"q": q, **caches} | {name: t for name, t in (("k", k), ("v", v)) if t is not None}
    work = _work(named, {"q": of_q, "k_cache": 2, "v_cache": 2, "k": of_new, "v": of_new})
    heads, one_key_head = q.shape[of_q], caches["k_cache"].shape[2] == 1 != q.shape[of_q]
    dims = {"q": {HEADS: of_q}}
    if not one_key_head:
        dims |= {"k_cache": {HEADS: 2}, "v_cache": {HEADS: 2}, "k": {HEADS: of_new}, "v": {HEADS: of_new}}
    for name in ("q_descale", "k_descale", "v_descale"):
        scale = given[name]
        dims[name] = {HEADS: scale.dim() - 1} if scale is not None and scale.shape[-1] != 1 else {}
    if tree_mask is not None and (tree_mask.dim() == 4 or (q.dim() == 3 and tree_mask.dim() == 3)):
        dim = tree_mask.dim() - 3
        dims["tree_mask"] = {HEADS: dim} if tree_mask.shape[dim] != 1 else {}
    local = {name: work.local_if_given(t, dims.get(name, {})) for name, t in given.items()}
    local |= {name: work.local_per_head(given[name]) for name in ("alibi_slopes", "sink")}
    for name, cache in caches.items():
        if k is not None and local[name].data_ptr() != cache.to_local().data_ptr():
            raise ValueError(
                f"{name}: got placements {cache.placements}, with k to be written to it; allowed: "
                f"{tuple(work.placements(dims.get(name, {})))}, because otherwise k would be written to a copy"
            )
    cache_seqlens = call.options["cache_seqlens"]
    if isinstance(cache_seqlens, Tensor):
        call = call.with_options(cache_seqlens=work.local(cache_seqlens, {}))
    out, lse = _cache.attend(call.with_tensors(**local))
    rows = q.shape[0] if q.dim() == 3 else q.shape[1]
    lse_shape = (heads, rows) if q.dim() == 3 else (q.shape[0], heads, rows)
    out = work.assemble(out, {HEADS: of_q}, (*q.shape[:-1], caches["v_cache"].shape[-1]))
    return out, work.assemble(lse, {HEADS: len(lse_shape) - 2}, lse_shape)


def _work(named: Mapping[str, Tensor], heads_dim: Mapping[str, int]) -> Work:
    """Checks the DTensors, and returns how the processes share the heads. The first tensor decides."""
    mesh = mesh_of(named)
    for name, t in named.items():
        assert isinstance(t, DTensor)
        for placement in t.placements:
            if not isinstance(placement, Replicate) and placement != Shard(heads_dim[name]):
                raise ValueError(
                    f"{name}: got placements {t.placements}; allowed: Replicate(), and Shard({heads_dim[name]}), the "
                    "heads, of packed sequences and caches"
                )
    query_name, key_name = list(named)[:2]
    query, key = named[query_name], named[key_name]
    assert isinstance(query, DTensor)
    work = Work(mesh, tuple(HEADS if isinstance(placement, Shard) else None for placement in query.placements))
    check_heads(key_name, query.shape[heads_dim[query_name]], key.shape[heads_dim[key_name]], work.num_parts(HEADS))
    return work
