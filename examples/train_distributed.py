"""Trains the demo's GPT on sequences twice as long, with each sequence sharded over two or more processes.

    torchrun --standalone --nproc-per-node 2 examples/train_distributed.py

Every process has some tokens of each sequence, and all parameters. Attention is context_parallel_attn, the only layer
where tokens interact. All other layers of a transformer work on one token at a time. Gradients of the parameters are
summed over the processes.

With --compare the first process then trains the same model alone, on the same batches, through flash_attn and through
torch's attention. The sharded run agrees if its distance from the run of flash_attn is at most FACTOR times the
distance of torch's run (see loss_agreement.py). The exit status is 1 if it does not agree.
"""

import argparse
import os
import sys
import time
from datetime import timedelta
from functools import partial
from itertools import islice

import torch
import torch.distributed as dist
from gpt_model import GPT, Shape
from gpt_training import Settings
from loss_agreement import FACTOR, ROUNDING, differences, largest, median
from stdlib_text import VOCABULARY, load_corpus, random_windows
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from flash_attn_ext import flash_attn
from flash_attn_ext.distributed import context_parallel_attn, shard_sequence


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimiser steps (default: %(default)s)")
    default = 2 * Settings.context
    parser.add_argument("--context", type=int, default=default, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=Settings.layers, help="default: %(default)s")
    parser.add_argument("--method", choices=["ring", "all_gather", "ulysses"], help="default: as the heads need")
    parser.add_argument("--compare", action="store_true", help="also train on one process, and compare")
    return parser.parse_args(argv)


def make_model(arguments: argparse.Namespace, attention) -> GPT:
    """Makes the same model on every process. rotate_by() sets its positions."""
    torch.manual_seed(Settings.seed)
    return GPT(Shape(VOCABULARY, arguments.context, Settings.d_model, Settings.heads, arguments.layers), attention)


def rotate_by(model: GPT, positions: torch.Tensor) -> None:
    """Sets the positions that this process's tokens have in the whole sequence, for rotary embedding."""
    for block in model.blocks:
        block.attention.cosine = block.attention.cosine[positions]
        block.attention.sine = block.attention.sine[positions]


def train(arguments: argparse.Namespace, corpus, attention, sharded: bool) -> list[float]:
    """Trains. Returns the loss of each step, over all tokens."""
    model = make_model(arguments, attention)
    if sharded:
        rotate_by(model, shard_sequence(torch.arange(arguments.context), 0))
    settings = Settings(steps=arguments.steps, context=arguments.context)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    batches = random_windows(corpus.train, settings.batch_size, settings.context, settings.seed)
    losses, start = [], time.perf_counter()
    for step, (inputs, targets) in enumerate(islice(batches, arguments.steps)):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate_at(step)
        tokens = targets.numel()
        if sharded:
            inputs, targets = (shard_sequence(x, 1) for x in (inputs, targets))
        # The mean over all tokens. Each process sums over its tokens, and all_reduce adds the sums.
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / tokens
        optimizer.zero_grad()
        loss.backward()
        loss = loss.detach()
        if sharded:
            for weight in model.parameters():
                dist.all_reduce(weight.grad)
            dist.all_reduce(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0 and (step + 1) % max(arguments.steps // 10, 1) == 0:
            seconds = (time.perf_counter() - start) / (step + 1)
            where = f"{dist.get_world_size()} processes" if sharded else "1 process"
            print(f"{where}, step {step + 1}: loss {losses[-1]:.4f}, {seconds:.2f} s a step", flush=True)
    return losses


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    if "RANK" not in os.environ:
        print("train_distributed.py: start it by torchrun, as its first lines say", file=sys.stderr)
        return 2
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    try:
        corpus = load_corpus()
        ours = train(arguments, corpus, partial(context_parallel_attn, method=arguments.method), sharded=True)
        if not arguments.compare or dist.get_rank() != 0:
            return 0
        alone = train(arguments, corpus, flash_attn, sharded=False)
        torchs = train(arguments, corpus, scaled_dot_product_attention, sharded=False)
        difference, yardstick = (median(differences(alone, other)) for other in (ours, torchs))
        limit = max(FACTOR * yardstick, ROUNDING["float32"] * largest(alone))
        print(f"median difference of the losses from one process: {difference:.1e} (allowed: {limit:.1e}, ", end="")
        print(f"{FACTOR:g} times the difference of torch's attention)")
        return 0 if difference <= limit else 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
