"""Compiles and runs tests/gpu_units, which checks the assumptions of the kernels and of the host tests about the
hardware."""

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from benchmarks import ROOT

SOURCES = ROOT / "tests" / "gpu_units"
PROGRAM = ROOT / "build" / "gpu_units"
# Not -arch=sm_90a, because nvcc 13.0 then also compiles for sm_90.
FLAGS = ("-std=c++20", "-O1", "--expt-relaxed-constexpr", "-gencode=arch=compute_90a,code=sm_90a")


def nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    beside = Path(home) / "bin" / "nvcc"
    return str(beside) if beside.exists() else shutil.which("nvcc")


def sources() -> list[Path]:
    return sorted(SOURCES.glob("*.cu"))


def compile_units(compiler: str) -> None:
    """Compiles the sources in parallel. Exits if one does not compile."""
    PROGRAM.parent.mkdir(exist_ok=True)
    objects = [PROGRAM.parent / f"gpu_units_{source.stem}.o" for source in sources()]
    compilers = [
        subprocess.Popen([compiler, *FLAGS, f"-I{ROOT}", "-c", source, "-o", output])
        for source, output in zip(sources(), objects, strict=True)
    ]
    if any([process.wait() for process in compilers]):
        sys.exit("nvcc could not compile the units")
    subprocess.run([compiler, *FLAGS, *objects, "-o", PROGRAM], check=True)


def is_newer_than_sources(output: Path) -> bool:
    """Whether the output is newer than the units and all of csrc, which they include."""
    files = [*SOURCES.iterdir(), *(path for path in (ROOT / "csrc").rglob("*") if path.is_file())]
    return output.exists() and output.stat().st_mtime > max(path.stat().st_mtime for path in files)


def try_to_compile() -> None:
    """Compiles in parallel to the build. If this fails, the stage `units` compiles again and reports the failure."""
    compiler = nvcc()
    if compiler and not is_newer_than_sources(PROGRAM):
        with suppress(SystemExit, subprocess.CalledProcessError):
            compile_units(compiler)


def main() -> int:
    compiler = nvcc()
    if compiler is None:
        print("needs nvcc: CUDA_HOME, /usr/local/cuda and PATH have none")
        return 1
    if not is_newer_than_sources(PROGRAM):
        compile_units(compiler)
    return subprocess.run([PROGRAM]).returncode


if __name__ == "__main__":
    sys.exit(main())
