"""The CPU kernels on 64-bit ARM: cross-compiled, and run by an emulator where there is one."""

import os
import re
import shutil
import subprocess

import pytest
from paths import CPP, ROOT

BUILD = ROOT / "build" / "arm"
COMPILERS = ["aarch64-linux-gnu-g++", *(f"aarch64-linux-gnu-g++-{version}" for version in range(15, 10, -1))]

# Model of the emulator -> the kernels that it can run. In qemu 7.2 only `max` has FEAT_BF16.
MODELS = {
    "cortex-a53": "generic, neon",
    "cortex-a72": "generic, neon",
    "neoverse-n1": "generic, neon",
    "a64fx": "generic, neon",
    "max": "generic, neon, neon_bf16",
}


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


@pytest.fixture(scope="module")
def emulate(program):
    """Returns a function that runs the program on a model of the emulator. It returns exit status and output."""
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None:
        pytest.skip("needs an emulator of 64-bit ARM, as in Debian's qemu-user-static")

    def run(model, *arguments, program=program):
        command = [emulator, "-cpu", model, program, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        return done.returncode, done.stdout

    return run


def test_compiles(program):
    header = program.read_bytes()[:20]
    assert header[:4] == b"\x7fELF"
    assert int.from_bytes(header[18:20], "little") == 183  # EM_AARCH64


@pytest.mark.parametrize(("model", "kernels"), MODELS.items())
def test_each_model_runs_the_kernels_that_it_supports(emulate, model, kernels):
    status, output = emulate(model, "avx2")
    assert status == 77
    assert output.endswith(f"not an instruction set of this build; allowed here: {kernels}\n")
    status, output = emulate(model, "", "no such case")
    assert output.startswith(kernels.split(", ")[-1] + ":")  # the best kernels, if none are forced
    if "neon_bf16" not in kernels:
        status, output = emulate(model, "neon_bf16")
        assert status == 77
        assert "which this CPU cannot run" in output


@pytest.mark.parametrize(
    ("model", "isa", "match"),
    [
        ("cortex-a53", "generic", "everything, all gradients"),
        ("cortex-a53", "neon", "everything, all"),
        ("a64fx", "neon", "grouped heads, causal"),
        ("neoverse-n1", "neon", "every dtype"),
        ("max", "neon_bf16", "everything, all"),
        ("max", "neon_bf16", "sink, few queries"),
        ("max", "neon_bf16", "lengths"),
    ],
)
def test_values_under_emulation(emulate, model, isa, match):
    status, output = emulate(model, isa, match)
    assert status == 0, output
    assert re.search(rf"^{isa}: [1-9]\d* cases, [1-9]\d* runs, 0 failures$", output, re.M), output


HELPERS = r"""
#include <cstring>
#include "cpu/neon.h"
int main() {
  namespace cpu = flash_attn_ext::cpu;
  for (int shift = 0; shift < 256; ++shift) {
    uint8_t bytes[64];
    uint64_t expected = 0;
    for (int n = 0; n < 64; ++n) {
      bytes[n] = (n * 37 + shift) % 5 == 0 ? 0 : n + shift;
      expected |= uint64_t(bytes[n] != 0) << n;
    }
    if (cpu::bits_of_64_bytes(bytes) != expected) return 1;
    uint32_t four;
    std::memcpy(&four, bytes, sizeof(four));
    const uint32x4_t wide = cpu::widen_4_bytes(four);
    const int32x4_t wide_signed = cpu::widen_4_signed_bytes(four);
    for (int n = 0; n < 4; ++n)
      if (wide[n] != bytes[n] || wide_signed[n] != static_cast<int8_t>(bytes[n])) return 2;
  }
}
"""


def test_vectors_of_bytes(emulate, tmp_path):
    """The functions that widen 8-bit caches and convert bool masks to bits are right for every byte."""
    compiler = next(filter(shutil.which, COMPILERS))
    (tmp_path / "bytes.cpp").write_text(HELPERS)
    command = [compiler, "-std=c++17", "-O2", "-static", f"-I{ROOT / 'csrc'}", "-o", tmp_path / "bytes"]
    subprocess.run([*command, tmp_path / "bytes.cpp"], check=True)
    assert emulate("cortex-a53", program=tmp_path / "bytes") == (0, "")


@pytest.mark.parametrize(
    ("isa", "used", "absent"),
    [("neon", ["fcvtl", "fcvtn", "fmaxnm", "umull"], ["bfdot"]), ("neon_bf16", ["fcvtl", "bfdot", "bfcvtn"], [])],
)
def test_each_kernel_uses_its_own_instructions(program, isa, used, absent):
    tool = shutil.which("aarch64-linux-gnu-objdump")
    if tool is None:
        pytest.skip("needs objdump for 64-bit ARM, as in Debian's binutils-aarch64-linux-gnu")
    command = [tool, "-d", "--no-show-raw-insn", BUILD / f"plain.d/isa_{isa}.o"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for name in used:
        assert len(re.findall(rf"\s{name}\s", text)) >= 4, name
    for name in absent:
        assert name not in text
