"""The sizes of the problem that is counted. This file does not import flash_attn_ext.reference."""

from dataclasses import dataclass

import torch

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Problem:
    """Attention of B * H heads: self-attention, unless S_k or D_v is given."""

    B: int
    H: int
    S: int
    D: int
    dtype: str = "float16"
    backward: bool = True
    mask: bool = False
    dropout: float = 0.0
    S_k: int | None = None
    D_v: int | None = None
    visible: float = 1.0  # s, the share of visible blocks. Only block-sparse FlashAttention skips hidden blocks
    key_itemsize: float | None = None  # bytes of an element of k and v, if their dtype differs, as in an 8-bit cache

    @property
    def heads(self) -> int:
        return self.B * self.H

    def tensors(self, n: int) -> list[torch.Tensor]:
        """The first n of q, k, v and dout of one head."""
        S_k, D_v = self.S_k or self.S, self.D_v or self.D
        shapes = [(self.S, self.D), (S_k, self.D), (S_k, D_v), (self.S, D_v)]
        return [torch.empty(shape, dtype=DTYPES[self.dtype], device="meta") for shape in shapes[:n]]
