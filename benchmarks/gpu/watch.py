"""Runs a program on the GPU that may hang, and ends it if it prints nothing for some time."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

KILL_SECONDS = 2.0  # a process that the driver holds may not end at once


def watch(
    command: Sequence[str], patience: float, end: float = float("inf"), env: dict[str, str] | None = None
) -> tuple[int | None, list[str]]:
    """Returns the exit status and the lines of output, which are also printed.

    The program is ended after `patience` seconds without output, and at time.monotonic() `end`. Then the status is
    None.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env,
        start_new_session=True,
    )  # fmt: skip
    stream, received = process.stdout.fileno(), b""
    try:
        while True:
            left = min(patience, end - time.monotonic())
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                return None, text(received)
            piece = os.read(stream, 1 << 16)
            if not piece:
                return process.wait(KILL_SECONDS), text(received)
            received += piece
            sys.stdout.write(piece.decode(errors="replace"))
            sys.stdout.flush()
    except subprocess.TimeoutExpired:
        return None, text(received)
    finally:
        kill(process)


def text(received: bytes) -> list[str]:
    return received.decode(errors="replace").splitlines()


def kill(process: subprocess.Popen) -> None:
    """Kills the process and all processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(KILL_SECONDS)
    process.stdout.close()
