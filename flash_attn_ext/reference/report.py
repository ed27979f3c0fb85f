"""Tables on the terminal and figures in files, for the commands of this folder and of iomodel."""

from collections.abc import Iterable
from pathlib import Path

EXTRA = "pip install 'flash_attn_ext[model]'"
# Also distinguishable in grey: the list is ordered by lightness.
COLORS = ["#1b3a6b", "#c8501e", "#3f8f5b", "#9a6fc0", "#d8a730"]
# A method has the same colour in every panel of every figure.
METHOD_COLORS = {
    **dict.fromkeys(["torch default", "torch flash", "sdpa", "flash1"], COLORS[0]),
    **dict.fromkeys(["ours", "flash_attn_ext", "flash2"], COLORS[1]),
    **dict.fromkeys(["torch math", "sdpa-math", "block_sparse"], COLORS[2]),
    **dict.fromkeys(["standard", "torch efficient"], COLORS[3]),
    **dict.fromkeys(["torch cudnn"], COLORS[4]),
}


def print_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]], *, width: int = 118) -> None:
    """Prints a table. The first column is aligned left, all other columns right."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError as error:
        raise SystemExit(f"tables need rich: {EXTRA}") from error
    table = Table(title=title, title_justify="left", title_style="bold")
    for n, column in enumerate(columns):
        table.add_column(column, justify="right" if n else "left")
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=width, highlight=False).print(table)


def pyplot():
    """Returns matplotlib.pyplot for drawing to files. No display is needed."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit(f"figures need matplotlib: {EXTRA}") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def save(figure, path: Path) -> None:
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    pyplot().close(figure)
    print(f"drawn: {path}")
