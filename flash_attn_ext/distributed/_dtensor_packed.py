"""flash_attn_varlen and flash_attn_with_kvcache on DTensors: heads are shared, everything else is whole everywhere."""

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..kvcache import flash_attn_with_kvcache
from ..varlen import flash_attn_varlen
from ._work import HEADS, Work, check_heads, mesh_of


def varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    alibi_slopes: Tensor | None,
    sink: Tensor | None,
    rng_state: Tensor | None,
    *,
    dropout_p: float,
    return_lse: bool,
    tensors: Mapping[str, Tensor | None],
    **options,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_attn_varlen` of DTensors (T, H, D) each; results are DTensors, placed as query is."""
    named = {"query": query, "key": key, "value": value}
    work = _work(named, {"query": 1, "key": 1, "value": 1})
    heads = query.shape[1]
    of_keys = {} if key.shape[1] == 1 != heads else {HEADS: 1}
    mask_dims = {}
    if attn_mask is not None and attn_mask.dim() > 2:
        dim = attn_mask.dim() - 3  # (H, T_q, max_seqlen_k), or (B, H, max_seqlen_q, max_seqlen_k)
        mask_dims = {HEADS: dim} if attn_mask.shape[dim] != 1 else {}
    q = work.local(query, {HEADS: 1})
    out, lse = flash_attn_varlen(
        q, work.local(key, of_keys), work.local(value, of_keys),
        **{name: work.local_if_given(t, {}) for name, t in tensors.items()},
        attn_mask=work.local_if_given(attn_mask, mask_dims),
        alibi_slopes=work.local_per_head(alibi_slopes),
        sink=work.local_per_head(sink),
        rng_state=work.rng_state(rng_state, 1, heads, q.device) if dropout_p != 0.0 else None,
        dropout_p=dropout_p, return_lse=True, **options | {"enable_gqa": options["enable_gqa"] or not of_keys},
    )  # fmt: skip
    whole = work.whole(out, {HEADS: 1}, (*query.shape[:2], value.shape[2]))
    if not return_lse:
        return whole
    return whole, work.whole(lse, {HEADS: 0}, (heads, query.shape[0]))


def with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    alibi_slopes: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    tree_mask: Tensor | None,
    sink: Tensor | None,
    *,
    return_softmax_lse: bool,
    **others,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_attn_with_kvcache` of DTensors; results are DTensors, placed as q is."""
    of_q = q.dim() - 2  # (B, S_q, H, D), or packed (T_q, H, D)
    of_new = 0 if k is None else k.dim() - 2
    named = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    named |= {name: t for name, t in (("k", k), ("v", v)) if t is not None}
    work = _work(named, {"q": of_q, "k_cache": 2, "v_cache": 2, "k": of_new, "v": of_new})
    heads, one_key_head = q.shape[of_q], k_cache.shape[2] == 1 != q.shape[of_q]
    caches = {name: work.local(named[name], {} if one_key_head else {HEADS: 2}) for name in ("k_cache", "v_cache")}
    for name, local in caches.items():
        if k is not None and local.data_ptr() != named[name].to_local().data_ptr():
            raise ValueError(
                f"{name}: got placements {named[name].placements}, with k to be written to it; allowed: "
                f"{tuple(work.placements({} if one_key_head else {HEADS: 2}))}, as a copy would be written to otherwise"
            )

    def scale(t: Tensor | None) -> Tensor | None:
        return None if t is None else work.local(t, {HEADS: t.dim() - 1} if t.shape[-1] != 1 else {})

    tree_dims = {}
    if tree_mask is not None and (tree_mask.dim() == 4 or (q.dim() == 3 and tree_mask.dim() == 3)):
        dim = tree_mask.dim() - 3
        tree_dims = {HEADS: dim} if tree_mask.shape[dim] != 1 else {}
    out, lse = flash_attn_with_kvcache(
        work.local(q, {HEADS: of_q}), *caches.values(),
        *(work.local_if_given(t, {} if one_key_head else {HEADS: of_new}) for t in (k, v)),
        alibi_slopes=work.local_per_head(alibi_slopes), sink=work.local_per_head(sink), k_descale=scale(k_descale),
        v_descale=scale(v_descale), tree_mask=work.local_if_given(tree_mask, tree_dims), return_softmax_lse=True,
        **{name: work.local(t, {}) if isinstance(t, Tensor) else t for name, t in others.items()},
    )  # fmt: skip
    whole = work.whole(out, {HEADS: of_q}, (*q.shape[:-1], v_cache.shape[-1]))
    if not return_softmax_lse:
        return whole
    rows = (q.shape[0],) if q.dim() == 3 else (q.shape[1],)
    lse_shape = (heads, *rows) if q.dim() == 3 else (q.shape[0], heads, *rows)
    return whole, work.whole(lse, {HEADS: len(lse_shape) - 2}, lse_shape)


def _work(named: Mapping[str, Tensor], heads_dim: Mapping[str, int]) -> Work:
    """Shares heads as the first tensor does; errors name the argument."""
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
    check_heads(key_name, query.shape[heads_dim[query_name]], key.shape[heads_dim[key_name]], work.parts(HEADS))
    return work
