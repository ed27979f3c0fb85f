"""The functions of the gallery, by name: from torch's attention-gym collection and from torch's tests."""

import math

import torch
from torch.nn.attention.flex_attention import and_masks, or_masks

SCORES = (
    "identity", "softcap", "alibi", "learned_slope", "relative_table", "dense_bias", "bias_of_rows", "t5_buckets",
    "causal_score", "everything", "integers", "transformer_xl", "tanh", "temperature",
)  # fmt: skip
MASKS = ("causal", "window", "prefix_lm", "document", "dilated", "natten", "nothing_for_some", "by_table",
    "flamingo", "dilated_window",
)  # fmt: skip


def score_mods(heads, q_len, k_len, dtype=torch.float32, seed=0):
    """{name: (score_mod, the float tensors that it captures)}."""
    g = torch.Generator().manual_seed(seed)

    def parameter(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype).requires_grad_()

    table, bias, per_head = parameter(heads, q_len + k_len), parameter(heads, q_len, k_len), parameter(heads)
    per_row, per_key, one, offset = parameter(q_len), parameter(k_len), parameter(()), torch.tensor(3)
    buckets, by_query = parameter(8, heads), parameter(heads, q_len, q_len + k_len)
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1) / heads)

    def identity(score, b, h, q, k):
        return score

    def softcap(score, b, h, q, k):
        return 5.0 * torch.tanh(score / 5.0)

    def alibi(score, b, h, q, k):
        return score + slopes[h] * (k - q)

    def learned_slope(score, b, h, q, k):
        return score - per_head[h] * (q - k).abs()

    def relative_table(score, b, h, q, k):
        return score + table[h, q - k + k_len]

    def dense_bias(score, b, h, q, k):
        return score + bias[h, q, k]

    def bias_of_rows(score, b, h, q, k):
        return score * per_row[q] + per_key[k] * one

    def t5_buckets(score, b, h, q, k):
        distance = (q - k).abs()
        far = 4 + (torch.log(distance.clamp(min=1) / 4.0) / math.log(8.0) * 4).to(torch.int32)
        bucket = torch.where(distance < 4, distance, far.clamp(max=7))
        return score + buckets[bucket, h]

    def causal_score(score, b, h, q, k):
        return torch.where(q >= k, score, -float("inf"))

    def everything(score, b, h, q, k):
        x = torch.sigmoid(score) * torch.exp(-score.abs()) + torch.erf(score) - torch.log1p(score * score)
        y = torch.sin(score) + torch.cos(score * 0.5) + torch.sqrt(score * score + 1) + torch.rsqrt(score * score + 2)
        z = (
            torch.exp2(score * 0.1)
            + torch.expm1(score * 0.2)
            + torch.pow(score.abs() + 0.5, 1.5)
            + torch.log2(y * y + 1)
        )
        return x + y / (1 + score.square()) + z.clamp(-3, 3) + torch.maximum(x, y) - torch.minimum(x, z) + torch.relu(z)

    def integers(score, b, h, q, k):
        a = (q * 7 - k * 5 + offset) % 11 - (q - k) // 3 + (k << 1) - (q >> 2)
        c = torch.div(k - q, 4, rounding_mode="trunc") + ((q ^ k) & 5) + torch.maximum(q, k) - torch.sign(q - k)
        a, c = a.to(score.dtype), c.to(score.dtype)
        return score + 0.01 * a + 0.02 * c + torch.where((q % 2 == 0) | ~(k > 3), 0.5, -0.25) * (b + 1)

    def transformer_xl(score, b, h, q, k):
        return score + by_query[h, q, q - k + k_len]  # <q, r_(i - j)>, computed before

    def temperature(score, b, h, q, k):
        return score * torch.exp(per_head[h])

    def tanh(score, b, h, q, k):
        return torch.tanh(score)

    return {
        "transformer_xl": (transformer_xl, (by_query,)),
        "tanh": (tanh, ()),
        "temperature": (temperature, (per_head,)),
        "identity": (identity, ()),
        "softcap": (softcap, ()),
        "alibi": (alibi, ()),
        "learned_slope": (learned_slope, (per_head,)),
        "relative_table": (relative_table, (table,)),
        "dense_bias": (dense_bias, (bias,)),
        "bias_of_rows": (bias_of_rows, (per_row, per_key, one)),
        "t5_buckets": (t5_buckets, (buckets,)),
        "causal_score": (causal_score, ()),
        "everything": (everything, ()),
        "integers": (integers, ()),
    }


def mask_mods(batch, q_len, k_len, seed=0):
    """{name: mask_mod}."""
    g = torch.Generator().manual_seed(seed)
    prefix = torch.randint(0, k_len + 1, (batch,), generator=g)
    documents = torch.sort(torch.randint(0, 4, (max(q_len, k_len),), generator=g)).values
    dense = torch.rand(batch, q_len, k_len, generator=g) < 0.5
    image_of_text = torch.sort(torch.randint(0, 4, (q_len,), generator=g)).values
    image_of_key = torch.sort(torch.randint(0, 4, (k_len,), generator=g)).values

    def causal(b, h, q, k):
        return q >= k

    def window(b, h, q, k):
        return (q - k).abs() <= 20

    def prefix_lm(b, h, q, k):
        return k < prefix[b]

    def document(b, h, q, k):
        return documents[q] == documents[k]

    def dilated(b, h, q, k):
        return (q - k) % 3 == h % 3

    def natten(b, h, q, k):
        return ((q // 8 - k // 8).abs() <= 1) & ((q % 8 - k % 8).abs() <= 1)

    def nothing_for_some(b, h, q, k):
        return (q % 5 != 0) & (k >= 0)

    def by_table(b, h, q, k):
        return dense[b, q, k]

    def flamingo(b, h, q, k):
        return image_of_text[q] == image_of_key[k]

    def dilated_window(b, h, q, k):
        return ((q - k).abs() <= 24) & ((q - k) % 4 == 0)

    return {
        "flamingo": flamingo,
        "dilated_window": dilated_window,
        "causal": causal,
        "window": window,
        "prefix_lm": or_masks(prefix_lm, causal),
        "document": and_masks(document, causal),
        "dilated": dilated,
        "natten": natten,
        "nothing_for_some": nothing_for_some,
        "by_table": by_table,
    }
