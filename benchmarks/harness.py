"""Paired timing: functions alternate in one process, so other load slows all of them equally. Describes the machine."""

import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import flash_attn_ext

# Environment variables that limit the instruction sets or the threads of one library.
ENVIRONMENT = (
    "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "FLASH_ATTN_EXT_ISA", "OMP_NUM_THREADS",
)  # fmt: skip


@dataclass(frozen=True)
class Paired:
    """The seconds of each pair: ours and the peer's."""

    ours: list[float]
    peer: list[float]

    @property
    def ratios(self) -> list[float]:
        """peer / ours: above 1, ours is faster."""
        return [p / o for o, p in zip(self.ours, self.peer, strict=True)]


def time_in_turn(
    functions: list[Callable],
    *,
    seconds: float,
    rounds: tuple[int, int],
    between: Callable | None = None,
    before: Callable[[Callable], object] | None = None,
    after: Callable[[Callable], object] | None = None,
    shuffle: bool = False,
) -> list[list[float]]:
    """Returns a list of seconds for each function. A round runs every function once. rounds[0] to rounds[1] rounds
    run, for about `seconds`.

    The time of a call depends on caches and threads, and so on the call before it. `between` runs before each round.
    Then the first function runs once without timing, so no timed call directly follows `between`. `before` and `after`
    get the function, and run without timing before and after each timed call. `shuffle` changes the order in each
    round.
    """
    for function in functions:
        function()
    times: list[list[float]] = [[] for _ in functions]
    order, shuffled = list(range(len(functions))), random.Random(0)
    start = time.perf_counter()
    while len(times[0]) < rounds[0] or (time.perf_counter() - start < seconds and len(times[0]) < rounds[1]):
        if between:
            between()
            functions[0]()
        if shuffle:
            shuffled.shuffle(order)
        for n in order:
            if before:
                before(functions[n])
            begin = time.perf_counter()
            functions[n]()
            times[n].append(time.perf_counter() - begin)
            if after:
                after(functions[n])
    return times


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Returns the lower quartile, the median and the upper quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def machine() -> dict:
    """Describes the machine."""
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


def environment() -> dict[str, str]:
    """Returns the variables of ENVIRONMENT that are set."""
    return {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
