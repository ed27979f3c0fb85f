"""The machine code of every kernel has no register spills and no local memory.

A spill or an array that the compiler could not keep in registers is traffic to memory that no test of values sees.
Needs nvcc (CUDA_HOME, or /usr/local/cuda), no GPU.
"""

import re

import pytest
from cubins import CUDA, NVCC, compiled, compiled_once

pytestmark = pytest.mark.skipif(not NVCC.exists(), reason=f"needs nvcc to compile the CUDA kernels; there is no {NVCC}")

FUNCTION = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\w+)'")
MEMORY = re.compile(r"\d+ bytes stack frame, \d+ bytes spill stores, \d+ bytes spill loads")
NO_SPILLS = " 0 bytes spill stores, 0 bytes spill loads"
NO_MEMORY = f"0 bytes stack frame,{NO_SPILLS}"
# The plain kernels of two row tiles need all registers. On an H200, at head dimension 64, tiles of 128 keys with these
# spills took 0.86 of the time of tiles of 64 keys without spills. The loop over values with Inf or NaN is not unrolled,
# which halves the time of compilation; then a kernel with functions of the user spills two registers.
SPILLED = {"sm80/forward_bfloat16.cu": 432, "sm80/flex_forward_bfloat16.cu": 8}  # bytes of a thread, at most


def sources():
    """(source, architecture). The dtypes share their text, so each is compiled for one architecture.

    Builds and `make gpu` compile them all. float16 differs from bfloat16 in its conversions alone, and sm75 has float16
    only. In simt float64 needs the most registers: 240 in the backward, 248 in the double backward, 255 in the forward
    and in forward mode. There bfloat16 needs 216, 239, 227 and 250.
    """
    for source in sorted(CUDA.rglob("*.cu")):
        is_sm75, is_sm90, is_simt = (source.parent.name == tier for tier in ("sm75", "sm90", "simt"))
        if source.stem.endswith("_float16") and not is_sm75:
            continue
        if is_simt and source.stem.endswith(("_bfloat16", "_float32")):
            continue
        architecture = "75" if is_sm75 else "90a" if is_sm90 else "80"
        yield pytest.param(source, architecture, id=f"{source.relative_to(CUDA)}-{architecture}")


@pytest.mark.parametrize(("source", "architecture"), list(sources()))
def test_no_spills_and_no_local_memory(source, architecture):
    _, said = compiled_once(source, architecture)
    kernels, memory = FUNCTION.findall(said), MEMORY.findall(said)
    assert "warning" not in said, said
    assert len(memory) >= len(kernels)
    assert kernels or source.name == "select.cu"
    # A program's values are an array. Its indices are known only at run time.
    wanted = NO_SPILLS if source.stem.startswith(("flex_", "score_")) else NO_MEMORY
    allowed = SPILLED.get(str(source.relative_to(CUDA)), 0)
    numbers = [max(map(int, re.findall(r"(\d+) bytes spill", line))) for line in memory]
    assert all(line.endswith(wanted) or number <= allowed for line, number in zip(memory, numbers, strict=True)), said


def test_kernels_of_newer_gpus_compile_for_7_5(tmp_path):
    """There they are empty, so that every list of architectures compiles. One unit takes half the time of 12."""
    units = [p for tier in ("sm80", "sm90") for p in sorted((CUDA / tier).glob("*.cu")) if "_float16" not in p.stem]
    source = tmp_path / "newer.cu"
    source.write_text("".join(f'#include "{path}"\n' for path in units))
    said = compiled(source, "75", tmp_path / "newer.cubin")
    memory = MEMORY.findall(said)
    assert "warning" not in said, said
    assert len(memory) >= len(FUNCTION.findall(said)) > 100
    assert all(line.endswith(NO_MEMORY) for line in memory), said


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
    memory = MEMORY.findall(compiled(source, "80", tmp_path / "array.cubin"))
    assert len(memory) == 1
    assert all(line != NO_MEMORY for line in memory)
