"""The binding's CUDA half compiles against torch's headers, as setup.py compiles it with a CUDA build of torch.

Needs the CUDA toolkit's headers (CUDA_HOME, or /usr/local/cuda), no GPU and no CUDA build of torch. Linking and
importing it needs the latter: `make gpu` does that, and `FLASH_ATTN_EXT_CUDA=1 pip install .` in such an environment.
"""

import os
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest
from paths import ROOT
from torch.utils import cpp_extension

TOOLKIT = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"
MACRO = "FLASH_ATTN_EXT_WITH_CUDA"
UNITS = ROOT / "csrc" / "translation_units"
SOURCES = [*sorted(UNITS.glob("*.cpp")), ROOT / "csrc/cuda/tiers.cpp"]

pytestmark = pytest.mark.skipif(
    not (TOOLKIT / "cuda_runtime_api.h").exists(),
    reason=f"needs the CUDA toolkit's headers; there are none in {TOOLKIT}",
)


@pytest.fixture
def cuda_macros(tmp_path):
    """The one header of c10/cuda that a CPU build of torch lacks, because CMake writes it for CUDA builds."""
    header = tmp_path / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    header.parent.mkdir(parents=True)
    header.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    return tmp_path


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_compiles(source, cuda_macros):
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"], TOOLKIT, cuda_macros]
    command = ["g++", "-std=c++20", "-fsyntax-only", "-Wall", "-Wno-unknown-pragmas", f"-D{MACRO}"]
    command += ["-DTORCH_EXTENSION_NAME=_C", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    command += [f"-isystem{path}" for path in includes]
    done = subprocess.run([*command, source], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert "warning" not in done.stdout, done.stdout


def text_with_includes(path):
    """The text of a source and of the .cpp files that it includes."""
    included = re.findall(r'^#include "(.+\.cpp)"', path.read_text(), re.M)
    return "".join(each.read_text() for each in [path, *(path.parent / name for name in included)])


def test_every_source_with_the_macro_is_compiled():
    compiled = "".join(text_with_includes(path) for path in SOURCES)
    with_macro = [path for path in (ROOT / "csrc").rglob("*.cpp") if MACRO in path.read_text()]
    assert with_macro
    assert [path for path in with_macro if path.read_text() not in compiled] == []
