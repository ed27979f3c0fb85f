"""Checks the requirements of a stage at its start, so that the log ends with a clear line instead of a traceback."""

import os
import sys
import time

import torch

SKIPPED = 77


def a_gpu_and_our_build() -> None:
    """Ends the process with status 1 if torch sees no GPU, or if flash_attn_ext has no CUDA kernels."""
    if not torch.cuda.is_available():
        sys.exit(f"needs an NVIDIA GPU: torch {torch.__version__} sees none")
    try:
        import flash_attn_ext
    except ImportError as error:
        sys.exit(f"needs flash_attn_ext built in place (stage build): {error}")
    if not flash_attn_ext.build_info()["cuda"]:
        sys.exit("needs flash_attn_ext with its CUDA half: FLASH_ATTN_EXT_CUDA=1 python setup.py build_ext --inplace")


def seconds_left() -> float:
    """Returns the rest of the time that run.py gives this stage; without run.py, an hour."""
    end = os.environ.get("GPU_STAGE_END")
    return float(end) - time.time() if end else 3600.0


def skip(reason: str) -> None:
    """Ends the process, because this stage lacks a tool."""
    print(f"skipped: {reason}")
    sys.exit(SKIPPED)
