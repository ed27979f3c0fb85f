"""The models of benchmarks/models.py: named shapes with random parameters, and one step of each that returns a loss.

`layers` limits the depth. Time and memory grow with the depth, but attention's fraction of a layer does not change.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from examples.gpt_model import GPT, Shape

Step = Callable[[], Tensor]  # runs the forward and returns the loss


@dataclass(frozen=True)
class Problem:
    """A model at one sequence length. `build(length, layers)` returns the module and the step."""

    name: str
    lengths: tuple[int, int]
    build: Callable[[int, int], tuple[nn.Module, Step]]


def gpt(length: int, layers: int) -> tuple[nn.Module, Step]:
    """The model of the demo: 4 heads of dimension 64, batch 4."""
    model = GPT(
        Shape(vocabulary=256, context=length, d_model=256, heads=4, layers=layers), scaled_dot_product_attention
    )
    tokens = torch.randint(256, (4, length))
    return model, lambda: nn.functional.cross_entropy(model(tokens).flatten(0, -2).float(), tokens.flatten())


def bert(length: int, layers: int) -> tuple[nn.Module, Step]:
    """torch's encoder in BERT-base's size: 12 heads of dimension 64, batch 4, lengths full, 3/4, 1/2 and 1/4."""
    layer = nn.TransformerEncoderLayer(768, 12, 3072, dropout=0.0, activation="gelu", batch_first=True)
    model = nn.TransformerEncoder(layer, layers)
    x = torch.randn(4, length, 768)
    padding = torch.arange(length) >= torch.tensor([length, length * 3 // 4, length // 2, length // 4])[:, None]
    return model, lambda: model(x, src_key_padding_mask=padding)[~padding].float().square().mean()


def llama(length: int, layers: int) -> tuple[nn.Module, Step]:
    """16 query heads of dimension 64 that share 4 key heads, width 1024, batch 1; transformers' with `sdpa`."""
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=256, hidden_size=1024, intermediate_size=2816, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=4, max_position_embeddings=length,
    )  # fmt: skip
    model, tokens = LlamaModel(config), torch.randint(256, (1, length))
    return model, lambda: model(tokens, use_cache=False).last_hidden_state.float().square().mean()


def vit(length: int, layers: int) -> tuple[nn.Module, Step]:
    """ViT-B/16: 12 heads of dimension 64, batch 4; transformers' with `sdpa`. `length` is patches and one more."""
    from transformers import ViTConfig, ViTModel

    size = 16 * round((length - 1) ** 0.5)
    config = ViTConfig(num_hidden_layers=layers, image_size=size, hidden_dropout_prob=0.0)
    model, image = ViTModel(config, add_pooling_layer=False), torch.randn(4, 3, size, size)
    return model, lambda: model(image).last_hidden_state.float().square().mean()


def whisper(length: int, layers: int) -> tuple[nn.Module, Step]:
    """The encoder of Whisper-tiny: 6 heads of dimension 64, batch 2; transformers' WhisperEncoder with `sdpa`."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=384, encoder_layers=layers, encoder_attention_heads=6, encoder_ffn_dim=1536, max_source_positions=length
    )
    model, sound = WhisperEncoder(config), torch.randn(2, 80, 2 * length)
    return model, lambda: model(sound).last_hidden_state.float().square().mean()


MODELS = {
    "gpt": Problem("GPT of the demo", (512, 2048), gpt),
    "bert": Problem("BERT-base encoder, padded", (128, 512), bert),
    "llama": Problem("Llama-style, 16:4 heads", (512, 2048), llama),
    "vit": Problem("ViT-B/16", (197, 577), vit),
    "whisper": Problem("Whisper-tiny encoder", (500, 1500), whisper),
}
