"""The figures of the commands."""

from pathlib import Path

from ..reference.report import METHOD_COLORS, pyplot, save
from .counts import LABELS
from .sweeps import VALUES, BlockPoint, Sweep


def blocks(path: Path, points: list[BlockPoint], title: str, M: int) -> None:
    """Draws traffic and predicted time against the block size. A hollow dot: the tiles exceed M."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for algorithm in dict.fromkeys(p.algorithm for p in points):
        color = METHOD_COLORS[algorithm]
        line = [p for p in points if p.algorithm == algorithm]
        for axis, values in (
            (left, [p.counts.bytes / 1e9 for p in line]),
            (right, [p.time.seconds * 1e3 for p in line]),
        ):
            axis.plot([p.block for p in line], values, color=color, lw=1.5, label=LABELS[algorithm])
            for point, value in zip(line, values, strict=True):
                inside = color if point.counts.chip_peak <= M else "white"
                axis.plot(point.block, value, "o", color=color, markerfacecolor=inside)
    for axis, label in ((left, "slow-memory traffic (GB)"), (right, "predicted time (ms, roofline)")):
        axis.set_xscale("log", base=2)
        axis.set_xticks([p.block for p in points], [str(p.block) for p in points])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("block size (keys)")
        axis.set_title(label, loc="left", fontsize=10)
        axis.grid(alpha=0.25)
    left.legend(frameon=False)
    figure.suptitle(f"{title} (hollow: does not fit)", fontsize=10)
    save(figure, path)


def scaling(path: Path, sweeps: list[Sweep]) -> None:
    """Draws the accesses against N, d, M and s, and the extra memory against N."""
    figure, axes = pyplot().subplots(1, 5, figsize=(15, 3.4), layout="constrained")
    panels = [(sweep, "accesses") for sweep in sweeps] + [(sweeps[0], "extra memory")]
    for axis, (sweep, value) in zip(axes, panels, strict=True):
        for algorithm, counts in sweep.counts.items():
            color = METHOD_COLORS[algorithm]
            axis.plot(sweep.values, [VALUES[value](c) for c in counts], "o-", color=color, label=LABELS[algorithm])
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        axis.set_xlabel(sweep.variable)
        axis.set_title(f"{value} against {sweep.variable}", loc="left", fontsize=10)
        axis.grid(alpha=0.25)
        if sweep.variable in ("N", "s") and value == "accesses":
            axis.legend(frameon=False)
    save(figure, path)
