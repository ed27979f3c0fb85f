"""Measures attention alone against the sequence length: time and peak memory of a training step.

The sequences of the small GPT are too short to show the cost of the N x N matrix. Here lengths go up to 8192. The
result is the demo's second figure.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from gpt_report import machine
from rich import box
from rich.table import Table

sys.path.append(str(Path(__file__).parent.parent))
from benchmarks.attention_methods import Case, training_step
from benchmarks.harness import quartiles, time_in_turn
from benchmarks.peak_memory import measure
from flash_attn_ext.reference.report import METHOD_COLORS

matplotlib.use("Agg")  # draws to files only, so no display is needed
from matplotlib import pyplot as plt

METHODS = ("torch math", "torch default", "ours")
BATCH, HEADS, HEAD_DIM = 1, 2, 64
MIB = 2**20


@dataclass(frozen=True)
class Measured:
    """One method at one length. None: it does not fit into memory."""

    method: str
    length: int
    bytes: int | None
    milliseconds: float | None

    def cells(self) -> tuple[str, str]:
        """Returns time and memory as text."""
        if self.bytes is None or self.milliseconds is None:
            return "does not fit", "does not fit"
        return f"{self.milliseconds:.1f} ms", f"{self.bytes / MIB:.1f} MiB"


def can_measure_memory(device: str) -> bool:
    return device.startswith("cuda") or Path("/proc/self/clear_refs").exists()


def measure_lengths(lengths: Iterable[int], device: str, seconds: float = 0.5) -> Iterator[list[Measured]]:
    """Measures all methods at each length, causal, forward and backward. Memory is measured in a separate process."""
    for length in lengths:
        cases = {m: Case(m, BATCH, HEADS, length, HEAD_DIM, causal=True, device=device) for m in METHODS}
        peaks = {method: measure(case) for method, case in cases.items()}
        fitting = [method for method, peak in peaks.items() if peak is not None]
        times = time_in_turn([training_step(cases[m]) for m in fitting], seconds=seconds, rounds=(2, 20))
        medians = {method: 1e3 * quartiles(taken)[1] for method, taken in zip(fitting, times, strict=True)}
        yield [Measured(method, length, peaks[method], medians.get(method)) for method in METHODS]


def table(measured: list[list[Measured]]) -> Table:
    """Makes a table with a row for each length, and time and memory of each method."""
    result = Table(title="Attention alone: a training step", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    result.add_column("S", justify="right", no_wrap=True, min_width=4)
    for quantity in ("time", "memory"):
        for method in METHODS:
            heading = f"{method} {quantity}".replace(" ", "\n")
            result.add_column(heading, justify="right", no_wrap=True)
    for row in measured:
        times, sizes = zip(*(each.cells() for each in row), strict=True)
        result.add_row(str(row[0].length), *times, *sizes)
    return result


def write(measured: list[list[Measured]], device: str, picture: Path, numbers: Path) -> None:
    here = machine(device)
    where = here["cpu"] if here["device"] == "cpu" else here["device"]
    plot(picture, measured, f"{where}, threads: {here['threads']}, torch {here['torch']}")
    rows = [vars(each) for row in measured for each in row]
    numbers.write_text(json.dumps({"machine": here, "rows": rows}, indent=1) + "\n")


def plot(path: Path, measured: list[list[Measured]], where: str) -> None:
    figure, (times, sizes) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    for method in METHODS:
        color = METHOD_COLORS[method]
        rows = [each for row in measured for each in row if each.method == method and each.bytes is not None]
        lengths = [each.length for each in rows]
        times.plot(lengths, [each.milliseconds for each in rows], "o-", color=color, label=method)
        sizes.plot(lengths, [each.bytes / MIB for each in rows], "o-", color=color, label=method)
    for axis, title in ((times, "Time of forward and backward (ms)"), (sizes, "Peak memory beyond the inputs (MiB)")):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_xlabel("sequence length")
        axis.set_title(title, loc="left", fontsize=11)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    times.legend(frameon=False)
    figure.suptitle("Attention alone, torch's two ways and ours", fontsize=13)
    shape = f"batch {BATCH}, {HEADS} heads, head dimension {HEAD_DIM}, causal, float32"
    figure.supxlabel(f"{shape}; {where}", fontsize=8.5, color="#555555")
    figure.savefig(path, dpi=130)
    plt.close(figure)
