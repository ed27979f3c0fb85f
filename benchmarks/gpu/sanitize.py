"""One tool of compute-sanitizer over small calls of every tier: memcheck, racecheck, initcheck or synccheck.

With the argument `calls` it makes these calls: that is what the tool looks at.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import needs
import torch

FOUND = 9  # the tool's exit status if it found something


def sanitizer() -> str | None:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    beside = home / "bin" / "compute-sanitizer"
    return shutil.which("compute-sanitizer") or (str(beside) if beside.exists() else None)


# Tier that the call is meant for -> dtype, B, H, H_kv, S_q, S_k, D, and options. sm90 is Hopper's alone and takes
# plain calls; what it leaves goes to sm80 (16 bits, D in eights), and the rest to simt.
CALLS = {
    "simt": (torch.float32, 1, 2, 1, 70, 75, 20, {"is_causal": True}),
    "simt, 64 bits": (torch.float64, 1, 1, 1, 20, 70, 9, {}),
    "simt, decoding": (torch.bfloat16, 1, 4, 1, 1, 300, 64, {}),
    "sm80": (torch.bfloat16, 1, 2, 1, 70, 75, 24, {"is_causal": True}),
    "sm80, softcap": (torch.float16, 1, 2, 2, 130, 75, 64, {"softcap": 5.0}),
    "sm90": (torch.bfloat16, 1, 2, 1, 200, 150, 64, {"is_causal": True}),
    "sm90, D 128": (torch.float16, 1, 1, 1, 130, 300, 128, {}),
    "sm90, D 256": (torch.bfloat16, 1, 1, 1, 70, 100, 256, {}),
}


def make_calls() -> None:
    """Forward and backward. Inputs come from the CPU, so that few kernels run that are not ours."""
    from flash_attn_ext import flash_attn

    for name, (dtype, batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, options) in CALLS.items():
        shapes = [(batch, heads, seqlen_q, head_dim), *[(batch, heads_kv, seqlen_k, head_dim)] * 2]
        q, k, v = (torch.randn(shape, dtype=dtype).cuda().requires_grad_() for shape in shapes)
        out = flash_attn(q, k, v, enable_gqa=True, **options)
        torch.autograd.grad(out, (q, k, v), torch.randn(out.shape, dtype=dtype).cuda())
        torch.cuda.synchronize()
        print(f"called: {name}", flush=True)


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
    return subprocess.run([*command, sys.executable, __file__, "calls"], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
