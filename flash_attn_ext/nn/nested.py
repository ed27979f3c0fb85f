"""MultiheadAttention of nested tensors in both layouts of torch: packs the rows and calls `flash_attn_varlen`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..functional import new_rng_state
from ..varlen import flash_attn_varlen
from .attention_weights import attention_weights


@dataclass(frozen=True)
class Packed:
    """Sequence b has the rows `offsets[b]` to `offsets[b + 1]` of `rows`, (T, features)."""

    rows: Tensor
    offsets: Tensor  # (B + 1) int64

    @property
    def longest(self) -> int:
        return int(self.offsets.diff().max()) if len(self.offsets) > 1 else 0

    def sequences_and_positions(self) -> tuple[Tensor, Tensor]:
        """Returns for each row the number of its sequence and its position in the sequence."""
        sequence = torch.repeat_interleave(self.offsets.diff(), output_size=self.rows.size(0))
        return sequence, torch.arange(len(sequence), device=sequence.device) - self.offsets[sequence]

    def padded(self) -> Tensor:
        """Returns (B, longest, ...), with zeros after each sequence."""
        empty = self.rows.new_zeros(len(self.offsets) - 1, self.longest, *self.rows.shape[1:])
        return empty.index_put(self.sequences_and_positions(), self.rows)


def pack(x: Tensor) -> Packed:
    """Packs a nested tensor (B, *, features). A jagged tensor without holes is not copied."""
    if x.layout is not torch.jagged:
        parts = x.unbind()
        lengths = torch.tensor([0, *(part.size(0) for part in parts)], device=x.device)
        return Packed(torch.cat(parts), lengths.cumsum(0))
    if x.lengths() is None:
        return Packed(x.values(), x.offsets().to(torch.int64))
    offsets = F.pad(x.lengths().cumsum(0), (1, 0))
    return Packed(x.values()[_rows_in_use(x)], offsets)


def unpack(rows: Tensor, packed: Packed, x: Tensor) -> Tensor:
    """Returns `rows` as a nested tensor with the layout and the holes of `x`. `packed` is `pack(x)`."""
    if x.layout is not torch.jagged:
        return torch.nested.as_nested_tensor(list(rows.split(packed.offsets.diff().tolist())))
    if x.lengths() is not None:
        rows = rows.new_zeros(x.values().size(0), rows.size(-1)).index_copy(0, _rows_in_use(x), rows)
    # The same offsets object as in `x`: torch compares the shapes of jagged tensors by the identity of the offsets.
    return torch.nested.nested_tensor_from_jagged(rows, x.offsets(), x.lengths())


def _rows_in_use(x: Tensor) -> Tensor:
    """Returns the numbers of the rows in a jagged tensor's values, without the rows of holes."""
    lengths = x.lengths()
    ends = lengths.cumsum(0)
    in_order = torch.arange(int(ends[-1]) if len(ends) else 0, device=lengths.device)
    return in_order + torch.repeat_interleave(x.offsets()[:-1] - (ends - lengths), lengths)


def append_keys(packed: Packed, tail: Tensor) -> Packed:
    """Appends the rows `tail`, (n, features), to each sequence."""
    count = tail.size(0)
    sequences = torch.arange(len(packed.offsets), device=packed.offsets.device)
    offsets = packed.offsets + count * sequences
    rows = packed.rows.new_zeros(packed.rows.size(0) + count * (len(sequences) - 1), packed.rows.size(1))
    sequence, position = packed.sequences_and_positions()
    rows = rows.index_copy(0, offsets[sequence] + position, packed.rows)
    ends = (offsets[1:, None] + torch.arange(-count, 0, device=offsets.device)).flatten()
    return Packed(rows.index_copy(0, ends, tail.repeat(len(sequences) - 1, 1)), offsets)


def check(module: nn.MultiheadAttention, inputs: dict[str, Tensor], masks: dict[str, Tensor | None]) -> None:
    """Raises AssertionError for inputs of different layouts or not 3-D, for masks, and without `batch_first`."""
    layout = next(x.layout for x in inputs.values() if x.is_nested)
    query = inputs["query"]
    if query.dim() != 3:  # an empty list of sequences has no number of features
        raise AssertionError(f"query: got a {query.dim()}-D nested tensor, must be 3-D: (B, *, embed_dim)")
    for name, x in inputs.items():
        if not x.is_nested or x.layout is not layout:
            got = f"a {x.layout} nested tensor" if x.is_nested else "a dense tensor"
            raise AssertionError(f"{name}: got {got}, must be a {layout} nested tensor like the other inputs")
    for name, mask in masks.items():
        if mask is not None:
            raise AssertionError(f"{name}: must be None with nested inputs, got a tensor")
    if not module.batch_first:
        raise AssertionError("query: got a nested tensor, allowed with batch_first=True only")


def forward(
    module: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    need_weights: bool,
    average: bool,
    is_causal: bool,
    top_k: int | None,
) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor] | None]:
    """Computes MultiheadAttention.forward. The weights are padded, as in torch."""
    # One packed tensor for each distinct input: `_project` compares them by identity.
    packed = {id(x): pack(x) for x in (query, key, value)}
    q, k, v = (packed[id(x)] for x in (query, key, value))
    if len(k.offsets) != len(q.offsets):
        raise RuntimeError(f"key: got batch size {len(k.offsets) - 1}, must be query's {len(q.offsets) - 1}")
    if not torch.equal(k.offsets, v.offsets):
        got, allowed = v.offsets.diff().tolist(), k.offsets.diff().tolist()
        raise AssertionError(f"value: got sequence lengths {got}, must be key's {allowed}")
    module._check(q.rows, k.rows, v.rows, None, None, need_weights, is_causal)

    rows_q, rows_k, rows_v = module._project(q.rows, k.rows, v.rows)
    tail_k, tail_v = module._append_keys(rows_k[:0], rows_v[:0], batched=False)
    k, v = (append_keys(Packed(rows, k.offsets), tail) if tail.size(0) else Packed(rows, k.offsets)
            for rows, tail in ((rows_k, tail_k), (rows_v, tail_v)))  # fmt: skip
    heads = [Packed(p.rows.unflatten(-1, (module.num_heads, module.head_dim)), p.offsets)
             for p in (Packed(rows_q, q.offsets), k, v)]  # fmt: skip
    module._check_top_k(top_k, need_weights, k.longest)

    dropout_p = module.dropout if module.training else 0.0
    rng_state = new_rng_state(rows_q.device) if need_weights and dropout_p > 0.0 else None
    out, lse = flash_attn_varlen(
        *(p.rows for p in heads), q.offsets, k.offsets, dropout_p=dropout_p, rng_state=rng_state, return_lse=True
    )  # fmt: skip
    out = unpack(F.linear(out.flatten(-2), module.out_proj.weight, module.out_proj.bias), q, query)
    if not need_weights:
        return out, None

    padded_q, padded_k = (p.padded().transpose(1, 2) for p in heads[:2])
    is_key, is_query = (torch.arange(p.longest, device=p.offsets.device) < p.offsets.diff()[:, None] for p in (k, q))
    padded_lse = Packed(lse.detach().t(), q.offsets).padded().transpose(1, 2)
    weights = attention_weights(padded_q, padded_k, None, is_key, padded_lse, rng_state, dropout_p, average, top_k)
    # As in torch: 0 in the rows of padded queries.
    rows = is_query[..., None] if average else is_query[:, None, :, None]
    if top_k is None:
        return out, torch.where(rows, weights, 0.0)
    return out, (torch.where(rows, weights[0], 0.0), weights[1])
