"""The timelines of FlashAttention-3's schedules."""

from pathlib import Path

from .flash3_schedule import EXP_UNITS, LOADS, TENSOR_CORES, Run
from .report import COLORS, pyplot, save

SHORT = {TENSOR_CORES: "GEMM", EXP_UNITS: "softmax", LOADS: "loads"}


def timelines(path: Path, runs: dict[str, Run]) -> None:
    """Draws one panel for each schedule and one line for each worker and unit.

    Blocks of keys alternate between dark and pale.
    """
    figure, axes = pyplot().subplots(len(runs), 1, figsize=(11, 8), sharex=True, layout="constrained")
    for axis, (name, run) in zip(axes, runs.items(), strict=True):
        lines = sorted({(i.worker, i.unit) for i in run.timeline if i.unit != LOADS}, reverse=True)
        lines = [("producer", LOADS), *lines]
        for interval in run.timeline:
            if (interval.worker, interval.unit) not in lines:
                continue
            y = lines.index((interval.worker, interval.unit))
            kind, _, block = interval.label.partition(" ")
            color = COLORS[["QK", "PV", "softmax", "K", "V"].index(kind)]
            pale = 0.55 if block and int(block) % 2 else 1.0
            axis.barh(y, interval.end - interval.start, left=interval.start, height=0.8, color=color, alpha=pale)
            if interval.end - interval.start > 0.02 * max(r.clocks for r in runs.values()):
                middle = (interval.start + interval.end) / 2
                axis.text(
                    middle,
                    y,
                    interval.label.replace("softmax", "exp"),
                    ha="center",
                    va="center",
                    fontsize=6,
                    color="white",
                )
        axis.set_yticks(range(len(lines)), [f"{worker}: {SHORT[unit]}" for worker, unit in lines], fontsize=8)
        busy = f"{run.clocks:.0f} clocks, tensor cores busy {run.busy(TENSOR_CORES):.0%}"
        axis.set_title(f"{name}: {busy}", loc="left", fontsize=10)
    axes[-1].set_xlabel("clocks")
    save(figure, path)
