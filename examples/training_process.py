"""An object in a separate process with methods for the caller, and the memory of a process."""

import os
import resource
import signal
import sys
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch


class TrainingProcess:
    """Calls make(*args) in a new process, so its peak memory is separate. Then calls methods of the result there."""

    def __init__(self, make: Callable, *args):
        self._pool = ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn"))
        self.ready = self._pool.submit(_start, make, *args)

    def submit(self, method: str, *args) -> Future:
        """Starts a call of a method, after the calls before it."""
        return self._pool.submit(_call, method, *args)

    def call(self, method: str, *args):
        """Calls a method, and returns its result."""
        self.ready.result()  # raises the error of make()
        return self.submit(method, *args).result()

    def close(self) -> None:
        self._pool.shutdown()


_trainer: object  # set in the process of a TrainingProcess


def _start(make: Callable, *args) -> None:
    global _trainer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process of the terminal handles Ctrl-C
    _trainer = make(*args)


def _call(method: str, *args):
    return getattr(_trainer, method)(*args)


def memory_in_use(device: str) -> int:
    """Returns the allocated bytes: of torch on a CUDA device, of the whole process otherwise."""
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated()
    return _status_bytes("VmRSS") or peak_memory(device)


def peak_memory(device: str) -> int:
    """Returns the peak of the bytes in this process's life."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    # On Linux a new process inherits ru_maxrss from its parent, so /proc comes first.
    unit = 1 if sys.platform == "darwin" else 1024
    return _status_bytes("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status_bytes(field: str) -> int | None:
    status = Path(f"/proc/{os.getpid()}/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":")), None)
