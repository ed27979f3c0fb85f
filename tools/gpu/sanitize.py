"""Runs a tool of compute-sanitizer on small calls of every tier: memcheck, racecheck, initcheck or synccheck.

compute-sanitizer runs this file with the argument `calls`, which makes the calls. If a call hangs, the tool starts
again with the next call.
"""

import functools
import os
import shutil
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu import needs
from benchmarks.gpu.watch import watch
from tools.gpu.calls import CALLS, GPUS, has_forward_mode, inputs

FOUND = 9  # the tool's exit status if it found something
PATIENCE = 15.0  # seconds for one call, and for the start of Python, torch and CUDA under a tool
AT_THE_END = 2.0  # seconds of the stage for the verdict
CALLED = "called: "


def sanitizer() -> str | None:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    beside = home / "bin" / "compute-sanitizer"
    return shutil.which("compute-sanitizer") or (str(beside) if beside.exists() else None)


def names() -> list[tuple[str, str]]:
    """Returns tier and name of every call that this GPU runs, in order. Without a GPU: of every call."""
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (None, None)
    tiers = [tier for tier in CALLS if major is None or 10 * major + minor in GPUS[tier]]
    return [(tier, name) for tier in tiers for name in CALLS[tier]]


def make_calls(first: int) -> None:
    """Makes all passes of all calls from number `first` on, with the tier forced."""
    from flash_attn_ext import flash_attn, force_cuda_tier

    for tier, name in names()[first:]:
        call = CALLS[tier][name]
        force_cuda_tier(tier)
        q, k, v = inputs(call, requires_grad=True)
        out = flash_attn(q, k, v, enable_gqa=True, **call.options)
        grad = torch.randn(out.shape, dtype=out.dtype, device="cpu").cuda()
        torch.autograd.grad(out, (q, k, v), grad)
        if has_forward_mode(tier, name):
            attend = functools.partial(flash_attn, enable_gqa=True, **call.options)
            torch.func.jvp(attend, (q, k, v), (q, k, v))
        torch.cuda.synchronize()
        print(f"{CALLED}{tier}, {name}", flush=True)


def run(command: list[str], environment: dict[str, str], patience: float = PATIENCE) -> int:
    """Returns the worst exit status. `command` gets the number of its first call, and prints a line after each call."""
    first, worst, end = 0, 0, time.monotonic() + needs.seconds_left() - AT_THE_END
    while first < len(names()):
        status, lines = watch([*command, str(first)], patience, end, environment)
        if status is not None:
            return max(worst, abs(status))
        first += sum(line.startswith(CALLED) for line in lines)
        if time.monotonic() >= end:
            print(
                f"no time was left from {', '.join(names()[first])} on" if first < len(names()) else "no time was left"
            )
            return max(worst, 1)
        if first < len(names()):
            print(f"hangs: {', '.join(names()[first])}", flush=True)
        first, worst = first + 1, max(worst, 1)
    return worst


def main(tool: str, first: int = 0) -> int:
    needs.a_gpu_and_our_build()
    if tool == "calls":
        make_calls(first)
        return 0
    program = sanitizer()
    if program is None:
        needs.skip("compute-sanitizer is not on this machine")
    # Every tensor has a separate allocation. In torch's cache, an access beyond a tensor would hit its neighbour.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [program, f"--tool={tool}", f"--error-exitcode={FOUND}", "--print-limit=20"]
    return run([*command, sys.executable, "-m", __spec__.name, "calls"], environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(int, sys.argv[2:])))
