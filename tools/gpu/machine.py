"""The machine of a measurement as JSON: GPU, driver, torch, CUDA, compilers."""

import json
import re
import subprocess
from importlib import metadata

import torch

OLDEST_SETUPTOOLS = 77  # pyproject.toml
# What the stages need beside torch, by the part that fails, or is slow, without it.
PACKAGES = {"ninja": "a fast build", "rich": "measurements", "pytest": "tests", "hypothesis": "tests", "numpy": "tests"}


def said(*command: str) -> str:
    """Returns the command's output, or the reason why there is no output."""
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
    facts["setuptools"] = setuptools(installed("setuptools"))
    facts["missing packages"] = missing([name for name in PACKAGES if installed(name) is None])
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


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def setuptools(version: str | None) -> str:
    """Returns the version, with instructions if the build would refuse it."""
    if version is not None and int(version.split(".")[0]) >= OLDEST_SETUPTOOLS:
        return version
    return f"{version or 'missing'}; the build needs {OLDEST_SETUPTOOLS}: pip install 'setuptools>={OLDEST_SETUPTOOLS}'"


def missing(names: list[str]) -> str:
    """Returns the missing packages with the parts that need them, and instructions."""
    if not names:
        return "none"
    return f"{', '.join(f'{name} ({PACKAGES[name]})' for name in names)}: pip install {' '.join(names)}"


def cudnn() -> int | None:
    return torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None


if __name__ == "__main__":
    print(json.dumps(machine()))
