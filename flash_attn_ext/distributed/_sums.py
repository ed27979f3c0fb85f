"""The sums over the tiles of a call: out and lse in the forward, gradients in the backward.

The sums are float32, or float64 for float64 inputs.
"""

from itertools import pairwise

import torch
from torch import Tensor

from .. import _ops
from ._sharded_call import Inputs, ShardedCall, accumulator_dtype
from ._tiles import Tile


class ForwardSums:
    """Out and lse of this process's queries. Each tile adds the part of its keys, in a fixed order."""

    def __init__(self, call: ShardedCall, inputs: Inputs):
        self.call, self.inputs = call, inputs
        query, sink = inputs.query, inputs.sink
        dtype = accumulator_dtype(query)
        self.out = query.new_zeros(*query.shape[:3], inputs.value.shape[3], dtype=dtype)
        self.lse = query.new_full(query.shape[:3], -torch.inf, dtype=dtype)
        if sink is not None:  # one more score in each row, without a value
            self.lse.copy_(sink.unsqueeze(-1).expand_as(self.lse))

    def add(self, tile: Tile, key: Tensor, value: Tensor) -> None:
        """Adds the attention of a tile's queries to its keys, which are rows of ``key`` and ``value``."""
        rows = slice(tile.q_begin, tile.q_end)
        q = self.inputs.query[:, :, rows]
        k, v = (t[:, :, tile.k_begin : tile.k_end] for t in (key, value))
        slopes, rng_state = self.inputs.alibi_slopes, self.call.tile_rng_state(self.inputs.rng_state, tile)
        options = self.call.tile_options(tile)
        if tile.lengths is None:
            mask, key_mask = masks_of_tile(self.inputs, tile)
            part, part_lse = _ops.attention(q, k, v, mask, slopes, None, rng_state, key_mask, **options)
        else:
            cu, longest = _packing(tile, q.device)
            part, part_lse = _ops.attention_varlen(
                *(packed(t) for t in (q, k, v)), None, slopes, None, cu, cu, None, None, rng_state, **options, **longest
            )
            part, part_lse = unpacked(part), part_lse.unsqueeze(0)
        _ops.attention_merge_(self.out[:, :, rows], self.lse[:, :, rows], part, part_lse)

    def results(self) -> tuple[Tensor, Tensor]:
        return self.out.to(self.inputs.query.dtype), self.lse


class BackwardSums:
    """The gradients of this process's own tensors. Each tile adds its part."""

    def __init__(
        self, call: ShardedCall, inputs: Inputs, out: Tensor, lse: Tensor, grad_out: Tensor | None,
        grad_lse: Tensor | None, wanted: list[bool],
    ):  # fmt: skip
        self.call, self.inputs = call, inputs
        self.out, self.lse, self.grad_out, self.grad_lse = out, lse, grad_out, grad_lse
        self.wanted = dict(zip(_ops.DIFFERENTIABLE, wanted, strict=True))
        self.wants_keys = self.wanted["key"] or self.wanted["value"]
        self.query, self.mask, self.slopes = (
            self._zeros(name, like)
            for name, like in (
                ("query", inputs.query), ("attn_mask", inputs.attn_mask), ("alibi_slopes", inputs.alibi_slopes)
            )
        )  # fmt: skip

    def _zeros(self, name: str, like: Tensor | None) -> Tensor | None:
        if like is None or not self.wanted[name]:
            return None
        return torch.zeros_like(like, dtype=accumulator_dtype(self.inputs.query))

    def add(self, tile: Tile, key: Tensor, value: Tensor, grad_key: Tensor, grad_value: Tensor) -> None:
        """Adds the gradients of a tile. ``grad_key`` and ``grad_value`` belong to the caller."""
        rows, columns = slice(tile.q_begin, tile.q_end), slice(tile.k_begin, tile.k_end)
        q = self.inputs.query[:, :, rows]
        k, v = (t[:, :, columns] for t in (key, value))
        grad_out, grad_lse = (t if t is None else t[:, :, rows] for t in (self.grad_out, self.grad_lse))
        out, lse = self.out[:, :, rows], self.lse[:, :, rows]
        slopes, rng_state = self.inputs.alibi_slopes, self.call.tile_rng_state(self.inputs.rng_state, tile)
        options = self.call.tile_options(tile)
        options["grad_mask"] = [
            self.query is not None, self.wants_keys, self.wants_keys, self.mask is not None, self.slopes is not None,
            False,
        ]  # fmt: skip
        if tile.lengths is None:
            mask, key_mask = masks_of_tile(self.inputs, tile)
            dq, dk, dv, dmask, dslopes, _ = _ops.attention_backward(
                grad_out, grad_lse, q, k, v, mask, slopes, None, rng_state, key_mask, out, lse, **options
            )
        else:
            cu, longest = _packing(tile, q.device)
            packed_grad, *packed_qkv = (t if t is None else packed(t) for t in (grad_out, q, k, v))
            dq, dk, dv, dmask, dslopes, _ = _ops.attention_varlen_backward(
                packed_grad, None if grad_lse is None else grad_lse[0], *packed_qkv, None, slopes, None, cu, cu, None,
                None, rng_state, packed(out), lse[0], **options, **longest,
            )  # fmt: skip
            dq, dk, dv = (t if t is None else unpacked(t) for t in (dq, dk, dv))
        if self.query is not None:
            self.query[:, :, rows] += dq
        if self.wants_keys:
            grad_key[:, :, columns] += dk
            grad_value[:, :, columns] += dv
        if self.mask is not None:
            _mask_of_tile(self.mask, tile).add_(dmask)
        if self.slopes is not None:
            self.slopes += dslopes

    def results(self, grad_key: Tensor, grad_value: Tensor) -> list[Tensor]:
        """Returns the wanted gradients, each in the dtype of its tensor.

        The gradients of keys and values are copied, because they are views of a message.
        """
        sums = (self.query, grad_key, grad_value, self.mask, self.slopes, self._of_sink())
        of_keys = ("key", "value")
        return [
            total.to(given.dtype, copy=name in of_keys)
            for name, total, given in zip(_ops.DIFFERENTIABLE, sums, self.inputs, strict=False)
            if total is not None and given is not None and self.wanted[name]
        ]

    def _of_sink(self) -> Tensor | None:
        """Returns the sink's gradient, which belongs to no tile."""
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
        share = share.masked_fill(self.lse == -torch.inf, 0.0)  # rows without keys and without a sink
        per_head = -(share * delta).sum(-1)
        return per_head.sum(0) if sink.dim() == 1 else per_head


def masks_of_tile(inputs: Inputs, tile: Tile) -> tuple[Tensor | None, Tensor | None]:
    """Returns views of attn_mask and key_mask: the parts that a tile needs."""
    mask, key_mask = inputs.attn_mask, inputs.key_mask
    if key_mask is not None:
        key_mask = key_mask[:, tile.key : tile.key + tile.k_end - tile.k_begin]
    return None if mask is None else _mask_of_tile(mask, tile), key_mask


def _mask_of_tile(mask: Tensor, tile: Tile) -> Tensor:
    """Returns a tile's view of a mask (B, H, rows of this process, all keys). Dimensions of size 1 stay."""
    if mask.shape[2] != 1:
        mask = mask[:, :, tile.q_begin : tile.q_end]
    if mask.shape[3] != 1:
        mask = mask[..., tile.key : tile.key + tile.k_end - tile.k_begin]
    return mask


def _packing(tile: Tile, device: torch.device) -> tuple[Tensor, dict[str, int]]:
    """Returns cu_seqlens of a tile of several whole documents, and the length of the longest document."""
    assert tile.lengths is not None
    longest = max(end - begin for begin, end in pairwise(tile.lengths))
    cu_seqlens = torch.tensor(tile.lengths, dtype=torch.int64, device=device)
    return cu_seqlens, {"max_seqlen_q": longest, "max_seqlen_k": longest}


def packed(t: Tensor) -> Tensor:
    """Returns (1, H, S, D) as (S, H, D)."""
    return t[0].transpose(0, 1)


def unpacked(t: Tensor) -> Tensor:
    """Returns (S, H, D) as (1, H, S, D)."""
    return t.transpose(0, 1).unsqueeze(0)
