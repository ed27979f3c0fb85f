"""Predicts the time of attention on several devices: ring, all-gather and Ulysses (flash_attn_ext.distributed).

Nothing is measured here. Attention runs at a given fraction of the device's peak for products. A message runs at a
given fraction of the link's rate, plus a latency. Ring overlaps the message of a step with its computation; the two
other methods add both times. Causal work is balanced, as by shard_sequence's zigzag: each device computes the same
number of scores, and all devices together half of all scores.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from .devices import Device
from .problem import DTYPES

METHODS = ("ring", "all_gather", "ulysses")


@dataclass(frozen=True)
class Link:
    """The connection of the devices. bandwidth: bytes/s that each device can send.

    latency: seconds for each message.
    """

    name: str
    bandwidth: float
    latency: float
    source: str
    devices: int = 2**20  # at most


# Peak, one direction. Latencies are orders of magnitude of a collective's step, not data-sheet figures.
LINKS = {
    "nvlink": Link(
        "nvlink", 450e9, 5e-6, "NVIDIA H100 data sheet, SXM: 900 GB/s in both directions together; 8 GPUs", 8
    ),
    "400g": Link("400g", 50e9, 15e-6, "one 400 Gb/s adapter for each GPU"),
}


@dataclass(frozen=True)
class Sharded:
    """One layer's attention of a batch of B sequences of S tokens, over n devices."""

    B: int
    H: int
    H_kv: int
    S: int
    D: int
    n: int
    dtype: str = "bfloat16"
    causal: bool = True
    backward: bool = True

    def __post_init__(self) -> None:
        if self.S % (2 * self.n):
            raise ValueError(f"S: got {self.S} for n = {self.n}; allowed: a multiple of 2 n")
        if self.H % self.H_kv:
            raise ValueError(f"H_kv: got {self.H_kv} for H = {self.H}; allowed: a divisor of H")


@dataclass(frozen=True)
class Sent:
    """The bytes that each device sends, and the number of messages one after another."""

    forward: float
    backward: float
    messages: int

    @property
    def bytes(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Prediction:
    compute: float  # seconds
    communication: float
    seconds: float
    memory: float  # bytes on each device: inputs, results, gradients, and the method's own buffers

    @property
    def exposed(self) -> float:
        """The fraction of the time in which nothing is computed."""
        return 1 - self.compute / self.seconds


def possible(method: str, problem: Sharded) -> bool:
    return method != "ulysses" or problem.H_kv % problem.n == 0


def sent(method: str, problem: Sharded) -> Sent:
    """Bytes and messages by the formulas of context_parallel_attn, if every process needs every key."""
    p, item = problem, DTYPES[problem.dtype].itemsize
    accumulator = 8 if p.dtype == "float64" else 4
    rows = p.S // p.n
    key_value = p.B * p.H_kv * rows * 2 * p.D
    passes = 1 if p.backward else 0
    n = p.n
    if method == "ring":
        gradients = n * key_value * accumulator if n > 1 else 0
        backward = (n - 1) * key_value * item + gradients
        return Sent((n - 1) * key_value * item, passes * backward, (n - 1) + passes * (2 * n - 1) * (n > 1))
    if method == "all_gather":
        return Sent((n - 1) * key_value * item, passes * (n - 1) * key_value * (item + accumulator), 1 + 2 * passes)
    if method == "ulysses":
        both_ways = (n - 1) * (key_value + 2 * p.B * p.H * rows * p.D) * item / n
        return Sent(both_ways, passes * both_ways, 2 + 2 * passes)
    raise ValueError(f"method: got {method!r}; allowed: {', '.join(METHODS)}")


def memory(method: str, problem: Sharded) -> float:
    """Bytes on each device in the pass that needs most: inputs, results and the method's own buffers."""
    p, item = problem, DTYPES[problem.dtype].itemsize
    accumulator = 8 if p.dtype == "float64" else 4
    rows = p.S // p.n
    query, key_value = p.B * p.H * rows * p.D, p.B * p.H_kv * rows * 2 * p.D
    passes = 2 if p.backward else 1
    given = passes * (2 * query + key_value) * item  # q, out, k, v and their gradients
    sums = query * accumulator  # out, or dq
    if method == "ring":
        return given + sums + 2 * key_value * item + (2 * key_value * accumulator if p.backward else 0)
    if method == "all_gather":
        return given + sums + p.n * key_value * item + (2 * p.n * key_value * accumulator if p.backward else 0)
    return given * 2


def predict(
    method: str, problem: Sharded, device: Device, link: Link, *, efficiency: float = 0.6, link_efficiency: float = 0.8
) -> Prediction:
    """The time of one layer's attention. ``efficiency`` and ``link_efficiency`` are fractions of the peaks."""
    if not possible(method, problem):
        raise ValueError(
            f"method: got 'ulysses' for {problem.H_kv} key heads on {problem.n} devices; allowed: a multiple"
        )
    p, traffic = problem, sent(method, problem)
    rate = device.matmul[p.dtype] * efficiency
    flops = 4 * p.B * p.H * p.S * p.S * p.D / p.n / (2 if p.causal else 1)
    forward, backward = flops / rate, (2.5 * flops / rate if p.backward else 0.0)
    bandwidth = link.bandwidth * link_efficiency
    wire = traffic.bytes / bandwidth + traffic.messages * link.latency
    if method != "ring":
        return Prediction(forward + backward, wire, forward + backward + wire, memory(method, p))
    # A step computes while its message is in flight. The first step waits for no message; no computation hides the last
    # message.
    total = 0.0
    for compute, sent_bytes, sums in ((forward, traffic.forward, False), (backward, traffic.backward, True)):
        if compute == 0.0:
            continue
        steps = p.n - 1
        message = (
            sent_bytes / max(p.n if sums else steps, 1) / bandwidth + (2 if sums else 1) * link.latency
            if steps
            else 0.0
        )
        step = compute / p.n
        total += steps * max(step, message) + step + (message if sums and steps else 0.0)
    return Prediction(forward + backward, wire, total, memory(method, p))


def over(
    device: Device, link: Link, lengths: Iterable[int], sizes: Iterable[int], model: Sharded, **rates: float
) -> Iterator[tuple[Sharded, dict[str, Prediction]]]:
    """Yields the predictions of all possible methods, for each length and each number of devices that the link can
    connect.
    """
    for S, n in product(lengths, sizes):
        if n <= link.devices:
            p = replace(model, S=S, n=n)
            yield p, {m: predict(m, p, device, link, **rates) for m in METHODS if possible(m, p)}
