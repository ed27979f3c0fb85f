"""Profiles our kernels with Nsight Compute: one forward and one backward of each head dimension.

For each kernel: its time, how busy tensor cores, shared memory, L2 and memory were, and the main reason for waits.
Everything that ncu read is in the JSON. With --child it makes the calls of one head dimension; ncu runs this. One that
hangs costs only its own rows.
"""

import argparse
import csv
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import output
from benchmarks.gpu import needs
from benchmarks.gpu.kernels import short_name
from benchmarks.gpu.problem import HEAD_DIMS, Problem
from benchmarks.gpu.timing import dtype_16
from benchmarks.gpu.watch import watch

SECTIONS = (
    "SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "WarpStateStats", "InstructionStats",
    "SchedulerStats", "LaunchStats",
)  # fmt: skip
# Column of the table -> the metrics that may hold it; their names differ between versions.
BUSY = {
    "tensor": r"sm__(inst_executed_)?pipe_tensor\w*\.(avg|sum)\.pct_of_peak_sustained_active",
    "shared memory": r"l1tex__data_pipe\w*shared\w*\.(avg|sum)\.pct_of_peak_sustained_elapsed"
    r"|l1tex__data_bank\w*\.(avg|sum)\.pct_of_peak_sustained_elapsed|l1tex__throughput\.avg\.pct\w*",
    "L2": r"lts__throughput\.avg\.pct_of_peak_sustained_elapsed",
    "memory": r"(gpu__dram|dram)__throughput\.avg\.pct_of_peak_sustained_elapsed",
    "issue": r"smsp?__(inst_executed|issue_active)\.avg\.(pct_of_peak_sustained_active|per_cycle_active)",
}
DURATION = "gpu__time_duration.sum"
PATIENCE = 20.0  # seconds without output from ncu: it starts torch, and runs each kernel some 30 times
AT_THE_END = 2.0  # seconds of the stage for the table
STALL = re.compile(r"smsp__average_warps?_(?:issue_stalled|latency_issue_stalled)_(\w+?)(?:_per_issue_active)?\.ratio")


def problem_of(head_dim: int) -> Problem:
    """Smaller than the problems of the comparison, because ncu runs each kernel many times."""
    return Problem(B=2, H=2048 // head_dim, S=4096, D=head_dim, causal=False)


def make_calls(head_dim: int) -> None:
    from flash_attn_ext import flash_attn

    problem = problem_of(head_dim)
    shape = (problem.B, problem.H, problem.S, problem.D)
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype_16()).requires_grad_() for _ in range(3))
    out = flash_attn(q, k, v)
    torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    torch.cuda.synchronize()
    print(f"called: D {head_dim}", flush=True)


def command(ncu: str, report: Path, head_dim: int) -> list[str]:
    """Does not change the clocks, because other users may share the machine."""
    sections = [part for name in SECTIONS for part in ("--section", name)]
    chosen = ["--kernel-name", r"regex:^(forward|backward)_kernel$"]
    how = ["--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(report)]
    return [ncu, *chosen, *sections, *how, sys.executable, "-m", __spec__.name, "--child", str(head_dim)]


def rows_of(report: str) -> list[dict]:
    """The kernels in the output of `ncu --csv --page raw`, with all their metrics. Its second line has units."""
    lines = report.splitlines()
    header = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        raise RuntimeError(f"ncu printed no table: {report.strip()[-300:]}")
    return [row for row in csv.DictReader(lines[header:]) if row["ID"]]


def number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def largest(row: dict, pattern: str) -> float | None:
    """Several metrics may be of the same unit: the busiest counts."""
    found = [number(text) for name, text in row.items() if name and re.fullmatch(pattern, name)]
    values = [value for value in found if value is not None]
    return max(values, default=None)


def stalls(row: dict) -> list[tuple[str, float]]:
    """Returns the reasons of a warp's waits, in cycles per issued instruction, the longest first."""
    found = [(match[1], number(text)) for name, text in row.items() if name and (match := STALL.fullmatch(name))]
    return sorted(((name, value) for name, value in found if value), key=lambda pair: -pair[1])


def text(record: dict) -> Iterator:
    yield f"{record['machine']}; B 2, S 4096, 2048 columns of heads, bf16, full; % of the unit's peak\n"
    lines = []
    for row in record["rows"]:
        duration = number(row.get(DURATION))
        busy = [largest(row, pattern) for pattern in BUSY.values()]
        measured = ["-" if value is None else f"{value:.0f}" for value in busy]
        worst = ", ".join(f"{name} {value:.1f}" for name, value in stalls(row)[:3])
        name = short_name(row["Kernel Name"])
        registers = row.get("launch__registers_per_thread") or "-"
        lines.append([name, "-" if duration is None else f"{duration / 1e3:.0f}", *measured, registers, worst or "-"])
    yield output.table(["", "us", *BUSY, "registers", "stalls"], lines)
    yield from record["failed"]


def profile(ncu: str, report: Path, head_dim: int, end: float) -> tuple[list[dict], str]:
    """The rows of one head dimension, and the reason if there are none."""
    report.unlink(missing_ok=True)
    status, _ = watch(command(ncu, report, head_dim), PATIENCE, end)
    said = report.read_text() if report.exists() else ""
    if "ERR_NVGPUCTRPERM" in said:
        needs.skip("this user may not read the GPU's counters (ERR_NVGPUCTRPERM)")
    if status is None:
        return [], f"D {head_dim}: hangs, or the stage's time was used up"
    if status:
        return [], f"D {head_dim}: exit status {status}: {said.strip()[-500:]}"
    return rows_of(said), ""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--child", type=int, metavar="D", help="make the calls of this head dimension")
    output.add_arguments(parser)
    args = parser.parse_args(argv)
    needs.a_gpu_and_our_build()
    if args.child:
        make_calls(args.child)
        return 0
    ncu = shutil.which("ncu")
    if ncu is None:
        needs.skip("ncu (Nsight Compute) is not on PATH")
    end = time.monotonic() + needs.seconds_left() - AT_THE_END
    report = (args.json or Path("ncu.json")).with_suffix(".csv")
    record = {"machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}", "rows": [], "failed": []}
    for head_dim in HEAD_DIMS:
        rows, why = profile(ncu, report, head_dim, end)
        record["rows"] += rows
        record["failed"] += [why] if why else []
        output.write_json(record, args.json)
    output.write_text(text(record), args.text)
    return 1 if record["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
