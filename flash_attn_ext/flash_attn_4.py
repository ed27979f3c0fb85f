"""flash-attention 4's functions (flash_attn.cute): the same names, order of arguments and results.

Layouts and meanings are as in :mod:`flash_attn_ext.flash_attn_interface`, with these differences:

- Both functions return (out, lse), with or without ``return_lse``. The backward always includes the gradient of lse; in
  flash-attention 4 only with ``return_lse=True``.
- A window's limit of None means no limit. ``softcap`` may be None.
- ``num_splits``, ``pack_gqa``, ``min_seqlen_k``, ``scheduler_metadata``, ``seqlen_k_per_split`` and
  ``disable_scheduler_metadata`` are hints about speed. The kernels use ``num_splits``; the other hints change nothing.
- ``qv``, ``gather_kv_indices``, ``score_mod``, ``mask_mod``, their tensors and scalars, and lists of blocks raise a
  NotImplementedError.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import flash_attn_interface as interface
from ._flash_arguments import call_with_names, check_hints, refuse_given, window_sides_of

_NAMES = {"sink": "learnable_sink", "block_table": "page_table"}
__all__ = ["flash_attn_func", "flash_attn_varlen_func"]


def _window(window_size: object, causal: bool) -> tuple[int | None, int | None]:
    """Converts flash-attention 4's window. Its negative numbers are limits on the other side of the diagonal."""
    left, right = window_sides_of(window_size, "two ints or None (left, right); None is no limit")
    if causal:
        right = 0
    if left is not None and right is not None and left + right < 0:
        return None, None  # as in flash-attention 4
    if -1 in (left, right):
        raise ValueError(
            f"window_size: got {window_size!r}; allowed: ints other than -1, which is a limit there and none here; "
            "None is no limit"
        )
    return left, right


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float | None = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable | None = None,
    score_mod_bwd: Callable | None = None,
    mask_mod: Callable | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    aux_scalars: Sequence | None = None,
    block_sparse_tensors: object = None,
    block_sparse_tensors_bwd: object = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """q (B, S_q, H, D), k (B, S_k, H_k, D), v (B, S_k, H_k, D_v). Returns out (B, S_q, H, D_v) and lse (B, H, S_q)."""
    refuse_given(
        qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
        block_sparse_tensors=block_sparse_tensors, block_sparse_tensors_bwd=block_sparse_tensors_bwd,
    )  # fmt: skip
    out, lse, _ = call_with_names(
        _NAMES, interface.flash_attn_func, q, k, v, 0.0, softmax_scale, causal,
        _window(window_size, causal), softcap or 0.0, None, deterministic, True,
        num_splits=check_hints(num_splits, pack_gqa), learnable_sink=learnable_sink,
    )  # fmt: skip
    return out, lse


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    gather_kv_indices: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float | None = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable | None = None,
    score_mod_bwd: Callable | None = None,
    mask_mod: Callable | None = None,
    block_sparse_tensors: object = None,
    aux_tensors: Sequence[Tensor] | None = None,
    aux_scalars: Sequence | None = None,
    return_lse: bool = False,
    scheduler_metadata: object = None,
    seqlen_k_per_split: int | None = None,
    disable_scheduler_metadata: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of sequences with different lengths of queries, of keys, or of both.

    Args:
        q: (T_q, H, D) with ``cu_seqlens_q``; otherwise (B, S_q, H, D).
        k: (T_k, H_k, D) with ``cu_seqlens_k``; otherwise (B, S_k, H_k, D), or pages (num_pages, page_size, H_k, D) with
            ``page_table`` and ``seqused_k``. Pages have no gradient.
        v: as ``k``, with head dimension D_v.
        seqused_q: (B): the number of rows in use, for each sequence. Not allowed with ``page_table``.
        seqused_k: (B): the number of keys in use, for each sequence.

    Returns:
        out (T_q, H, D_v) and lse (H, T_q); or out (B, S_q, H, D_v) and lse (B, H, S_q).
    """
    refuse_given(
        qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod, score_mod_bwd=score_mod_bwd,
        mask_mod=mask_mod, block_sparse_tensors=block_sparse_tensors, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
    )  # fmt: skip
    if page_table is not None and (cu_seqlens_k is not None or seqused_k is None):
        raise ValueError("seqused_k: got page_table without seqused_k, or with cu_seqlens_k; allowed: seqused_k alone")
    given_q = q
    q, cu_seqlens_q, max_seqlen_q = _packed("q", q, cu_seqlens_q, max_seqlen_q)
    if page_table is None:
        v, *_ = _packed("v", v, cu_seqlens_k, max_seqlen_k)
        k, cu_seqlens_k, max_seqlen_k = _packed("k", k, cu_seqlens_k, max_seqlen_k)
    out, lse, _ = call_with_names(
        _NAMES, interface.flash_attn_varlen_func, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0,
        softmax_scale, causal, _window(window_size, causal), softcap or 0.0, None, deterministic, True, page_table,
        seqused_q=seqused_q, seqused_k=seqused_k, num_splits=check_hints(num_splits, pack_gqa),
        learnable_sink=learnable_sink,
    )  # fmt: skip
    if given_q.dim() == 4:
        out, lse = out.unflatten(0, given_q.shape[:2]), lse.unflatten(1, given_q.shape[:2]).transpose(0, 1)
    return out, lse


def _packed(name: str, t: Tensor, cu_seqlens: Tensor | None, longest: int | None) -> tuple[Tensor, Tensor, int | None]:
    """Returns rows (T, H, D), their offsets and the longest length, for a packed or a padded tensor."""
    if cu_seqlens is not None:
        return t, cu_seqlens, longest
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: got {type(t).__name__}; allowed: a torch.Tensor")
    if t.dim() != 4:
        raise ValueError(
            f"{name}: got shape {list(t.shape)}; allowed: (batch, seqlen, heads, head_dim), or 3-D with its cu_seqlens"
        )
    batch, rows = t.shape[:2]
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=t.device) * rows
    return t.flatten(0, 1), offsets, rows
