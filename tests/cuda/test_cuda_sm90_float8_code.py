"""The machine code of the sm90 kernel with products of float8, by the rules of test_cuda_sm90_code.py."""

import re
from collections import Counter

import pytest
import sass
from cubins import CUDA, NVCC, compiled_once
from test_cuda_sm90_code import check_the_messages_of_ptxas, division, functions_of

SOURCE = CUDA / "sm90" / "forward_float8.cu"
KEYS = {64: 128, 128: 128, 256: 96}  # of a tile, by head dimension
# Instructions of one iteration of the main loop, masks included, at most.
MOST_INSTRUCTIONS = {64: 560, 128: 605, 256: 590}

pytestmark = pytest.mark.skipif(not NVCC.exists(), reason=f"needs nvcc to compile the CUDA kernels; there is no {NVCC}")


@pytest.fixture
def code(head_dim):
    found = [c for name, c in functions_of(compiled_once(SOURCE, "90a")[0]).items() if f"ILi{head_dim}E" in name]
    assert len(found) == 1
    return found[0]


def test_ptxas_leaves_wgmma_and_registers_alone():
    said = compiled_once(SOURCE, "90a")[1]
    check_the_messages_of_ptxas(said)
    assert re.findall(r"(\d+) bytes spill", said) == ["0"] * 6  # stores and loads of three kernels


@pytest.mark.parametrize("head_dim", KEYS)
def test_machine_code(code, head_dim):
    marks = {"QGMMA": "P", "MUFU.EX2": "E", "WARPGROUP.DEPBAR": "W", "WARPGROUP.ARRIVE": "A"}
    order = "".join(mark for i in code for word, mark in marks.items() if i.operation.startswith(word))
    scores, output = "P" * (head_dim // 32), "P" * (KEYS[head_dim] // 32)
    exponentials = "E" * (KEYS[head_dim] // 2 + 2)
    schedule = "A" + scores + "W" + exponentials + "A" + scores + "A" + output + "W" + exponentials + "W"
    assert schedule + "A" + output + "W" in order, order


@pytest.mark.parametrize("head_dim", KEYS)
def test_main_loop(code, head_dim):
    loop = sass.main_loop(code, (head_dim + KEYS[head_dim]) // 32)
    assert len(loop) <= MOST_INSTRUCTIONS[head_dim]
    assert not [str(i) for i in loop if division("plain").match(i.operation)]
    assert not [str(i) for i in loop if i.operation.startswith(("LDL", "STL", "R2UR"))]
    # P moves to no other thread: the only shuffles are of the row maximum.
    assert Counter(i.operation.split(".")[0] for i in loop)["SHFL"] == 4


@pytest.mark.parametrize("head_dim", KEYS)
def test_registers(code, head_dim):
    """No instruction touches registers of a running product, or needs more registers than setmaxnreg leaves."""
    assert sass.hazards(code) == []
    waits = [n for n, i in enumerate(code) if i.operation.startswith("WARPGROUP.DEPBAR")]
    assert len(waits) == 4
    assert all(sass.hazards(code[:n] + code[n + 1 :]) for n in waits)
    found = sass.registers_after_setmaxnreg(code)
    assert len(found) == 2
    assert all(0 < used <= most for most, used in found)


@pytest.mark.parametrize("head_dim", KEYS)
def test_a_warp_transposes_without_conversion(code, head_dim):
    """For each 32 keys and 16 columns: one ldmatrix, four permutations of bytes, one stmatrix."""
    assert any(i.operation.startswith("LDSM.16.MT88.4") for i in code)
    assert any(i.operation.startswith("STSM.16.M88.4") or i.operation.startswith("STSM") for i in code)
