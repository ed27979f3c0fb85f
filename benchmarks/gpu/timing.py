"""Timing on a GPU with CUDA events, functions in turn; and the same GPU's rates of a matmul and of a copy."""

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
    """Seconds of each call by function, by events around it on the current stream; all run once a round.

    About `seconds`, and rounds[0] to rounds[1] times. With `flush_l2` a call finds nothing of its inputs in the cache.
    The GPU is busy while the call is enqueued. So the measured time is the GPU's, not Python's.
    """
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    scratch = torch.empty(4 * l2_bytes() if flush_l2 else 0, dtype=torch.int8, device="cuda")
    for function in functions:  # warm up: compilation, handles, the allocator's blocks
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
    """bfloat16, or float16 on GPUs whose tensor cores do not have bfloat16."""
    is_old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0)
    return torch.float16 if is_old else torch.bfloat16


def name_of_dtype_16() -> str:
    return str(dtype_16()).removeprefix("torch.")


def matmul_peak(size: int = MATMUL) -> float:
    """FLOP/s of torch.mm in dtype_16() on random data: zeros would draw less power and run faster."""
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
