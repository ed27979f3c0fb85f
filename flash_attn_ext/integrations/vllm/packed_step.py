"""One step of vLLM's scheduler as one packed call: prefills, parts of prefills and decodes, one after another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


class NewRows(NamedTuple):
    """The cache rows for the new keys and values of a step. Each new token is a sequence of one row."""

    tokens: Tensor | None  # the tokens to write; None: all
    count: int
    pages: Tensor  # (count, 1)
    rows: Tensor  # (count): the row in the page
    offsets: Tensor  # (count + 1): 0, 1, 2, ...


@dataclass
class PackedStep:
    """Metadata of one step for the layers of one cache group. All tensors are on CPU.

    Index tensors are int64, because the operators would convert other integers in each layer.
    """

    num_tokens: int
    query_offsets: Tensor  # (B + 1): rows of the packed queries
    lengths: Tensor  # (B): keys of each sequence, including new keys
    block_table: Tensor  # (B, pages)
    longest_query: int
    slot_mapping: Tensor  # (tokens): page * page size + row; -1: no row. vLLM may replace it after build().
    causal: bool = True
    _new_rows: dict[int, NewRows] = field(default_factory=dict, repr=False)  # by page size; all layers share them

    @classmethod
    def from_vllm(cls, common: Any, page_size: int) -> PackedStep:
        """Converts vLLM's CommonAttentionMetadata."""
        if isinstance(common.causal, Tensor):
            raise NotImplementedError(
                "causal: got a tensor, one value for each sequence; allowed with FLASH_ATTN_EXT: True or False"
            )
        # vLLM's table has columns for the longest possible sequence. The operator would read all columns, so cut them.
        table = common.block_table_tensor
        used = max(1, min(table.shape[1], -(-int(common.max_seq_len) // page_size)))
        return cls(
            num_tokens=int(common.query_start_loc_cpu[-1]),  # without the tokens that pad a batch
            query_offsets=common.query_start_loc.long(),
            lengths=common.seq_lens.long(),
            block_table=table[:, :used].long(),
            longest_query=common.max_query_len,
            slot_mapping=common.slot_mapping,
            causal=bool(common.causal),
        )

    def new_rows(self, page_size: int) -> NewRows:
        """Returns the cache rows of the new tokens, for pages of ``page_size`` rows."""
        rows = self._new_rows.get(page_size)
        if rows is None:
            rows = self._new_rows[page_size] = new_rows(self.slot_mapping, page_size)
        return rows


def new_rows(slots: Tensor, page_size: int) -> NewRows:
    """Converts vLLM's slot mapping. Tokens without a slot (-1), which pad a batch, are omitted."""
    tokens = None
    if bool((slots < 0).any()):
        tokens = (slots >= 0).nonzero().flatten()
        slots = slots[tokens]
    pages = slots.div(page_size, rounding_mode="floor")
    offsets = torch.arange(len(slots) + 1, device=slots.device)
    return NewRows(tokens, len(slots), pages[:, None], slots - pages * page_size, offsets)
