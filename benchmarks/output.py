"""Writes the results of a benchmark: tables as text in Markdown, all numbers as JSON, and a figure."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--text", type=Path, metavar="FILE", help="for the tables that the terminal shows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for all numbers")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="for the figure, a PNG")


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """Makes a table in Markdown. The first column is aligned left, all other columns right."""
    result = Table(box=box.MARKDOWN)
    for n, column in enumerate(columns):
        result.add_column(column, justify="right" if n else "left", no_wrap=True)
    for row in rows:
        result.add_row(*row)
    return result


def write_json(record: dict, path: Path | None) -> None:
    """Writes numbers with four digits and one line for each row, so the file is short enough for the repository."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [f"{json.dumps(key)}: {_value(value)}" for key, value in record.items()]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _value(value: object) -> str:
    short = json.loads(json.dumps(value), parse_float=lambda number: float(f"{float(number):.4g}"))
    if isinstance(short, list) and short:
        return "[\n" + ",\n".join(json.dumps(row) for row in short) + "\n]"
    return json.dumps(short)


def write_text(parts: Iterable[str | Table], path: Path | None) -> None:
    """Writes to the terminal, and to the file if there is one."""
    console = Console(width=260, highlight=False, markup=False, soft_wrap=True, record=True)
    for part in parts:
        console.print(part)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        console.save_text(path)


def settings(args: argparse.Namespace) -> dict:
    """Returns the arguments without the names of output files."""
    return {key: value for key, value in vars(args).items() if key not in ("text", "json", "plot")}
