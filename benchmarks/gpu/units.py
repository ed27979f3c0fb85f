"""Compiles tests/gpu_units and runs it: does the hardware do what the kernels and their host run rely on?"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
SOURCES = ROOT / "tests" / "gpu_units"
PROGRAM = ROOT / "build" / "gpu_units"
# Not -arch=sm_90a, which with nvcc 13.0 also makes a pass for plain sm_90.
FLAGS = ("-std=c++20", "-O1", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a")


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    beside = Path(home) / "bin" / "nvcc"
    return str(beside) if beside.exists() else shutil.which("nvcc")


def compile_units(compiler: str) -> None:
    PROGRAM.parent.mkdir(exist_ok=True)
    objects, compilers = [], []
    for source in sorted(SOURCES.glob("*.cu")):
        objects.append(PROGRAM.parent / f"gpu_units_{source.stem}.o")
        compilers.append(subprocess.Popen([compiler, *FLAGS, f"-I{ROOT}", "-c", source, "-o", objects[-1]]))
    if any([process.wait() for process in compilers]):
        sys.exit("nvcc could not compile the units")
    subprocess.run([compiler, *FLAGS, *objects, "-o", PROGRAM], check=True)


def main() -> int:
    compiler = nvcc()
    if compiler is None:
        print("needs nvcc: CUDA_HOME, /usr/local/cuda and PATH have none")
        return 1
    compile_units(compiler)
    return subprocess.run([PROGRAM]).returncode


if __name__ == "__main__":
    sys.exit(main())
