"""flash_attn_with_kvcache: attention of new tokens to a cache of keys and values, which they are appended to first."""

import contextlib
import re

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _append, _ops  # noqa: F401  _append registers the operator for CUDA
from ._flash_arguments import exactly_one_name, sink_of, true_or_false, whole_number, window_of
from .functional import check_is_dense, checked_options, operator_options, some_dtensor

# The operators' names of arguments, in their error messages, and the caller's names.
_NAMES_OF_APPEND = {
    "query": "q", "key": "k", "value": "v", "key_cache": "k_cache", "value_cache": "v_cache",
    "query's": "q's", "key's": "k's",
}  # fmt: skip
_NAMES_OF_ATTENTION = {
    "query": "q", "key": "k_cache", "value": "v_cache", "seqused_k": "cache_seqlens", "batch_idx": "cache_batch_idx",
    "leftpad": "cache_leftpad", "scale": "softmax_scale", "window": "window_size", "query's": "q's",
    "key's": "k_cache's",
}  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    page_table: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    tree_mask: Tensor | None = None,
    sink: Tensor | None = None,
    learnable_sink: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash-attention's function of this name: appends ``k`` and ``v`` to the caches in place, then attends.

    B counts sequences, S_q the new queries and S_new the new keys of each. Without derivatives: an input that requires
    a gradient is an error unless gradients are disabled. No check fails after rows were written. Causal masks, windows
    and ALiBi are aligned to the lower right corner: the last query has the position of the last key.

    Args:
        q: (B, S_q, H, D); or packed (T_q, H, D) with ``cu_seqlens_q``.
        k_cache: (caches, rows, H_k, D), with H a multiple of H_k; or, with ``block_table``, pages
            (num_pages, page_size, H_k, D) of any size. ``q``'s dtype; or int8, float8_e4m3fn or float8_e5m2 with
            ``k_descale``. Its last dimension is contiguous. Where rows are appended, no two elements share memory, also
            not with ``v_cache``, ``q``, ``k`` or ``v``; overlaps of strided views are not all found.
        v_cache: (caches, rows, H_k, D_v), likewise.
        k: (B, S_new, H_k, D) to be written behind each sequence's ``cache_seqlens`` rows; or packed (T_new, H_k, D)
            with ``cu_seqlens_k_new``. Pages for them must be in ``block_table``.
        v: (B, S_new, H_k, D_v), likewise.
        rotary_cos: (positions, rotary_dim / 2). With it ``k`` is rotated by its position before it is written, and
            ``q`` by its own position if ``causal`` or a window is given, otherwise by that of the first new key.
        rotary_sin: likewise.
        cache_seqlens: how many rows of each sequence are in the cache: (B), int32 or int64, or one number. None: all.
        cache_batch_idx: (B): which of the caches is each sequence's. None: its own number. With ``block_table``: which
            row of the table, and the table may have any number of rows.
        cache_leftpad: (B): so many rows at the start of each cache are left out. Rotary positions count from the
            cache's start all the same, as in flash-attention; ``rotary_seqlens`` gives other positions.
        block_table: (B, pages of a sequence), int32 or int64: numbers of its pages.
        window_size: (left, right); -1 is no limit.
        rotary_interleaved: pairs of columns are (0, 1), (2, 3), ...; otherwise c and c + rotary_dim / 2.
        alibi_slopes: (H) or (B, H).
        num_splits: pieces of the keys, as in :func:`flash_attn`.
        return_softmax_lse: also return the logsumexp of the scores, (B, H, S_q), or (H, T_q).
        cu_seqlens_q, cu_seqlens_k_new: (B + 1) offsets of packed ``q`` and ``k``.
        max_seqlen_q: the longest packed sequence of ``q``; None is always right.
        rotary_seqlens: (B): positions of the first new keys for the rotation, in place of ``cache_seqlens``.
        page_table: FlashAttention-3's name for ``block_table``.
        k_descale: what 8-bit keys are multiplied with: (H_k), (caches or pages, H_k), or broadcastable to
            (caches or pages, rows, H_k): one for each token.
        v_descale: likewise.
        tree_mask: of the new tokens among themselves, where they are a tree of guesses (speculative decoding): row i
            says to which of the sequence's own S_q queries' keys, its last S_q, query i attends. All keys before are
            visible. bool, True attends, or float, added. (S_q, S_q), (B, S_q, S_q) or broadcastable to
            (B, H, S_q, S_q); packed: (T_q, max_seqlen_q) or (H, T_q, max_seqlen_q). ``causal`` and a window apply
            besides: leave ``causal`` out for a tree, whose branches lie behind each other.
        sink: (H) or (B, H): one more score in each row, without a value, as in :func:`flash_attn`.
        learnable_sink: FlashAttention-4's name for ``sink``.
        qv: not taken: multi-head latent attention's second query has no kernel here.

    Returns:
        out (B, S_q, H, D_v) or (T_q, H, D_v).

    Raises:
        TypeError, ValueError: an argument is not allowed, and on CPU also lengths, positions or page numbers outside
            the cache.

    Source: Dao et al., "Flash-Decoding", 2023; Kwon et al., "PagedAttention", 2023 (arXiv 2309.06180).
    """
    block_table, sink = with_one_name(qv, page_table, block_table, learnable_sink, sink)
    return_softmax_lse = true_or_false("return_softmax_lse", return_softmax_lse)
    if some_dtensor(q, k_cache, v_cache, k, v):
        from .distributed import _dtensor_packed  # which imports torch.distributed.tensor

        return _dtensor_packed.with_kvcache(
            q, k_cache, v_cache, k, v, alibi_slopes, k_descale, v_descale, tree_mask, sink, rotary_cos=rotary_cos,
            rotary_sin=rotary_sin, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad, block_table=block_table, softmax_scale=softmax_scale, causal=causal,
            window_size=window_size, softcap=softcap, rotary_interleaved=rotary_interleaved, num_splits=num_splits,
            return_softmax_lse=return_softmax_lse, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new,
            max_seqlen_q=max_seqlen_q, rotary_seqlens=rotary_seqlens,
        )  # fmt: skip
    check_not_differentiated("flash_attn_with_kvcache", q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    append, attend = operator_arguments(
        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes, num_splits,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens, k_descale=k_descale, v_descale=v_descale, tree_mask=tree_mask, sink=sink,
    )  # fmt: skip
    if append is not None:
        if not torch.compiler.is_compiling():  # a compiled graph is checked when it is traced, before anything runs
            values = list(attend.values())
            count = len(_ops.CACHE_TENSORS)
            with _renamed_errors(_NAMES_OF_ATTENTION):
                _ops.check_cache(tuple(values[:count]), tuple(values[count:]))
        with _renamed_errors(_NAMES_OF_APPEND):
            rotated, attend["seqused_k"] = _ops.append_to_cache(**append)
        if rotary_cos is not None:
            attend["query"] = rotated
    with _renamed_errors(_NAMES_OF_ATTENTION):
        out, lse = _ops.attention_cache(**attend)
    if cu_seqlens_q is None:
        out = out.unflatten(0, q.shape[:2])
        lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return (out, lse) if return_softmax_lse else out


def check_not_differentiated(function: str, **tensors: Tensor | None) -> None:
    """Refuses tensors whose gradient or tangent somebody may ask for: operators on caches have no derivative."""
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            continue
        if torch.is_grad_enabled() and t.requires_grad:
            raise NotImplementedError(
                f"{name}: got a tensor that requires a gradient; allowed in {function}: tensors that require none, or "
                "torch.no_grad(). flash_attn_varlen has gradients"
            )
        if forward_ad.unpack_dual(t).tangent is not None:
            raise NotImplementedError(f"{name}: got a tensor with a tangent; allowed in {function}: tensors without")


@contextlib.contextmanager
def _renamed_errors(names: dict[str, str]):
    """Puts the caller's names of arguments into an operator's errors."""
    if torch.compiler.is_compiling():
        yield
        return
    try:
        yield
    except (TypeError, ValueError) as error:
        name, colon, rest = str(error).partition(":")
        if not colon or name not in names:
            raise
        rest = re.sub(r"\b(query's|key's)(?=\W)", lambda found: names.get(found[0], found[0]), rest)
        raise type(error)(f"{names[name]}:{rest}") from None


def with_one_name(qv, page_table, block_table, learnable_sink, sink):
    """block_table and sink, whichever of their names was used."""
    if qv is not None:
        raise NotImplementedError("qv: got a tensor; allowed: None. Its kernel does not exist here")
    block_table = exactly_one_name("page_table", page_table, "block_table", block_table)
    sink = exactly_one_name("learnable_sink", learnable_sink, "sink", sink)
    return block_table, sink


def operator_arguments(
    q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
    softmax_scale, causal, window_size, softcap, rotary_interleaved, alibi_slopes, num_splits, *, cu_seqlens_q,
    cu_seqlens_k_new, max_seqlen_q, rotary_seqlens, k_descale, v_descale, tree_mask, sink,
) -> tuple[dict | None, dict]:  # fmt: skip
    """The arguments of append_to_cache, None if nothing is appended, and of attention_cache, in their schemas' order.

    The latter has the queries and lengths from before: rotated and longer ones are results of append_to_cache.
    """
    given = {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin, "cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad,
        "block_table": block_table, "alibi_slopes": alibi_slopes, "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k_new": cu_seqlens_k_new, "rotary_seqlens": rotary_seqlens, "k_descale": k_descale,
        "v_descale": v_descale, "tree_mask": tree_mask, "sink": sink,
    }  # fmt: skip
    for name, t in given.items():
        if t is not None or name in ("q", "k_cache", "v_cache"):
            check_is_dense(name, t)
    for name, t in (("k_cache", k_cache), ("v_cache", v_cache)):
        if t.dim() != 4:
            raise ValueError(f"{name}: got shape {list(t.shape)}; allowed: (caches or pages, rows, heads_k, head_dim)")
    for name, t in (("block_table", block_table), ("tree_mask", tree_mask)):
        if t is not None and t.dim() < 2:
            raise ValueError(f"{name}: got shape {list(t.shape)}; allowed: at least 2 dimensions")
    for name, t, other, needed in (
        ("rotary_cos", rotary_cos, "rotary_sin", rotary_sin), ("rotary_sin", rotary_sin, "rotary_cos", rotary_cos),
        ("rotary_cos", rotary_cos, "k", k), ("k", k, "v", v), ("v", v, "k", k),
    ):  # fmt: skip
        if t is not None and needed is None:
            raise ValueError(f"{name}: got one without {other}; allowed: both or none")
    causal = true_or_false("causal", causal)
    rotary_interleaved = true_or_false("rotary_interleaved", rotary_interleaved)
    window = window_of(window_size)
    max_seqlen_q, num_splits = whole_number("max_seqlen_q", max_seqlen_q), whole_number("num_splits", num_splits)
    packed = cu_seqlens_q is not None
    if packed and tree_mask is not None and max_seqlen_q is None:
        max_seqlen_q = tree_mask.shape[-1]
    if isinstance(max_seqlen_q, int) and not 0 <= max_seqlen_q < 2**63:
        raise ValueError(f"max_seqlen_q: got {max_seqlen_q}; allowed: None, or an int of 0 or more")
    cu_seqlens, batch, longest = _query_offsets(q, cu_seqlens_q, max_seqlen_q)
    if block_table is not None and cache_batch_idx is not None:
        block_table, cache_batch_idx = _rows_of_table(block_table, cache_batch_idx, batch), None
    lengths = _lengths(
        cache_seqlens, batch, k_cache.shape[1] * (1 if block_table is None else block_table.shape[-1]), q
    )
    rows = q.reshape(-1, *q.shape[-2:])
    scales = {
        "key_scale": _as_scale("k_descale", k_descale, k_cache),
        "value_scale": _as_scale("v_descale", v_descale, v_cache),
    }
    append = None
    if k is not None:
        k, v, cu_seqlens_new = _new_rows(k, v, k_cache, batch, cu_seqlens_k_new)
        append = {
            "query": rows,
            "key": k,
            "value": v,
            "key_cache": k_cache,
            "value_cache": v_cache,
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_k_new": cu_seqlens_new,
            "cache_seqlens": lengths,
            "rotary_cos": rotary_cos,
            "rotary_sin": rotary_sin,
            "rotary_seqlens": rotary_seqlens,
            "cache_batch_idx": cache_batch_idx,
            "cache_leftpad": cache_leftpad,
            "block_table": block_table,
            **scales,
            "interleaved": rotary_interleaved,
            "advance_query_positions": causal or window is not None,
        }
    with _renamed_errors(_NAMES_OF_ATTENTION):
        options = checked_options(
            operator_options(
                dropout_p=0.0,
                is_causal=False,
                scale=softmax_scale,
                causal="lower_right" if causal else None,
                window=window,
                softcap=softcap,
                alibi_slopes=alibi_slopes,
                num_splits=num_splits,
                unified_max=None,
                deterministic=False,
            )
        )
    attend = {
        "query": rows,
        "key": k_cache,
        "value": v_cache,
        "alibi_slopes": alibi_slopes,
        "cu_seqlens_q": cu_seqlens,
        "seqused_k": lengths,
        "batch_idx": cache_batch_idx,
        "leftpad": cache_leftpad,
        "block_table": block_table,
        **scales,
        "tree_mask": _as_tree_mask(tree_mask, packed),
        "sink": sink_of(sink, q),
        **options,
        "lower_right": True,
        "max_seqlen_q": longest,
    }
    return append, attend


def _query_offsets(q: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None):
    """Offsets, the number of sequences, the longest."""
    if cu_seqlens_q is None:
        if q.dim() != 4:
            raise ValueError(
                f"q: got shape {list(q.shape)}; allowed: (batch, seqlen_q, heads, head_dim), or 3-D with cu_seqlens_q"
            )
        batch, rows = q.shape[:2]
        return torch.arange(batch + 1, device=q.device) * rows, batch, rows
    if q.dim() != 3:
        raise ValueError(f"q: got shape {list(q.shape)}; allowed: (total_q, heads, head_dim) with cu_seqlens_q")
    return cu_seqlens_q, len(cu_seqlens_q) - 1, max_seqlen_q


def _lengths(cache_seqlens: int | Tensor | None, batch: int, most: int, q: Tensor) -> Tensor:
    """(B)"""
    if isinstance(cache_seqlens, Tensor) and cache_seqlens.dim() > 0:
        check_is_dense("cache_seqlens", cache_seqlens)
        if cache_seqlens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"cache_seqlens: got dtype {cache_seqlens.dtype}; allowed: an int, int32 or int64")
        if cache_seqlens.shape != (batch,):
            raise ValueError(f"cache_seqlens: got shape {list(cache_seqlens.shape)}; allowed: an int or [{batch}]")
        return cache_seqlens
    length = whole_number("cache_seqlens", cache_seqlens)
    if isinstance(length, int) and not 0 <= length <= most:
        raise ValueError(f"cache_seqlens: got {length}; allowed: 0 to {most}, the rows of a sequence's cache")
    return torch.full((batch,), most if length is None else length, device=q.device)


def _rows_of_table(block_table: Tensor, rows: Tensor, batch: int) -> Tensor:
    """The rows of ``block_table`` that cache_batch_idx names, one for each sequence."""
    if rows.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cache_batch_idx: got dtype {rows.dtype}; allowed: int32, int64")
    if rows.shape != (batch,):
        raise ValueError(f"cache_batch_idx: got shape {list(rows.shape)}; allowed: ({batch},)")
    if block_table.dim() != 2:
        raise ValueError(f"block_table: got shape {list(block_table.shape)}; allowed: (rows, pages of a sequence)")
    if rows.is_cpu and not torch.compiler.is_compiling() and ((rows < 0) | (rows >= len(block_table))).any():
        raise ValueError(
            f"cache_batch_idx: got {rows.tolist()}; allowed: 0 to {len(block_table) - 1}, the rows of block_table"
        )
    return block_table.index_select(0, rows)


def _new_rows(
    k: Tensor, v: Tensor, k_cache: Tensor, batch: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """k and v packed, and their offsets."""
    if cu_seqlens is not None:
        for name, t in (("k", k), ("v", v)):
            if t.dim() != 3:
                raise ValueError(
                    f"{name}: got shape {list(t.shape)}; allowed: (total_new, heads_k, head_dim) with cu_seqlens_k_new"
                )
        return k, v, cu_seqlens
    if k.dim() != 4 or k.shape[0] != batch or k.shape[2:] != k_cache.shape[2:]:
        heads, head_dim = k_cache.shape[2:]
        raise ValueError(f"k: got shape {list(k.shape)}; allowed: ({batch}, seqlen_new, {heads}, {head_dim})")
    if v.dim() != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v: got shape {list(v.shape)}; allowed: ({', '.join(map(str, k.shape[:3]))}, head_dim_v)")
    offsets = torch.arange(batch + 1, device=k.device) * k.shape[1]
    return k.flatten(0, 1), v.flatten(0, 1), offsets


def _as_tree_mask(mask: Tensor | None, packed: bool) -> Tensor | None:
    """As the operator takes it: (B, H, S_q, S_q), or (H, T_q, max_seqlen_q) for packed queries."""
    if mask is None or mask.dim() == 4:
        return mask
    if packed:
        return mask[None] if mask.dim() == 2 else mask
    return mask[None, None] if mask.dim() == 2 else mask[:, None]


def _as_scale(name: str, scale: Tensor | None, cache: Tensor) -> Tensor | None:
    """The factors of 8-bit rows as the operator needs them: (caches or pages, rows, H_k)."""
    if scale is None:
        return None
    given = list(scale.shape)
    if scale.dim() == 2:
        scale = scale[:, None]
    sizes = zip(reversed(scale.shape), reversed(cache.shape[:3]), strict=False)
    if not 1 <= scale.dim() <= 3 or any(size not in (1, full) for size, full in sizes):
        caches, rows, heads = cache.shape[:3]
        raise ValueError(
            f"{name}: got shape {given}; allowed: ({heads},), ({caches}, {heads}), or what broadcasts to "
            f"({caches}, {rows}, {heads})"
        )
    return scale.expand(cache.shape[:3]).float()
