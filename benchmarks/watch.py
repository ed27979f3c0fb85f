"""Detects a busy machine: every round also times a fixed product of matrices.

Quartiles do not show a load that lasts as long as a cell, because all times of the cell are slow then. The product is
the same in all cells. If it was slower in a cell than in the quietest cell, the machine was busy.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tqdm import tqdm

BUSY = 1.15  # a slowdown above this marks a cell
SHARE = 0.1  # of the watched call's time, about: a short product would miss a load that slows a long call
MOST_PRODUCTS = 300


class Watch:
    """A function for the rounds of one cell, and its verdict."""

    def __init__(self, call: Callable) -> None:
        """`call` is measured in this cell. It runs twice, and the second run decides the length of the product."""
        torch.manual_seed(0)
        self._matrix = torch.randn(256, 256)  # half a MiB with its product: stays in the cache
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
        """Returns the mean time, not the median, so a short load counts by its share."""
        return {"reference_ms": self.seconds / self.products * 1e3}


def _seconds(function: Callable) -> float:
    before = time.perf_counter()
    function()
    return time.perf_counter() - before


def mark(rows: Sequence[dict]) -> None:
    """Adds to each row its slowdown compared with the quietest row, and whether it is too large."""
    quietest = min((row["reference_ms"] for row in rows), default=0.0)
    for row in rows:
        row["slowdown"] = row["reference_ms"] / quietest
        row["busy"] = row["slowdown"] > BUSY


def measure_all(problems: Sequence[Any], measure: Callable[[Any], dict], repeats: int) -> list[dict]:
    """Measures a row for each problem. A row of a busy machine is measured up to `repeats` times again."""
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
    """Returns a remark for below the table; empty if the machine was quiet."""
    busy = sum(row["busy"] for row in rows)
    if not busy:
        return ""
    return (
        f"\n? marks {busy} of {len(rows)} rows: the machine was busy, a fixed product ran more than {BUSY} times as "
        "long as in the quietest row. Do not rely on them.\n"
    )
