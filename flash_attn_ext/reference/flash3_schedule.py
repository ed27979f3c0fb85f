"""5. FlashAttention-3's schedules, executed on a model of one streaming multiprocessor.

Source: Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision", 2024 (arXiv
2407.08608), section 3. A producer loads and consumers compute (algorithm 1). Two warpgroups alternate (ping-pong).
Inside one warpgroup, GEMM and softmax overlap in two stages (algorithm 2).

The arithmetic of FlashAttention-2 really runs, tile by tile, on the counting chip. Only the time is a model: a task
takes its counted FLOPs, exponentials or bytes, divided by a rate of :class:`Rates`. Each unit computes one task at a
time (pipeline.py). As with wgmma, a result may be used only after the wait for it.

    serial      one warpgroup; Q K^T, softmax and P V one after the other
    overlap     one warpgroup; the next Q K^T is issued early, and P V runs during the next softmax
    ping-pong   two warpgroups; while one uses the tensor cores, the other computes its softmax
    both        two warpgroups in ping-pong, each overlapping within itself
"""

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from .flash2 import check_blocks
from .memory import SlowMemory, SlowTensor, blocks, statistics_dtype
from .pipeline import Acquire, Interval, Issue, Pipeline, Process, Release, Ticket, Wait
from .standard import default_scale
from .tile import Tile, exp_minus, log, mask_, maximum, row_max, row_sum

SCHEDULES = {"serial": (1, False), "overlap": (1, True), "ping-pong": (2, False), "both": (2, True)}
TENSOR_CORES, EXP_UNITS, LOADS = "tensor cores", "exp units", "loads"


@dataclass(frozen=True)
class Rates:
    """Rates of one streaming multiprocessor for each clock. Default: the H100 of the paper's section 3.

    An H100 has 132 multiprocessors at 1.83 GHz, 989 TFLOP/s of dense 16-bit products and 3.9e12 exponentials per
    second. So one multiprocessor has 4096 FLOP and 16 exponentials per clock. 64 bytes per clock is our assumption for
    loads that hit the L2 cache. The other steps of a softmax (maxima, sums, conversions) take no time in this model.
    """

    tensor_flops: float = 4096
    exponentials: float = 16
    load_bytes: float = 64


@dataclass(frozen=True)
class Run:
    """The results of a schedule, and the time of each task."""

    out: Tensor
    lse: Tensor
    timeline: list[Interval]

    @property
    def clocks(self) -> float:
        return max(interval.end for interval in self.timeline)

    def busy(self, unit: str) -> float:
        """The fraction of the time in which `unit` works."""
        return sum(i.end - i.start for i in self.timeline if i.unit == unit) / self.clocks


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    schedule: str = "both",
    block_q: int = 128,
    block_k: int = 128,
    stages: int = 2,
    rates: Rates | None = None,
    scale: float | None = None,
    mask: Tensor | None = None,
    memory: SlowMemory | None = None,
) -> Run:
    """Runs one head, q (N_q, d). The warpgroups share each block of `block_q` queries.

    stages: the ring holds `stages` blocks of K and `stages` blocks of V.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule: got {schedule!r}; allowed: {', '.join(SCHEDULES)}")
    if not q.shape[0] or not k.shape[0]:
        raise ValueError(f"q, k: got {q.shape[0]} queries, {k.shape[0]} keys; allowed: at least one of each")
    memory, rates = memory or SlowMemory(), rates or Rates()
    check_blocks(block_q, block_k, q.shape[1], memory.capacity)
    Q, K, V = memory.put("q", q), memory.put("k", k), memory.put("v", v)
    MASK = None if mask is None else memory.put("mask", mask)
    O = memory.new("out", Q, q.shape[0], v.shape[1], result=True)
    L = memory.new("lse", Q, q.shape[0], 1, dtype=statistics_dtype(q.dtype))

    warpgroups, overlap = SCHEDULES[schedule]
    pipeline = Pipeline(
        {
            TENSOR_CORES: lambda: memory.chip.matmul_flops / rates.tensor_flops,
            EXP_UNITS: lambda: memory.chip.exponentials / rates.exponentials,
            LOADS: lambda: memory.bytes / rates.load_bytes,
        }
    )
    for block in blocks(q.shape[0], block_q):
        parts = list(blocks(block.stop, math.ceil((block.stop - block.start) / warpgroups), block.start))
        ring = Ring(K, V, list(blocks(k.shape[0], block_k)), stages, readers=len(parts))
        processes = {"producer": ring.produce()}
        for n, rows in enumerate(parts):
            group = Warpgroup(n, len(parts), rows, ring, Q, O, L, MASK, default_scale(scale, q))
            processes[f"warpgroup {n}"] = overlapped(group) if overlap else one_by_one(group)
        pipeline.run(processes)
    return Run(O.tensor, L.tensor, pipeline.timeline)


def one_by_one(group: "Warpgroup") -> Process:
    """Repeats Q K^T, softmax, P V. Within a warpgroup nothing overlaps."""
    yield from group.begin()
    last = group.ring.length - 1
    (qk,) = yield from group.issue_in_turn(("QK", 0))
    for j in range(last + 1):
        S = yield from group.wait("K", j, qk)
        P = yield from group.softmax(S, j)
        group.rescale_out()
        pv, *more = yield from group.issue_in_turn(("PV", j, P), *([("QK", j + 1)] if j < last else []))
        yield from group.wait("V", j, pv)
        qk = more[0] if more else None
    yield from group.finish()


def overlapped(group: "Warpgroup") -> Process:
    """Algorithm 2: S_next = Q K_j^T and O += P V_(j-1) are both in flight when softmax(S_next) starts."""
    yield from group.begin()
    last = group.ring.length - 1
    (qk,) = yield from group.issue_in_turn(("QK", 0))
    P = yield from group.softmax((yield from group.wait("K", 0, qk)), 0)
    for j in range(1, last + 1):
        qk, pv = yield from group.issue_in_turn(("QK", j), ("PV", j - 1, P))
        S_next = yield from group.wait("K", j, qk)
        P_next = yield from group.softmax(S_next, j)
        yield from group.wait("V", j - 1, pv)
        group.rescale_out()  # O holds the keys up to j - 1, but the maximum already includes block j
        P = P_next
    (pv,) = yield from group.issue_in_turn(("PV", last, P))
    yield from group.wait("V", last, pv)
    yield from group.finish()


@dataclass
class Ring:
    """The producer's tiles: `stages` slots for K and `stages` for V.

    A slot is free when all readers have released it.
    """

    K: SlowTensor
    V: SlowTensor
    keys: list[slice]
    stages: int
    readers: int
    loads: dict[tuple[str, int], Ticket] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.keys)

    def produce(self) -> Process:
        """Loads K 0, K 1, V 0, K 2, V 1, ...: the order in which the consumers need the tiles."""
        yield from self._load("K", self.K, 0)
        for j in range(1, self.length):
            yield from self._load("K", self.K, j)
            yield from self._load("V", self.V, j - 1)
        yield from self._load("V", self.V, self.length - 1)

    def _load(self, name: str, tensor: SlowTensor, j: int) -> Process:
        if j >= self.stages:
            for _ in range(self.readers):
                yield Acquire(("released", name, j - self.stages))
            del self.loads[name, j - self.stages]
        self.loads[name, j] = yield Issue(LOADS, f"{name} {j}", lambda: tensor.load(self.keys[j]))
        yield Release(("loaded", name, j), self.readers)

    def tile(self, name: str, j: int) -> Generator:
        yield Acquire(("loaded", name, j))
        return (yield Wait(self.loads[name, j]))


@dataclass
class Warpgroup:
    """A consumer warpgroup: its queries and its registers. Its steps are generators; a schedule decides their order."""

    number: int
    groups: int
    rows: slice
    ring: Ring
    Q: SlowTensor
    O: SlowTensor
    L: SlowTensor
    MASK: SlowTensor | None
    scale: float

    def begin(self) -> Generator:
        queries = self.rows.stop - self.rows.start
        self.Q_i = yield Wait((yield Issue(LOADS, "Q", lambda: self.Q.load(self.rows))))
        self.O_i = self.Q.on_chip(queries, self.O.shape[1], 0.0)
        self.l_i, self.m_i = self.Q.on_chip(queries, 1, 0.0), self.Q.on_chip(queries, 1, -math.inf)
        if self.groups > 1 and self.number == 0:
            yield Release(("turn", 0))

    def issue_in_turn(self, *products: tuple) -> Generator:
        """Issues GEMMs, ("QK", j) or ("PV", j, P), and returns their tickets.

        Ping-pong: two warpgroups issue alternately. After one has issued, the other may issue.
        """
        if self.groups > 1:
            yield Acquire(("turn", self.number))
        tickets = []
        for name, j, *P in products:
            operand = yield from self.ring.tile("K" if name == "QK" else "V", j)
            work = (
                partial(self.Q_i.__matmul__, operand.T) if name == "QK" else partial(self.O_i.add_product_, *P, operand)
            )
            tickets.append((yield Issue(TENSOR_CORES, f"{name} {j}", work)))
        if self.groups > 1:
            yield Release(("turn", (self.number + 1) % self.groups))
        return tickets

    def wait(self, operand: str, j: int, ticket: Ticket) -> Generator:
        """Waits for a GEMM, then releases the slot of its operand."""
        value = yield Wait(ticket)
        yield Release(("released", operand, j))
        return value

    def softmax(self, S: Tile, j: int) -> Generator:
        """One step of the online softmax. P overwrites S."""
        return (yield Wait((yield Issue(EXP_UNITS, f"softmax {j}", lambda: self._softmax(S, j)))))

    def _softmax(self, S: Tile, j: int) -> Tile:
        S *= self.scale
        if self.MASK is not None:
            mask_(S, self.MASK.load(self.rows, self.ring.keys[j]))
        m_new = maximum(self.m_i, row_max(S))
        self.rescale = exp_minus(self.m_i, m_new)
        self.m_i = m_new
        S.exp_minus_(m_new)
        self.l_i *= self.rescale
        self.l_i += row_sum(S)
        return S

    def rescale_out(self) -> None:
        self.O_i *= self.rescale

    def finish(self) -> Generator:
        yield Wait((yield Issue(LOADS, "O", self._store)))

    def _store(self) -> None:
        self.O.store(self.O_i.divide_rows_(self.l_i), self.rows)
        self.L.store(self.m_i + log(self.l_i), self.rows)
