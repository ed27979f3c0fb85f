"""The AMX kernels on a CPU with AMX, and the emulation (tests/cpp/emulated_amx.cpp) against this CPU.

Other machines run the emulation only, so these tests show that its results are the CPU's results.
"""

import os
import re

import pytest
from cases import KERNELS
from paths import CPP, ROOT
from test_sanitizers import MIN_CASES, assert_passed, run

import flash_attn_ext

BUILD = ROOT / "build" / "sanitizers"
INPUTS = 9  # kinds of operands in amx_hardware.cpp

pytestmark = pytest.mark.skipif(
    "amx" not in flash_attn_ext.available_kernels(), reason=f"needs a CPU with {KERNELS['amx']}"
)


def built(name):
    """Builds a program of tests/cpp/Makefile and returns its path."""
    program = BUILD / name
    status, output = run("make", f"-j{len(os.sched_getaffinity(0))}", "-C", CPP, f"BUILD={BUILD}", program)
    assert status == 0, output
    return program


def test_the_emulation_has_the_bits_of_the_cpu():
    """Sums of subnormal numbers, of infinities and of ordinary numbers are equal. NaNs may have other payloads."""
    status, output = run(built("amx_hardware"))
    assert status == 0, output
    assert len(re.findall(r"\d{5,} sums, 0 different", output)) == INPUTS, output


def test_a_wrong_emulation_differs_from_the_cpu():
    status, output = run(built("amx_hardware"), "tile pairs")
    assert status == 1
    assert "FAIL near 1: " in output


def test_memory_and_values_on_the_cpu():
    """As test_sanitizers.test_memory_and_values. AddressSanitizer does not see the accesses of tile instructions."""
    status, output = run(built("hardware"), "amx")
    assert_passed(output, status, "amx", MIN_CASES)
