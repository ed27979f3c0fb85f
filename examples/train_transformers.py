"""Trains a small Llama of the transformers library on Python's standard library, on CPU, for about a minute.

Two copies start from the same parameters and see the same text. Their steps alternate. One copy has the attention of
transformers, the other has flash_attn_ext. Your own program has to change only the line that is marked below.

    pip install "transformers>=5"
    python examples/train_transformers.py
"""

import argparse
import copy
import statistics
import sys
import time

import torch
from stdlib_text import VOCABULARY, load_corpus, random_windows

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    sys.exit(f"this example needs transformers 5 ({error}): pip install 'transformers>=5'")

from flash_attn_ext import active_kernel
from flash_attn_ext.integrations.transformers import register


def small_llama(context: int) -> LlamaForCausalLM:
    """3 million parameters; 8 query heads share 2 key heads. A token is a byte."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=context, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Run:
    """One model, its optimiser, and the seconds of its steps."""

    def __init__(self, name: str, model: LlamaForCausalLM) -> None:
        self.name, self.model = name, model.train()
        self.optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        start = time.perf_counter()
        logits = self.model(inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="of training, for both together (default: 60)")
    parser.add_argument("--context", type=int, default=1024, help="bytes in a window of text (default: 1024)")
    parser.add_argument("--batch-size", type=int, default=2, help="windows in a step (default: 2)")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    as_it_is = small_llama(args.context)
    ours = copy.deepcopy(as_it_is)
    ours.set_attn_implementation(register())  # <- the line to change
    runs = [Run("transformers (sdpa)", as_it_is), Run("flash_attn_ext", ours)]

    print(f"{torch.get_num_threads()} threads, kernels {active_kernel()}, torch {torch.__version__}")
    start = shown = time.perf_counter()
    for inputs, targets in random_windows(load_corpus().train, args.batch_size, args.context, seed=0):
        for run in runs:
            run.step(inputs, targets)
        done, now = len(runs[0].losses), time.perf_counter()
        if done == 1 or now - shown > 5:
            print(f"step {done:4}  loss " + "  ".join(f"{run.name}: {run.losses[-1]:.4f}" for run in runs), flush=True)
            shown = now
        if now - start > args.seconds and done >= 3:
            break

    for run in runs:
        # The first step warms up caches and thread pools.
        milliseconds = statistics.median(run.seconds[1:]) * 1e3
        print(f"{run.name:20} {milliseconds:8.1f} ms a step, last loss {run.losses[-1]:.4f}")
    ratios = [theirs / ours for theirs, ours in zip(runs[0].seconds[1:], runs[1].seconds[1:], strict=True)]
    difference = max(abs(a - b) for a, b in zip(runs[0].losses, runs[1].losses, strict=True))
    print(f"flash_attn_ext is {statistics.median(ratios):.2f} times as fast; losses differ by at most {difference:.1e}")


if __name__ == "__main__":
    main()
