"""Tells which calls no other program disturbed.

On a shared host other programs run on the second hardware threads of our cores. Then our kernels have half to all of a
core's instructions, and this changes within milliseconds. The peak of peaks.py does not show it: multiply-adds in
registers need a third of a core's instructions. torch.exp in L2 does show it.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch

FEWEST = 7  # calls that a median needs
SLOWER = 1.15  # torch.exp is disturbed above this part of its shortest time
LONGEST_WAIT = 0.05  # seconds


def fastest_tenth(times: Sequence[float]) -> float:
    """Returns the time that a tenth of the calls do not exceed.

    Another program may start and stop during a call of milliseconds. So this time is nearer to the time of a quiet
    machine than the median.
    """
    return statistics.quantiles(times, n=10, method="inclusive")[0]


class Undisturbed:
    """Times torch.exp directly before and after each call, on all threads. An object serves all calls of a process."""

    def __init__(self, seconds: float = 1.0) -> None:
        """``seconds``: the time to find the shortest time of torch.exp."""
        self._x = torch.linspace(-1, 1, torch.get_num_threads() << 15)  # 128 KiB of each thread
        self._out = torch.empty_like(self._x)
        self._shortest = float("inf")
        # The slower side of each call. Weak, because a function may hold gigabytes of caches.
        self._slowest: WeakKeyDictionary[Callable, list[float]] = WeakKeyDictionary()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._seconds()

    def before(self, function: Callable) -> None:
        """Waits for other programs, but not for long."""
        end = time.perf_counter() + LONGEST_WAIT
        while (seconds := self._seconds()) > SLOWER * self._shortest and time.perf_counter() < end:
            pass
        self._slowest.setdefault(function, []).append(seconds)

    def after(self, function: Callable) -> None:
        slowest = self._slowest[function]
        slowest[-1] = max(slowest[-1], self._seconds())

    def calls(self, function: Callable) -> list[int]:
        """Returns the numbers of the undisturbed calls. Returns all numbers if they are fewer than FEWEST."""
        slowest = self._slowest[function]
        chosen = [n for n, seconds in enumerate(slowest) if seconds <= SLOWER * self._shortest]
        return chosen if len(chosen) >= FEWEST else list(range(len(slowest)))

    def times_of(self, function: Callable, times: Sequence[float]) -> list[float]:
        """Returns the times of calls(function)."""
        return [times[n] for n in self.calls(function)]

    def _seconds(self) -> float:
        torch.exp(self._x, out=self._out)  # starts the threads
        begin = time.perf_counter()
        for _ in range(2):
            torch.exp(self._x, out=self._out)
        seconds = time.perf_counter() - begin
        self._shortest = min(self._shortest, seconds)
        return seconds
