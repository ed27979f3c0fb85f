"""A small GPT with the attention as an argument: a callable with the arguments and the meaning of torch's SDPA."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention

Attention = Callable[..., Tensor]  # (query, key, value, *, is_causal) of (B, H, S, D) -> (B, H, S, D)

ATTENTION_NAMES = {
    "sdpa": "torch's scaled_dot_product_attention with the kernel that torch chooses",
    "sdpa-math": "the same with torch's math kernel, the plain softmax over an S x S matrix",
    "flash_attn_ext": "this project",
}


class AttentionUnavailable(RuntimeError):
    """Raised if an attention cannot be used here."""


def attention_by_name(name: str) -> Attention:
    """Returns the callable of this name. Raises AttentionUnavailable if it cannot be used here."""
    if name == "sdpa":
        return scaled_dot_product_attention
    if name == "sdpa-math":
        return sdpa_kernel(SDPBackend.MATH)(scaled_dot_product_attention)
    if name != "flash_attn_ext":
        raise ValueError(f"attention is {name!r}; allowed: {', '.join(ATTENTION_NAMES)}")
    try:
        from flash_attn_ext import flash_attn
    except (ImportError, OSError) as error:
        raise AttentionUnavailable(
            f"flash_attn_ext is not built for {sys.executable} ({error}).\n"
            f"Build it in the repository's root: {sys.executable} -m pip install --no-build-isolation -e ."
        ) from error
    return flash_attn


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT."""

    vocabulary: int
    context: int
    d_model: int
    heads: int
    layers: int


class SelfAttention(nn.Module):
    """Causal multi-head self-attention, (B, S, d_model) -> (B, S, d_model)."""

    def __init__(self, shape: Shape, attention: Attention):
        super().__init__()
        if shape.d_model % (2 * shape.heads):
            raise ValueError(f"d_model is {shape.d_model}; it must be a multiple of 2 * heads, {2 * shape.heads}")
        self.heads = shape.heads
        self.attention = attention
        self.query = nn.Linear(shape.d_model, shape.d_model)
        self.key = nn.Linear(shape.d_model, shape.d_model)
        self.value = nn.Linear(shape.d_model, shape.d_model)
        cosine, sine = rotation(shape.context, shape.d_model // shape.heads)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)
        self.project = nn.Linear(shape.d_model, shape.d_model)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (self._split(part(x)) for part in (self.query, self.key, self.value))
        query, key = self._rotate(query), self._rotate(key)
        out = self.attention(query, key, value, is_causal=True)  # the only line that differs between the runs
        return self.project(out.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        """(B, S, d_model) -> (B, H, S, D). A view, which the attention reads without a copy."""
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotary position embedding (Su et al. 2021), (B, H, S, D) -> (B, H, S, D)."""
        left, right = x.chunk(2, dim=-1)
        cosine, sine = self.cosine[: x.shape[2]], self.sine[: x.shape[2]]
        return torch.cat([left * cosine - right * sine, left * sine + right * cosine], dim=-1).type_as(x)


def rotation(context: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position * frequency, each (context, head_dim / 2)."""
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(context), frequencies)
    return angles.cos(), angles.sin()


class Block(nn.Module):
    """One pre-norm transformer layer, (B, S, d_model) -> (B, S, d_model)."""

    def __init__(self, shape: Shape, attention: Attention):
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.d_model)
        self.attention = SelfAttention(shape, attention)
        self.mlp_norm = nn.LayerNorm(shape.d_model)
        wide = 4 * shape.d_model
        self.mlp = nn.Sequential(nn.Linear(shape.d_model, wide), nn.GELU(), nn.Linear(wide, shape.d_model))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """Tokens (B, S) -> logits (B, S, vocabulary). No dropout, because all runs must compute the same function."""

    def __init__(self, shape: Shape, attention: Attention):
        super().__init__()
        self.shape = shape
        self.token_embedding = nn.Embedding(shape.vocabulary, shape.d_model)
        self.blocks = nn.Sequential(*(Block(shape, attention) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.d_model)
        self.apply(_initialise)
        for block in self.blocks:  # 2 * layers branches add up in the residual stream
            for last in (block.attention.project, block.mlp[-1]):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * shape.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.token_embedding(tokens)))
        return linear(x, self.token_embedding.weight)  # tied weights

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats per token, in float32 at least; inputs and targets are (B, S)."""
        logits = self(inputs).flatten(0, 1)
        return cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())

    @torch.no_grad()
    def generate(self, prompt: list[int], count: int, seed: int, temperature: float = 0.5) -> list[int]:
        """Returns the prompt and `count` sampled tokens after it, or fewer if the logits become infinite or NaN."""
        device = self.token_embedding.weight.device
        generator = torch.Generator().manual_seed(seed)
        tokens = list(prompt)
        for _ in range(count):
            window = torch.tensor([tokens[-self.shape.context :]], device=device)
            logits = self(window)[0, -1].float().cpu()
            if not logits.isfinite().all():
                break
            probabilities = torch.softmax(logits / temperature, dim=-1)
            tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
        return tokens


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
