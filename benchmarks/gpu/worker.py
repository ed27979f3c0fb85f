"""Runs tasks on the GPU in a separate process. If a task hangs or breaks the CUDA context, only its result is lost.

The parent has a `Worker` and sends it one task after the other. If a task is too slow or kills its process, the result
is an error, and the next task gets a new process. The child calls `serve`. Parent and child are the same program:
`add_child_argument` and `child_command`.
"""

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

START_SECONDS = 60.0  # Python, torch and CUDA
KILL_SECONDS = 5.0  # a process that the driver holds may not end at once


def add_child_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--child", action="store_true", help="answer tasks on stdin: this program calls itself so")


def child_command(module: str, *arguments: str) -> list[str]:
    """The command of a Worker: this program as a child. ``module``: the program's __spec__.name."""
    return [sys.executable, "-m", module, *arguments, "--child"]


class Worker:
    """The child process of `command`, for at most `seconds` from now. Its stderr is this process's."""

    def __init__(self, command: list[str], seconds: float = float("inf")):
        self.command = command
        self.end = time.monotonic() + seconds
        self.process: subprocess.Popen | None = None
        self.received = b""

    def ask(self, task: dict, seconds: float) -> dict:
        """Returns {"result": result of the child's function} or {"error": reason}.

        The dict also has "broken" if the process was ended because the task hung, crashed or left a CUDA error.
        """
        if time.monotonic() > self.end:
            return {"error": "the time was used up"}
        if self.process is None:
            refusal = self._start()
            if refusal:
                return refusal
        try:
            self.process.stdin.write(json.dumps(task).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return self._give_up(f"its process died: {self._exit_status()}")
        return self._reply(seconds)

    def close(self) -> None:
        if self.process is None:
            return
        with suppress(ProcessLookupError):
            self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(KILL_SECONDS)
        self.process.stdin.close()
        self.process.stdout.close()
        self.process = None

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _start(self) -> dict | None:
        self.received = b""
        self.process = subprocess.Popen(self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        reply = self._reply(START_SECONDS)
        return None if "result" in reply else {"error": f"could not start: {reply['error']}", "broken": True}

    def _reply(self, seconds: float) -> dict:
        """Returns the child's next line."""
        seconds = min(seconds, self.end - time.monotonic())
        end = time.monotonic() + seconds
        stream = self.process.stdout.fileno()
        while b"\n" not in self.received:
            left = end - time.monotonic()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                return self._give_up(f"hangs: stopped after {seconds:.1f} s")
            piece = os.read(stream, 1 << 16)
            if not piece:
                return self._give_up(f"its process died: {self._exit_status()}")
            self.received += piece
        line, self.received = self.received.split(b"\n", 1)
        reply = json.loads(line)
        if reply.get("broken"):
            self.close()
        return reply

    def _exit_status(self) -> str:
        try:
            code = self.process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            return "it does not end"
        return signal.Signals(-code).name if code < 0 else f"exit status {code}"

    def _give_up(self, why: str) -> dict:
        self.close()
        return {"error": why, "broken": True}


def serve(function: Callable[[dict], object]) -> None:
    """Runs in the child: answers each task on stdin with the result or the error of function(task)."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the output of libraries must not be a reply

    def reply(message: dict) -> None:
        print(json.dumps(message), file=replies, flush=True)

    reply({"result": "ready"})
    for line in sys.stdin:
        try:
            message = {"result": function(json.loads(line))}
        except Exception as error:
            print(f"{line.strip()}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            message = {"error": first_line(error)} | ({"broken": True} if cuda_is_broken() else {})
        reply(message)
        if "broken" in message:
            return


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def cuda_is_broken() -> bool:
    """Whether this process's CUDA context has an error, after which it runs nothing."""
    import torch

    if not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
