"""The plot of two or more training runs."""

from pathlib import Path

import matplotlib
from gpt_report import MIB, Run, machine
from gpt_training import Settings
from loss_agreement import differences, median

from flash_attn_ext.reference.report import METHOD_COLORS

matplotlib.use("Agg")  # draws to files only, so no display is needed
from matplotlib import pyplot as plt

COLORS_OF_REPEATED_NAMES = ["#8a63b5", "#8c6239", "#c9579b"]


def plot(path: Path, runs: list[Run], settings: Settings) -> None:
    """Draws the losses and their differences on the left, time and memory on the right."""
    colors = colors_of(runs)
    figure, axes = plt.subplot_mosaic(
        [["loss", "time"], ["loss", "memory"], ["difference", "memory"]],
        figsize=(12, 7.5),
        width_ratios=[2.3, 1],
        height_ratios=[1.25, 0.25, 1],
        layout="constrained",
    )
    _plot_losses(axes["loss"], runs, colors)
    _plot_differences(axes["difference"], runs, colors)
    axes["difference"].sharex(axes["loss"])
    _plot_times(axes["time"], runs, colors)
    _plot_memory(axes["memory"], runs, colors)
    for axis in axes.values():
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("One small GPT, trained on Python's standard library through each attention", fontsize=14)
    figure.supxlabel(_caption(runs, settings), fontsize=8.5, color="#555555")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def colors_of(runs: list[Run]) -> list[str]:
    more = iter(COLORS_OF_REPEATED_NAMES * len(runs))
    return [METHOD_COLORS[run.name] if run.name in METHOD_COLORS else next(more) for run in runs]


def _plot_losses(axis, runs: list[Run], colors: list[str]) -> None:
    for index, (run, color) in enumerate(zip(runs, colors, strict=True)):
        # The first run is broad and pale. The next runs are thin, with dashes that alternate, so all stay visible.
        line = {"lw": 5, "alpha": 0.35} if index == 0 else {"lw": 1.2, "ls": (4 * index, (4, 4))}
        marker = {"marker": "o", "ms": 9, "alpha": 0.5} if index == 0 else {"marker": "x+"[index % 2], "ms": 8}
        steps = range(1, len(run.steps) + 1)
        axis.plot(steps, run.curves.loss, color=color, label=f"{run.name}, training", **line)
        steps, losses = zip(*run.validation, strict=True)
        axis.plot(steps, losses, color=color, ls="none", label=f"{run.name}, validation", **marker)
    axis.set_ylabel("loss (nats per token)")
    axis.set_title("Loss of each run", loc="left")
    axis.legend(frameon=False, ncols=2)
    axis.grid(alpha=0.25)


def _plot_differences(axis, runs: list[Run], colors: list[str]) -> None:
    for run, color in list(zip(runs, colors, strict=True))[1:]:
        apart = differences(runs[0].curves.loss, run.curves.loss)
        steps = [step for step, value in enumerate(apart, 1) if value > 0]  # a logarithm has no 0
        values = [apart[step - 1] for step in steps]
        axis.plot(steps, values, ".", color=color, ms=3, label=f"{run.name} (median {median(apart):.1e})")
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel("|difference|")
    axis.set_title(f"Difference of the training loss from {runs[0].name}", loc="left")
    axis.set_ylim(top=30 * axis.get_ylim()[1])  # room for the legend
    axis.legend(frameon=False, fontsize=9, loc="upper left", ncols=2)
    axis.grid(alpha=0.25)


def _plot_times(axis, runs: list[Run], colors: list[str]) -> None:
    firsts, medians, thirds = zip(*(run.milliseconds() for run in runs), strict=True)
    below = [median - first for first, median in zip(firsts, medians, strict=True)]
    above = [third - median for median, third in zip(medians, thirds, strict=True)]
    names = [run.name for run in runs]
    bars = axis.bar(names, medians, width=0.55, color=colors, yerr=[below, above], capsize=6)
    axis.bar_label(bars, [f"{median:.0f} ms" for median in medians], label_type="center", color="white")
    axis.set_ylabel("ms")
    axis.set_title("Time per step (median, quartiles)", loc="left")


def _plot_memory(axis, runs: list[Run], colors: list[str]) -> None:
    names = [run.name for run in runs]
    start = [run.memory_at_start / MIB for run in runs]
    training = [(run.peak_memory - run.memory_at_start) / MIB for run in runs]
    axis.bar(names, start, width=0.55, color="#c9c9c9", label="before the model: Python, torch, the text")
    bars = axis.bar(names, training, bottom=start, width=0.55, color=colors)
    axis.bar_label(bars, [f"{value:.0f} MiB" for value in training], label_type="center", color="white")
    axis.margins(y=0.3)
    axis.set_ylabel("MiB")
    axis.set_title("Peak memory of the process", loc="left")
    axis.legend(frameon=False, fontsize=8.5)


def _caption(runs: list[Run], settings: Settings) -> str:
    here = machine(settings.device)
    where = here["cpu"] if here["device"] == "cpu" else here["device"]
    kernels = ", ".join(f"{run.name} kernel: {run.kernel}" for run in runs if run.kernel)
    model = f"{settings.layers} layers, d_model {settings.d_model}, {settings.heads} heads"
    first = f"{model}, context {settings.context}, batch {settings.batch_size}, {settings.dtype}"
    first += f", seed {settings.seed}"
    second = f"{where}, threads: {here['threads']} ({here['cpu_capability']}), torch {here['torch']}"
    return first + "\n" + ", ".join(filter(None, [second, kernels]))
