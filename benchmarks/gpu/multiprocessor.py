"""Simulates the warpgroups of one block on a multiprocessor, and returns their time.

Products queue at the tensor cores, in the order in which they come. Other instructions share the units. If they need
more of a unit than it has, all become slower.
"""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Instructions between two events: cycles that they keep each unit busy, and that a warp takes to issue them.
    latency: from the last of them to its result."""

    units: dict[str, float]
    stalls: float
    latency: float = 0.0

    @property
    def cycles(self) -> float:
        """The cycles if no other warpgroup uses the units."""
        return max([self.stalls, *self.units.values()]) + self.latency


@dataclass(frozen=True)
class Product:
    cycles: float
    shared_bytes: int
    ends_batch: bool
    latency: float = 0.0  # from its last multiplication to its result


@dataclass(frozen=True)
class Wait:
    pending: int  # the number of batches that may still run


@dataclass(frozen=True)
class Meet:
    """All consumers of the block. latency: from the last arrival to the next instruction."""

    latency: float = 0.0


Program = list[Work | Product | Wait | Meet]


class Warpgroup:
    def __init__(self, its_program: Program, iterations: int):
        self.steps = deque(its_program * iterations)
        self.left = 0.0  # of the current work, in cycles alone
        self.busy: Work | None = None
        self.batches: list[float] = []  # the time when each batch is done; inf: the batch has not ended
        self.meets = False

    def done_until(self, pending: int) -> float:
        """Returns the time when all but the last `pending` batches are done."""
        ended = self.batches[: len(self.batches) - pending]
        return max(ended, default=0.0)


def simulate(its_program: Program, consumers: int, iterations: int) -> float:
    """Returns the cycles until all warpgroups have finished `iterations` iterations."""
    groups = [Warpgroup(its_program, iterations) for _ in range(consumers)]
    now, tensor_free = 0.0, 0.0
    while any(group.steps or group.busy for group in groups):
        for group in groups * 2:  # when the last warpgroup arrives, the other warpgroups continue
            tensor_free = advance(group, groups, now, tensor_free)
        active = [group for group in groups if group.busy]
        shares: dict[str, float] = {}
        for group in active:
            for unit, cycles in group.busy.units.items():
                shares[unit] = shares.get(unit, 0.0) + cycles / group.busy.cycles
        slower = max(1.0, *shares.values()) if shares else 1.0
        events = [group.left * slower for group in active]
        events += [
            group.done_until(group.steps[0].pending) - now
            for group in groups
            if not group.busy and group.steps and isinstance(group.steps[0], Wait)
        ]
        if not events:
            break
        step = min(events)
        now += step
        for group in active:
            group.left -= step / slower
            if group.left <= 1e-9:
                group.busy = None
    return max(now, tensor_free)


def advance(group: Warpgroup, groups: list[Warpgroup], now: float, tensor_free: float) -> float:
    """Starts all products that the warpgroup can start now. Returns the time when the tensor cores are free."""
    while group.steps and not group.busy:
        step = group.steps[0]
        if isinstance(step, Work):
            group.busy, group.left = step, step.cycles
        elif isinstance(step, Product):
            tensor_free = max(tensor_free, now) + step.cycles
            if step.ends_batch:
                group.batches.append(tensor_free + step.latency)
        elif isinstance(step, Wait):
            if group.done_until(step.pending) > now + 1e-9:
                break
        else:
            group.meets = True
            if not all(other.meets for other in groups):
                break
            for other in groups:
                other.meets = False
                if step.latency:
                    other.busy, other.left = Work({}, step.latency), step.latency
                if other is not group:
                    other.steps.popleft()
        group.steps.popleft()
    return tensor_free
