"""Paired timing: two functions in turn in one process, so that a noisy machine slows both alike."""

import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import flash_attn_ext


@dataclass(frozen=True)
class Paired:
    """Seconds of each pair, ours and the peer's."""

    ours: list[float]
    peer: list[float]

    @property
    def ratios(self) -> list[float]:
        """peer / ours: above 1, ours is faster."""
        return sorted(p / o for o, p in zip(self.ours, self.peer, strict=True))

    def quartiles(self) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile of the ratio."""
        low, middle, high = statistics.quantiles(self.ratios, n=4, method="inclusive")
        return low, middle, high


def time_pairs(ours: Callable, peer: Callable, *, seconds: float = 1.0, pairs: tuple[int, int] = (5, 200)) -> Paired:
    """Runs ours and peer alternately for about `seconds`, at least pairs[0] and at most pairs[1] times each."""
    return Paired(*time_in_turn([ours, peer], seconds=seconds, rounds=pairs))


def time_in_turn(functions: list[Callable], *, seconds: float, rounds: tuple[int, int]) -> list[list[float]]:
    """Seconds of each call, by function: all run once a round, for about `seconds` and rounds[0] to rounds[1] times."""
    for function in functions:
        function()
    times: list[list[float]] = [[] for _ in functions]
    start = time.perf_counter()
    while len(times[0]) < rounds[0] or (time.perf_counter() - start < seconds and len(times[0]) < rounds[1]):
        for function, record in zip(functions, times, strict=True):
            before = time.perf_counter()
            function()
            record.append(time.perf_counter() - before)
    return times


def gemm_peak(seconds: float = 0.5) -> float:
    """GFLOP/s of torch's fp32 matmul at 1024 x 1024 now, the practical ceiling of this machine; best of several."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < seconds:
        before = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - before)
    return 2 * 1024**3 / best / 1e9


def machine() -> dict:
    """What the numbers were measured on."""
    cpuinfo = Path("/proc/cpuinfo")
    models = (
        [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")] if cpuinfo.exists() else []
    )
    return {
        "cpu": models[0].split(":", 1)[1].strip() if models else platform.processor(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "isa": flash_attn_ext.active_kernel(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
    }
