"""Ulysses attention (Jacobs et al. 2023, arXiv 2309.14509): exchanges heads for rows of the sequence, by all-to-all.

First each process receives the whole sequence for its part of the heads, and sends its rows of the other heads. Then it
computes an ordinary attention. A second exchange returns the results. The two exchanges are operators of torch, and
each is the backward of the other. ``seqlens`` are the lengths of the whole sequences.
"""

from itertools import pairwise

import torch
from torch import Tensor

from .. import _ops
from ._exchange import all_to_all
from ._group import named_group
from ._layout import Layout
from ._sharded_call import Inputs, ShardedCall, rng_state_at
from ._sums import packed, unpacked


@torch.library.custom_op("flash_attn_ext::heads_for_sequence", mutates_args=())
def heads_for_sequence(tensors: list[Tensor], group: str, balanced: bool, seqlens: list[int]) -> list[Tensor]:
    """Exchanges each tensor (B, heads, rows of this process, D) for (B, heads / n, S, D)."""
    processes, layouts = named_group(group), _layouts(group, balanced, seqlens)
    n = processes.size
    parts = [torch.cat([t.chunk(n, dim=1)[r].reshape(-1) for t in tensors]) for r in range(n)]
    shapes = [
        [(t.shape[0], t.shape[1] // n, layout.rows(r), t.shape[3]) for t, layout in zip(tensors, layouts, strict=True)]
        for r in range(n)
    ]
    sizes = [[torch.Size(shape).numel() for shape in of_rank] for of_rank in shapes]
    received = all_to_all(processes, parts, [sum(of_rank) for of_rank in sizes])
    shards = [
        [part.view(shape) for part, shape in zip(flat.split(size), of_rank, strict=True)]
        for flat, size, of_rank in zip(received, sizes, shapes, strict=True)
    ]
    return [
        torch.cat([shards[rank][i][:, :, begin:end] for rank, begin, end in layout.in_order()], dim=2)
        for i, layout in enumerate(layouts)
    ]


@torch.library.custom_op("flash_attn_ext::sequence_for_heads", mutates_args=())
def sequence_for_heads(tensors: list[Tensor], group: str, balanced: bool, seqlens: list[int]) -> list[Tensor]:
    """Exchanges each tensor (B, heads / n, S, D) for (B, heads, rows of this process, D)."""
    processes, layouts = named_group(group), _layouts(group, balanced, seqlens)
    n, own = processes.size, processes.rank
    parts = []
    for r in range(n):
        rows = [
            torch.cat([t[:, :, begin:end] for begin, end, _ in layout.pieces(r)], dim=2).reshape(-1)
            for t, layout in zip(tensors, layouts, strict=True)
        ]
        parts.append(torch.cat(rows))
    shapes = [(*t.shape[:2], layout.rows(own), t.shape[3]) for t, layout in zip(tensors, layouts, strict=True)]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    received = [flat.split(sizes) for flat in all_to_all(processes, parts, [sum(sizes)] * n)]
    return [torch.cat([received[r][i].view(shape) for r in range(n)], dim=1) for i, shape in enumerate(shapes)]


def _layouts(group: str, balanced: bool, seqlens: list[int]) -> list[Layout]:
    return [Layout(seqlen, named_group(group).size, balanced) for seqlen in seqlens]


@heads_for_sequence.register_fake
def _(tensors, group, balanced, seqlens):
    n = named_group(group).size
    return [t.new_empty(t.shape[0], t.shape[1] // n, s, t.shape[3]) for t, s in zip(tensors, seqlens, strict=True)]


@sequence_for_heads.register_fake
def _(tensors, group, balanced, seqlens):
    _, rank, n = named_group(group)
    rows = [layout.rows(rank) for layout in _layouts(group, balanced, seqlens)]
    return [t.new_empty(t.shape[0], t.shape[1] * n, s, t.shape[3]) for t, s in zip(tensors, rows, strict=True)]


def _differentiate(exchange, inverse) -> None:
    def save(ctx, inputs, output) -> None:
        _, *ctx.where = inputs
        ctx.results = [(t.shape, t.dtype, t.device) for t in output]

    def backward(ctx, grads):
        grads = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            for grad, (shape, dtype, device) in zip(grads, ctx.results, strict=True)
        ]
        return inverse(grads, *ctx.where), None, None, None

    exchange.register_autograd(backward, setup_context=save)


_differentiate(heads_for_sequence, sequence_for_heads)
_differentiate(sequence_for_heads, heads_for_sequence)


def attention(call: ShardedCall, inputs: Inputs, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Computes (out, lse) of this process's queries.

    lse needs one more message, so it is None without ``return_lse``.
    """
    queries, keys = call.geometry.queries, call.geometry.keys
    where = call.group.name, queries.balanced
    q, k, v = heads_for_sequence(list(inputs[:3]), *where, [queries.seqlen, keys.seqlen, keys.seqlen])
    rank, heads = call.group.rank, call.heads // call.group.size
    own = slice(rank * heads, (rank + 1) * heads)
    mask, slopes, sink, rng_state, key_mask = inputs[3:]
    if mask is not None and mask.shape[1] != 1:
        mask = mask[:, own]
    slopes, sink = (t if t is None else t[..., own] for t in (slopes, sink))
    if rng_state is not None:
        rng_state = rng_state_at(rng_state, 0, 0, rank * heads, call.heads)
    band, documents = call.geometry.band, call.geometry.documents
    options = call.options | {
        "causal": False, "lower_right": False, "diagonal": band.diagonal, "window_left": band.left,
        "window_right": band.right,
    }  # fmt: skip
    if documents is None:
        out, lse = _ops.attention(q, k, v, mask, slopes, sink, rng_state, key_mask, **options)
    else:
        cu = torch.tensor(documents, dtype=torch.int64, device=q.device)
        longest = max(end - begin for begin, end in pairwise(documents))
        out, lse = _ops.attention_varlen(
            packed(q), packed(k), packed(v), None, slopes, sink, cu, cu, None, None, rng_state,
            **options, max_seqlen_q=longest, max_seqlen_k=longest,
        )  # fmt: skip
        out, lse = unpacked(out), lse.unsqueeze(0)
    (out,) = sequence_for_heads([out], *where, [queries.seqlen])
    if not return_lse:
        return out, None
    (lse,) = sequence_for_heads([lse.unsqueeze(-1)], *where, [queries.seqlen])
    return out, lse.squeeze(-1)
