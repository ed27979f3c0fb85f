"""A call of context parallel attention in the form that ring, all-gather and Ulysses need."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ._group import Group
from ._layout import Layout, layout_of
from ._tiles import Band, Geometry, Tile


class Inputs(NamedTuple):
    """This process's tensors in the order of the operator ``attention``. Masks have all keys of the sequence."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    rng_state: Tensor | None
    key_mask: Tensor | None


class Sharding(NamedTuple):
    """The group of a call and the sequence that it shares, in types that operators of torch have."""

    group: str  # the name of the group
    balanced: bool
    seqlen_q: int | None  # rows of the whole sequence; None: this process's rows times the number of processes
    seqlen_k: int | None
    documents: list[int] | None  # cu_seqlens


@dataclass(frozen=True)
class ShardedCall:
    group: Group
    geometry: Geometry
    options: dict  # the options of the operator ``attention``
    heads: int

    def tile_options(self, tile: Tile) -> dict:
        """Returns the options of the operator for one tile."""
        band = self.geometry.band
        return self.options | {
            "causal": False,
            "lower_right": False,
            "diagonal": tile.diagonal,
            "window_left": band.left if tile.bounded else None,
            "window_right": band.right if tile.bounded else None,
            "attention_chunk": band.chunk if tile.bounded else 0,
            "first_key": band.first_key + tile.col,
        }

    def tile_rng_state(self, rng_state: Tensor | None, tile: Tile) -> Tensor | None:
        """Returns the dropout state of one tile: seed and offset of the call, and the tile's position in it."""
        if rng_state is None:
            return None
        return rng_state_at(rng_state, tile.row, tile.col, tile.document * self.heads, self.heads)


def make_sharded_call(group: Group, inputs: Inputs, sharding: Sharding, options: dict) -> ShardedCall:
    """Raises if this process's number of rows does not match the sharded sequence."""
    rank, size = group.rank, group.size
    queries = layout_of("query", inputs.query.shape[2], sharding.seqlen_q, rank, size, sharding.balanced)
    keys = layout_of("key", inputs.key.shape[2], sharding.seqlen_k, rank, size, sharding.balanced)
    has_columns = inputs.key_mask is not None or (inputs.attn_mask is not None and inputs.attn_mask.shape[3] != 1)
    depends_on_band_only = inputs.rng_state is None and inputs.alibi_slopes is None and not has_columns
    documents = None if sharding.documents is None else _documents(sharding.documents, inputs, queries, keys)
    geometry = Geometry(queries, keys, _band(options, queries, keys), documents, depends_on_band_only)
    return ShardedCall(group, geometry, options, inputs.query.shape[1])


def meta_inputs(group: Group, inputs: Inputs, sharding: Sharding, options: dict) -> Inputs:
    """Returns this process's queries and all keys as meta tensors. The operator can check them without memory."""
    seqlen_k = make_sharded_call(group, inputs, sharding, options).geometry.keys.seqlen

    def meta(t: Tensor | None, rows: int | None = None) -> Tensor | None:
        if t is None:
            return None
        shape = t.shape if rows is None else (*t.shape[:2], rows, t.shape[3])
        return torch.empty(shape, dtype=t.dtype, device="meta")

    if inputs.key.shape[2] != inputs.value.shape[2]:
        raise ValueError(f"value: got {inputs.value.shape[2]} rows; allowed: as many as key has, {inputs.key.shape[2]}")
    whole = inputs._replace(key=meta(inputs.key, seqlen_k), value=meta(inputs.value, seqlen_k))
    return Inputs(*(meta(t) for t in whole))


def accumulator_dtype(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def rng_state_at(rng_state: Tensor, row: int, col: int, head: int, heads: int) -> Tensor:
    """Returns a dropout state for a part of a call: csrc/core/params.h, DropoutParams."""
    position = torch.tensor([row, col, head, heads], dtype=torch.int64, device="cpu")
    return torch.cat([rng_state[:2], position.to(rng_state.device, non_blocking=True)])


def _band(options: dict, queries: Layout, keys: Layout) -> Band:
    """Returns the band of the whole sequence."""
    right = options["window_right"]
    if options["causal"]:
        right = 0 if right is None else min(0, right)
    corner = keys.seqlen - queries.seqlen if options["lower_right"] else 0
    chunks = options["attention_chunk"], options["first_key"]
    return Band(options["window_left"], right, corner + options["diagonal"], *chunks)


def _documents(offsets: list[int], inputs: Inputs, queries: Layout, keys: Layout) -> tuple[int, ...]:
    """Checks cu_seqlens."""
    ascending = all(a <= b for a, b in pairwise(offsets))
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != queries.seqlen or not ascending:
        raise ValueError(
            f"cu_seqlens: got {len(offsets)} offsets that do not ascend from 0 to {queries.seqlen}; allowed: "
            "where each document of the whole sequence begins, and the sequence's length"
        )
    batch, heads = inputs.query.shape[:2]
    if batch != 1 or queries.seqlen != keys.seqlen:
        raise ValueError(
            f"query: got a batch of {batch}, {queries.seqlen} queries and {keys.seqlen} keys; allowed with "
            "cu_seqlens: a batch of 1, as many keys as queries"
        )
    for name in ("attn_mask", "key_mask"):
        if getattr(inputs, name) is not None:
            raise ValueError(f"{name}: got one together with cu_seqlens; allowed: one of them")
    for name in ("alibi_slopes", "sink"):
        t = getattr(inputs, name)
        if t is not None and t.dim() != 1:
            raise ValueError(f"{name}: got shape {list(t.shape)}; allowed with cu_seqlens: ({heads})")
    return tuple(offsets)
