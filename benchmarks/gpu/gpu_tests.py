"""Runs tests/test_gpu.py on the GPU, with a time-out for each case.

A case that hangs on the GPU cannot be interrupted: pytest-timeout ends its process, and pytest-xdist goes on with the
other cases in a new one. Without these two, the first hanging case ends the stage, with a traceback of where it hangs.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import needs

ROOT = Path(__file__).parent.parent.parent
SECONDS_PER_CASE = 60
WORKERS = 4


def command(junit: Path | None, quick: bool, installed: set[str]) -> list[str]:
    result = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_gpu.py"]
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--junit", type=Path, help="for pytest's record")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    needs.a_gpu_and_our_build()
    installed = {name for name in ("pytest_timeout", "xdist") if importlib.util.find_spec(name)}
    for name in {"pytest_timeout", "xdist"} - installed:
        print(f"{name} is not installed: the first case that hangs ends the stage")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command(args.junit, args.quick, installed), cwd=ROOT, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
