"""A clock for concurrent work: processes issue tasks to units, wait for them, and synchronise by semaphores.

A process is a generator. It yields commands and is resumed with their answers:

    ticket = yield Issue("tensor cores", "QK 0", work)   continues at once; a unit runs its tasks in order of issue
    value  = yield Wait(ticket)                          continues when the task is done; value: the result of `work`
    yield Acquire(name)                                  continues when the semaphore is above 0, and decrements it
    yield Release(name, n)                               adds n

``work`` really runs. Its duration is the increase of its unit's meter, for example the counted FLOPs divided by the
unit's FLOPs per clock.
"""

import heapq
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Interval:
    """One task on the timeline, in clocks."""

    worker: str
    unit: str
    label: str
    start: float
    end: float


@dataclass
class Ticket:
    """A task in flight. `value` raises until a process has waited for the task."""

    label: str
    end: float
    _value: Any
    waited: bool = False

    @property
    def value(self) -> Any:
        if not self.waited:
            raise RuntimeError(f"{self.label}: used before the wait for it")
        return self._value


@dataclass(frozen=True)
class Issue:
    unit: str
    label: str
    work: Callable[[], Any]


@dataclass(frozen=True)
class Wait:
    ticket: Ticket


@dataclass(frozen=True)
class Acquire:
    name: Hashable


@dataclass(frozen=True)
class Release:
    name: Hashable
    n: int = 1


Process = Generator[Issue | Wait | Acquire | Release, Any, None]


class Pipeline:
    """Runs processes. `meters[unit]()` returns the work of a unit so far, in clocks."""

    def __init__(self, meters: dict[str, Callable[[], float]]):
        self.meters = meters
        self.timeline: list[Interval] = []
        self.now = 0.0
        self.free_at: dict[str, float] = defaultdict(float)

    def run(self, processes: dict[str, Process]) -> None:
        """Runs all processes to their ends. The clock continues from the end of the last run."""
        self.available: dict[Hashable, int] = defaultdict(int)
        self.queues: dict[Hashable, list] = defaultdict(list)
        self.ready: list = []
        self.resumed = 0
        for name, process in processes.items():
            self._resume(self.now, name, process, None)
        while self.ready:
            self.now, _, name, process, answer = heapq.heappop(self.ready)
            try:
                command = process.send(answer)
            except StopIteration:
                continue
            self._obey(command, name, process)
        stuck = [f"{name} waits for {key}" for key, queue in self.queues.items() for name, _ in queue]
        if stuck:
            raise RuntimeError("deadlock: " + ", ".join(stuck))
        self.now = max([self.now, *self.free_at.values()])

    def _resume(self, when: float, name: str, process: Process, answer: Any) -> None:
        self.resumed += 1  # equal times: first come, first served
        heapq.heappush(self.ready, (when, self.resumed, name, process, answer))

    def _obey(self, command: Issue | Wait | Acquire | Release, name: str, process: Process) -> None:
        match command:
            case Issue(unit, label, work):
                before = self.meters[unit]()
                value = work()
                start = max(self.now, self.free_at[unit])
                end = start + self.meters[unit]() - before
                self.free_at[unit] = end
                self.timeline.append(Interval(name, unit, label, start, end))
                self._resume(self.now, name, process, Ticket(label, end, value))
            case Wait(ticket):
                ticket.waited = True
                self._resume(max(self.now, ticket.end), name, process, ticket.value)
            case Acquire(key):
                self.queues[key].append((name, process))
                self._serve(key)
                # The process continues when another process releases the semaphore.
            case Release(key, n):
                self.available[key] += n
                self._serve(key)
                self._resume(self.now, name, process, None)

    def _serve(self, key: Hashable) -> None:
        while self.available[key] and self.queues[key]:
            self.available[key] -= 1
            self._resume(self.now, *self.queues[key].pop(0), None)
