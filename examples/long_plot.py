"""Draws the record of train_long.py.

python examples/long_plot.py build/long/record.json train_long.png
"""

import argparse
import json
from itertools import accumulate
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # draws to files only, so no display is needed
from matplotlib import pyplot as plt

MIB = 2**20
COLORS = {"torch": "tab:gray", "activate": "tab:blue", "varlen": "tab:red", "2 processes": "tab:green"}
LINES = {"float32": "-", "bfloat16": "--"}


def plot(record: dict, path: Path) -> None:
    """Draws losses against steps, wall clock and CPU time, and bars of speed and memory."""
    runs = [run for run in record["runs"] if run["loss"]]
    layout = [["steps", "seconds", "cpu_seconds"], ["validation", "speed", "memory"]]
    figure, axes = plt.subplot_mosaic(layout, figsize=(13, 7.5), layout="constrained")
    for run in runs:
        style = {"color": COLORS[run["way"]], "ls": LINES[run["dtype"]], "lw": 1.2, "label": run["name"]}
        axes["steps"].plot(smoothed(run["loss"]), **style)
        for name in ("seconds", "cpu_seconds"):
            axes[name].plot([total / 60 for total in accumulate(run[name])], smoothed(run["loss"]), **style)
        if run["validation"]:
            axes["validation"].plot(*zip(*run["validation"], strict=True), marker=".", **style)
    for name, title in (("steps", "step"), ("seconds", "minutes, wall clock"), ("cpu_seconds", "minutes of CPU time"),
                        ("validation", "step")):  # fmt: skip
        axes[name].set(xlabel=title, ylabel="validation loss" if name == "validation" else "training loss (mean of 20)")
        axes[name].grid(alpha=0.25)
    axes["steps"].legend(frameon=False, fontsize=8)
    draw_bars(axes["speed"], runs, [run["tokens_per_second"] for run in runs], "tokens a second")
    memory = [(run["peak_memory"] - run["memory_at_start"]) / MIB for run in runs]
    draw_bars(axes["memory"], runs, memory, "peak memory of a process, MiB\n(without torch and the text)")
    figure.suptitle("A GPT on packed documents, " + describe(record))
    figure.savefig(path, dpi=110)
    plt.close(figure)


def smoothed(loss: list[float], width: int = 20) -> list[float]:
    """The mean of the last `width` steps, or of all steps so far."""
    return [sum(part) / len(part) for end in range(1, len(loss) + 1) if (part := loss[max(0, end - width) : end])]


def draw_bars(axis, runs: list[dict], values: list[float], title: str) -> None:
    colors = [COLORS[run["way"]] for run in runs]
    bars = axis.barh([run["name"] for run in runs], values, color=colors)
    for bar, run in zip(bars, runs, strict=True):
        bar.set_alpha(1 if run["dtype"] == "float32" else 0.6)
    axis.bar_label(bars, [f"{value:,.0f}" for value in values], padding=3, fontsize=8)
    axis.margins(x=0.15)
    axis.invert_yaxis()
    axis.set_title(title, fontsize=10)


def describe(record: dict) -> str:
    settings, machine = record["settings"], record["machine"]
    sizes = f"context {settings['context']}, {settings['layers']} layers of {settings['d_model']}"
    where = f"{machine['cpu']}, {machine['threads']} threads, torch {machine['torch']}"
    return "\n".join(filter(None, [sizes, where, record["note"]]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("figure", type=Path, help="a PNG")
    arguments = parser.parse_args()
    plot(json.loads(arguments.record.read_text()), arguments.figure)


if __name__ == "__main__":
    main()
