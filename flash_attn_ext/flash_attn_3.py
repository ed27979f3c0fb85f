"""FlashAttention-3's functions (hopper/flash_attn_interface.py): the same names, order of arguments and results.

Layouts and meanings are as in :mod:`flash_attn_ext.flash_attn_interface`. Every dtype, device and head dimension of
this package is allowed, with gradients.

- ``return_attn_probs=True`` returns (out, softmax_lse).
- ``num_splits``, ``pack_gqa``, ``sm_margin`` and ``scheduler_metadata`` are hints about speed. The kernels use
  ``num_splits``; the other three change nothing.
- ``attention_chunk`` is the option of :func:`flash_attn_ext.flash_attn`; it is differentiable.
- ``q_descale``, ``k_descale`` and ``v_descale`` are the factors of float8_e4m3fn tensors, without gradients. The
  output is bfloat16, as in FlashAttention-3. :func:`flash_attn_with_kvcache` also has factors of 8-bit caches for
  16-bit queries.
"""

import torch
from torch import Tensor

from . import flash_attn_interface as interface
from ._combine import flash_attn_combine
from ._flash_arguments import call_with_names, check_hints
from .kvcache import flash_attn_with_kvcache as _with_kvcache

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """q (B, S_q, H, D), k (B, S_k, H_k, D), v (B, S_k, H_k, D_v). Returns out (B, S_q, H, D_v); with
    ``return_attn_probs`` (out, softmax_lse), softmax_lse (B, H, S_q)."""
    num_splits = check_hints(num_splits, pack_gqa, sm_margin)
    out, lse, _ = interface.flash_attn_func(
        q, k, v, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic, True, qv=qv,
        num_splits=num_splits, attention_chunk=attention_chunk, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale,
    )  # fmt: skip
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_attn_func` with qkv (B, S, 3, H, D); or (B, S, num_heads_q + 2 * H_k, D), the heads of q, k and v in
    this order.
    """
    if not isinstance(qkv, Tensor):
        raise TypeError(f"qkv: got {type(qkv).__name__}; allowed: a torch.Tensor")
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif qkv.dim() == 4 and num_heads_q is not None and (qkv.shape[2] - num_heads_q) % 2 == 0:
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, heads_k, heads_k], dim=2)
    else:
        raise ValueError(
            f"qkv: got shape {list(qkv.shape)} and num_heads_q {num_heads_q}; allowed: (batch, seqlen, 3, heads, "
            "head_dim), or (batch, seqlen, num_heads_q + 2 * heads_k, head_dim) with num_heads_q"
        )
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """q (T_q, H, D), k (T_k, H_k, D), v (T_k, H_k, D_v). Returns out (T_q, H, D_v); with ``return_attn_probs`` (out,
    softmax_lse), softmax_lse (H, T_q)."""
    num_splits = check_hints(num_splits, pack_gqa, sm_margin)
    out, lse, _ = interface.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal, window_size,
        softcap, None, deterministic, True, seqused_q=seqused_q, seqused_k=seqused_k, qv=qv,
        num_splits=num_splits, attention_chunk=attention_chunk, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale,
    )  # fmt: skip
    return (out, lse) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None, None]:
    """:func:`flash_attn_ext.flash_attn_with_kvcache` in FlashAttention-3's order of arguments.

    ``k_descale`` and ``v_descale`` are (B, H_k), a factor for each sequence and key head. They are allowed with an
    8-bit cache; ``q_descale`` is allowed with float8_e4m3fn queries. With ``page_table`` or ``cache_batch_idx`` all
    sequences must have the same ``k_descale`` and ``v_descale``. The reason: a page of this package has one factor for
    all sequences that read it.

    Returns:
        out; with ``return_softmax_lse`` (out, softmax_lse, None, None), as FlashAttention-3 returns four values.
    """
    num_splits = check_hints(num_splits, pack_gqa, sm_margin)
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    own_cache = page_table is None and cache_batch_idx is None
    result = call_with_names(
        {"block_table": "page_table"}, _with_kvcache, q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens,
        cache_batch_idx, cache_leftpad, page_table,
        softmax_scale, causal, window_size, softcap, rotary_interleaved, None, num_splits, return_softmax_lse,
        cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens, qv=qv, q_descale=q_descale,
        k_descale=_factors("k_descale", k_descale, k_cache, batch, own_cache),
        v_descale=_factors("v_descale", v_descale, v_cache, batch, own_cache), attention_chunk=attention_chunk,
    )  # fmt: skip
    return (*result, None, None) if return_softmax_lse else result


def _factors(name: str, descale: Tensor | None, cache: Tensor, batch: int, own_cache: bool) -> Tensor | None:
    """Converts factors (B, H_k) to (caches, H_k), or to (H_k) if all sequences have the same factors."""
    if not isinstance(descale, Tensor):
        return descale
    shape = (batch, cache.shape[2]) if cache.dim() == 4 else None
    if shape is not None and descale.shape != shape:
        raise ValueError(f"{name}: got shape {list(descale.shape)}; allowed: (batch, heads_k), {list(shape)}")
    if own_cache and len(cache) == batch:
        return descale
    if batch and descale.stride(0) != 0 and (descale != descale[:1]).any():
        raise NotImplementedError(
            f"{name}: got different factors for the sequences; allowed with page_table or cache_batch_idx: the same"
        )
    return descale[0] if batch else None


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """Returns an empty int32 tensor on the device of ``cache_seqlens``: the kernels compute their own schedule."""
    return cache_seqlens.new_empty(0, dtype=torch.int32)
