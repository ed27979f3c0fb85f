"""Trains a small GPT with DeepSeek sparse attention on Python's standard library, in the stages of DeepSeek V3.2.

First the model attends to all keys, while the indexer learns where the heads look (warm-up). Then copies of the model
go on from there. They use all keys, the keys that its indexer chooses, the keys of an untrained indexer, or a window
with as many keys. All see the same batches. The validation losses show the cost of the choice. With --attention latent
the model has multi-head latent attention in place of one key head.

Afterwards the program measures a training step of one attention layer at several sequence lengths. It compares all keys
with chosen keys, including the choice and the indexer's training. The results are in a folder: results.json and
sparse_indexer.png.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import matplotlib
import torch
from gpt_model import Shape
from gpt_report import machine
from sparse_gpt import ATTENTIONS, Indexer, LatentAttention, SparseGPT
from stdlib_text import VOCABULARY, Batch, load_corpus, random_windows

from flash_attn_ext import flash_attn, indexer_loss, indexer_topk

matplotlib.use("Agg")  # draws to files only, so no display is needed
from matplotlib import pyplot as plt

BATCH, VALIDATION_BATCHES, LEARNING_RATE = 4, 8, 1e-3
RUNS = ("all keys", "chosen keys", "untrained indexer", "window")
# The measured layer: 16 query heads and one key head, with so many columns of keys and of values. A latent value is a
# view of the key.
HEADS = 16
COLUMNS = {"multi-query": (64, 64), "latent": (LatentAttention.LATENT + LatentAttention.ROTARY, LatentAttention.LATENT)}
LAYER_INDEXER = Indexer(heads=16, head_dim=32, topk=512)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    torch.manual_seed(arguments.seed)
    started = time.perf_counter()
    corpus = load_corpus()
    shape = Shape(VOCABULARY, arguments.context, arguments.d_model, arguments.heads, arguments.layers)
    indexer = Indexer(arguments.index_heads, arguments.index_dim, arguments.topk)
    model = SparseGPT(shape, indexer, arguments.attention)
    untrained = copy.deepcopy(index_parameters(model))
    batches = random_windows(corpus.train, BATCH, arguments.context, arguments.seed)
    validation = random_windows(corpus.validation, BATCH, arguments.context, 1)
    held_out = [next(validation) for _ in range(VALIDATION_BATCHES)]

    model.set_stage("warm-up")
    curves = {"warm-up": train(model, batches, arguments.steps)}
    after = validation_loss(model, held_out)
    print(f"{arguments.steps} steps with all keys: validation loss {after:.4f}", flush=True)
    shared = [next(batches) for _ in range(arguments.sparse_steps)]
    losses = {}
    for name in RUNS:
        run = copy.deepcopy(model)
        prepare(run, name, untrained)
        before = validation_loss(run, held_out)
        curves[name] = train(run, iter(shared), arguments.sparse_steps)
        losses[name] = {"before": before, "after": validation_loss(run, held_out)}
        print(
            f"{name:>18}: {before:.4f} at once, {losses[name]['after']:.4f} after {arguments.sparse_steps} more steps",
            flush=True,
        )
    seconds = time.perf_counter() - started
    print(f"{seconds:.0f} s of training")

    rows = [measure_layer(length, arguments.attention) for length in arguments.lengths]
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = {
        "machine": machine("cpu"), "attention": arguments.attention, "losses": losses, "seconds": seconds, "layer": rows
    }  # fmt: skip
    (arguments.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    plot(arguments.out / "sparse_indexer.png", arguments, curves, losses, rows)
    print(f"Results in {arguments.out}")
    return 0


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = {
        "steps": (300, "steps with all keys"),
        "sparse-steps": (100, "steps of each copy afterwards"),
        "context": (512, "tokens of a window, which is the sequence length"),
        "topk": (64, "keys that the indexer chooses for each query"),
        "d-model": (192, "width of the model"),
        "heads": (12, "query heads"),
        "layers": (2, "transformer layers"),
        "index-heads": (8, "heads of the indexer"),
        "index-dim": (16, "head dimension of the indexer"),
        "seed": (0, "seed of the parameters and the batches"),
    }
    for name, (default, meaning) in numbers.items():
        parser.add_argument("--" + name, type=int, default=default, help=f"{meaning} (default: {default})")
    parser.add_argument("--attention", choices=ATTENTIONS, default="multi-query", help="(default: multi-query)")
    text = "sequence lengths of the measured layer (default: 1024 to 16384)"
    parser.add_argument("--lengths", type=int, nargs="*", default=[2**n for n in range(10, 15)], metavar="S", help=text)
    parser.add_argument("--out", type=Path, default=Path("build/sparse_indexer"), metavar="FOLDER")
    return parser.parse_args(argv)


def index_parameters(model: SparseGPT) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if "index_" in name}


def prepare(model: SparseGPT, name: str, untrained: dict[str, torch.Tensor]) -> None:
    """Makes a copy of the warmed-up model the run of this name."""
    model.set_stage("dense" if name in ("all keys", "window") else "sparse")
    if name == "untrained indexer":
        model.load_state_dict(untrained, strict=False)
        for parameter in (p for n, p in model.named_parameters() if "index_" in n):
            parameter.requires_grad_(False)
    if name == "window":
        for block in model.blocks:
            block.attention.window = (block.attention.indexer.topk - 1, 0)


def train(model: SparseGPT, batches: Iterator[Batch], steps: int) -> list[float]:
    """Returns the model's loss of each step. The indexer's loss has gradients for the indexer only."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    curve = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20)
        loss = model.loss(*next(batches))
        optimizer.zero_grad()
        (loss + model.index_loss()).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        curve.append(loss.item())
    return curve


@torch.no_grad()
def validation_loss(model: SparseGPT, batches: list[Batch]) -> float:
    return sum(model.loss(*batch).item() for batch in batches) / len(batches)


def measure_layer(length: int, attention: str) -> dict[str, float]:
    """Times one attention layer in milliseconds. Steps take turns, and the fastest of each counts."""
    rounds = max(1, min(3, 16384 // length))
    (columns, value_columns), indexer = COLUMNS[attention], LAYER_INDEXER
    query = torch.randn(1, HEADS, length, columns, requires_grad=True)
    key = torch.randn(1, 1, length, columns, requires_grad=True)
    is_latent = attention == "latent"
    value = key[..., :value_columns] if is_latent else torch.randn(1, 1, length, value_columns, requires_grad=True)
    inputs = (query, key) if is_latent else (query, key, value)
    index = [
        torch.randn(1, indexer.heads, length, indexer.head_dim, requires_grad=True),
        torch.randn(1, length, indexer.head_dim, requires_grad=True),
        torch.rand(1, length, indexer.heads, requires_grad=True),
    ]
    attend = partial(flash_attn, query, key, value, is_causal=True, enable_gqa=True)

    def all_keys() -> None:
        torch.autograd.grad(attend().sum(), inputs, retain_graph=is_latent)

    def chosen_keys() -> None:
        chosen = indexer_topk(*index, indexer.topk, is_causal=True)
        out, lse = attend(key_indices=chosen, return_lse=True)
        loss = indexer_loss(*index, query, key, lse, indices=chosen, is_causal=True)
        torch.autograd.grad(out.sum() + loss, (*inputs, *index), retain_graph=is_latent)

    @torch.no_grad()
    def all_keys_forward() -> None:
        attend()

    @torch.no_grad()
    def chosen_keys_forward() -> None:
        attend(key_indices=indexer_topk(*index, indexer.topk, is_causal=True))

    steps = (all_keys, chosen_keys, all_keys_forward, chosen_keys_forward)
    best = dict.fromkeys((step.__name__ for step in steps), float("inf"))
    for _ in range(rounds):
        for step in steps:
            begin = time.perf_counter()
            step()
            best[step.__name__] = min(best[step.__name__], 1e3 * (time.perf_counter() - begin))
    print(f"S {length:>6}: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in best.items()), flush=True)
    return {"length": length, **best}


def plot(path: Path, arguments: argparse.Namespace, curves: dict, losses: dict, rows: list[dict]) -> None:
    figure, (training, times) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    first = len(curves["warm-up"])
    training.plot(smoothed(curves["warm-up"]), color="#777777", label="all keys, the indexer learns")
    for name in RUNS:
        steps = range(first, first + len(curves[name]))
        training.plot(steps, smoothed(curves[name]), label=f"{name}: {losses[name]['after']:.3f} at the end")
    training.set_title("Training loss, and validation loss at the end", loc="left", fontsize=11)
    training.set_xlabel(f"step; S {arguments.context}, {arguments.topk} keys")
    training.set_ylim(bottom=min(map(min, curves.values())) - 0.1, top=max(curves["warm-up"][min(30, first - 1) :]))
    lengths = [row["length"] for row in rows]
    for name, style in (
        ("all_keys", "o-"),
        ("chosen_keys", "o-"),
        ("all_keys_forward", "o--"),
        ("chosen_keys_forward", "o--"),
    ):
        color = "#1f77b4" if name.startswith("all") else "#d62728"
        times.plot(lengths, [row[name] for row in rows], style, color=color, label=name.replace("_", " "))
    if rows:
        times.set_xscale("log", base=2)
        times.set_yscale("log")
        times.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    times.set_title(f"One layer, forward and backward (ms); {LAYER_INDEXER.topk} keys", loc="left", fontsize=11)
    times.set_xlabel("sequence length")
    for axis in (training, times):
        axis.legend(frameon=False, fontsize=9)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    here = machine("cpu")
    figure.supxlabel(f"float32; {here['cpu']}, threads: {here['threads']}", fontsize=8.5, color="#555555")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def smoothed(curve: list[float], factor: float = 0.9) -> list[float]:
    """Exponential moving average, started at the mean of the first values."""
    value = sum(curve[:5]) / max(len(curve[:5]), 1)
    result = []
    for loss in curve:
        value = factor * value + (1 - factor) * loss
        result.append(value)
    return result


if __name__ == "__main__":
    sys.exit(main())
