"""Allows Ctrl-C to end a training early, so that the program still writes its results."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def catch_interruption() -> Iterator[Callable[[], bool]]:
    """In this block Ctrl-C and SIGTERM are only recorded. Yields a function that returns True after one of them."""
    came = []
    handlers = {number: signal.signal(number, lambda *_: came.append(True)) for number in STOP_SIGNALS}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def steps_until_interruption(steps: int) -> Iterator[int]:
    """Yields 0 to steps - 1, or fewer: after Ctrl-C or SIGTERM the current step is the last step."""
    with catch_interruption() as interrupted:
        yield from takewhile(lambda _: not interrupted(), range(steps))
