"""The machine of a measurement as JSON: GPU, driver, torch, CUDA, compilers."""

import json
import re
import subprocess

import torch


def said(*command: str) -> str:
    """The command's output, or why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{type(error).__name__}: {error}"
    return (done.stdout or done.stderr).strip()


def machine() -> dict[str, str]:
    facts = {"torch": torch.__version__, "cuda of torch": str(torch.version.cuda), "cudnn": str(cudnn())}
    facts["driver"] = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    release = re.search(r"release ([\d.]+)", said("nvcc", "--version"))
    facts["nvcc"] = release.group(1) if release else "not on PATH"
    if not torch.cuda.is_available():
        return facts | {"GPU": "none that torch sees"}
    device = torch.cuda.get_device_properties(0)
    return facts | {
        "GPU": f"{device.name}, {torch.cuda.device_count()} of them",
        "compute capability": f"{device.major}.{device.minor}",
        "multiprocessors": str(device.multi_processor_count),
        "memory": f"{device.total_memory / 2**30:.1f} GiB",
        "L2": f"{device.L2_cache_size / 2**20:.0f} MiB",
    }


def cudnn() -> int | None:
    return torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None


if __name__ == "__main__":
    print(json.dumps(machine()))
