"""Predicts how well the library's tasks fill 8 to 128 threads, on a machine with fewer: python -m benchmarks.scaling.

task_times.cpp runs all tasks of the kernels in order on one thread and prints the work and time of each
(recorded_tasks.h). This program simulates many threads that draw the same tasks in order, as csrc/cpu/parallel.h does,
with the waiting of csrc/cpu/turns.h. It ignores shared memory and caches, and the time to start threads.
"""

import argparse
import heapq
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import ROOT, output
from flash_attn_ext import active_kernel

THREADS = (8, 32, 64, 128)

# Instruction set -> its table in csrc/cpu/run.h.
TABLES = {"generic": "kGenericKernels", "avx2": "kAvx2Kernels", "avx512": "kAvx512Kernels"}
TABLES |= {
    "avx512_bf16": "kAvx512Bf16Kernels",
    "amx": "kAmxKernels",
    "neon": "kNeonKernels",
    "neon_bf16": "kNeonBf16Kernels",
}


@dataclass(frozen=True)
class Workload:
    name: str
    shape: tuple[int, int, int, int, int, int]  # B, H, H_kv, S_q, S_k, D
    window: tuple[int, int] = (-1, -1)  # left, right; (-1, 0) is causal
    mask: tuple[int, int, int, int] = (0, 0, 0, 0)  # its shape; zeros: none
    passes: tuple[str, ...] = ("forward", "backward")


def square(batch: int, heads: int, seqlen: int, **options) -> Workload:
    kind = "causal" if options.get("window") == (-1, 0) else "window" if "window" in options else "full"
    return Workload(f"{batch},{heads},{seqlen},64 {kind}", (batch, heads, heads, seqlen, seqlen, 64), **options)


def decode(heads: str, shape: tuple[int, int, int, int, int, int]) -> Workload:
    return Workload(f"decode, {heads}, S_k {shape[4]}", shape, passes=("forward",))


def mask_gradient(name: str, shape: tuple[int, int, int, int]) -> Workload:
    return Workload(f"2,8,1024,64 mask {name}", (2, 8, 8, 1024, 1024, 64), mask=shape, passes=("mask_gradient",))


CAUSAL = {"window": (-1, 0)}
WORKLOADS = [
    square(1, 8, 2048),
    square(1, 8, 2048, **CAUSAL),
    square(8, 12, 1024, **CAUSAL),
    square(32, 8, 128),
    square(1, 4, 4096, window=(512, 0)),
    square(1, 1, 8192),
    square(1, 1, 8192, **CAUSAL),
    Workload("2,8,1024,64 GQA 8:1", (2, 8, 1, 1024, 1024, 64)),
    decode("H 32", (1, 32, 32, 1, 8192, 128)),
    decode("H 32 on 8", (1, 32, 8, 1, 8192, 128)),
    decode("H 1", (1, 1, 1, 1, 65536, 128)),
    mask_gradient("(1,1,S,S)", (1, 1, 1024, 1024)),
    mask_gradient("(1,H,S,S)", (1, 8, 1024, 1024)),
    mask_gradient("(B,1,1,S)", (2, 1, 1, 1024)),
]


@dataclass
class Pass:
    """The tasks between two synchronisations of all threads."""

    serial: float  # seconds before the tasks, on one thread
    tasks: list[list[tuple]] = field(default_factory=list)  # of ("work", seconds), ("wait" or "next", counter, step)


def read(report: str) -> list[Pass]:
    """Parses the output of task_times.cpp. Returns the passes of its last call."""
    passes: list[Pass] = []
    for line in report.splitlines():
        event, *values = line.split()
        if event == "call":
            passes = []
        elif event in ("pass", "end"):
            passes.append(Pass(float(values[0])))
        elif event == "task":
            passes[-1].tasks.append([])
        elif event == "work":
            passes[-1].tasks[-1].append(("work", float(values[0])))
        else:
            passes[-1].tasks[-1].append((event, values[0], int(values[1])))
    return passes


def work(one: Pass) -> float:
    return one.serial + sum(event[1] for task in one.tasks for event in task if event[0] == "work")


def makespan(one: Pass, threads: int) -> float:
    """Returns the seconds of a pass on so many threads. A task waits for earlier tasks only."""
    free = [0.0] * threads
    reached: dict[str, list[tuple[int, float]]] = {}  # counter -> (step, the time when it is reached)
    for task in one.tasks:
        now = heapq.heappop(free)
        for event, *values in task:
            if event == "work":
                now += values[0]
            elif event == "wait":
                counter, step = values
                now = max(now, next(when for at, when in reached[counter] if at > step))
            else:
                counter, step = values
                reached.setdefault(counter, []).append((step, now))
        heapq.heappush(free, now)
    return one.serial + max(free)


def efficiency(passes: Sequence[Pass], threads: int) -> float:
    """Returns the fraction of the threads' time that is work, until the last thread has ended."""
    return sum(map(work, passes)) / (threads * sum(makespan(one, threads) for one in passes))


def build(isa: str, folder: Path, optimize: str = "-O3") -> Path:
    """Compiles task_times.cpp with the kernels of one instruction set into `folder`."""
    sources = [f"{ROOT}/csrc/cpu/{name}.cpp" for name in (f"isa_{isa}", "key_lists", "task_list", "widen_float8")]
    here = Path(__file__).parent
    flags = ["-std=c++17", optimize, "-Wno-psabi", f"-DKERNELS={TABLES[isa]}", f"-I{ROOT}/csrc", f"-I{here}"]
    flags += ["-DFA_TESTED_PASSES_ONLY", "-DFA_TESTED_16_BIT_TYPE=BFloat16"]  # task_times.cpp calls no others
    built = folder / "task_times"
    command = ["g++", *flags, "-include", str(here / "recorded_tasks.h"), str(here / "task_times.cpp"), *sources]
    subprocess.run([*command, "-o", str(built)], check=True)
    return built


def record(built: Path, workload: Workload, pass_name: str, threads: int) -> list[Pass]:
    numbers = [*workload.shape, *workload.window, *workload.mask, threads]
    return read(
        subprocess.run([built, *map(str, numbers), pass_name], capture_output=True, text=True, check=True).stdout
    )


def shortest(events: tuple[tuple, ...]) -> tuple:
    """Merges one event of several records: keeps its shortest time."""
    return ("work", min(event[1] for event in events)) if events[0][0] == "work" else events[0]


def steadied(records: list[list[Pass]]) -> list[Pass]:
    """Merges records of the same call."""
    passes = []
    for same in zip(*records, strict=True):
        tasks = zip(*(one.tasks for one in same), strict=True)
        each = [[shortest(events) for events in zip(*task, strict=True)] for task in tasks]
        passes.append(Pass(min(one.serial for one in same), each))
    return passes


def predict(built: Path, repeat: int) -> list[dict]:
    results = []
    for workload in WORKLOADS:
        for pass_name in workload.passes:
            cuts = {n: steadied([record(built, workload, pass_name, n) for _ in range(repeat)]) for n in THREADS}
            results.append(
                {
                    "workload": workload.name,
                    "pass": pass_name,
                    "seconds": sum(map(work, cuts[THREADS[0]])),
                    "tasks": "+".join(str(len(one.tasks)) for one in cuts[THREADS[-1]] if one.tasks),
                    "efficiency": {n: efficiency(cuts[n], n) for n in THREADS},
                }
            )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--text", type=Path, metavar="FILE", help="for the table, as it is on the terminal")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for everything predicted")
    parser.add_argument(
        "--repeat", type=int, default=3, help="records of each call; the shortest time of each event counts"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="flash_attn_ext_tasks_") as folder:
        results = predict(build(active_kernel(), Path(folder)), args.repeat)
    rows = [
        [f"{r['workload']}, {r['pass'].replace('_', ' ')}", f"{1e3 * r['seconds']:.3g} ms", r["tasks"]]
        + [f"{100 * r['efficiency'][n]:.0f}%" for n in THREADS]
        for r in results
    ]
    title = f"Predicted efficiency of threads: {active_kernel()}, float32; tasks of each pass as cut for {THREADS[-1]}."
    table = output.table(["B,H,S,D", "one thread", "tasks", *(f"{n} threads" for n in THREADS)], rows)
    output.write_text([title, "", table], args.text)
    output.write_json({"isa": active_kernel(), "rows": results}, args.json)


if __name__ == "__main__":
    main()
