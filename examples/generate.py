"""Generates text with a key-value cache, and shows why `flash_attn_with_kvcache` exists.

    python examples/generate.py --steps 100 --tokens 200

A model that generates text computes one query for each new token, and attends to the keys and values of all tokens
before it. They are kept in a cache. This program compares two caches:

- flash_attn_with_kvcache: a cache of pages with room for all tokens. One call rotates the new key, writes it and the
  new value into the pages in place, and attends. Sequences of different lengths share the pages, without padding.
- torch: tensors that grow by torch.cat, which copies the whole cache for every token. Prompts of different lengths are
  padded on the left and need a mask.

Part 1 trains the model of train_gpt.py for a few steps and continues a batch of prompts. The model always chooses the
most likely token, and both caches must give the same tokens. Part 2 measures the attention of one token against the
length of the cache. Together they take about two minutes on two idle cores.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from gpt_model import GPT, Shape, attention_by_name, rotation
from stdlib_text import VOCABULARY, Corpus, load_corpus, random_windows
from torch import Tensor
from torch.nn.functional import linear, pad, scaled_dot_product_attention
from tqdm import tqdm

from flash_attn_ext import explain_kvcache, flash_attn_with_kvcache

PROMPTS = [b"import os\nimport sys\n\n", b"def main():\n", b"class Path:\n    def __init__(self", b"\n"]
PAGE_SIZE = 16


def trained_model(corpus: Corpus, shape: Shape, steps: int) -> GPT:
    torch.manual_seed(0)
    model = GPT(shape, attention_by_name("flash_attn_ext"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = islice(random_windows(corpus.train, 4, shape.context, seed=0), steps)
    for inputs, targets in tqdm(batches, total=steps, unit="step", leave=False):
        optimizer.zero_grad()
        loss = model.loss(inputs, targets)
        loss.backward()
        optimizer.step()
    print(f"Trained for {steps} steps; loss {loss.item():.2f} nats a token")
    return model.eval()


def layers(model: GPT, x: Tensor, attend) -> Tensor:
    """Returns the most likely next token for each row of x. attend(layer, q, k, v) also rotates q and k."""
    for number, block in enumerate(model.blocks):
        attention = block.attention
        normed = block.attention_norm(x)
        q, k, v = (part(normed).unflatten(-1, (attention.heads, -1))
                   for part in (attention.query, attention.key, attention.value))  # fmt: skip
        x = x + attention.project(attend(number, q, k, v).flatten(-2))
        x = x + block.mlp(block.mlp_norm(x))
    return linear(model.norm(x), model.token_embedding.weight).argmax(-1)


def write_paged(model: GPT, prompts: list[Tensor]) -> Iterator[Tensor]:
    """Yields one token for each prompt at a time. The prompts are packed. Their caches share one set of pages."""
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
        cu_seqlens = pad(rows.cumsum(0), (1, 0))

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
    """Yields the same tokens through torch's SDPA: left padding, a mask, and caches that grow by torch.cat."""
    longest, batch = max(map(len, prompts)), len(prompts)
    tokens = torch.stack([pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
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
    """Returns tokens (prompts, count), and the tokens per second."""
    start = time.perf_counter()
    tokens = torch.stack(list(islice(write(model, prompts), count)), 1)
    return tokens, tokens.numel() / (time.perf_counter() - start)


def generate(options: argparse.Namespace) -> None:
    """Part 1: writes a continuation of each prompt through both caches."""
    corpus = load_corpus()
    prompts = [corpus.tokenizer.encode(prompt).long() for prompt in PROMPTS]
    if max(map(len, prompts)) + options.tokens > options.context:
        raise SystemExit(f"--tokens: got {options.tokens}; the longest prompt and its continuation must fit --context")
    shape = Shape(VOCABULARY, options.context, options.d_model, options.heads, options.layers)
    model = trained_model(corpus, shape, options.steps)
    paged, paged_speed = timed(write_paged, model, prompts, options.tokens)
    concatenated, concatenated_speed = timed(write_concatenated, model, prompts, options.tokens)
    for prompt, tokens in zip(PROMPTS, paged, strict=True):
        print("-" * 80)
        print((prompt + corpus.tokenizer.decode(tokens.tolist())).decode(errors="replace"))
    print("-" * 80)
    same = (paged == concatenated).float().mean().item()
    lengths = ", ".join(str(len(prompt)) for prompt in prompts)
    print(f"{len(prompts)} prompts of {lengths} tokens, {options.tokens} new tokens each, through the whole model:")
    print(f"  flash_attn_with_kvcache, pages of {PAGE_SIZE}: {paged_speed:.0f} tokens per second")
    print(f"  torch's SDPA, concatenated caches: {concatenated_speed:.0f} tokens per second")
    print(f"  {same:.1%} of the tokens are the same")


def paged_step(batch: int, heads: int, length: int, head_dim: int) -> tuple[Callable[[], Tensor], dict]:
    """Makes a decoding step on a paged cache of `length` rows, and the arguments of its call. Repeats write one row."""
    pages = -(-(length + 1) // PAGE_SIZE)
    cache = torch.randn(2, batch * pages, PAGE_SIZE, heads, head_dim)
    new = torch.randn(3, batch, 1, heads, head_dim)
    cosine, sine = rotation(pages * PAGE_SIZE, head_dim)
    call = {
        "q": new[0], "k_cache": cache[0], "v_cache": cache[1], "k": new[1], "v": new[2],
        "rotary_cos": cosine, "rotary_sin": sine, "rotary_interleaved": False, "causal": True,
        "cache_seqlens": torch.full((batch,), length, dtype=torch.int32),
        "block_table": torch.randperm(batch * pages, dtype=torch.int32).view(batch, pages),
    }  # fmt: skip
    return lambda: flash_attn_with_kvcache(**call), call


def concatenated_step(batch: int, heads: int, length: int, head_dim: int) -> Callable[[], Tensor]:
    """Makes the same step with torch: rotate the new key, torch.cat, scaled_dot_product_attention."""
    keys, values = torch.randn(2, batch, heads, length, head_dim)
    q, k, v = torch.randn(3, batch, heads, 1, head_dim)
    cosine, sine = (table[length] for table in rotation(length + 1, head_dim))

    def rotate(x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return torch.cat([left * cosine - right * sine, left * sine + right * cosine], -1)

    def step() -> Tensor:
        return scaled_dot_product_attention(rotate(q), torch.cat([keys, rotate(k)], 2), torch.cat([values, v], 2))

    return step


@torch.no_grad()
def measure_decoding(lengths: list[int], batch: int = 4, heads: int = 8, head_dim: int = 64) -> None:
    """Part 2: the time of one attention layer for one new token of each sequence."""
    print(f"\nOne attention layer, one new token for each of {batch} sequences, {heads} heads of {head_dim}, float32:")
    print(f"{'keys in the cache':>18} {'flash_attn_with_kvcache':>24} {'torch.cat and SDPA':>20} {'ratio':>7}")
    for length in lengths:
        step, call = paged_step(batch, heads, length, head_dim)
        ours = milliseconds(step)
        torchs = milliseconds(concatenated_step(batch, heads, length, head_dim))
        print(f"{length:>18} {ours:>21.3f} ms {torchs:>17.3f} ms {torchs / ours:>7.2f}")
    if lengths:
        print("\nThe plan of the last call, from explain_kvcache:")
        print(explain_kvcache(**call))


def milliseconds(step: Callable[[], Tensor], calls: int = 20) -> float:
    """The median time of a call, after two calls that warm up."""
    times = []
    for _ in range(calls + 2):
        start = time.perf_counter()
        step()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="training steps of the model (default: 100)")
    parser.add_argument("--tokens", type=int, default=200, help="new tokens of each prompt (default: 200)")
    parser.add_argument("--context", type=int, default=512, help="longest text in tokens (default: 512)")
    parser.add_argument("--d-model", type=int, default=128, help="width of the model (default: 128)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (default: 4)")
    parser.add_argument("--layers", type=int, default=4, help="transformer layers (default: 4)")
    parser.add_argument(
        "--lengths", type=int, nargs="*", default=[512, 2048, 8192], metavar="S",
        help="lengths of the cache in part 2 (default: 512 2048 8192); without a length there is no part 2",
    )  # fmt: skip
    options = parser.parse_args()
    generate(options)
    if options.lengths:
        measure_decoding(options.lengths)


if __name__ == "__main__":
    main()
