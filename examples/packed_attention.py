"""Four ways to compute attention within each document of a packed sequence, for the GPT of gpt_model.py.

Rotary positions count from the start of the pack. Scores depend only on differences of positions, so positions from the
start of each document would give the same scores.
"""

import torch
from packed_text import Pack
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import flash_attn_ext
from flash_attn_ext.distributed import context_parallel_attn

WAYS = {
    "torch": "torch's scaled_dot_product_attention with a mask of the documents",
    "activate": "the same call after flash_attn_ext.activate()",
    "varlen": "flash_attn_varlen",
    "2 processes": "context_parallel_attn on two processes, each with half of every sequence",
}


class PackedAttention:
    """Causal attention within the documents of the current pack, (1, H, T, D) -> (1, H, T, D)."""

    def __init__(self, way: str):
        if way not in WAYS:
            raise ValueError(f"way: got {way!r}; allowed: {', '.join(WAYS)}")
        self._attend = {"varlen": self._varlen, "2 processes": self._sharded}.get(way, self._masked)
        if way == "activate":
            flash_attn_ext.activate()
        self.set_pack(None)

    def set_pack(self, pack: Pack | None) -> None:
        """Sets the documents of the next forward."""
        self.pack, self._mask = pack, None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        if not is_causal:
            raise ValueError("is_causal: got False; allowed: True")
        return self._attend(query, key, value)

    def _masked(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if self._mask is None:  # all layers share the mask
            self._mask = document_mask(self.pack.cu_seqlens)
        return scaled_dot_product_attention(query, key, value, attn_mask=self._mask)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        offsets = self.pack.cu_seqlens
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # views of (T, H, D)
        out = flash_attn_ext.flash_attn_varlen(query, key, value, offsets, offsets, is_causal=True)
        return out.transpose(0, 1)[None]

    def _sharded(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return context_parallel_attn(query, key, value, is_causal=True, cu_seqlens=self.pack.cu_seqlens)


def document_mask(cu_seqlens: Tensor) -> Tensor:
    """Returns (T, T), bool: True where a query may attend to a key, in the same document and not after it."""
    lengths = cu_seqlens.diff()
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return (document[:, None] == document[None, :]).tril()
