"""Measures the peak memory of one training step in a new process: python -m benchmarks.peak_memory '<a Case as JSON>'.

On CPU it is the growth of the resident set at its peak, as Linux reports it. On a GPU it is the growth of torch's
allocator. The inputs do not count. The results and all temporary memory count.
"""

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from benchmarks import ROOT
from benchmarks.attention_methods import Case, training_step


def measure(case: Case, environment: dict[str, str] | None = None) -> int | None:
    """Returns bytes, or None if the process died or could not allocate. `environment` adds variables to the process."""
    environ = os.environ | (environment or {})
    command = [sys.executable, "-m", __spec__.name, json.dumps(asdict(case))]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3600, env=environ)
    if run.returncode < 0 or "not enough memory" in run.stderr or "OutOfMemoryError" in run.stderr:
        return None
    if run.returncode:
        raise RuntimeError(f"{case}: {run.stderr}")
    return int(run.stdout)


def grow(case: Case) -> int:
    training_step(replace(case, B=1, H=1, S=64))()  # libraries, thread pools
    step = training_step(case)
    if case.device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = status("VmRSS")
    step()
    return status("VmHWM") - before


def status(field: str) -> int:
    """Bytes, from /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def available() -> int:
    """Returns the bytes that this machine can allocate without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/meminfo has no MemAvailable")


if __name__ == "__main__":
    print(grow(Case(**json.loads(sys.argv[1]))))
