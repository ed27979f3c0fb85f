"""Draws README.md's figure from a record of compare_torch.py.

python -m benchmarks.summary_figure RECORD.json FIGURE.png
"""

import json
import sys
from pathlib import Path

from flash_attn_ext.reference.report import COLORS, METHOD_COLORS, pyplot, save

MIB = 2**20
# One hue for each dtype. The other panel has METHOD_COLORS, so these hues differ from them.
PASSES = {
    ("float32", "fwd"): COLORS[3], ("float32", "fwd+bwd"): "#cdb7e0",
    ("bfloat16", "fwd"): COLORS[4], ("bfloat16", "fwd+bwd"): "#ecd398",
}  # fmt: skip


def speeds(axis, rows: list[dict]) -> None:
    """Draws the median of torch's time over ours for each shape, with quartiles."""
    shapes = [row for row in rows if row["kind"] == "shapes" and row["case"] == "causal"]
    names = list(dict.fromkeys(",".join(map(str, row["B,H,S_q,D"])) for row in shapes))
    for n, ((dtype, which), color) in enumerate(PASSES.items()):
        these = [row for row in shapes if (row["dtype"], row["pass"]) == (dtype, which)]
        middle = [row["ratio"] for row in these]
        low = [row["ratio"] - row["ratio_quartiles"][0] for row in these]
        high = [row["ratio_quartiles"][1] - row["ratio"] for row in these]
        at = [position + (n - 1.5) * 0.2 for position in range(len(names))]
        axis.bar(at, middle, width=0.19, yerr=[low, high], color=color, ecolor="#555555", label=f"{dtype}, {which}")
    axis.axhline(1, color="black", lw=0.8)
    axis.set_xticks(range(len(names)), names, fontsize=8, rotation=20)
    axis.set_xlabel("B, H, S, D")
    axis.set_title("Speed: torch's time / ours, causal", loc="left", fontsize=11)
    axis.legend(frameon=False, fontsize=8, ncols=2)


def memory(axis, rows: list[dict]) -> None:
    """Draws the peak memory of forward and backward against S, with and without dropout."""
    these = [row for row in rows if row["dtype"] == "float32"]
    for method in ("torch math", "torch default", "ours"):
        color = METHOD_COLORS[method]
        for dropout, style in ((0.0, "o-"), (0.1, "s--")):
            points = [(row["B,H,S,D"][2], row[method] / MIB) for row in these if row["dropout"] == dropout]
            label = method + (", dropout" if dropout else "")
            axis.plot(*zip(*points, strict=True), style, color=color, label=label, ms=4)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xlabel("S")
    axis.set_title("Peak memory, B 1, H 2, D 64 (MiB)", loc="left", fontsize=11)
    axis.legend(frameon=False, fontsize=8)


def main(record: Path, figure_path: Path) -> None:
    measured = json.loads(record.read_text())
    figure, axes = pyplot().subplots(1, 2, figsize=(11, 4.2), width_ratios=[1.7, 1], layout="constrained")
    speeds(axes[0], measured["rows"])
    memory(axes[1], measured["memory"])
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    here = measured["machine"]
    where = f"{here['cpu']}, {here['threads']} threads; torch {here['torch']}; ours with {here['isa']}"
    figure.supxlabel(where, fontsize=8, color="#555555")
    figure_path.parent.mkdir(parents=True, exist_ok=True)
    save(figure, figure_path)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
