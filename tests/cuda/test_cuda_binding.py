"""The sources of a CUDA build that g++ compiles, and not nvcc, as setup.py compiles them with a CUDA build of torch.

Two kinds: the binding's CUDA half, against torch's headers, and the C++ sources of csrc/cuda. A header of csrc/cuda
with functions of the GPU compiles in tests/cuda_host, but not here.

Needs the CUDA toolkit's headers (CUDA_HOME, or /usr/local/cuda), no GPU and no CUDA build of torch. Only with a CUDA
build of torch can the binding be linked and imported. `make gpu` and `FLASH_ATTN_EXT_CUDA=1 pip install .` do that.
"""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from paths import ROOT
from torch.utils import cpp_extension

TOOLKIT = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
MACRO = "FLASH_ATTN_EXT_WITH_CUDA"
# The sources that differ in a build with CUDA. They are compiled as one unit, as setup.py compiles sources: torch's
# headers take half of the time.
SOURCES = sorted(path for path in (ROOT / "csrc").rglob("*.cpp") if MACRO in path.read_text())

pytestmark = pytest.mark.skipif(
    not (TOOLKIT / "cuda_runtime_api.h").exists(),
    reason=f"needs the CUDA toolkit's headers; there are none in {TOOLKIT}",
)


def assert_compiles(source: Path, *options: str) -> None:
    """g++ accepts the source without a warning, with the macro of a CUDA build."""
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wno-unknown-pragmas", f"-D{MACRO}", *options]
    done = subprocess.run([*command, source], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert "warning" not in done.stdout, done.stdout


@pytest.fixture
def cuda_macros(tmp_path):
    """The one header of c10/cuda that a CPU build of torch lacks, because CMake writes it for CUDA builds."""
    header = tmp_path / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    header.parent.mkdir(parents=True)
    header.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    return tmp_path


def test_compiles(cuda_macros):
    assert len(SOURCES) >= 4, "the macro has another name"
    unit = cuda_macros / "unit.cpp"
    unit.write_text("".join(f'#include "{source}"\n' for source in SOURCES))
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"], TOOLKIT, cuda_macros]
    macros = ["-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    assert_compiles(unit, *macros, *(f"-isystem{path}" for path in includes))


# gpu_code.cpp: setup.py passes the list of GPUs.
OF_TIERS = sorted((ROOT / "csrc" / "cuda").rglob("*.cpp"))


@pytest.mark.parametrize("source", OF_TIERS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_source_without_kernels_compiles_without_nvcc(source):
    assert_compiles(source, "-DFLASH_ATTN_EXT_GPU_CODE=sm_80", f"-isystem{TOOLKIT}")
