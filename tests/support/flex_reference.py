"""The dense reference: functions by torch.vmap on all scores, in the dtype of the inputs."""

import torch
from torch import Tensor
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.nn.attention.flex_attention import _vmap_for_bhqkv


def dense_flex(query, key, value, score_mod=None, mask_mod=None, scale=None, softcap=0.0, visible=None):
    """(out, lse). ``visible``: a bool mask in addition."""
    group = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(group, 1) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    sizes = (scores.shape[0], scores.shape[1], scores.shape[2], scores.shape[3])
    indices = [torch.arange(n) for n in sizes]
    with TransformGetItemToIndex():
        if score_mod is not None:
            scores = _vmap_for_bhqkv(score_mod, prefix=(0,), out_dims=0)(scores, *indices)
        if mask_mod is not None:
            mask = _vmap_for_bhqkv(mask_mod, prefix=())(*indices)
            scores = scores.masked_fill(~mask, -torch.inf)
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)
    return softmax_of(scores) @ value, torch.logsumexp(scores, -1)


def softmax_of(scores: Tensor) -> Tensor:
    """Rows of -inf alone become 0, with gradient 0."""
    hidden = scores.isneginf()
    empty = hidden.all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(empty, 0.0), -1).masked_fill(hidden, 0.0)
