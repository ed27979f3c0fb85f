"""Learned attention sinks, as in gpt-oss: a GPT with a sink in each head against the same GPT without sinks.

    python examples/train_sinks.py --plot sinks.png

A sink is one more score in each row of the softmax, without a value. So a head with a sink can attend to nothing. A
head without a sink must attend to some token. Many heads of large models then put the weight on the first token.

The program trains both models on the same batches. Then it measures the mean weights of the first token and of the
sink in each head. The logsumexp of flash_attn gives both without a matrix of S x S: exp(score of key 0 - lse) and
exp(sink - lse).
"""

import argparse
import time
from itertools import islice
from pathlib import Path

import torch
from gpt_model import GPT, Shape
from stdlib_text import FILE_START, VOCABULARY, Corpus, load_corpus, random_windows
from torch import Tensor, nn

from flash_attn_ext import flash_attn

FIRST_SINK = 0.0  # as a key with score 0


class SinkAttention(nn.Module):
    """flash_attn with a learned sink for each head, or without. Measures weights where `measured` is a list."""

    def __init__(self, heads: int, with_sink: bool):
        super().__init__()
        self.sink = nn.Parameter(torch.full((heads,), FIRST_SINK)) if with_sink else None
        self.measured: list[Tensor] | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        out, lse = flash_attn(query, key, value, is_causal=is_causal, sink=self.sink, return_lse=True)
        if self.measured is not None:
            self.measured.append(self.weights(query, key, lse))
        return out

    def weights(self, query: Tensor, key: Tensor, lse: Tensor) -> Tensor:
        """Returns the mean weight of the first key and of the sink, (2, H). Only the later half of the rows counts."""
        first_score = (query * key[:, :, :1]).sum(-1) * query.shape[-1] ** -0.5
        first = (first_score - lse).exp()
        sink = torch.zeros_like(first) if self.sink is None else (self.sink[:, None] - lse).exp()
        return torch.stack([x[:, :, x.shape[2] // 2 :].mean((0, 2)) for x in (first, sink)])


def make_model(shape: Shape, with_sinks: bool) -> GPT:
    """Makes the GPT of gpt_model.py. Models with and without sinks start from the same other parameters."""
    torch.manual_seed(0)
    model = GPT(shape, flash_attn)
    for block in model.blocks:
        block.attention.attention = SinkAttention(shape.heads, with_sinks)
    return model


class Trainer:
    """A model and its optimiser. Sinks learn ten times as fast as the rest, and do not decay."""

    def __init__(self, model: GPT, steps: int, learning_rate: float = 2e-3):
        self.model, self.losses = model, []
        named = dict(model.named_parameters())
        groups = [
            {"params": [weight for name, weight in named.items() if not name.endswith(".sink")], "weight_decay": 0.1},
            {"params": [weight for name, weight in named.items() if name.endswith(".sink")], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW([group for group in groups if group["params"]], betas=(0.9, 0.95))
        rates = [learning_rate, 10 * learning_rate][: len(self.optimizer.param_groups)]
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, rates, total_steps=steps)

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        self.optimizer.zero_grad()
        loss = self.model.loss(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.item())
        return self.losses[-1]


def starting_windows(tokens: Tensor, batch_size: int, context: int, seed: int):
    """Yields random batches. Each window begins with the token that begins a file, as in training."""
    start = FILE_START[0]
    for inputs, targets in random_windows(tokens, batch_size, context - 1, seed):
        first = torch.full((batch_size, 1), start)
        yield torch.cat([first, inputs], 1), torch.cat([inputs[:, :1], targets], 1)


@torch.no_grad()
def measure(model: GPT, batches: list[tuple[Tensor, Tensor]]) -> tuple[float, Tensor]:
    """Returns the mean loss, and the mean weights of the first key and of the sink, (2, layers, H)."""
    modules = [block.attention.attention for block in model.blocks]
    for module in modules:
        module.measured = []
    loss = torch.stack([model.loss(*batch) for batch in batches]).mean().item()
    weights = torch.stack([torch.stack(module.measured).mean(0) for module in modules], 1)
    for module in modules:
        module.measured = None
    return loss, weights


def train(corpus: Corpus, shape: Shape, steps: int, batch: int) -> dict[str, Trainer]:
    """Trains both models in turns, on the same batches."""
    runs = {name: Trainer(make_model(shape, name == "with sinks"), steps) for name in ("without sinks", "with sinks")}
    batches = starting_windows(corpus.train, batch, shape.context, seed=0)
    for step, (inputs, targets) in enumerate(islice(batches, steps)):
        losses = {name: run.step(inputs, targets) for name, run in runs.items()}
        if step % 20 == 0 or step == steps - 1:
            text = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
            print(f"step {step:4d}  loss {text}  CPU time {time.process_time():.0f} s", flush=True)
    return runs


def plot(runs: dict[str, Trainer], weights: dict[str, Tensor], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 4, figsize=(14, 3), layout="constrained", width_ratios=[1.3, 1, 1, 1])
    for name, run in runs.items():
        axes[0].plot(run.losses, lw=0.8, label=name)
    axes[0].set(xlabel="step", ylabel="nats per token", title="training loss")
    axes[0].legend(frameon=False)
    pictures = [
        ("weight of the first token,\nwithout sinks", weights["without sinks"][0]),
        ("weight of the first token,\nwith sinks", weights["with sinks"][0]),
        ("weight of the sink", weights["with sinks"][1]),
    ]
    for axis, (title, table) in zip(axes[1:], pictures, strict=True):
        image = axis.imshow(table, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axis.set(title=title, xlabel="head", ylabel="layer", xticks=range(table.shape[1]), yticks=range(table.shape[0]))
        for layer, row in enumerate(table.tolist()):
            for head, value in enumerate(row):
                axis.text(head, layer, f"{value:.2f}", ha="center", va="center", fontsize=8,
                          color="black" if value > 0.6 else "white")  # fmt: skip
    figure.colorbar(image, ax=axes[1:])
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="for the figure, a PNG")
    arguments = parser.parse_args(argv)
    shape = Shape(VOCABULARY, arguments.context, arguments.d_model, arguments.heads, arguments.layers)
    corpus = load_corpus()
    runs = train(corpus, shape, arguments.steps, arguments.batch)
    held_out = list(islice(starting_windows(corpus.validation, arguments.batch, shape.context, seed=1), 8))
    weights = {}
    for name, run in runs.items():
        loss, weights[name] = measure(run.model, held_out)
        first, sink = weights[name].mean((1, 2)).tolist()
        print(f"{name}: validation loss {loss:.4f}; mean weight of the first token {first:.3f}, of the sink {sink:.3f}")
    for layer, block in enumerate(runs["with sinks"].model.blocks):
        print(f"layer {layer}: sinks {', '.join(f'{sink:.2f}' for sink in block.attention.attention.sink.tolist())}")
    if arguments.plot:
        plot(runs, weights, arguments.plot)


if __name__ == "__main__":
    main()
