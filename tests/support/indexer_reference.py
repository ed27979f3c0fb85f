"""The indexer in dense PyTorch: scores, choice and loss, with arrays of S_q x S_k."""

import torch


def visible(seqlen_q, seqlen_k, *, is_causal=False, causal=None, window=None, diagonal=0, key_mask=None, batch=1):
    """(B, S_q, S_k) bool."""
    left, right = (None, None) if window is None else (window if isinstance(window, tuple) else (window, window))
    lower_right = causal == "lower_right" or (causal is None and not is_causal and window is not None)
    shift = diagonal + (seqlen_k - seqlen_q if lower_right else 0)
    distance = torch.arange(seqlen_k) - (torch.arange(seqlen_q)[:, None] + shift)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if is_causal or causal is not None:
        seen &= distance <= 0
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    seen = seen.expand(batch, -1, -1)
    return seen if key_mask is None else seen & key_mask[:, None]


def scores(q, k, weights, scale=None):
    """(B, S_q, S_k), in the accumulator's dtype."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    products = torch.einsum("bhid,bjd->bhij", q.to(dtype), k.to(dtype)) * scale
    return torch.einsum("bih,bhij->bij", weights.to(dtype), products.relu())


def topk(dense, seen, count):
    """indices (B, 1, S_q, count): ascending, ties to the lower index, NaN the largest, then -1."""
    by_score = dense.sort(dim=-1, descending=True, stable=True).indices
    visible_first = seen.gather(-1, by_score).int().sort(dim=-1, descending=True, stable=True).indices
    best = by_score.gather(-1, visible_first)[..., :count]
    keys = seen.shape[-1]
    best = torch.where(seen.gather(-1, best), best, keys).sort(-1).values
    chosen = torch.full((*dense.shape[:2], count), -1, dtype=torch.int32)
    chosen[..., : best.shape[-1]] = torch.where(best < keys, best, -1)
    return chosen[:, None]


def at_chosen(dense, indices):
    """The scores at chosen keys, -inf for -1."""
    rows = dense[:, None].expand(-1, indices.shape[1], -1, -1)
    picked = rows.gather(-1, indices.clamp(min=0).long())
    return picked.masked_fill(indices < 0, -torch.inf)


def loss(q, k, weights, query, key, lse, seen, *, index_scale=None, scale=None):
    """(B, S_q): the KL divergence of each row. `seen` (B, S_q, S_k) says which keys count."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    dense = scores(q, k, weights, index_scale)
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    probs = ((query @ key.mT).to(lse.dtype) * scale - lse[..., None]).exp()
    probs = probs.masked_fill(~seen[:, None] | (lse == -torch.inf)[..., None], 0.0).sum(1).detach()
    mass = probs.sum(-1, keepdim=True)
    target = probs / mass.masked_fill(mass == 0, 1.0)
    log_probs = dense.masked_fill(~seen, -torch.inf)
    log_probs = log_probs - log_probs.logsumexp(-1, keepdim=True).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    terms = torch.xlogy(target, target) - target * log_probs.masked_fill(~seen, 0.0)
    return terms.sum(-1)
