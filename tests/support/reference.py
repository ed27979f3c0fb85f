"""Dense attention in plain torch: the oracle. It stores the N x N matrix and shares no code with the kernels."""

import math

import torch


def visible(seqlen_q, seqlen_k, *, causal=None, window=None, attention_chunk=0, default_lower_right=True):
    """bool (S_q, S_k): True where the diagonal options leave a key visible. Written from their definitions."""
    lower_right = causal == "lower_right" or (causal is None and default_lower_right)
    diagonal = seqlen_k - seqlen_q if lower_right else 0
    left, right = window if isinstance(window, (tuple, list)) else (window, window)
    i = torch.arange(seqlen_q)[:, None] + diagonal
    j = torch.arange(seqlen_k)[None, :]
    keep = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)
    if causal is not None:
        keep &= j <= i
    if left not in (None, -1):
        keep &= j >= i - left
    if right not in (None, -1):
        keep &= j <= i + right
    if attention_chunk:
        keep &= i.div(attention_chunk, rounding_mode="floor") == j.div(attention_chunk, rounding_mode="floor")
    return keep


def attention(
    query,
    key,
    value,
    attn_mask=None,
    *,
    causal=None,
    window=None,
    attention_chunk=0,
    softcap=0.0,
    alibi_slopes=None,
    sink=None,
    scale=None,
    kept=None,
    dropout_p=0.0,
):
    """(out, lse) of (B, H, S, D) tensors, in their own dtype, differentiable. `kept` is dropout's bool mask."""
    _, heads, seqlen_q, head_dim = query.shape
    seqlen_k = key.shape[2]
    group = heads // max(key.shape[1], 1)
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.transpose(-1, -2) * (1 / math.sqrt(head_dim) if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        diagonal = 0 if causal == "upper_left" else seqlen_k - seqlen_q
        distance = (torch.arange(seqlen_q)[:, None] + diagonal - torch.arange(seqlen_k)[None, :]).abs()
        slopes = alibi_slopes if alibi_slopes.dim() == 2 else alibi_slopes[None]
        scores = scores - slopes[:, :, None, None] * distance
    hidden = ~visible(seqlen_q, seqlen_k, causal=causal, window=window, attention_chunk=attention_chunk)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        hidden = hidden | ~attn_mask
    elif attn_mask is not None:
        scores = scores + attn_mask
        hidden = hidden | (attn_mask == -math.inf)
    hidden = hidden.expand(scores.shape)
    dead = hidden.all(-1, keepdim=True)
    # a row without a visible key: any finite values
    scores = scores.masked_fill(hidden, -math.inf).masked_fill(dead, 0.0)
    if sink is None:
        lse = torch.logsumexp(scores, -1) if seqlen_k else scores.sum(-1)
        probs = torch.softmax(scores, -1).masked_fill(dead, 0.0)
    else:  # one more column, dropped after the softmax
        sink = (sink if sink.dim() == 2 else sink[None])[:, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores.masked_fill(dead, -math.inf), sink.to(scores.dtype)], -1)
        lse, probs, dead = torch.logsumexp(scores, -1), torch.softmax(scores, -1)[..., :-1], torch.zeros_like(dead)
    if kept is not None:
        probs = probs * kept / (1 - dropout_p) if dropout_p < 1 else probs * 0
    return probs @ value, lse.masked_fill(dead.squeeze(-1), -math.inf)
