"""The CPU kernels on 64-bit ARM: cross-compiled, and run by an emulator where there is one."""

import os
import re
import shutil
import subprocess

import pytest
from paths import CPP, ROOT

BUILD = ROOT / "build" / "arm"
COMPILERS = ["aarch64-linux-gnu-g++", *(f"aarch64-linux-gnu-g++-{version}" for version in range(15, 10, -1))]


@pytest.fixture(scope="module")
def program():
    compiler = next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        pytest.skip("needs a compiler for 64-bit ARM, as in Debian's g++-12-aarch64-linux-gnu")
    target = BUILD / "plain"
    jobs = f"-j{len(os.sched_getaffinity(0))}"
    done = subprocess.run(
        ["make", jobs, "-C", CPP, f"CXX={compiler}", f"BUILD={BUILD}", target], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return target


def test_compiles(program):
    header = program.read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    assert int.from_bytes(header[18:20], "little") == 183  # EM_AARCH64


@pytest.mark.parametrize("match", ["decode", "everything", "bool"])
def test_values_under_emulation(program, match):
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None:
        pytest.skip("needs an emulator of 64-bit ARM, as in Debian's qemu-user-static")
    done = subprocess.run([emulator, program, "generic", match], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout
    assert re.search(r"^generic: [1-9]\d* cases, [1-9]\d* runs, 0 failures$", done.stdout, re.M), done.stdout


def test_only_the_generic_kernels_exist_there(program):
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None:
        pytest.skip("needs an emulator of 64-bit ARM, as in Debian's qemu-user-static")
    done = subprocess.run([emulator, program, "avx2"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 77
    assert "not an instruction set of this build; allowed here: generic" in done.stdout
