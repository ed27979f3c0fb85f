"""Timing on a GPU with CUDA events; the functions alternate.

Also measures the GPU's rates of a matmul and of a copy.
"""

import statistics
import time
from collections.abc import Callable

import torch

MATMUL = 8192  # rows and columns of the 16-bit product that represents the GPU's peak
COPY_BYTES = 1 << 30
SLEEP_CYCLES = 1_000_000  # about half a millisecond


def time_in_turn(
    functions: list[Callable], *, seconds: float, rounds: tuple[int, int], flush_l2: bool = False
) -> list[list[float]]:
    """Returns the seconds of each call for each function, from events around the call on the current stream.

    A round runs every function once. rounds[0] to rounds[1] rounds run, for about `seconds`. With `flush_l2` no input
    of a call is in the cache. The GPU is busy while a call is enqueued, so the time of Python is not measured.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    scratch = torch.empty(4 * l2_bytes() if flush_l2 else 0, dtype=torch.int8, device="cuda")
    for function in functions:  # warms up: compilation, handles, the allocator's blocks
        for _ in range(2):
            function()
    torch.cuda.synchronize()
    times: list[list[float]] = [[] for _ in functions]
    start = time.perf_counter()
    while len(times[0]) < rounds[0] or (time.perf_counter() - start < seconds and len(times[0]) < rounds[1]):
        for function, record in zip(functions, times, strict=True):
            scratch.zero_()
            torch.cuda._sleep(SLEEP_CYCLES)
            events[0].record()
            function()
            events[1].record()
            torch.cuda.synchronize()
            record.append(events[0].elapsed_time(events[1]) / 1e3)
    return times


def l2_bytes() -> int:
    return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size


def median_rate(function: Callable, amount: float) -> float:
    """amount / median seconds."""
    (taken,) = time_in_turn([function], seconds=0.5, rounds=(5, 50))
    return amount / statistics.median(taken)


def dtype_16() -> torch.dtype:
    """Returns bfloat16, or float16 on GPUs without bfloat16 tensor cores."""
    is_old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    return torch.float16 if is_old else torch.bfloat16


def name_of_dtype_16() -> str:
    return str(dtype_16()).removeprefix("torch.")


def matmul_peak(size: int = MATMUL) -> float:
    """FLOP/s of torch.mm in dtype_16() on random data, because zeros draw less power and run faster."""
    a, b = (torch.randn(size, size, device="cuda", dtype=dtype_16()) for _ in range(2))
    out = torch.empty_like(a)
    return median_rate(lambda: torch.mm(a, b, out=out), matmul_flops(size))


def matmul_flops(size: int) -> int:
    return 2 * size**3


def copy_bandwidth(size: int = COPY_BYTES) -> float:
    """Bytes per second, read and written, of one tensor copied into another."""
    source = torch.randint(127, (size,), device="cuda", dtype=torch.int8)
    target = torch.empty_like(source)
    return median_rate(lambda: target.copy_(source), 2 * size)
