"""Packs of sequences, and flash_attn_varlen against the dense oracle of each sequence."""

from itertools import accumulate

import reference
import torch
from helpers import gradients, leaves
from tolerances import assert_as_exact_as_torch, slack_of_delta

from flash_attn_ext import dropout_mask, flash_attn_varlen, new_rng_state

# Queries and keys of each sequence: empty sequences, one row, few queries with many keys, tile edges.
LENGTHS = [(70, 130), (1, 64), (0, 5), (97, 3), (7, 0), (65, 65), (8, 200)]


def offsets(lengths, dtype=torch.int32):
    """(B + 1) for each side."""
    return [torch.tensor([0, *accumulate(side)], dtype=dtype) for side in zip(*lengths, strict=True)]


def longest(lengths):
    return [max(side) for side in zip(*lengths, strict=True)]


def make_pack(lengths, heads=4, heads_kv=2, head_dim=17, head_dim_v=9, dtype=torch.float32):
    """q, k, v that require gradients."""
    total_q, total_k = map(sum, zip(*lengths, strict=True))
    shapes = [(total_q, heads, head_dim), (total_k, heads_kv, head_dim), (total_k, heads_kv, head_dim_v)]
    return [torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def of_sequence(t, cu_seqlens, b):
    """(T, H, D) rows of sequence b as (1, H, S, D)."""
    return t[cu_seqlens[b] : cu_seqlens[b + 1]].transpose(0, 1)[None]


def mask_of_sequence(mask, cu_seqlens, b, seqlen_q, seqlen_k):
    if mask is None:
        return None
    if mask.dim() == 4:
        mask = mask[b if mask.shape[0] > 1 else 0][None]
        return mask[:, :, : max(seqlen_q, 1) if mask.shape[2] > 1 else 1, : seqlen_k if mask.shape[3] > 1 else 1][
            :, :, :seqlen_q
        ]
    rows = mask[..., cu_seqlens[b] : cu_seqlens[b + 1], : seqlen_k if mask.shape[-1] > 1 else 1]
    return rows[None] if rows.dim() == 3 else rows[None, None]


def dense(tensors, cu_seqlens, *, kept=None, **options):
    """(out (T_q, H, D_v), lse (H, T_q)) of the oracle, sequence by sequence."""
    q, k, v, mask, slopes = tensors
    outs, lses = [], []
    for b in range(len(cu_seqlens[0]) - 1):
        own = [of_sequence(t, cu, b) for t, cu in zip((q, k, v), (cu_seqlens[0], *cu_seqlens[1:] * 2), strict=True)]
        seqlen_q, seqlen_k = own[0].shape[2], own[1].shape[2]
        out, lse = reference.attention(
            *own, mask_of_sequence(mask, cu_seqlens[0], b, seqlen_q, seqlen_k),
            alibi_slopes=slopes if slopes is None or slopes.dim() == 1 else slopes[b : b + 1],
            kept=None if kept is None else kept[b : b + 1, :, :seqlen_q, :seqlen_k], **options,
        )  # fmt: skip
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def check_pack(
    lengths,
    dtype=torch.float32,
    attn_mask=None,
    *,
    alibi_slopes=None,
    dropout_p=0.0,
    offsets_dtype=torch.int32,
    tensors=None,
    **options,
):
    """out, lse and every gradient against the oracle, in fp64 and in the same dtype."""
    inputs = [*(tensors or make_pack(lengths, dtype=dtype)), attn_mask, alibi_slopes]
    heads = inputs[0].shape[1]
    cu_seqlens = offsets(lengths, offsets_dtype)
    rng_state = new_rng_state() if dropout_p else None
    kept = dropout_mask(rng_state, len(lengths), heads, *longest(lengths), dropout_p) if dropout_p else None
    of_oracle = {name: value for name, value in options.items() if name != "num_splits"}

    ours_in = leaves(inputs)
    ours = flash_attn_varlen(
        *ours_in[:3], *cu_seqlens, *longest(lengths), ours_in[3], alibi_slopes=ours_in[4], dropout_p=dropout_p,
        rng_state=rng_state, enable_gqa=True, return_lse=True, **options,
    )  # fmt: skip
    results = []
    for precision in (torch.float64, dtype):
        oracle_in = leaves(inputs, precision)
        results.append((dense(oracle_in, cu_seqlens, kept=kept, dropout_p=dropout_p, **of_oracle), oracle_in))
    (exact, exact_in), (theirs, theirs_in) = results
    for name, a, b, c in zip(("out", "lse"), ours, theirs, exact, strict=True):
        assert a.shape == c.shape
        assert_as_exact_as_torch(name, a, b, c, 2)

    grads = [torch.randn_like(exact[0]), torch.randn_like(exact[1]).masked_fill(exact[1] == -torch.inf, 0.0)]
    wanted = [t for t in exact_in if t is not None and t.requires_grad]
    slacks = slack_of_delta(exact[0], exact[1].T, wanted, grads[0], dtype)
    all_grads = [gradients(o, i, grads) for o, i in ((ours, ours_in), (theirs, theirs_in), (exact, exact_in))]
    names = [n for n, t in zip(("dq", "dk", "dv", "dmask", "dslopes"), inputs, strict=True)
             if t is not None and t.requires_grad]  # fmt: skip
    for name, slack, a, b, c in zip(names, slacks, *all_grads, strict=True):
        assert a.shape == c.shape
        assert_as_exact_as_torch(name, a, b, c, 3, slack)
    return ours
