"""Attention of rounded operands in fp64: the definition of flash_attn's ``quantize="int8"``, without the rounding of P.

The codes are computed in float32, as the kernels do. In fp64 a number near the middle of two codes could get the other
code. ``fused``: the product x * inverse is not rounded before it is rounded to an integer, because the instruction set
has fused multiply-adds.
"""

import math

import reference
import torch

KEYS = 64  # of a tile of values


def codes(x, most, dim, fused):
    """x in float32, rounded to integers up to ``most`` along ``dim``, times the factor. Returns numbers in fp64."""
    largest = x.abs().amax(dim, keepdim=True)
    inverse = torch.full_like(largest, most) / largest  # torch computes 127 / x as 127 * (1 / x)
    product = x.double() * inverse.double() if fused else x * inverse
    return torch.where(largest == 0, 0.0, product.round().double() * (1 / inverse).double())


def hidden_from_all(key, attn_mask=None):
    """(B, 1, S_k, 1): whether a mask with one element for each key hides the key."""
    hidden = torch.zeros(key.shape[0], 1, 1, key.shape[2], dtype=torch.bool)
    if attn_mask is not None and attn_mask.dim() == 4 and attn_mask.shape[1:3] == (1, 1):
        hidden |= ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == -math.inf
    return hidden.transpose(-1, -2)


def mean_of_keys(key, hidden):
    """The sum of the rows in order, times the rounded share of a row."""
    total = torch.zeros_like(key[:, :, :1])
    for j in range(key.shape[2]):
        total += key[:, :, j : j + 1].masked_fill(hidden[:, :, j : j + 1], 0.0)
    count = (~hidden).sum(2, keepdim=True)
    return torch.where(count == 0, 0.0, total * (1 / count.double()).float())


def rounded_values(value, fused):
    padded = torch.nn.functional.pad(value, (0, 0, 0, -value.shape[2] % KEYS))
    tiles = padded.unflatten(2, (-1, KEYS))
    return codes(tiles, 4095, 3, fused).flatten(2, 3)[:, :, : value.shape[2]]


def attention(query, key, value, *args, scale=None, fused=True, **options):
    """(out, lse) in fp64. The arguments of reference.attention."""
    q, k, v = (t.detach().float() for t in (query, key, value))
    hidden = hidden_from_all(k, *args[:1], **{n: t for n, t in options.items() if n == "attn_mask"})
    mean = mean_of_keys(k, hidden)
    product = q.double() @ mean.double().repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)
    # scores = <codes of q, codes of k> + <q, mean>: one more column
    q = torch.cat([codes(q, 127, 3, fused), product], 3)
    k = torch.cat([codes(k - mean, 127, 3, fused), torch.ones_like(mean[..., :1]).double().expand(*k.shape[:3], 1)], 3)
    options = {n: t.double() if torch.is_tensor(t) and t.is_floating_point() else t for n, t in options.items()}
    scale = 1 / math.sqrt(query.shape[3]) if scale is None else scale
    return reference.attention(q, k, rounded_values(v.masked_fill(hidden, 0.0), fused), *args, scale=scale, **options)
