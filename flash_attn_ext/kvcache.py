"""flash_attn_with_kvcache: attention of new tokens to a cache of keys and values, which they are appended to first."""

import torch
from torch import Tensor

from . import _ops
from .functional import checked_options, operator_options
from .layers.rotary import check_rotary, rotate, rows_at


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
) -> Tensor | tuple[Tensor, Tensor]:
    """flash-attention's function of this name: appends ``k`` and ``v`` to the caches in place, then attends.

    B counts sequences, S_q the new queries and S_new the new keys of each. Without gradients. Causal masks, windows and
    ALiBi are aligned to the lower right corner: the last query has the position of the last key.

    Args:
        q: (B, S_q, H, D); or packed (T_q, H, D) with ``cu_seqlens_q``.
        k_cache: (caches, rows, H_k, D), with H a multiple of H_k; or, with ``block_table``, pages
            (num_pages, page_size, H_k, D) of any size. ``q``'s dtype; or int8, float8_e4m3fn or float8_e5m2 with
            ``k_descale``. Its last dimension is contiguous.
        v_cache: (caches, rows, H_k, D_v), likewise.
        k: (B, S_new, H_k, D) to be written behind each sequence's ``cache_seqlens`` rows; or packed (T_new, H_k, D)
            with ``cu_seqlens_k_new``. Pages for them must be in ``block_table``.
        v: (B, S_new, H_k, D_v), likewise.
        rotary_cos: (positions, rotary_dim / 2). With it ``k`` is rotated by its position before it is written, and
            ``q`` by its own position if ``causal`` or a window is given, otherwise by that of the first new key.
        rotary_sin: likewise.
        cache_seqlens: how many rows of each sequence are in the cache: (B), int32 or int64, or one number. None: all.
        cache_batch_idx: (B): which of the caches is each sequence's. None: its own number.
        cache_leftpad: (B): so many rows at the start of each cache are left out. Rotary positions count from there.
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
        qv: not taken: multi-head latent attention's second query has no kernel here.

    Returns:
        out (B, S_q, H, D_v) or (T_q, H, D_v).

    Raises:
        TypeError, ValueError: an argument is not allowed, and on CPU also lengths, positions or page numbers outside
            the cache.

    Source: Dao et al., "Flash-Decoding", 2023; Kwon et al., "PagedAttention", 2023 (arXiv 2309.06180).
    """
    if qv is not None:
        raise NotImplementedError("qv: got a tensor; allowed: None. Its kernel does not exist here")
    if page_table is not None:
        if block_table is not None:
            raise ValueError(
                "page_table: got one besides block_table, of which it is another name; allowed: one of them"
            )
        block_table = page_table
    cu_seqlens, batch, longest = _query_offsets(q, cu_seqlens_q, max_seqlen_q)
    window = None if tuple(window_size) in ((-1, -1), (None, None)) else tuple(window_size)
    cache = _Cache(k_cache, v_cache, batch, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, q.device)
    lengths = cache.lengths
    if (rotary_cos is None) != (rotary_sin is None) or (rotary_cos is not None and k is None):
        raise ValueError("rotary_cos: got one without rotary_sin or k; allowed: all three or none")
    if (k is None) != (v is None):
        raise ValueError("v: got k or v alone; allowed: both or none")
    if k is not None:
        sequence, index, counts = _new_rows(k, batch, cu_seqlens_k_new)
        if rotary_cos is not None:
            check_rotary(rotary_cos, rotary_sin, q.shape[-1])
            first = lengths if rotary_seqlens is None else rotary_seqlens.long()
            if cache_leftpad is not None and rotary_seqlens is None:
                first = first - cache_leftpad.long()
            tables = ("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)
            k = _rotated(k, tables, first[sequence] + index, rotary_interleaved)
            rows_q = torch.arange(len(cu_seqlens[0]), device=q.device)
            own, at = cu_seqlens[0], rows_q - cu_seqlens[1][cu_seqlens[0]]
            at = at if causal or window is not None else torch.zeros_like(at)
            q = _rotated(q, tables, first[own] + at, rotary_interleaved)
        cache.append(k, v, sequence, lengths[sequence] + index, k_descale, v_descale)
        lengths = lengths + counts
    options = operator_options(
        0.0, False, softmax_scale, "lower_right" if causal else None, window, softcap, alibi_slopes, num_splits, None,
        False,
    )  # fmt: skip
    out, lse = _ops.attention_cache(
        q.reshape(-1, *q.shape[-2:]), k_cache, v_cache, alibi_slopes, cu_seqlens[1], lengths,
        cache.batch_idx, cache.leftpad, cache.block_table, _as_scale(k_descale, k_cache), _as_scale(v_descale, v_cache),
        **checked_options(options) | {"lower_right": True, "max_seqlen_q": longest},
    )  # fmt: skip
    if cu_seqlens_q is None:
        out = out.unflatten(0, q.shape[:2])
        lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return (out, lse) if return_softmax_lse else out


def _query_offsets(q: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None):
    """(sequence of each row, offsets), the number of sequences, the longest."""
    if cu_seqlens_q is None:
        if q.dim() != 4:
            raise ValueError(
                f"q: got shape {list(q.shape)}; allowed: (batch, seqlen_q, heads, head_dim), or 3-D with cu_seqlens_q"
            )
        batch, rows = q.shape[:2]
        sequence = torch.arange(batch, device=q.device).repeat_interleave(rows)
        return (sequence, torch.arange(batch + 1, device=q.device) * rows), batch, rows
    if q.dim() != 3:
        raise ValueError(f"q: got shape {list(q.shape)}; allowed: (total_q, heads, head_dim) with cu_seqlens_q")
    sequence = torch.searchsorted(cu_seqlens_q[1:].long(), torch.arange(len(q), device=q.device), right=True)
    return (sequence.clamp(max=len(cu_seqlens_q) - 2), cu_seqlens_q.long()), len(cu_seqlens_q) - 1, max_seqlen_q


def _new_rows(k: Tensor, batch: int, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor | int]:
    """For each new row its sequence and its number there, shaped as k without its heads; rows of each sequence."""
    if cu_seqlens is None:
        if k.dim() != 4 or k.shape[0] != batch:
            raise ValueError(f"k: got shape {list(k.shape)}; allowed: ({batch}, seqlen_new, heads_k, head_dim)")
        index = torch.arange(k.shape[1], device=k.device).expand(k.shape[:2])
        return torch.arange(batch, device=k.device)[:, None].expand(k.shape[:2]), index, k.shape[1]
    cu_seqlens, rows = cu_seqlens.long(), torch.arange(len(k), device=k.device)
    sequence = torch.searchsorted(cu_seqlens[1:], rows, right=True).clamp(max=batch - 1)
    return sequence, rows - cu_seqlens[sequence], cu_seqlens.diff()


def _rotated(x: Tensor, tables, positions: Tensor, interleaved: bool) -> Tensor:
    positions = positions.reshape(x.shape[:-2])
    cos, sin = (rows_at(table, name, positions)[..., None, :] for name, table in tables)
    return rotate(x, cos, sin, interleaved)


def _as_scale(scale: Tensor | None, cache: Tensor) -> Tensor | None:
    """A scale as the operator takes it, broadcastable to (caches or pages, rows, H_k)."""
    if scale is None:
        return None
    if scale.dim() == 2:
        scale = scale[:, None]
    return scale.expand(cache.shape[:3]).float()


class _Cache:
    """Where each sequence's rows are."""

    def __init__(self, k_cache, v_cache, batch, seqlens, batch_idx, leftpad, block_table, device):
        self.k, self.v, self.batch_idx, self.leftpad, self.block_table = (
            k_cache,
            v_cache,
            batch_idx,
            leftpad,
            block_table,
        )
        for name, t in (("k_cache", k_cache), ("v_cache", v_cache)):
            if t.dim() != 4:
                raise ValueError(
                    f"{name}: got shape {list(t.shape)}; allowed: (caches or pages, rows, heads_k, head_dim)"
                )
        if block_table is not None and batch_idx is not None:
            raise ValueError("cache_batch_idx: got one with block_table; allowed: one of them")
        pages = 1 if block_table is None else block_table.shape[-1]
        self.rows = k_cache.shape[1] * pages
        if isinstance(seqlens, Tensor):
            self.lengths = seqlens.long()
        else:
            self.lengths = torch.full((batch,), self.rows if seqlens is None else seqlens, device=device)
        if self.lengths.shape != (batch,):
            raise ValueError(f"cache_seqlens: got shape {list(self.lengths.shape)}; allowed: a number or [{batch}]")

    def append(self, k, v, sequence, positions, k_scale, v_scale):
        readable = k.is_cpu and not torch.compiler.is_compiling()
        if readable and positions.numel() and not 0 <= positions.min() <= positions.max() < self.rows:
            low, high = positions.min(), positions.max()
            raise ValueError(f"cache_seqlens: got new rows at {low} to {high}; allowed: 0 to {self.rows - 1}")
        if self.block_table is None:
            where = (sequence if self.batch_idx is None else self.batch_idx.long()[sequence]), positions
        else:
            page_size = self.k.shape[1]
            where = self.block_table.long()[sequence, positions // page_size], positions % page_size
        owner = where[0]
        if readable and owner.numel() and not 0 <= owner.min() <= owner.max() < len(self.k):
            name = "cache_batch_idx" if self.block_table is None else "block_table"
            raise ValueError(f"{name}: got {owner.min()} to {owner.max()}; allowed: 0 to {len(self.k) - 1}")
        for cache, new, scale in ((self.k, k, k_scale), (self.v, v, v_scale)):
            if cache.dtype != new.dtype:
                new = _quantized(new, cache.dtype, 1.0 if scale is None else _as_scale(scale, cache)[where][..., None])
            cache.index_put_(where, new)


def _quantized(x: Tensor, dtype: torch.dtype, scale: Tensor | float) -> Tensor:
    x = x.float() / scale
    limits = torch.iinfo(dtype) if dtype == torch.int8 else torch.finfo(dtype)
    x = x.round() if dtype == torch.int8 else x
    return x.clamp(limits.min, limits.max).to(dtype)
