"""One tool of compute-sanitizer over small calls of every tier: memcheck, racecheck, initcheck or synccheck.

With the argument `calls` it makes the calls; compute-sanitizer runs this.
"""

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.gpu import needs
from tools.gpu.calls import CALLS, FORWARD_MODE, inputs

FOUND = 9  # the tool's exit status if it found something


def sanitizer() -> str | None:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    beside = home / "bin" / "compute-sanitizer"
    return shutil.which("compute-sanitizer") or (str(beside) if beside.exists() else None)


def make_calls() -> None:
    """Every pass of every call of every tier, by force of that tier."""
    from flash_attn_ext import flash_attn, force_cuda_tier

    for tier, named in CALLS.items():
        force_cuda_tier(tier)
        for name, call in named.items():
            q, k, v = inputs(call, requires_grad=True)
            out = flash_attn(q, k, v, enable_gqa=True, **call.options)
            grad = torch.randn(out.shape, dtype=out.dtype, device="cpu").cuda()
            torch.autograd.grad(out, (q, k, v), grad)
            if tier in FORWARD_MODE:
                attend = functools.partial(flash_attn, enable_gqa=True, **call.options)
                torch.func.jvp(attend, (q, k, v), (q, k, v))
            torch.cuda.synchronize()
            print(f"called: {tier}, {name}", flush=True)


def main(tool: str) -> int:
    needs.a_gpu_and_our_build()
    if tool == "calls":
        make_calls()
        return 0
    program = sanitizer()
    if program is None:
        needs.skip("compute-sanitizer is not on this machine")
    # Every tensor an allocation of its own: in torch's cache, one tensor's neighbour hides an access beyond its end.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [program, f"--tool={tool}", f"--error-exitcode={FOUND}", "--print-limit=20"]
    return subprocess.run([*command, sys.executable, "-m", __spec__.name, "calls"], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
