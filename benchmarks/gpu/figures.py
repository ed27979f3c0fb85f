"""Draws the figures. Without matplotlib, prints a line about the missing package."""

import importlib.util
from pathlib import Path

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")


def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def possible(path: Path | None) -> bool:
    if path is None:
        return False
    if importlib.util.find_spec("matplotlib") is None:
        print("no figure: matplotlib is not installed")
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    return True


def plot_comparison(record: dict, path: Path | None) -> None:
    """TFLOP/s against S: a row for each D, a column for each pass, full and causal."""
    if not possible(path):
        return
    rows = record["rows"]
    dims = sorted({row["D"] for row in rows})
    kinds = list(dict.fromkeys((row["pass"], row["causal"]) for row in rows))
    names = list(dict.fromkeys(name for row in rows for name in row["TFLOP/s"]))
    figure, axes = pyplot().subplots(
        len(dims), len(kinds), figsize=(3.2 * len(kinds), 2.4 * len(dims)), squeeze=False, layout="constrained"
    )
    for line, dim in zip(axes, dims, strict=True):
        for axis, (direction, causal) in zip(line, kinds, strict=True):
            here = [row for row in rows if (row["D"], row["pass"], row["causal"]) == (dim, direction, causal)]
            for name, color in zip(names, COLORS, strict=False):
                points = [(row["S"], row["TFLOP/s"][name]) for row in here if name in row["TFLOP/s"]]
                if points:
                    axis.plot(*zip(*points, strict=True), "o-", color=color, ms=3, lw=1, label=name)
            axis.axhline(record["matmul_peak_TFLOP/s"], color="gray", lw=0.8, ls=":")
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.set_title(f"D {dim}, {direction}, {'causal' if causal else 'full'}", fontsize=9)
            axis.tick_params(labelsize=8)
            axis.grid(alpha=0.25)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    figure.suptitle(f"TFLOP/s against S, {record['dtype']}; dotted: matmul. {record['machine']}", fontsize=9)
    figure.savefig(path, dpi=130)


def plot_decoding(record: dict, path: Path | None) -> None:
    """Fraction of the copy bandwidth against S_k, one line for each batch."""
    if not possible(path):
        return
    rows = record["rows"]
    kinds = list(dict.fromkeys((row["H"], row["H_kv"]) for row in rows))
    figure, axes = pyplot().subplots(
        1, len(kinds), figsize=(3.6 * len(kinds), 3), squeeze=False, layout="constrained", sharey=True
    )
    for axis, kind in zip(axes[0], kinds, strict=True):
        for batch, color in zip(sorted({row["B"] for row in rows}), COLORS, strict=False):
            here = [row for row in rows if (row["H"], row["H_kv"], row["B"]) == (*kind, batch)]
            points = [(row["S_k"], row["of_copy"]) for row in here]
            if points:
                axis.plot(*zip(*points, strict=True), "o-", color=color, ms=3, lw=1, label=f"B {batch}")
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_title("H {}, H_kv {}".format(*kind), fontsize=9)
        axis.grid(alpha=0.25)
        axis.legend(frameon=False, fontsize=8)
    figure.suptitle(f"Decoding: K and V read, of the copy bandwidth. {record['machine']}", fontsize=9)
    figure.savefig(path, dpi=130)
