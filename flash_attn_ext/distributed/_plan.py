"""A call of context parallel attention, checked: what every method needs to know of it."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .. import _ops
from ._group import Group
from ._tiles import Geometry, Tile


@dataclass(frozen=True)
class Plan:
    group: Group
    geometry: Geometry
    options: dict  # of the operators, without what says where the band lies
    heads: int

    def tile_options(self, tile: Tile) -> dict:
        """The operator's options for one tile."""
        band = self.geometry.band
        return self.options | {
            "causal": False,
            "lower_right": False,
            "diagonal": tile.diagonal,
            "window_left": band.left if tile.bounded else None,
            "window_right": band.right if tile.bounded else None,
        }

    def tile_rng_state(self, rng_state: Tensor | None, tile: Tile) -> Tensor | None:
        """The dropout state of one tile: that of the call, and where the tile lies in it."""
        if rng_state is None:
            return None
        return rng_state_at(rng_state, tile.row, tile.col, tile.document * self.heads, self.heads)


def rng_state_at(rng_state: Tensor, row: int, col: int, head: int, heads: int) -> Tensor:
    """A dropout state for a part of a call: csrc/core/params.h, DropoutParams."""
    place = torch.tensor([row, col, head, heads], dtype=torch.int64)
    return torch.cat([rng_state[:2], place.to(rng_state.device, non_blocking=True)])


def mask_of_tile(mask: Tensor | None, tile: Tile) -> Tensor | None:
    """The part of a mask (B, H, rows of this process, all keys) that a tile needs; sizes of 1 stay. A view."""
    if mask is None:
        return None
    if mask.shape[2] != 1:
        mask = mask[:, :, tile.q_begin : tile.q_end]
    if mask.shape[3] != 1:
        mask = mask[..., tile.key : tile.key + tile.k_end - tile.k_begin]
    return mask


@dataclass
class Inputs:
    """The tensors of a call, of which tiles take their parts."""

    query: Tensor
    mask: Tensor | None
    slopes: Tensor | None
    sink: Tensor | None
    rng_state: Tensor | None


def accumulator_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


class ForwardState:
    """Out and lse of this process's queries, to which each tile adds what its keys give, in a fixed order."""

    def __init__(self, plan: Plan, inputs: Inputs, head_dim_v: int):
        self.plan, self.inputs = plan, inputs
        batch, heads, rows, _ = inputs.query.shape
        dtype = accumulator_dtype(inputs.query)
        self.out = inputs.query.new_zeros(batch, heads, rows, head_dim_v, dtype=dtype)
        self.lse = inputs.query.new_full((batch, heads, rows), -torch.inf, dtype=dtype)
        if inputs.sink is not None:  # a score without a value, once for each row
            self.lse.copy_(inputs.sink.unsqueeze(-1).expand_as(self.lse))

    def add(self, tile: Tile, key: Tensor, value: Tensor) -> None:
        """What the queries of a tile get from its keys; key and value are those of the visit."""
        plan, inputs = self.plan, self.inputs
        q = inputs.query[:, :, tile.q_begin : tile.q_end]
        k, v = (t[:, :, tile.k_begin : tile.k_end] for t in (key, value))
        rng_state, options = plan.tile_rng_state(inputs.rng_state, tile), plan.tile_options(tile)
        if tile.lengths is None:
            mask = mask_of_tile(inputs.mask, tile)
            part, part_lse = _ops.attention(q, k, v, mask, inputs.slopes, None, rng_state, **options)
        else:
            cu = torch.tensor(tile.lengths, dtype=torch.int64, device=q.device)
            longest = max(end - begin for begin, end in pairwise(tile.lengths))
            part, part_lse = _ops.attention_varlen(
                *(packed(t) for t in (q, k, v)), None, inputs.slopes, None, cu, cu, None, None, rng_state,
                **options, max_seqlen_q=longest, max_seqlen_k=longest,
            )  # fmt: skip
            part, part_lse = unpacked(part), part_lse.unsqueeze(0)
        rows = slice(tile.q_begin, tile.q_end)
        _ops.attention_merge_(self.out[:, :, rows], self.lse[:, :, rows], part, part_lse)


class BackwardState:
    """The gradients of this process's own tensors, to which each tile adds; the caller holds those of keys."""

    def __init__(
        self, plan: Plan, inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None,
        wanted: dict[str, bool],
    ):  # fmt: skip
        self.plan, self.inputs, self.wanted = plan, inputs, wanted
        self.out, self.lse, self.grad_out, self.grad_lse = out, lse, grad_out, grad_lse
        accumulator = accumulator_dtype(inputs.query)

        def zeros(name: str, like: Tensor | None) -> Tensor | None:
            return torch.zeros_like(like, dtype=accumulator) if like is not None and wanted[name] else None

        self.query = zeros("query", inputs.query)
        self.mask = zeros("attn_mask", inputs.mask)
        self.slopes = zeros("alibi_slopes", inputs.slopes)

    def add(self, tile: Tile, key: Tensor, value: Tensor, grad_key: Tensor, grad_value: Tensor) -> None:
        """The gradients that a tile gives; those of keys and values are added to ``grad_key`` and ``grad_value``."""
        plan, inputs = self.plan, self.inputs
        rows, columns = slice(tile.q_begin, tile.q_end), slice(tile.k_begin, tile.k_end)
        q = inputs.query[:, :, rows]
        k, v = (t[:, :, columns] for t in (key, value))
        grad_out, grad_lse = (t if t is None else t[:, :, rows] for t in (self.grad_out, self.grad_lse))
        out, lse = self.out[:, :, rows], self.lse[:, :, rows]
        rng_state, options = plan.tile_rng_state(inputs.rng_state, tile), plan.tile_options(tile)
        wants_kv = self.wanted["key"] or self.wanted["value"]
        flags = [self.query is not None, wants_kv, wants_kv, self.mask is not None, self.slopes is not None, False]
        if tile.lengths is None:
            mask = mask_of_tile(inputs.mask, tile)
            dq, dk, dv, dmask, dslopes, _ = _ops.attention_backward(
                grad_out, grad_lse, q, k, v, mask, inputs.slopes, None, rng_state, None, out, lse,
                **options, grad_mask=flags,
            )  # fmt: skip
        else:
            cu = torch.tensor(tile.lengths, dtype=torch.int64, device=q.device)
            longest = max(end - begin for begin, end in pairwise(tile.lengths))
            packed_out, *rest = (t if t is None else packed(t) for t in (grad_out, q, k, v))
            dq, dk, dv, dmask, dslopes, _ = _ops.attention_varlen_backward(
                packed_out, None if grad_lse is None else grad_lse[0], *rest, None, inputs.slopes, None, cu, cu, None,
                None, rng_state, packed(out), lse[0],
                **options, max_seqlen_q=longest, max_seqlen_k=longest, grad_mask=flags,
            )  # fmt: skip
            dq, dk, dv = (t if t is None else unpacked(t) for t in (dq, dk, dv))
        if self.query is not None:
            self.query[:, :, rows] += dq
        if wants_kv:
            grad_key[:, :, columns] += dk
            grad_value[:, :, columns] += dv
        if self.mask is not None and dmask is not None:
            mask_of_tile(self.mask, tile).add_(dmask)
        if self.slopes is not None:
            self.slopes += dslopes

    def of_sink(self) -> Tensor | None:
        """The sink's gradient; it is no part of any tile."""
        sink = self.inputs.sink
        if sink is None or not self.wanted["sink"]:
            return None
        accumulator = accumulator_dtype(self.inputs.query)
        delta = torch.zeros_like(self.lse)
        if self.grad_out is not None:
            delta += (self.grad_out.to(accumulator) * self.out.to(accumulator)).sum(-1)
        if self.grad_lse is not None:
            delta -= self.grad_lse
        share = (sink.to(accumulator).unsqueeze(-1) - self.lse).exp()
        share = share.masked_fill(self.lse == -torch.inf, 0.0)  # rows that see nothing, without a sink
        per_head = -(share * delta).sum(-1)
        return (per_head.sum(0) if sink.dim() == 1 else per_head).to(sink.dtype)

    def results(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of query, mask and slopes, each in its tensor's dtype."""

        def as_given(gradient: Tensor | None, given: Tensor | None) -> Tensor | None:
            return None if gradient is None or given is None else gradient.to(given.dtype)

        inputs = self.inputs
        return (
            as_given(self.query, inputs.query),
            as_given(self.mask, inputs.mask),
            as_given(self.slopes, inputs.slopes),
        )


def packed(t: Tensor) -> Tensor:
    """(1, H, S, D) as (S, H, D)."""
    return t[0].transpose(0, 1)


def unpacked(t: Tensor) -> Tensor:
    """(S, H, D) as (1, H, S, D)."""
    return t.transpose(0, 1).unsqueeze(0)
