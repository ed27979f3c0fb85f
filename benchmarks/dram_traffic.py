"""Counts the bytes that one training step moves between a GPU and its memory, by Nsight Compute's counters.

Needs `ncu` on PATH and the right to read the counters: as root, or with a driver option for all users. ncu runs python
-m benchmarks.dram_traffic '<a Case as JSON>' and measures one step, after a warm-up step.
"""

import csv
import json
import shutil
import subprocess
import sys
from dataclasses import asdict

import torch

from benchmarks import ROOT
from benchmarks.attention_methods import Case, training_step

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")


class Unavailable(RuntimeError):
    """Raised if the counters cannot be read. The message has the reason."""


def measure(case: Case) -> int:
    """Returns the bytes that all kernels of one step read and write."""
    ncu = shutil.which("ncu")
    if ncu is None:
        raise Unavailable("ncu (Nsight Compute) is not on PATH")
    command = [ncu, "--csv", "--print-units", "base", "--profile-from-start", "off", "--metrics", ",".join(METRICS)]
    command += ["--clock-control", "none"]  # bytes do not depend on clocks, and other users may share the GPU
    command += [sys.executable, "-m", __spec__.name, json.dumps(asdict(case))]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600)
    if "ERR_NVGPUCTRPERM" in run.stdout + run.stderr:
        raise Unavailable("this user may not read the GPU's counters (ERR_NVGPUCTRPERM)")
    if run.returncode:
        raise RuntimeError(f"{case}: {run.stderr or run.stdout}")
    return total(run.stdout)


def total(report: str) -> int:
    """Sums over all kernels of an `ncu --csv` report."""
    lines = report.splitlines()
    header = next((n for n, line in enumerate(lines) if line.startswith('"ID"')), None)
    if header is None:
        raise RuntimeError(f"ncu printed no table: {report}")
    rows = csv.DictReader(lines[header:])
    return sum(int(float(row["Metric Value"].replace(",", ""))) for row in rows if row["Metric Name"] in METRICS)


def run_under_ncu(case: Case) -> None:
    step = training_step(case)
    step()
    torch.cuda.profiler.start()
    step()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    run_under_ncu(Case(**json.loads(sys.argv[1])))
