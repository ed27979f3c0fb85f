"""Processes that run functions together under torch.distributed with gloo. They start once for all files."""

import atexit
import multiprocessing.connection
import os
import sys
import tempfile
import traceback
from datetime import timedelta
from functools import cache
from pathlib import Path

TIMEOUT = timedelta(seconds=120)  # of a message; a busy machine takes long to start processes


class Processes:
    """``size`` processes with a default group. Each call runs one function in all of them."""

    def __init__(self, size: int, timeout: timedelta = TIMEOUT):
        self._size, self._timeout = size, timeout
        self._pipes, self._processes = [], []
        self._folder = None

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        # Each process is a copy of one that has imported this, and no thread yet.
        context.set_forkserver_preload(["flash_attn_ext.distributed"])
        self._folder = tempfile.TemporaryDirectory()
        store = str(Path(self._folder.name) / "store")
        # Freed memory returns to the system, so that a process's memory is the memory in use.
        os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            arguments = (rank, self._size, store, self._timeout, theirs, sys.path)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function, *args, **kwargs) -> list:
        """Returns the results of all processes. A failure in one process ends all of them, and is raised here."""
        self._send(function, args, kwargs)
        answers, waiting = {}, list(self._pipes)
        while waiting:
            ready = multiprocessing.connection.wait(waiting, 2 * TIMEOUT.total_seconds())
            if not ready:
                self.close()
                raise TimeoutError("a process does not answer")
            for pipe in ready:
                waiting.remove(pipe)
                rank = self._pipes.index(pipe)
                try:
                    answers[rank], failure = pipe.recv()
                except EOFError:
                    self.close()
                    raise AssertionError(f"process {rank} of {self._size} died") from None
                if failure is not None:
                    self.close()
                    raise AssertionError(f"process {rank} of {self._size} failed: {answers[rank]}\n{failure}")
        return [answers[rank] for rank in range(self._size)]

    def first_answer(self, function, *args):
        """Returns the result of the first process. The other processes may die before they answer."""
        self._send(function, args, {})
        if not self._pipes[0].poll(2 * TIMEOUT.total_seconds()):
            raise TimeoutError("the process does not answer")
        result, failure = self._pipes[0].recv()
        assert failure is None, failure
        return result

    def _send(self, function, args, kwargs) -> None:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


@cache
def shared(size: int) -> Processes:
    """The processes that all tests of this worker share."""
    processes = Processes(size)
    atexit.register(processes.close)
    return processes


@cache
def group_of(size: int):
    """Returns this process's group of ``size`` processes, out of four processes."""
    import torch.distributed as dist

    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, 4, size)]
    return groups[dist.get_rank() // size]


def _serve(rank: int, size: int, store: str, timeout: timedelta, pipe, path: list[str]) -> None:
    sys.path[:] = path
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            break
        try:
            torch.manual_seed(0)
            pipe.send((function(*args, **kwargs), None))
        except Exception as error:
            pipe.send((f"{type(error).__name__}: {error}", traceback.format_exc()))
    os._exit(0)  # a group that other processes have left need not be destroyed
