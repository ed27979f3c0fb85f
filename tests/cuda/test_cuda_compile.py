"""What nvcc makes of every kernel, for sm_80 and sm_90a: no register spills, no local memory.

A spill or an array that the compiler could not keep in registers is traffic to memory that no test of values sees.
Needs nvcc (CUDA_HOME, or /usr/local/cuda), no GPU.
"""

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest
from paths import ROOT

CUDA = ROOT / "csrc" / "cuda"
NVCC = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"
ARCHITECTURES = ["80", "90a"]

pytestmark = pytest.mark.skipif(not NVCC.exists(), reason=f"needs nvcc to compile the CUDA kernels; there is no {NVCC}")

FUNCTION = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\w+)'")
MEMORY = re.compile(r"\d+ bytes stack frame, \d+ bytes spill stores, \d+ bytes spill loads")
NO_MEMORY = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"


def nvcc_flags():
    """What setup.py gives nvcc, beside what torch adds."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if isinstance(node, ast.Dict):
            flags = {ast.unparse(k): v for k, v in zip(node.keys, node.values, strict=True)}
            if "'nvcc'" in flags:
                return ast.literal_eval(flags["'nvcc'"])
    raise AssertionError("setup.py no longer has a dict of compiler flags with the key 'nvcc'")


def compile_verbosely(source, output):
    """Everything that nvcc and ptxas say of one source."""
    targets = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    command = [
        NVCC,
        "-std=c++20",
        *nvcc_flags(),
        *targets,
        "-Xptxas",
        "-v",
        "--threads",
        "2",
        "-c",
        source,
        "-o",
        output,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert "warning" not in done.stdout, done.stdout
    return done.stdout


@pytest.mark.parametrize("source", sorted(CUDA.rglob("*.cu")), ids=lambda path: str(path.relative_to(CUDA)))
def test_no_spills_and_no_local_memory(source, tmp_path):
    said = compile_verbosely(source, tmp_path / "object.o")
    kernels, memory = FUNCTION.findall(said), MEMORY.findall(said)
    assert len(memory) >= len(kernels)
    for architecture in ARCHITECTURES:
        assert any(a == architecture for _, a in kernels) or source.name == "select.cu", (
            "a source of kernels shows some"
        )
    assert all(line == NO_MEMORY for line in memory), said


def test_local_memory_is_seen(tmp_path):
    """The check itself: a kernel with an array that cannot be kept in registers."""
    source = tmp_path / "array.cu"
    source.write_text(
        "__global__ void kernel(float* x, int n) {\n"
        "  float a[64] = {};\n"
        "  for (int i = 0; i < 64; ++i) a[x[i] > 0 ? i : n] += x[i];\n"
        "  x[0] = a[n];\n"
        "}\n"
    )
    memory = MEMORY.findall(compile_verbosely(source, tmp_path / "object.o"))
    assert len(memory) == len(ARCHITECTURES)
    assert all(line != NO_MEMORY for line in memory)
