"""A GPT with DeepSeek sparse attention: one key head for all query heads, and an indexer that chooses keys."""

from dataclasses import dataclass

import torch
from gpt_model import GPT, Shape, rotation
from torch import Tensor, nn

from flash_attn_ext import flash_attn, indexer_loss, indexer_topk

STAGES = ("dense", "warm-up", "sparse")


@dataclass(frozen=True)
class Indexer:
    """The sizes of an indexer, and how many keys it chooses for each query."""

    heads: int
    head_dim: int
    topk: int


class IndexedAttention(nn.Module):
    """Causal self-attention of many query heads to one key head, (B, S, d_model) -> (B, S, d_model).

    Stage "dense": all keys, without the indexer. "warm-up": all keys, and the indexer learns where the heads look.
    "sparse": the chosen keys, and the indexer learns from them. The indexer reads a detached input and learns from
    ``index_loss`` only, so the model does not depend on it in the first two stages.
    """

    def __init__(self, shape: Shape, indexer: Indexer):
        super().__init__()
        self.heads, self.indexer = shape.heads, indexer
        head_dim = shape.d_model // shape.heads
        self.query = nn.Linear(shape.d_model, shape.d_model)
        self.key = nn.Linear(shape.d_model, head_dim)
        self.value = nn.Linear(shape.d_model, head_dim)
        self.project = nn.Linear(shape.d_model, shape.d_model)
        self.index_query = nn.Linear(shape.d_model, indexer.heads * indexer.head_dim)
        self.index_key = nn.Linear(shape.d_model, indexer.head_dim)
        self.index_weights = nn.Linear(shape.d_model, indexer.heads)
        for name, columns in (("angles", head_dim), ("index_angles", indexer.head_dim)):
            self.register_buffer(name, torch.stack(rotation(shape.context, columns)), persistent=False)
        self.stage = "dense"
        self.window: tuple[int, int] | None = None  # of stage "dense"
        self.index_loss: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        query = rotate(self.query(x).unflatten(2, (self.heads, -1)).transpose(1, 2), self.angles)
        key, value = rotate(self.key(x)[:, None], self.angles), self.value(x)[:, None]
        if self.stage == "dense":
            out = flash_attn(query, key, value, is_causal=True, enable_gqa=True, window=self.window)
            return self.project(out.transpose(1, 2).flatten(2))
        index = self.index(x.detach())
        chosen = indexer_topk(*index, self.indexer.topk, is_causal=True) if self.stage == "sparse" else None
        out, lse = flash_attn(
            query, key, value, is_causal=True, enable_gqa=True, key_indices=chosen, return_lse=True
        )  # fmt: skip
        self.index_loss = indexer_loss(*index, query, key, lse, indices=chosen, is_causal=True)
        return self.project(out.transpose(1, 2).flatten(2))

    def index(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (B, H_I, S, D_I), (B, S, D_I) and (B, S, H_I)."""
        query = self.index_query(x).unflatten(2, (self.indexer.heads, -1)).transpose(1, 2)
        weights = self.index_weights(x) * self.indexer.heads**-0.5
        return rotate(query, self.index_angles), rotate(self.index_key(x), self.index_angles), weights


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary position embedding, (..., S, D) -> (..., S, D)."""
    left, right = x.chunk(2, dim=-1)
    cosine, sine = angles[:, : x.shape[-2]]
    return torch.cat([left * cosine - right * sine, left * sine + right * cosine], dim=-1)


class SparseGPT(GPT):
    """The GPT of gpt_model.py with an IndexedAttention in each block."""

    def __init__(self, shape: Shape, indexer: Indexer):
        super().__init__(shape, flash_attn)
        for block in self.blocks:
            attention = IndexedAttention(shape, indexer)
            for part in attention.modules():
                if isinstance(part, nn.Linear):
                    nn.init.normal_(part.weight, std=0.02 if part is not attention.project else 0.01)
                    nn.init.zeros_(part.bias)
            # Scores must differ at the start: from zeros no gradient would reach the indexer.
            nn.init.normal_(attention.index_weights.bias, mean=1.0, std=0.2)
            nn.init.normal_(attention.index_query.weight, std=shape.d_model**-0.5)
            nn.init.normal_(attention.index_key.weight, std=shape.d_model**-0.5)
            block.attention = attention

    def set_stage(self, stage: str) -> None:
        for block in self.blocks:
            block.attention.stage = stage

    def index_loss(self) -> Tensor | float:
        """The sum over the layers, of the last forward."""
        return sum(block.attention.index_loss for block in self.blocks)
