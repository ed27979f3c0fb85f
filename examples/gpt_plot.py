"""The plot of two or more training runs."""

from pathlib import Path

import matplotlib
from gpt_report import MIB, Run, machine
from gpt_training import Settings
from loss_agreement import differences

matplotlib.use("Agg")  # draws to files only, so no display is needed
from matplotlib import pyplot as plt

COLORS = ["#3b76af", "#e1712b", "#4a9a54", "#8a63b5"]


def plot(path: Path, runs: list[Run], settings: Settings, curve_limit: float) -> None:
    """Loss curves over their difference on the left; time and memory on the right."""
    figure, axes = plt.subplot_mosaic(
        [["loss", "time"], ["loss", "memory"], ["difference", "memory"]],
        figsize=(12, 7.5),
        width_ratios=[2.3, 1],
        height_ratios=[1.25, 0.25, 1],
        layout="constrained",
    )
    _plot_losses(axes["loss"], runs)
    _plot_differences(axes["difference"], runs, curve_limit)
    axes["difference"].sharex(axes["loss"])
    _plot_times(axes["time"], runs)
    _plot_memory(axes["memory"], runs)
    for axis in axes.values():
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("One small GPT, trained on Python's standard library through each attention", fontsize=14)
    figure.supxlabel(_caption(runs, settings), fontsize=8.5, color="#555555")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _plot_losses(axis, runs: list[Run]) -> None:
    for index, (run, color) in enumerate(zip(runs, COLORS, strict=False)):
        # The first run is broad and pale, the others are thin and dashed: so all are visible where they coincide.
        line = {"lw": 4, "alpha": 0.4} if index == 0 else {"lw": 1.1, "ls": (4 * index, (4, 2))}
        marker = {"marker": "o", "ms": 9, "alpha": 0.6} if index == 0 else {"marker": "x", "ms": 7}
        steps = range(1, len(run.steps) + 1)
        axis.plot(steps, run.curves.loss, color=color, label=f"{run.name}, training", **line)
        steps, losses = zip(*run.validation, strict=True)
        axis.plot(steps, losses, color=color, ls="none", label=f"{run.name}, validation", **marker)
    axis.set_ylabel("loss (nats per token)")
    axis.set_title("Loss curves, overlaid", loc="left")
    axis.legend(frameon=False)
    axis.grid(alpha=0.25)


def _plot_differences(axis, runs: list[Run], limit: float) -> None:
    for run, color in list(zip(runs, COLORS, strict=False))[1:]:
        apart = differences(runs[0].curves.loss, run.curves.loss)
        steps = [step for step, value in enumerate(apart, 1) if value > 0]  # a logarithm has no 0
        equal = f"to the last bit equal in {len(apart) - len(steps)} of {len(apart)} steps"
        values = [apart[step - 1] for step in steps]
        axis.plot(steps, values, ".-", color=color, lw=0.8, label=f"{run.name} ({equal})")
    axis.axhline(limit, color="#b03030", ls="--", lw=1, label=f"limit, {limit:g}")
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel("|difference|")
    axis.set_title(f"Difference of the training loss from {runs[0].name}", loc="left")
    axis.set_ylim(top=30 * limit)  # room for the legend
    axis.legend(frameon=False, fontsize=8.5, loc="upper right", ncols=2)
    axis.grid(alpha=0.25)


def _plot_times(axis, runs: list[Run]) -> None:
    firsts, medians, thirds = zip(*(run.milliseconds() for run in runs), strict=True)
    below = [median - first for first, median in zip(firsts, medians, strict=True)]
    above = [third - median for median, third in zip(medians, thirds, strict=True)]
    names = [run.name for run in runs]
    bars = axis.bar(names, medians, width=0.55, color=COLORS[: len(runs)], yerr=[below, above], capsize=6)
    axis.bar_label(bars, [f"{median:.0f} ms" for median in medians], label_type="center", color="white")
    axis.set_ylabel("ms")
    axis.set_title("Time per step (median, quartiles)", loc="left")


def _plot_memory(axis, runs: list[Run]) -> None:
    names = [run.name for run in runs]
    start = [run.memory_at_start / MIB for run in runs]
    training = [(run.peak_memory - run.memory_at_start) / MIB for run in runs]
    axis.bar(names, start, width=0.55, color="#c9c9c9", label="before the model: Python, torch, the text")
    bars = axis.bar(names, training, bottom=start, width=0.55, color=COLORS[: len(runs)])
    axis.bar_label(bars, [f"{value:.0f} MiB" for value in training], label_type="center", color="white")
    axis.margins(y=0.25)
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
