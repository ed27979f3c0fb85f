"""Notices that the machine was busy: a fixed product of matrices runs in every round, and its time is looked at.

Quartiles do not show a load that lasts as long as a cell: all its times are slow then, and agree. The product is the
same for all cells, so a cell in which it took longer than in the quietest cell was measured on a busy machine.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tqdm import tqdm

BUSY = 1.15  # a slowdown above this marks a cell
SHARE = 0.1  # of the time of the watched call, about: short products would miss what slows a long call
MOST_PRODUCTS = 300


class Watch:
    """A function for the rounds of one cell, and what its times say."""

    def __init__(self, call: Callable) -> None:
        """`call` is what is measured in this cell: it runs twice, and the second run decides how long to look."""
        torch.manual_seed(0)
        self._matrix = torch.randn(256, 256)  # with its product half a MiB: it stays in the cache
        self._product = torch.empty_like(self._matrix)
        self.seconds = 0.0
        self.products = 0
        call()
        once, needed = _seconds(self._multiply), _seconds(call)
        self._products = max(1, min(MOST_PRODUCTS, round(SHARE * needed / once)))

    def __call__(self) -> None:
        self._multiply()  # wakes the threads
        self.seconds += _seconds(lambda: [self._multiply() for _ in range(self._products)])
        self.products += self._products

    def _multiply(self) -> None:
        torch.mm(self._matrix, self._matrix, out=self._product)

    def row(self) -> dict[str, float]:
        """The mean time, and not the median: a load that comes and goes counts by its share."""
        return {"reference_ms": self.seconds / self.products * 1e3}


def _seconds(function: Callable) -> float:
    before = time.perf_counter()
    function()
    return time.perf_counter() - before


def mark(rows: Sequence[dict]) -> None:
    """Adds to each row its slowdown against the quietest one, and whether that is too much."""
    quietest = min((row["reference_ms"] for row in rows), default=0.0)
    for row in rows:
        row["slowdown"] = row["reference_ms"] / quietest
        row["busy"] = row["slowdown"] > BUSY


def measure_all(problems: Sequence[Any], measure: Callable[[Any], dict], repeats: int) -> list[dict]:
    """A row for each problem. Where the machine was busy, it is measured up to `repeats` times again."""
    rows = [measure(problem) for problem in tqdm(problems, leave=False)]
    mark(rows)
    for _ in range(repeats):
        busy = [number for number, row in enumerate(rows) if row["busy"]]
        for number in tqdm(busy, leave=False, desc="again, the machine was busy"):
            again = measure(problems[number])
            if again["reference_ms"] < rows[number]["reference_ms"]:
                rows[number] = again
        mark(rows)
    return rows


def note(rows: Sequence[dict]) -> str:
    """What to say below a table; empty if the machine was quiet."""
    busy = sum(row["busy"] for row in rows)
    if not busy:
        return ""
    return (
        f"\n? marks {busy} of {len(rows)} rows: the machine was busy, a fixed product ran more than {BUSY} times as "
        "long as in the quietest row. Do not rely on them.\n"
    )
