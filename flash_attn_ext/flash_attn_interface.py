"""flash-attention 2's functions on this package's kernels: the same names, arguments, defaults and meanings.

Tensors are (B, S, H, D), or packed (T, H, D); they are read by their strides, without copies. ``causal``, windows
and ALiBi are aligned to the lower right corner. Some arguments of FlashAttention-3 and 4 are also allowed, by keyword:
``seqused_q``, ``seqused_k``, ``page_table``, ``qv``, ``num_splits``, ``learnable_sink``.
:mod:`flash_attn_ext.flash_attn_3` and :mod:`flash_attn_ext.flash_attn_4` have these libraries' order of arguments.

``return_attn_probs=True`` returns (out, softmax_lse, S_dmask). S_dmask is None, because the probabilities are never
stored. :func:`flash_attn_ext.dropout_mask` returns the elements that dropout keeps.
"""

import torch
from torch import Tensor

from . import _ops
from ._flash_arguments import (
    check_dimensions,
    error_with_names,
    exactly_one_name,
    sink_of,
    true_or_false,
    unbound,
    whole_number,
    window_of,
)
from ._float8 import refuse_second_query
from ._options import checked_options, operator_options
from ._second_query import join, join_caches
from ._tensor_checks import check_are_dense
from .functional import flash_attn
from .kvcache import flash_attn_with_kvcache
from .varlen import flash_attn_varlen

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic):
    causal = true_or_false("causal", causal)
    return {
        "dropout_p": dropout_p, "scale": softmax_scale, "causal": "lower_right" if causal else None,
        "window": window_of(window_size), "softcap": softcap, "alibi_slopes": alibi_slopes,
        "deterministic": deterministic, "enable_gqa": True, "return_lse": True,
    }  # fmt: skip


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    qv: Tensor | None = None,
    num_splits: int = 0,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """q (B, S_q, H, D), k (B, S_k, H_k, D), v (B, S_k, H_k, D_v). Returns out (B, S_q, H, D_v); with
    ``return_attn_probs`` also softmax_lse (B, H, S_q) and None.

    H must be a multiple of H_k. Key j is visible to query i in ``[i + S_k - S_q - left, i + S_k - S_q + right]``, both
    included; a query without visible keys gets 0. ``learnable_sink`` (H) is the ``sink`` of
    :func:`flash_attn_ext.flash_attn`, and ``attention_chunk`` its ``attention_chunk``. q, k and v may be float8_e4m3fn,
    with FlashAttention-3's factors ``q_descale``, ``k_descale`` and ``v_descale`` (B, H_k), as in
    :func:`flash_attn_ext.flash_attn`: forward only, and out is bfloat16. ``qv`` is (B, S_q, H, D_v): scores are q k^T +
    qv v^T, as in :func:`flash_attn_ext.flash_attn_varlen`.
    """
    check_dimensions("(batch, seqlen, heads, head_dim)", q=q, k=k, v=v)
    if qv is not None:
        refuse_second_query(q)
        q, k = join(q, k, v, qv)
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    try:
        out, lse = flash_attn(
            *heads_first, num_splits=num_splits, sink=sink_of(learnable_sink, q), attention_chunk=attention_chunk,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, **options,
        )  # fmt: skip
    except (TypeError, ValueError, NotImplementedError) as error:
        raise error_with_names(error, q, k, v) from None
    out = out.transpose(1, 2)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """:func:`flash_attn_func` with k and v in kv (B, S_k, 2, H_k, D). The gradient has kv's shape."""
    k, v = unbound("kv", kv, 2, "(batch, seqlen, 2, heads_k, head_dim)")
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs)  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """:func:`flash_attn_func` with q, k and v in qkv (B, S, 3, H, D)."""
    q, k, v = unbound("qkv", qkv, 2, "(batch, seqlen, 3, heads, head_dim)")
    return flash_attn_func(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
                           deterministic, return_attn_probs)  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    qv: Tensor | None = None,
    num_splits: int = 0,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """q (T_q, H, D), k (T_k, H_k, D), v (T_k, H_k, D_v). Returns out (T_q, H, D_v); with ``return_attn_probs`` also
    softmax_lse (H, T_q) and None. Each sequence attends as in :func:`flash_attn_func`.

    ``block_table`` is (B, pages of a sequence). Its other name is ``page_table``. With it k is (num_pages, page_size,
    H_k, D) and v is (num_pages, page_size, H_k, D_v), for any page size. ``seqused_k``, or else ``cu_seqlens_k``, has
    the number of keys of each sequence. Pages allow neither dropout nor ``seqused_q``, and the backward raises.
    """
    block_table = exactly_one_name("page_table", page_table, "block_table", block_table)
    max_seqlen_q, max_seqlen_k, num_splits = (
        whole_number(name, value)
        for name, value in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k), ("num_splits", num_splits))
    )
    causal = true_or_false("causal", causal)
    check_dimensions("(total_q, heads, head_dim)", q=q)
    rows = "(total_k, heads_k, head_dim)" if block_table is None else "(num_pages, page_size, heads_k, head_dim)"
    check_dimensions(rows, k=k, v=v)
    key_has_value = False
    if qv is not None:
        refuse_second_query(q)
    if qv is not None and block_table is None:
        q, k = join(q, k, v, qv)
    elif qv is not None:
        second, k, key_has_value = join_caches(qv, q, k, v)
        q = second.joined(q)
    if block_table is not None:
        check_are_dense(
            {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_k": seqused_k,
             "block_table": block_table, "alibi_slopes": alibi_slopes, "learnable_sink": learnable_sink},
            ("cu_seqlens_q",),
        )  # fmt: skip
        for name, factor in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
            if factor is not None:
                raise NotImplementedError(
                    f"{name}: got a tensor together with block_table; allowed there: None. flash_attn_with_kvcache has "
                    "factors of pages"
                )
        lengths = _lengths_in_pages(k, cu_seqlens_k, seqused_k, block_table)
        if seqused_q is not None:
            raise NotImplementedError("seqused_q: got a tensor together with block_table; allowed there: None")
        window = window_of(window_size)
        options = operator_options(
            dropout_p=dropout_p, scale=softmax_scale, causal="lower_right" if causal else None, window=window,
            softcap=softcap, alibi_slopes=alibi_slopes, num_splits=num_splits, deterministic=deterministic,
            max_seqlen_q=max_seqlen_q, attention_chunk=attention_chunk,
        )  # fmt: skip
        try:
            options = checked_options(_ops.CACHE.option_types, options) | {"lower_right": True}
            out, lse = _ops.attention_cache(
                q, k, v, alibi_slopes=alibi_slopes, sink=sink_of(learnable_sink, q), cu_seqlens_q=cu_seqlens_q,
                seqused_k=lengths, block_table=block_table, key_has_value=key_has_value, **options,
            )  # fmt: skip
        except (TypeError, ValueError) as error:
            raise error_with_names(error, q, k, v) from None
    else:
        options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
        try:
            out, lse = flash_attn_varlen(
                q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=seqused_q,
                seqused_k=seqused_k, num_splits=num_splits, sink=sink_of(learnable_sink, q),
                attention_chunk=attention_chunk, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
                **options,
            )  # fmt: skip
        except (TypeError, ValueError, NotImplementedError) as error:
            raise error_with_names(error, q, k, v) from None
    return (out, lse, None) if return_attn_probs else out


def _lengths_in_pages(k, cu_seqlens_k, seqused_k, block_table) -> Tensor:
    """Returns the number of keys of each sequence in its pages."""
    if seqused_k is not None:
        return seqused_k
    lengths, most = cu_seqlens_k.diff(), k.shape[1] * block_table.shape[-1]
    if lengths.is_cpu and not torch.compiler.is_compiling() and ((lengths < 0) | (lengths > most)).any():
        raise ValueError(
            f"cu_seqlens_k: got lengths {lengths.tolist()}; allowed: 0 to {most}, the rows of the pages of one sequence"
        )
    return lengths


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """:func:`flash_attn_varlen_func` with k and v in kv (T_k, 2, H_k, D)."""
    k, v = unbound("kv", kv, 1, "(total_k, 2, heads_k, head_dim)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """:func:`flash_attn_varlen_func` with q, k and v in qkv (T, 3, H, D)."""
    q, k, v = unbound("qkv", qkv, 1, "(total, 3, heads, head_dim)")
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
