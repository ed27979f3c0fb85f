"""Runs the tests marked gpu or any_device on the GPU, with a time-out for each case, by the tier that --tier forces.

A case that the forced tier cannot run is skipped, with its reason. "sm90" forces nothing: the selector chooses sm90 if
possible, otherwise another tier.

A case that hangs on the GPU cannot be interrupted: pytest-timeout ends its process, and pytest-xdist continues with the
other cases in a new process. Without these two packages, the first hanging case ends the stage, with its traceback.
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import ROOT
from benchmarks.gpu import needs
from tools.gpu.calls import GPUS

SECONDS_PER_CASE = 30
WORKERS = 8
STOP_BEFORE = 4  # seconds before the stage's end: time for pytest to write its report
WORKERS_END = 0.5  # seconds in which the workers of a killed pytest end


def command(junit: Path | None, quick: bool, installed: set[str]) -> list[str]:
    result = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cuda/test_gpu.py", "tests/api"]
    result += ["--tb=short", "-p", "tools.gpu.skip_refusals", "-p", "tools.gpu.show_failures"]
    if "pytest_timeout" in installed:
        result += [f"--timeout={SECONDS_PER_CASE}", "--timeout-method=thread"]
    else:
        result += ["-o", f"faulthandler_timeout={SECONDS_PER_CASE}", "-o", "faulthandler_exit_on_timeout=true"]
    if {"pytest_timeout", "xdist"} <= installed:
        result += [f"--numprocesses={WORKERS}", "--max-worker-restart=20"]
    if quick:
        result += ["-k", "not gradcheck and not compile"]
    if junit:
        result.append(f"--junitxml={junit}")
    return result


def run(arguments: list[str], environment: dict[str, str], seconds: float) -> int:
    """Runs pytest, and interrupts it when the time is over, so that it still prints its report."""
    process = subprocess.Popen(arguments, cwd=ROOT, env=environment)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_BEFORE / 2)
    except subprocess.TimeoutExpired:
        process.kill()
        time.sleep(WORKERS_END)
    print(f"stopped after {seconds:.0f} s, before the last case")
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tier", choices=GPUS, default="sm90")
    parser.add_argument("--junit", type=Path, help="for pytest's record")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    needs.a_gpu_and_our_build()
    installed = {name for name in ("pytest_timeout", "xdist") if importlib.util.find_spec(name)}
    for name in {"pytest_timeout", "xdist"} - installed:
        print(f"{name} is not installed: the first case that hangs ends the stage")
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    settings = {"FLASH_ATTN_EXT_TEST_DEVICE": "cuda", "FLASH_ATTN_EXT_TEST_PAIRS": "1"}
    environment = os.environ | settings | {"PYTHONPATH": os.pathsep.join(path)}
    if args.tier != "sm90":
        environment["FLASH_ATTN_EXT_CUDA_TIER"] = args.tier
    return run(command(args.junit, args.quick, installed), environment, needs.seconds_left() - STOP_BEFORE)


if __name__ == "__main__":
    sys.exit(main())
