"""Tiles in shared memory, wgmma's descriptors and the instructions' fragments: compared with CuTe's, on the host."""

import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from cubins import NVCC
from paths import ROOT


def cute_headers():
    try:
        files = metadata.files("nvidia-cutlass") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if str(file).endswith("include/cute/tensor.hpp"):
            return Path(file.locate()).parent.parent
    pytest.skip("needs CuTe's headers, of PyPI's nvidia-cutlass")


def test_layouts_and_descriptors_equal_cute(tmp_path):
    toolkit = NVCC.parent.parent / "include"
    if not toolkit.exists() or shutil.which("g++") is None:
        pytest.skip("needs g++ and the CUDA toolkit's headers, which CuTe includes")
    program = tmp_path / "cute_layouts"
    ours = (ROOT / "csrc", ROOT / "tests" / "cuda_host")
    includes = [f"-I{path}" for path in (cute_headers(), toolkit, toolkit / "cccl", *ours)]
    source = ROOT / "tests" / "cpp" / "cute_layouts.cpp"
    subprocess.run(["g++", "-std=c++17", "-O1", "-w", *includes, source, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout == "301045 compared, 0 differ\n"
