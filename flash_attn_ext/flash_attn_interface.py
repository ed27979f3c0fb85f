"""flash-attention's functions under their own names, arguments, defaults and meanings, on this package's kernels.

Tensors are (B, S, H, D), or packed (T, H, D); they are read through their strides, without copies. ``causal`` is
aligned to the lower right corner, and so are windows and ALiBi. Arguments of FlashAttention-3 that mean something here
(``seqused_q``, ``seqused_k``, ``num_splits``) are taken by keyword. What the kernels decide by themselves
(``pack_gqa``, ``sm_margin``) has no argument.

``return_attn_probs=True`` returns (out, softmax_lse, S_dmask). S_dmask is None: the probabilities are never stored;
:func:`flash_attn_ext.dropout_mask` returns what dropout keeps.
"""

from torch import Tensor

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
    window = None if window_size in (None, (None, None), (-1, -1), [-1, -1]) else tuple(window_size)
    return {
        "dropout_p": dropout_p, "scale": softmax_scale, "causal": "lower_right" if causal else None, "window": window,
        "softcap": softcap, "alibi_slopes": alibi_slopes, "deterministic": deterministic, "enable_gqa": True,
        "return_lse": True,
    }  # fmt: skip


def _refuse_qv(qv: object) -> None:
    if qv is not None:
        raise NotImplementedError(
            "qv: got a tensor; allowed: None. The second query of multi-head latent attention has no kernel here: "
            "concatenate it to q and its key to k where head_dim allows"
        )


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
) -> Tensor | tuple[Tensor, Tensor, None]:
    """q (B, S_q, H, D), k (B, S_k, H_k, D), v (B, S_k, H_k, D_v). Returns out (B, S_q, H, D_v); with
    ``return_attn_probs`` also softmax_lse (B, H, S_q) and None.

    H must be a multiple of H_k. Key j is visible to query i in ``[i + S_k - S_q - left, i + S_k - S_q + right]``, both
    included; a query without keys gets 0.
    """
    _refuse_qv(qv)
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    out, lse = flash_attn(*(t.transpose(1, 2) for t in (q, k, v)), num_splits=num_splits, **options)
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
    """:func:`flash_attn_func` with k and v in kv (B, S_k, 2, H_k, D). Its gradient is of kv's shape."""
    return flash_attn_func(q, *kv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
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
    return flash_attn_func(*qkv.unbind(2), dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
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
    qv: Tensor | None = None,
    num_splits: int = 0,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """q (T_q, H, D), k (T_k, H_k, D), v (T_k, H_k, D_v). Returns out (T_q, H, D_v); with ``return_attn_probs`` also
    softmax_lse (H, T_q) and None. Each sequence as in :func:`flash_attn_func`."""
    _refuse_qv(qv)
    if block_table is not None:
        raise NotImplementedError(
            "block_table: got a tensor; allowed: None. Keys in pages are read by flash_attn_with_kvcache"
        )
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic)
    out, lse = flash_attn_varlen(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=seqused_q, seqused_k=seqused_k,
        num_splits=num_splits, **options,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


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
    return flash_attn_varlen_func(
        q, *kv.unbind(1), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
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
    return flash_attn_varlen_func(
        *qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip
