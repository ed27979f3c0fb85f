"""Ulysses attention (Jacobs et al. 2023, arXiv 2309.14509): heads for sequence, by all-to-all.

Before the attention each process gives away all heads but its own share of them, and gets the whole sequence of these;
after it the results go back. What lies between is an ordinary attention.
"""

from itertools import pairwise

import torch
from torch import Tensor

from .. import _ops
from ._exchange import all_to_all
from ._layout import Layout
from ._plan import Plan, packed, rng_state_at, unpacked


def _heads_for_sequence(plan: Plan, layouts: list[Layout], tensors: list[Tensor]) -> list[Tensor]:
    """(B, heads / n, S, D) of each (B, heads, rows of this process, D)."""
    n = plan.group.size
    parts = [torch.cat([t.chunk(n, dim=1)[r].reshape(-1) for t in tensors]) for r in range(n)]
    shapes = [
        [(t.shape[0], t.shape[1] // n, layout.rows(r), t.shape[3]) for t, layout in zip(tensors, layouts, strict=True)]
        for r in range(n)
    ]
    sizes = [[torch.Size(shape).numel() for shape in of_rank] for of_rank in shapes]
    received = all_to_all(plan.group, parts, [sum(of_rank) for of_rank in sizes])
    shards = [
        [part.view(shape) for part, shape in zip(flat.split(size), of_rank, strict=True)]
        for flat, size, of_rank in zip(received, sizes, shapes, strict=True)
    ]
    return [
        torch.cat([shards[rank][i][:, :, begin:end] for rank, begin, end in layout.in_order()], dim=2)
        for i, layout in enumerate(layouts)
    ]


def _sequence_for_heads(plan: Plan, layouts: list[Layout], tensors: list[Tensor]) -> list[Tensor]:
    """(B, heads, rows of this process, D) of each (B, heads / n, S, D): the inverse."""
    n, own = plan.group.size, plan.group.rank
    parts = []
    for r in range(n):
        rows = [
            torch.cat([t[:, :, begin:end] for begin, end, _ in layout.pieces(r)], dim=2).reshape(-1)
            for t, layout in zip(tensors, layouts, strict=True)
        ]
        parts.append(torch.cat(rows))
    shapes = [(*t.shape[:2], layout.rows(own), t.shape[3]) for t, layout in zip(tensors, layouts, strict=True)]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    received = [flat.split(sizes) for flat in all_to_all(plan.group, parts, [sum(sizes)] * n)]
    return [torch.cat([received[r][i].view(shape) for r in range(n)], dim=1) for i, shape in enumerate(shapes)]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: Plan, layouts: list[Layout], *tensors: Tensor):
        ctx.plan, ctx.layouts = plan, layouts
        return tuple(_heads_for_sequence(plan, layouts, list(tensors)))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return None, None, *_ToSequence.apply(ctx.plan, ctx.layouts, *grads)


class _ToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan: Plan, layouts: list[Layout], *tensors: Tensor):
        ctx.plan, ctx.layouts = plan, layouts
        return tuple(_sequence_for_heads(plan, layouts, list(tensors)))

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return None, None, *_ToHeads.apply(ctx.plan, ctx.layouts, *grads)


def ulysses_attention(
    plan: Plan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    slopes: Tensor | None,
    sink: Tensor | None,
    rng_state: Tensor | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of this process's queries; lse only if asked for, as it costs a message."""
    queries, keys = plan.geometry.queries, plan.geometry.keys
    n, rank = plan.group.size, plan.group.rank
    q, k, v = _ToHeads.apply(plan, [queries, keys, keys], query, key, value)
    heads = plan.heads // n
    own = slice(rank * heads, (rank + 1) * heads)
    if mask is not None and mask.shape[1] != 1:
        mask = mask[:, own]
    slopes, sink = (t if t is None else t[..., own] for t in (slopes, sink))
    if rng_state is not None:
        rng_state = rng_state_at(rng_state, 0, 0, rank * heads, plan.heads)
    band, documents = plan.geometry.band, plan.geometry.documents
    options = plan.options | {
        "causal": False, "lower_right": False, "diagonal": band.diagonal, "window_left": band.left,
        "window_right": band.right,
    }  # fmt: skip
    if documents is None:
        out, lse = _ops.attention(q, k, v, mask, slopes, sink, rng_state, **options)
    else:
        cu = torch.tensor(documents, dtype=torch.int64, device=q.device)
        longest = max(end - begin for begin, end in pairwise(documents))
        out, lse = _ops.attention_varlen(
            packed(q), packed(k), packed(v), None, slopes, sink, cu, cu, None, None, rng_state,
            **options, max_seqlen_q=longest, max_seqlen_k=longest,
        )  # fmt: skip
        out, lse = unpacked(out), lse.unsqueeze(0)
    (out,) = _ToSequence.apply(plan, [queries], out)
    if not return_lse:
        return out, None
    (lse,) = _ToSequence.apply(plan, [queries], lse.unsqueeze(-1))
    return out, lse.squeeze(-1)
