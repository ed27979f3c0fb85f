"""Trains the demo's model on documents of different lengths, packed and padded, and compares losses and times.

    python examples/train_packed.py --steps 100

Each step has the same documents in both forms. Packed, they follow each other in one sequence, and flash_attn_varlen
attends within each document. Padded, they are the rows of a batch, all as long as the longest document. All models
start from the same parameters.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from itertools import islice

import torch
from gpt_model import GPT, Shape, attention_by_name
from stdlib_text import VOCABULARY, load_corpus
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, pad
from torch.nn.utils.rnn import pad_sequence

from flash_attn_ext import flash_attn_varlen
from flash_attn_ext.layers.rotary import apply_rotary_emb

IGNORED = -100  # cross_entropy ignores this target


def random_documents(tokens: Tensor, batch_size: int, context: int, seed: int) -> Iterator[list[Tensor]]:
    """Yields endless batches of pieces of the text. Most pieces are much shorter than the context."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        shares = torch.rand(batch_size, generator=generator) ** 3
        lengths = (2 + shares * (context - 1)).long().tolist()
        starts = torch.randint(len(tokens) - context - 1, (batch_size,), generator=generator).tolist()
        yield [tokens[start : start + length].long() for start, length in zip(starts, lengths, strict=True)]


def packed_loss(model: GPT, documents: list[Tensor]) -> Tensor:
    """Returns the mean loss of a token. No layer computes a padding row."""
    inputs = torch.cat([document[:-1] for document in documents])
    targets = torch.cat([document[1:] for document in documents])
    lengths = torch.tensor([len(document) - 1 for document in documents], dtype=torch.int32)
    cu_seqlens, longest = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), int(lengths.max())
    x = model.token_embedding(inputs)
    for block in model.blocks:
        attention, normed = block.attention, block.attention_norm(x)
        q, k, v = (part(normed).unflatten(-1, (attention.heads, -1))
                   for part in (attention.query, attention.key, attention.value))  # fmt: skip
        q, k = (apply_rotary_emb(t, attention.cosine, attention.sine, cu_seqlens=cu_seqlens) for t in (q, k))
        out = flash_attn_varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest, is_causal=True)
        x = x + attention.project(out.flatten(-2))
        x = x + block.mlp(block.mlp_norm(x))
    return cross_entropy(linear(model.norm(x), model.token_embedding.weight), targets)


def padded_loss(model: GPT, documents: list[Tensor]) -> Tensor:
    """Returns the same loss. Padding comes after each document, so causal attention hides it."""
    inputs = pad_sequence([document[:-1] for document in documents], batch_first=True)
    targets = pad_sequence([document[1:] for document in documents], batch_first=True, padding_value=IGNORED)
    return cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def timed_step(loss_of, model: GPT, optimizer: torch.optim.Optimizer, documents: list[Tensor]) -> tuple[float, float]:
    """Runs one optimiser step. Returns the loss and the seconds."""
    start = time.perf_counter()
    optimizer.zero_grad()
    loss = loss_of(model, documents)
    loss.backward()
    optimizer.step()
    return loss.item(), time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--context", type=int, default=512, help="longest document in tokens (default: 512)")
    parser.add_argument("--batch-size", type=int, default=16, help="documents in one step (default: 16)")
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    shape = Shape(VOCABULARY, options.context, options.d_model, options.heads, options.layers)
    ways = {"packed": packed_loss, "padded, ours": padded_loss, "padded, torch": padded_loss}
    runs = {}
    for way in ways:
        torch.manual_seed(0)
        model = GPT(shape, attention_by_name("sdpa" if way.endswith("torch") else "flash_attn_ext"))
        runs[way] = model, torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses, seconds = ({way: [] for way in ways} for _ in range(2))
    rows = padding = 0
    batches = random_documents(load_corpus().train, options.batch_size, options.context, seed=0)
    for documents in islice(batches, options.steps):
        lengths = [len(document) - 1 for document in documents]
        rows, padding = rows + sum(lengths), padding + max(lengths) * len(lengths) - sum(lengths)
        for way, loss_of in ways.items():
            loss, taken = timed_step(loss_of, *runs[way], documents)
            losses[way].append(loss)
            seconds[way].append(taken)
    print(f"{options.steps} steps; {padding / (rows + padding):.0%} of the padded batches is padding")
    for way in ways:
        apart = max(abs(a - b) for a, b in zip(losses[way], losses["packed"], strict=True))
        print(f"{way:14} {statistics.median(seconds[way]) * 1e3:7.1f} ms a step, loss {losses[way][0]:.4f} to "
              f"{losses[way][-1]:.4f}, at most {apart:.1e} from packed")  # fmt: skip


if __name__ == "__main__":
    main()
