"""Makes tables, and a figure of the ratios, from the measurements of compare_torch.py."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from rich.table import Table

from benchmarks import output
from benchmarks.cells import KINDS
from benchmarks.watch import note
from flash_attn_ext.reference.report import COLORS, pyplot, save

PASSES = ("fwd", "fwd+bwd")
NOTES = {
    "windows": "GFLOP/s count visible scores only. The cost of a call is proportional to its window.\n",
    "decode": "K, V GB/s: the call reads both once. A plain read of the same memory ran in the same rounds.\n",
}


def text(record: dict) -> Iterator[str | Table]:
    rows = record["rows"]
    yield heading(record)
    yield note(rows)
    for kind in KINDS:
        of_kind = [row for row in rows if row["kind"] == kind]
        if of_kind:
            yield f"\n## {kind}\n\n{NOTES.get(kind, '')}"
            yield times(of_kind)
    if rows:
        slower = [row for row in rows if row["ratio"] < 1]
        yield f"\n## Where torch is faster: {len(slower)} of {len(rows)}\n"
        if slower:
            yield times(sorted(slower, key=lambda row: row["ratio"]))
    if record["memory"]:
        yield "\n## Peak memory of forward and backward beyond the inputs, MiB\n"
        yield memory(record["memory"])


def heading(record: dict) -> str:
    machine = {key: value for key, value in record["machine"].items() if key != "environment"}
    where = ", ".join(f"{key} {value}" for key, value in machine.items())
    environment = " ".join(f"{key}={value}" for key, value in record["machine"]["environment"].items())
    quick = "; --quick" if record["settings"]["quick"] else ""
    return f"torch / ours: {where}{quick}" + (f"; {environment}" if environment else "")


def times(rows: list[dict]) -> Table:
    columns = ["case", "B,H,S_q,D", "H_kv,S_k", "dtype", "pass"]
    columns += ["torch ms", "ours ms", "torch / ours", "GFLOP/s", "of FMA peak", "ISA"]
    reads = any("of_stream" in row for row in rows)
    lines = []
    for row in rows:
        line = [
            row["case"], ",".join(map(str, row["B,H,S_q,D"])), ",".join(map(str, row["H_kv,S_k"])), row["dtype"],
            row["pass"], f"{row['torch_ms']:.4g}", f"{row['ms']:.4g}", spread(row, "ratio") + " ?" * row["busy"],
            f"{row['GFLOP/s']:.3g}",
            f"{row['of_fma_peak']:.0%}", row["isa"],
        ]  # fmt: skip
        if reads:
            known = "of_stream" in row
            line += [f"{row['GB/s']:.1f}", spread(row, "of_stream")] if known else ["", ""]
        lines.append(line)
    return output.table([*columns, *(["K, V GB/s", "of plain read"] if reads else [])], lines)


def spread(row: dict, key: str) -> str:
    """Returns the median and its quartiles."""
    low, high = row[f"{key}_quartiles"]
    return f"{row[key]:.2f} [{low:.2f}, {high:.2f}]"


def memory(rows: list[dict]) -> Table:
    methods = ("ours", "torch default", "torch math")
    columns = ["B,H,S,D", "dtype", "dropout", *methods, "default / ours", "math / ours"]
    lines = []
    for row in rows:
        sizes = ["does not fit" if row[m] is None else f"{row[m] / 2**20:.1f}" for m in methods]
        ratios = ["" if row[m] is None else f"{row[m] / row['ours']:.1f}" for m in methods[1:]]
        lines.append([",".join(map(str, row["B,H,S,D"])), row["dtype"], f"{row['dropout']:g}", *sizes, *ratios])
    return output.table(columns, lines)


def plot(record: dict, path: Path) -> None:
    """Draws a dot with quartiles for each row. One column for each dtype, one colour for each pass."""
    rows = record["rows"]
    labels = list(dict.fromkeys((row["kind"], label(row)) for row in rows))
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    size = (2.6 + 2.9 * len(dtypes), 1.6 + 0.2 * len(labels))
    figure, axes = pyplot().subplots(1, len(dtypes), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis, dtype in zip(axes[0], dtypes, strict=True):
        for which, color, offset in zip(PASSES, COLORS, (-0.15, 0.15), strict=False):
            of_pass = [row for row in rows if (row["dtype"], row["pass"]) == (dtype, which)]
            draw(axis, of_pass, labels, which, color, offset)
        axis.axvline(1, color="black", lw=0.8)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_title(dtype, fontsize=10)
        axis.grid(alpha=0.25)
        for n, (before, after) in enumerate(pairwise(labels)):
            if before[0] != after[0]:
                axis.axhline(n + 0.5, color="grey", lw=0.6)
    axes[0][0].set_yticks(range(len(labels)), [name for _, name in labels], fontsize=7)
    axes[0][0].set_ylim(len(labels) - 0.4, -0.6)
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8
    )
    figure.supxlabel("torch's time / ours: median and quartiles; to the right of 1, ours is faster", fontsize=9)
    machine = record["machine"]
    where = f"{machine['cpu']}, {machine['threads']} threads; ours {machine['isa']}, torch {machine['torch_isa']}"
    figure.suptitle(where + ("; --quick" if record["settings"]["quick"] else ""), fontsize=9, ha="left", x=0.02)
    save(figure, path)


def draw(axis, rows: list[dict], labels: list[tuple[str, str]], name: str, color: str, offset: float) -> None:
    """Draws rows. Dots of a busy machine are hollow."""
    for busy, face in ((False, color), (True, "white")):
        these = [row for row in rows if row["busy"] is busy]
        if not these:
            continue
        middle = [row["ratio"] for row in these]
        low = [row["ratio"] - row["ratio_quartiles"][0] for row in these]
        high = [row["ratio_quartiles"][1] - row["ratio"] for row in these]
        at = [labels.index((row["kind"], label(row))) + offset for row in these]
        text = f"{name}, busy machine" if busy else name
        axis.errorbar(middle, at, xerr=[low, high], fmt="o", ms=3, lw=1, color=color, mfc=face, label=text)


def label(row: dict) -> str:
    """Returns a row's name on the axis. Column and colour show dtype and pass."""
    shape = ",".join(map(str, row["B,H,S_q,D"]))
    return f"{row['case']}  {shape}" + (f"  S_k {row['H_kv,S_k'][1]}" if row["kind"] == "decode" else "")
