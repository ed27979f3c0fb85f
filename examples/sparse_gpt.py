"""A GPT with DeepSeek sparse attention: one key head for all query heads, and an indexer that chooses keys.

The key head is an ordinary one, or a latent row, as in multi-head latent attention.
"""

from dataclasses import dataclass

import torch
from gpt_model import GPT, Shape, rotation
from torch import Tensor, nn

from flash_attn_ext import flash_attn, indexer_loss, indexer_topk


@dataclass(frozen=True)
class Indexer:
    """The sizes of an indexer, and the number of keys that it chooses for each query."""

    heads: int
    head_dim: int
    topk: int


class IndexedAttention(nn.Module):
    """Causal self-attention of many query heads to one key head, (B, S, d_model) -> (B, S, d_model).

    Stage "dense": all keys, without the indexer. "warm-up": all keys, and the indexer learns the probabilities of the
    heads. "sparse": the chosen keys, and the indexer learns from these keys. The indexer reads a detached input and
    learns from ``index_loss`` only, so the model does not depend on it in the first two stages.
    """

    scale: float | None = None  # of the scores; None: 1 / sqrt(columns of query)

    def __init__(self, shape: Shape, indexer: Indexer):
        super().__init__()
        self.heads, self.indexer = shape.heads, indexer
        self.index_query = nn.Linear(shape.d_model, indexer.heads * indexer.head_dim)
        self.index_key = nn.Linear(shape.d_model, indexer.head_dim)
        self.index_weights = nn.Linear(shape.d_model, indexer.heads)
        self.add_angles("index_angles", shape.context, indexer.head_dim)
        self.stage = "dense"
        self.window: tuple[int, int] | None = None  # of stage "dense"
        self.index_loss: Tensor | float = 0.0

    def add_angles(self, name: str, context: int, columns: int) -> None:
        self.register_buffer(name, torch.stack(rotation(context, columns)), persistent=False)

    def query_key_value(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (B, H, S, D), (B, 1, S, D) and (B, 1, S, D_v)."""
        raise NotImplementedError

    def output(self, out: Tensor) -> Tensor:
        """(B, H, S, D_v) -> (B, S, d_model)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.query_key_value(x)
        options = {"is_causal": True, "enable_gqa": True, "scale": self.scale}
        if self.stage == "dense":
            return self.output(flash_attn(query, key, value, window=self.window, **options))
        index = self.index(x.detach())
        chosen = indexer_topk(*index, self.indexer.topk, is_causal=True) if self.stage == "sparse" else None
        out, lse = flash_attn(query, key, value, key_indices=chosen, return_lse=True, **options)
        self.index_loss = indexer_loss(*index, query, key, lse, indices=chosen, is_causal=True, scale=self.scale)
        return self.output(out)

    def index(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns (B, H_I, S, D_I), (B, S, D_I) and (B, S, H_I)."""
        query = self.index_query(x).unflatten(2, (self.indexer.heads, -1)).transpose(1, 2)
        weights = self.index_weights(x) * self.indexer.heads**-0.5
        return rotate(query, self.index_angles), rotate(self.index_key(x), self.index_angles), weights


class MultiQueryAttention(IndexedAttention):
    """One key head and one value head (Shazeer 2019)."""

    def __init__(self, shape: Shape, indexer: Indexer):
        super().__init__(shape, indexer)
        head_dim = shape.d_model // shape.heads
        self.query = nn.Linear(shape.d_model, shape.d_model)
        self.key = nn.Linear(shape.d_model, head_dim)
        self.value = nn.Linear(shape.d_model, head_dim)
        self.project = nn.Linear(shape.d_model, shape.d_model)
        self.add_angles("angles", shape.context, head_dim)

    def query_key_value(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query = rotate(self.query(x).unflatten(2, (self.heads, -1)).transpose(1, 2), self.angles)
        return query, rotate(self.key(x)[:, None], self.angles), self.value(x)[:, None]

    def output(self, out: Tensor) -> Tensor:
        return self.project(out.transpose(1, 2).flatten(2))


class LatentAttention(IndexedAttention):
    """Multi-head latent attention (DeepSeek-V2, 2024), absorbed: a key is [latent row, rotary part].

    The value is the latent row. A head's keys and values would be linear functions of the latent row. Here these
    functions are applied to the query and the result instead.
    """

    LATENT, ROTARY = 64, 16  # columns

    def __init__(self, shape: Shape, indexer: Indexer):
        super().__init__(shape, indexer)
        head_dim = shape.d_model // shape.heads
        self.query = nn.Linear(shape.d_model, shape.heads * (head_dim + self.ROTARY))
        self.latent = nn.Linear(shape.d_model, self.LATENT)
        self.latent_norm = nn.LayerNorm(self.LATENT)
        self.rotary_key = nn.Linear(shape.d_model, self.ROTARY)
        self.of_keys = nn.Parameter(torch.randn(shape.heads, head_dim, self.LATENT) * self.LATENT**-0.5)
        self.of_values = nn.Parameter(torch.randn(shape.heads, self.LATENT, head_dim) * self.LATENT**-0.5)
        self.project = nn.Linear(shape.d_model, shape.d_model)
        self.add_angles("angles", shape.context, self.ROTARY)
        self.scale = (head_dim + self.ROTARY) ** -0.5

    def query_key_value(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query = self.query(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
        absorbed, rotary = query[..., : -self.ROTARY] @ self.of_keys, rotate(query[..., -self.ROTARY :], self.angles)
        latent = self.latent_norm(self.latent(x))
        key = torch.cat([latent, rotate(self.rotary_key(x), self.angles)], dim=-1)[:, None]
        return torch.cat([absorbed, rotary], dim=-1), key, key[..., : self.LATENT]

    def output(self, out: Tensor) -> Tensor:
        return self.project((out @ self.of_values).transpose(1, 2).flatten(2))


ATTENTIONS = {"multi-query": MultiQueryAttention, "latent": LatentAttention}


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary position embedding, (..., S, D) -> (..., S, D)."""
    left, right = x.chunk(2, dim=-1)
    cosine, sine = angles[:, : x.shape[-2]]
    return torch.cat([left * cosine - right * sine, left * sine + right * cosine], dim=-1)


class SparseGPT(GPT):
    """The GPT of gpt_model.py with an IndexedAttention in each block."""

    def __init__(self, shape: Shape, indexer: Indexer, attention: str = "multi-query"):
        super().__init__(shape, flash_attn)
        for block in self.blocks:
            module = ATTENTIONS[attention](shape, indexer)
            for part in module.modules():
                if isinstance(part, nn.Linear):
                    nn.init.normal_(part.weight, std=0.02 if part is not module.project else 0.01)
                    nn.init.zeros_(part.bias)
            # Scores must differ at the start, because with zeros the indexer would get no gradient.
            nn.init.normal_(module.index_weights.bias, mean=1.0, std=0.2)
            nn.init.normal_(module.index_query.weight, std=shape.d_model**-0.5)
            nn.init.normal_(module.index_key.weight, std=shape.d_model**-0.5)
            block.attention = module

    def set_stage(self, stage: str) -> None:
        for block in self.blocks:
            block.attention.stage = stage

    def index_loss(self) -> Tensor | float:
        """The sum over the layers, of the last forward."""
        return sum(block.attention.index_loss for block in self.blocks)
