"""Predicts the speed of the sm90 kernels from their machine code: TFLOP/s for each shape, and the unit that bounds it.

The main loop's instructions are read from SASS. The consumer warpgroups of a block run them in a simulation
(multiprocessor.py). Between two products a warpgroup needs issue slots, and the units for exponentials, other
arithmetic and shared memory. Multiprocessors get blocks and tasks in the order of the kernels. If a measurement is
slower, the model shows where to look. It is not a measurement. In the model, instructions wait only for the tensor
cores, barriers among the consumers and full units. They also wait for the compiler's stall counts, and for one latency
of each event.

python -m benchmarks.gpu.time_model prints the table; with --anchors, the best published figures next to it. Needs
cuobjdump, and nvcc or a build of the extension; no GPU.
"""

import argparse
import functools
import heapq
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import ROOT, output
from benchmarks.gpu import anchors, sass_listing
from benchmarks.gpu.multiprocessor import Meet, Product, Program, Wait, Work, simulate
from benchmarks.gpu.problem import LENGTHS, Problem, problems
from tools.gpu import units

# Rates of a multiprocessor of an H100 or H200 for each clock cycle. The first five are from NVIDIA (CUDA programming
# guide, throughput of arithmetic instructions, 9.0; H100 white paper). L2 and the clock are estimates.
MULTIPROCESSORS = 132
TENSOR_FMA = 2048  # bfloat16; float8: twice as many
SHARED_BYTES = 128
LANES = {"exponentials": 16, "ALU": 64, "fp32": 128, "lsu": 32}  # results per cycle
SCHEDULERS = 4  # instructions issued per cycle; each warpgroup has one warp on each scheduler
L2_BYTES = 26  # copies of whole tiles reach 26 of 32 bytes
MEMORY_BYTES_PER_SECOND = 4.2e12  # HBM3e, the rate of a copy
CLOCK = 1.7e9  # under load; a matmul's 788 TFLOP/s would be all tensor cycles at 1.46 GHz
L2_GROUP_BYTES = 24 << 20  # K and V of the heads with tasks at the same time, and
ROUND_ROWS = 16  # the rows of the table of rounds: both as in csrc/cuda/sm90
BLOCK_CYCLES = 2500  # before the first product and after the last: launch, first copies, the stores (est.)
# Cycles from an instruction to its result (est., of the order that microbenchmarks of Hopper report).
PRODUCT_LATENCY, MEET_LATENCY = 32, 30
LATENCIES = {"exponentials": 24, "lsu": 30}  # of the last instruction before an event, if it uses this unit

FP32 = ("FFMA", "FMUL", "FADD", "IMAD")
MEMORY = ("LDS", "STS", "STSM", "LDSM")
UNIFORM = ("U", "R2UR", "WARPGROUP", "SYNCS", "BRA", "BAR", "NOP", "S2", "VOTEU", "BSSY", "BSYNC", "MEMBAR")


@dataclass(frozen=True)
class HeadDims:
    """The head dimensions of query and key, and of value."""

    qk: int
    v: int

    def mean(self, backward: bool) -> float:
        """Returns the head dimension for both that needs as much work in this pass."""
        return (3 * self.qk + 2 * self.v) / 5 if backward else (self.qk + self.v) / 2

    def __str__(self) -> str:
        return f"D {self.qk}" if self.qk == self.v else f"D {self.qk}, D_v {self.v}"


@dataclass(frozen=True)
class Tiling:
    """The tiling of a kernel at one head dimension, as in csrc/cuda/sm90. A test compares it with the machine code."""

    consumers: int
    rows: int  # queries of a tile
    keys: int
    owns_keys: bool  # True: a block owns a tile of keys and loops over queries. False: the reverse
    bytes: int = 2  # of an element
    sharers: int = 1  # so many blocks of a cluster share what they load (multicast)

    def tile_bytes(self, dims: HeadDims) -> float:
        """Bytes of the two tiles that a block loads in an iteration."""
        return (self.rows if self.owns_keys else self.keys) * self.bytes * (dims.qk + dims.v)

    def added_bytes(self, dims: HeadDims) -> float:
        """Bytes of the tile of dQ, in fp32, that the backward adds in an iteration."""
        return self.rows * 4 * dims.qk if self.owns_keys else 0

    def in_pairs(self) -> "Tiling":
        return replace(self, sharers=2)


TILINGS = {
    ("forward", HeadDims(64, 64)): Tiling(3, 192, 128, False),
    ("forward", HeadDims(96, 96)): Tiling(2, 128, 128, False),
    ("forward", HeadDims(128, 128)): Tiling(2, 128, 128, False),
    ("forward", HeadDims(192, 128)): Tiling(2, 128, 128, False),
    ("forward", HeadDims(192, 192)): Tiling(2, 128, 112, False),
    ("forward", HeadDims(256, 256)): Tiling(2, 128, 80, False),
    ("backward", HeadDims(64, 64)): Tiling(2, 128, 128, True),
    ("backward", HeadDims(96, 96)): Tiling(2, 64, 128, True),
    ("backward", HeadDims(128, 128)): Tiling(2, 64, 128, True),
    ("backward", HeadDims(192, 128)): Tiling(2, 64, 64, True),
    ("backward", HeadDims(192, 192)): Tiling(2, 64, 64, True),
    ("backward", HeadDims(256, 256)): Tiling(2, 64, 64, True),
    ("float8", HeadDims(64, 64)): Tiling(3, 192, 128, False, 1),
    ("float8", HeadDims(128, 128)): Tiling(2, 128, 128, False, 1),
    ("float8", HeadDims(256, 256)): Tiling(2, 128, 96, False, 1),
}
# The source of each way, and the names of its plain kernels as the compiler writes them.
PLAIN = r"_kernelI13__nv_bfloat16Li(\d+)E(?:Li(\d+)E)?L(?:NS\d*_4FormE0E|b1E)"
SOURCES = {
    "forward": ("forward_bfloat16", r"\dforward" + PLAIN),
    "backward": ("backward_bfloat16", r"\dbackward" + PLAIN),
    "float8": ("forward_float8", r"\dforward_float8_kernelILi(\d+)E()"),
}
IN_PAIRS = "backward", HeadDims(256, 256)  # the kernel that FLASH_ATTN_EXT_SM90_BACKWARD_PAIRS runs in pairs of blocks
TRANSPOSERS = 3  # warps of the float8 forward that transpose V


# ---- one iteration of the main loop, as a warpgroup's program


def program(loop: list[sass_listing.Instruction]) -> Program:
    result, between = [], []

    def event(what: Product | Wait | Meet) -> None:
        if between:
            result.append(work(between))
        between.clear()
        result.append(what)

    for instruction in loop:
        between.append(instruction)
        if instruction.name.startswith(sass_listing.PRODUCTS):
            event(product(instruction))
        elif instruction.name == "WARPGROUP.DEPBAR.LE":
            event(Wait(int(re.search(r"gsb0, 0x(\w+)", instruction.operands)[1], 16)))
        elif instruction.name.startswith("BAR.SYNC"):
            event(Meet(MEET_LATENCY))
    return [*result, work(between)] if between else result


def product(instruction: sass_listing.Instruction) -> Product:
    rows, columns, depth = map(int, re.search(r"(\d+)x(\d+)x(\d+)", instruction.name).groups())
    from_registers = re.match(r"R\d+, R\d+, gdesc", instruction.operands)
    element = 1 if instruction.name.startswith("QGMMA") else 2
    read = element * depth * (columns + (0 if from_registers else rows))
    cycles = max(rows * columns * depth * element / 2 / TENSOR_FMA, read / SHARED_BYTES)
    return Product(cycles, read, "gsb0" in instruction.operands, PRODUCT_LATENCY)


def work(instructions: list[sass_listing.Instruction]) -> Work:
    """Returns the work of the four warps of a warpgroup."""
    lanes = dict.fromkeys(LANES, 0)
    for instruction in instructions:
        unit = unit_of(instruction.name)
        if unit:
            lanes[unit] += 4 * 32
    busy = {unit: amount / LANES[unit] for unit, amount in lanes.items() if amount}
    issue = 4 * len(instructions) / SCHEDULERS
    latency = max([LATENCIES.get(unit, 0) for unit in busy], default=0)
    return Work({"issue": issue} | busy, sum(instruction.stall for instruction in instructions), latency)


def unit_of(name: str) -> str | None:
    base = name.split(".")[0]
    if base == "MUFU":
        return "exponentials"
    if base in FP32:
        return "fp32"
    if base in MEMORY or base == "SHFL":
        return "lsu"
    return None if base.startswith((*UNIFORM, *sass_listing.PRODUCTS)) else "ALU"


# ---- one iteration of a block


@dataclass(frozen=True)
class Iteration:
    """Cycles of one iteration of a block's main loop: simulated, and the cycles that each unit would need alone."""

    cycles: float
    units: dict[str, float]

    @property
    def bound(self) -> str:
        """The busiest unit, and the fraction of time in which it is busy."""
        unit = max(self.units, key=self.units.get)
        return f"{unit} {self.units[unit] / self.cycles:.0%}"


ITERATIONS = 12  # simulated; the first iterations fill the pipeline


def transposition(loop: list[sass_listing.Instruction], tiling: Tiling, dims: HeadDims) -> dict[str, float]:
    """Cycles of the units in which the producer's warps transpose a tile of V. A warp waits for its own loads only, so
    the slowest warp is a unit, too. `loop`: of transpose.cuh; each load has 32 keys and 16 columns.
    """
    rounds = -(-tiling.keys * dims.v // (32 * 16) // sass_listing.count(loop, "LDSM"))
    cycles = sum(instruction.stall for instruction in loop) + LATENCIES["lsu"]
    return {
        "transposition": -(-rounds // TRANSPOSERS) * cycles,
        "issue": rounds * len(loop) / SCHEDULERS,
        "shared memory": 2 * tiling.keys * dims.v / SHARED_BYTES,
    }


def iteration_of(
    its_program: Program, tiling: Tiling, dims: HeadDims, others: dict[str, float] | None = None
) -> Iteration:
    """``others``: cycles of the units in which other warps than the consumers' use them."""
    total: dict[str, float] = {"tensor": 0.0, "shared memory": 0.0}
    for step in its_program:
        if isinstance(step, Product):
            total["tensor"] += step.cycles * tiling.consumers
            total["shared memory"] += step.shared_bytes * tiling.consumers / SHARED_BYTES
        elif isinstance(step, Work):
            for unit, cycles in step.units.items():
                total[unit] = total.get(unit, 0.0) + cycles * tiling.consumers
    loaded, added = tiling.tile_bytes(dims), tiling.added_bytes(dims)
    total["shared memory"] += total.pop("lsu", 0.0) + (loaded + added) / SHARED_BYTES
    total["L2"] = (loaded / tiling.sharers + added) / L2_BYTES
    for unit, cycles in (others or {}).items():
        total[unit] = total.get(unit, 0.0) + cycles
    iterations = [simulate(its_program, tiling.consumers, n) for n in (ITERATIONS // 2, ITERATIONS)]
    cycles = (iterations[1] - iterations[0]) / (ITERATIONS - ITERATIONS // 2)
    return Iteration(max(cycles, *total.values()), total)


# ---- a whole call


def tiles_of_tasks(problem: Problem, tiling: Tiling) -> list[int]:
    """The tiles of each task of one head, by position."""
    own, walked = (tiling.keys, tiling.rows) if tiling.owns_keys else (tiling.rows, tiling.keys)
    all_tiles = -(-problem.S // walked)
    blocks = range(-(-problem.S // own))
    if not problem.causal:
        return [all_tiles for _ in blocks]
    if tiling.owns_keys:  # blocks that share tiles visit the tiles that any of them sees
        return [all_tiles - n // tiling.sharers * tiling.sharers * own // walked for n in blocks]
    return [min(all_tiles, -(-(n + 1) * own // walked)) for n in blocks]


def tasks_in_order(problem: Problem, tiling: Tiling, dims: HeadDims) -> list[int]:
    """The tiles of all tasks, in the order in which blocks begin them (csrc/cuda/sm90/schedule.h and
    backward_schedule.h)."""
    of_head, heads = tiles_of_tasks(problem, tiling), problem.B * problem.H
    if tiling.owns_keys:
        return of_head * heads
    group = max(1, L2_GROUP_BYTES // (2 * problem.S * (dims.qk + dims.v)))
    order = []
    for first in range(0, heads, group):
        for tiles in reversed(of_head):
            order += [tiles] * min(group, heads - first)
    return order


def deal_as_they_end(lengths: list[float], sharers: int = 1) -> list[float]:
    """Returns the time of each multiprocessor. The first free multiprocessor gets the next block.

    ``sharers``: so many blocks begin and end together.
    """
    free = [0.0] * (MULTIPROCESSORS // sharers)
    for length in lengths[::sharers]:
        heapq.heapreplace(free, free[0] + length)
    return free


def slots_of_rounds(tiles: list[int], blocks: int) -> list[list[int]]:
    """Returns the slot of each persistent block in each round, as csrc/cuda/sm90/task_rounds.cpp assigns them."""
    sums = [[0] * blocks for _ in range(ROUND_ROWS)]
    for task, count in enumerate(tiles):
        sums[task // blocks % ROUND_ROWS][task % blocks] += count + 1
    rows: list[list[int]] = [[] for _ in sums]
    loads = [0] * blocks
    for row in sorted(range(ROUND_ROWS), key=lambda n: min(sums[n]) - max(sums[n])):
        by_load = sorted(range(blocks), key=loads.__getitem__)
        by_length = sorted(range(blocks), key=lambda slot: -sums[row][slot])
        rows[row] = [slot for _, slot in sorted(zip(by_load, by_length, strict=True))]
        for block, slot in enumerate(rows[row]):
            loads[block] += sums[row][slot]
    return rows


def deal_in_rounds(tiles: list[int], lengths: list[float]) -> list[float]:
    """The time of each persistent block."""
    blocks = min(MULTIPROCESSORS, len(tiles))
    rows, times = slots_of_rounds(tiles, blocks), [0.0] * blocks
    for n, first in enumerate(range(0, len(tiles), blocks)):
        for block, slot in enumerate(rows[n % ROUND_ROWS]):
            if first + slot < len(tiles):
                times[block] += lengths[first + slot]
    return times


def seconds(problem: Problem, way: str, iteration: Iteration, tiling: Tiling, dims: HeadDims) -> float:
    tiles = tasks_in_order(problem, tiling, dims)
    lengths = [BLOCK_CYCLES + (count + 1) * iteration.cycles for count in tiles]
    is_persistent = way == "forward" and dims.qk <= 128
    times = deal_in_rounds(tiles, lengths) if is_persistent else deal_as_they_end(lengths, tiling.sharers)
    # The backward's other kernels read out and dout, and write, read and round dQ's sums.
    bytes_around = 14 * problem.B * problem.H * problem.S * problem.D if way == "backward" else 0
    return max(times) / CLOCK + bytes_around / MEMORY_BYTES_PER_SECOND


def prediction(problem: Problem, way: str, head_dim_v: int | None = None, *, in_pairs: bool = False) -> dict | None:
    """Returns TFLOP/s and the unit that bounds them. ``way``: "forward", "backward", or "float8", a forward.

    None without the tools, or for a head dimension without a kernel. ``in_pairs``: with the switch of IN_PAIRS.
    """
    dims = HeadDims(problem.D, head_dim_v or problem.D)
    iteration = iterations(in_pairs).get((way, dims))
    if iteration is None:
        return None
    tiling = TILINGS[way, dims].in_pairs() if in_pairs else TILINGS[way, dims]
    flops = problem.flops(way == "backward") * dims.mean(way == "backward") / problem.D
    return {
        "TFLOP/s": flops / seconds(problem, way, iteration, tiling, dims) / 1e12,
        "bound": iteration.bound,
    }


@functools.cache
def iterations(in_pairs: bool = False) -> dict[tuple[str, HeadDims], Iteration]:
    """``in_pairs``: as if each kernel ran in pairs of blocks. A loop in pairs has a few more instructions."""
    result = {}
    for (way, dims), code in kernels().items():
        tiling = TILINGS[way, dims].in_pairs() if in_pairs else TILINGS[way, dims]
        others = transposition(sass_listing.copying_loop(code), tiling, dims) if way == "float8" else None
        result[way, dims] = iteration_of(program(sass_listing.main_loop(code)), tiling, dims, others)
    return result


@functools.cache
def kernels() -> dict[tuple[str, HeadDims], list[sass_listing.Instruction]]:
    """Returns the machine code of the bfloat16 and float8 kernels, by way and head dimensions.

    Empty if a tool is missing; prints the reason.
    """
    result = {}
    try:
        for way, (source, pattern) in SOURCES.items():
            for name, code in sass_listing.functions(sass_listing.disassemble(machine_code(source))).items():
                found = re.search(pattern, name)
                if found:
                    result[way, HeadDims(int(found[1]), int(found[2] or found[1]))] = code
    except FileNotFoundError as error:
        print(f"no time model: {error}", file=sys.stderr)
        return {}
    return result


def machine_code(source: str) -> Path:
    """Compiles the kernels of the current sources, because the built extension may be older."""
    result = ROOT / "build" / "time_model" / f"{source}.cubin"
    if not units.is_newer_than_sources(result):
        compile_machine_code()
    return result


def compile_machine_code() -> None:
    """Compiles all sources in parallel, in seconds."""
    compiler = units.nvcc()
    if compiler is None:
        raise FileNotFoundError("needs nvcc: CUDA_HOME, /usr/local/cuda and PATH have none")
    folder = ROOT / "build" / "time_model"
    folder.mkdir(parents=True, exist_ok=True)
    flags = ["-std=c++20", "-O3", "--expt-relaxed-constexpr", "-arch=sm_90a", "-cubin"]
    compilers = [
        subprocess.Popen(
            [compiler, *flags, ROOT / "csrc" / "cuda" / "sm90" / f"{source}.cu", "-o", folder / f"{source}.cubin"]
        )
        for source, _ in SOURCES.values()
    ]
    if any([process.wait() for process in compilers]):
        raise FileNotFoundError("nvcc could not compile the sm90 kernels")


# ---- the table


def text() -> Iterator:
    yield f"Speed limit of the sm90 kernels at {CLOCK / 1e9:g} GHz, bf16 and fp8, by a model of their machine code"
    yield "Cycles of one iteration of a block's main loop, and the cycles that each unit alone would need. In pairs: if"
    yield "two blocks shared what they load from L2. Only the backward at D 256 can, by a switch\n"
    columns = ["tensor", "exponentials", "issue", "ALU", "fp32", "shared memory", "L2", "transposition"]
    lines = []
    for kernel in TILINGS:
        way, dims, iteration = *kernel, iterations()[kernel]
        instructions = len(sass_listing.main_loop(kernels()[kernel]))
        line = [f"{way} {dims}", str(instructions), f"{iteration.cycles:.0f}"]
        units = [f"{iteration.units.get(unit, 0):.0f}" for unit in columns]
        lines.append([*line, *units, iteration.bound, f"{iterations(True)[kernel].cycles:.0f}"])
    yield output.table(["", "instructions", "cycles", *columns, "most busy", "in pairs"], lines)
    yield "\nTFLOP/s, full / causal\n"
    lengths = sorted(LENGTHS)
    lines = []
    for way, dims in TILINGS:
        for in_pairs in (False, True) if (way, dims) == IN_PAIRS else (False,):
            found = [prediction(p, way, dims.v, in_pairs=in_pairs) for p in problems(lengths, [dims.qk])]
            rates = [f"{each['TFLOP/s']:.0f}" for each in found]
            name = f"{way} {dims}, in pairs" if in_pairs else f"{way} {dims}"
            lines.append([name, *map("/".join, zip(rates[::2], rates[1::2], strict=True))])
    yield output.table(["", *map(str, lengths)], lines)


def text_of_anchors() -> Iterator:
    """The model's TFLOP/s next to the best published figures."""
    yield f"The model next to the best published TFLOP/s, bf16, {CLOCK / 1e9:g} GHz, L2 {L2_BYTES} bytes a clock\n"
    lines = []
    for problem, backward, rate in anchors.cells():
        ours = prediction(problem, "backward" if backward else "forward")
        ratio = ours["TFLOP/s"] / rate
        what = f"{'backward' if backward else 'forward'} D {problem.D} {'causal' if problem.causal else 'full'}"
        reason = "" if ratio >= anchors.ENOUGH else ours["bound"]
        lines.append([what, str(problem.S), f"{ours['TFLOP/s']:.0f}", str(rate), f"{ratio:.2f}", reason])
    yield output.table(["", "S", "model", "published", "ratio", f"bound, below {anchors.ENOUGH}"], lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, metavar="FILE", help="for the tables")
    parser.add_argument("--anchors", action="store_true", help="print the best published figures next to the model's")
    args = parser.parse_args(argv)
    if not iterations():
        return 1
    output.write_text(text_of_anchors() if args.anchors else text(), args.text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
