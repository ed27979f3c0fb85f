"""Writes text with the demo's model through a paged cache, and through torch's SDPA with a concatenated one.

    python examples/generate.py --steps 300 --tokens 200

Trains the model of train_gpt.py for a few steps, then continues a batch of prompts of different lengths, each token the
most likely one. Both ways must write the same; the tokens a second of each are printed.
"""

import argparse
import time
from collections.abc import Iterator
from itertools import islice

import torch
from gpt_model import GPT, Shape, attention_by_name
from stdlib_text import VOCABULARY, Corpus, load_corpus, random_windows
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from flash_attn_ext import flash_attn_with_kvcache

PROMPTS = [b"import os\nimport sys\n\n", b"def main():\n", b"class Path:\n    def __init__(self", b"\n"]
PAGE_SIZE = 16


def trained_model(corpus: Corpus, shape: Shape, steps: int) -> GPT:
    torch.manual_seed(0)
    model = GPT(shape, attention_by_name("flash_attn_ext"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for inputs, targets in islice(random_windows(corpus.train, 8, shape.context, seed=0), steps):
        optimizer.zero_grad()
        loss = model.loss(inputs, targets)
        loss.backward()
        optimizer.step()
    print(f"Trained for {steps} steps; loss {loss.item():.2f} nats a token")
    return model.eval()


def layers(model: GPT, x: Tensor, attend) -> Tensor:
    """The most likely next token for each row of x; attend(layer, q, k, v) gets (rows, H, D), not yet rotated."""
    for number, block in enumerate(model.blocks):
        attention = block.attention
        normed = block.attention_norm(x)
        q, k, v = (part(normed).unflatten(-1, (attention.heads, -1))
                   for part in (attention.query, attention.key, attention.value))  # fmt: skip
        x = x + attention.project(attend(number, q, k, v).flatten(-2))
        x = x + block.mlp(block.mlp_norm(x))
    return linear(model.norm(x), model.token_embedding.weight).argmax(-1)


def write_paged(model: GPT, prompts: list[Tensor]) -> Iterator[Tensor]:
    """Tokens, one for each prompt at a time. The prompts are packed; their caches share one set of pages."""
    shape, batch = model.shape, len(prompts)
    pages = -(-shape.context // PAGE_SIZE)
    caches = torch.zeros(
        shape.layers, 2, batch * pages, PAGE_SIZE, shape.heads, shape.d_model // shape.heads,
        dtype=model.token_embedding.weight.dtype,
    )  # fmt: skip
    block_table = torch.randperm(batch * pages, dtype=torch.int32).view(batch, pages)
    first = model.blocks[0].attention
    lengths = torch.zeros(batch, dtype=torch.int32)
    tokens, rows = torch.cat(prompts), torch.tensor([len(prompt) for prompt in prompts])
    while True:
        cu_seqlens = torch.nn.functional.pad(rows.cumsum(0), (1, 0))

        step = {"cache_seqlens": lengths, "cu_seqlens_q": cu_seqlens, "cu_seqlens_k_new": cu_seqlens}

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, step: dict = step) -> Tensor:
            return flash_attn_with_kvcache(
                q, *caches[layer], k, v, first.cosine, first.sine, block_table=block_table, causal=True,
                rotary_interleaved=False, **step,
            )  # fmt: skip

        written = layers(model, model.token_embedding(tokens), attend)
        lengths = lengths + rows.int()
        tokens, rows = written[cu_seqlens[1:] - 1], torch.ones_like(rows)
        yield tokens


def write_concatenated(model: GPT, prompts: list[Tensor]) -> Iterator[Tensor]:
    """The same through torch's SDPA: prompts padded on the left, a mask, caches that grow by torch.cat."""
    longest, batch = max(map(len, prompts)), len(prompts)
    tokens = torch.stack([torch.nn.functional.pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    padding = torch.tensor([longest - len(prompt) for prompt in prompts])
    first = model.blocks[0].attention
    caches: list[tuple[Tensor, Tensor] | None] = [None] * len(model.blocks)
    begin = 0
    while True:
        end = begin + tokens.shape[1]
        positions = (torch.arange(begin, end) - padding[:, None]).clamp(min=0)
        cosine, sine = (table[positions][:, :, None] for table in (first.cosine, first.sine))
        columns = torch.arange(end)
        keep = (columns >= padding[:, None, None]) & (columns <= torch.arange(begin, end)[:, None])

        def rotate(x: Tensor, cosine: Tensor = cosine, sine: Tensor = sine) -> Tensor:
            left, right = x.chunk(2, -1)
            return torch.cat([left * cosine - right * sine, left * sine + right * cosine], -1).type_as(x)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, rotate=rotate, keep: Tensor = keep) -> Tensor:
            k = rotate(k)
            if caches[layer] is not None:
                k, v = (torch.cat(pair, 1) for pair in zip(caches[layer], (k, v), strict=True))
            caches[layer] = (k, v)
            heads_first = (t.transpose(1, 2) for t in (rotate(q), k, v))
            return scaled_dot_product_attention(*heads_first, attn_mask=keep[:, None]).transpose(1, 2)

        written = layers(model, model.token_embedding(tokens), attend)
        tokens, begin = written[:, -1:], end
        yield tokens.view(batch)


@torch.no_grad()
def timed(write, model: GPT, prompts: list[Tensor], count: int) -> tuple[Tensor, float]:
    """(prompts, count) tokens, and tokens a second."""
    start = time.perf_counter()
    tokens = torch.stack(list(islice(write(model, prompts), count)), 1)
    return tokens, tokens.numel() / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="of training")
    parser.add_argument("--tokens", type=int, default=200, help="to write after each prompt")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    corpus = load_corpus()
    prompts = [corpus.tokenizer.encode(prompt).long() for prompt in PROMPTS]
    if max(map(len, prompts)) + options.tokens > options.context:
        parser.error(f"--tokens: got {options.tokens}; the prompts and what is written must fit --context")
    shape = Shape(VOCABULARY, options.context, options.d_model, options.heads, options.layers)
    model = trained_model(corpus, shape, options.steps)
    paged, paged_speed = timed(write_paged, model, prompts, options.tokens)
    concatenated, other_speed = timed(write_concatenated, model, prompts, options.tokens)
    for prompt, tokens in zip(PROMPTS, paged, strict=True):
        print("-" * 80)
        print((prompt + corpus.tokenizer.decode(tokens.tolist())).decode(errors="replace"))
    print("-" * 80)
    same = (paged == concatenated).float().mean().item()
    print(f"flash_attn_with_kvcache, pages of {PAGE_SIZE}: {paged_speed:.0f} tokens a second")
    print(
        f"torch's SDPA, concatenated caches: {other_speed:.0f} tokens a second; {same:.1%} of the tokens are the same"
    )


if __name__ == "__main__":
    main()
