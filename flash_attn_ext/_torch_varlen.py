"""What torch.nn.attention.varlen.varlen_attn calls, for CPU tensors: torch has no kernel of its own there."""

import torch
from torch import Tensor

from . import _ops
from .kvcache import flash_attn_with_kvcache

_registration: torch.library.Library | None = None


def register() -> None:
    global _registration
    if _registration is None:
        _registration = torch.library.Library("aten", "IMPL")
        _registration.impl("_flash_attention_forward", _forward, "CPU")
        _registration.impl("_flash_attention_backward", _backward, "CPU")


def unregister() -> None:
    global _registration
    if _registration is not None:
        _registration._destroy()
        _registration = None


def _options(name, cum_seq_q, dropout_p, is_causal, scale, left, right):
    if cum_seq_q is None:
        raise NotImplementedError(f"{name} on CPU: got cum_seq_q None; allowed: offsets of packed sequences")
    if dropout_p != 0.0:
        raise NotImplementedError(f"{name} on CPU: got dropout_p {dropout_p}; allowed: 0")
    left, right = (None if side in (None, -1) else side for side in (left, right))
    return {"scale": scale, "causal": is_causal, "lower_right": True, "window_left": left, "window_right": right}


def _forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
    num_splits=None,
):  # fmt: skip
    options = _options("_flash_attention_forward", cum_seq_q, dropout_p, is_causal, scale, window_size_left,
                       window_size_right)  # fmt: skip
    if block_table is None:
        out, lse = _ops.attention_varlen(
            query, key, value, None, alibi_slopes, None, cum_seq_q, cum_seq_k, None, seqused_k, **options,
            max_seqlen_q=max_q, max_seqlen_k=max_k, num_splits=num_splits or 0,
        )  # fmt: skip
    else:
        sides = tuple(-1 if side is None else side for side in (options["window_left"], options["window_right"]))
        out, lse = flash_attn_with_kvcache(
            query, key, value, cache_seqlens=cum_seq_k.diff() if seqused_k is None else seqused_k,
            block_table=block_table, softmax_scale=scale, causal=is_causal, window_size=sides,
            alibi_slopes=alibi_slopes, num_splits=num_splits or 0, return_softmax_lse=True, cu_seqlens_q=cum_seq_q,
            max_seqlen_q=max_q,
        )  # fmt: skip
    none = query.new_empty(0)
    return out, lse, query.new_zeros(2, dtype=torch.uint64), none, none


def _backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale=None, window_size_left=None, window_size_right=None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    options = _options("_flash_attention_backward", cum_seq_q, dropout_p, is_causal, scale, window_size_left,
                       window_size_right)  # fmt: skip
    dq, dk, dv, *_ = _ops.attention_varlen_backward(
        grad_out, None, query, key, value, None, None, None, cum_seq_q, cum_seq_k, None, None, None, out,
        logsumexp,
        **options, max_seqlen_q=max_q, max_seqlen_k=max_k, grad_mask=[True] * 3 + [False] * 3,
    )  # fmt: skip
    return dq, dk, dv
