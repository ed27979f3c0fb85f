"""The CPU kernels without torch (tests/cpp), under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer."""

import os
import re
import shutil
import subprocess

import pytest
from cases import KERNELS
from paths import CPP, ROOT

from flash_attn_ext import available_kernels

BUILD = ROOT / "build" / "sanitizers"
NEEDS = "needs make and g++ (or CXX) with the runtimes of -fsanitize=address,undefined and -fsanitize=thread"

ONE_CASE = "everything, all gradients"
IN_A_KERNEL = r"#[0-3] .* flash_attn_ext::cpu::generic::"  # 1: below a memcpy; 3: below a std::fill
# AMX is emulated with AVX-512 BF16.
ISAS = [isa for isa in KERNELS if isa in available_kernels() or (isa == "amx" and "avx512_bf16" in available_kernels())]
MIN_CASES = 200  # fewer would mean that a list of cases is lost


def run(*command):
    """Returns the exit status and everything that the command prints."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    environment |= {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1", "TSAN_OPTIONS": ""}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, timeout=600
    )
    return done.returncode, done.stdout


@pytest.fixture(scope="session")
def programs():
    """Builds the two programs for the instruction sets of this CPU, and returns their folder."""
    if shutil.which("make") is None:
        pytest.fail(f"{NEEDS}; there is no make")
    status, output = run(
        "make", f"-j{len(os.sched_getaffinity(0))}", "-C", CPP, f"BUILD={BUILD}", f"ISAS={' '.join(ISAS)}"
    )
    assert status == 0, f"{output}\nThe build failed, see above; it {NEEDS}."
    return BUILD


def assert_passed(output, status, isa, min_cases, dtypes=(2, 3)):
    """`dtypes`: the smallest and the largest mean number of dtypes of a case."""
    assert status == 0, output
    cases, runs, failures = map(
        int, re.search(rf"^{isa}: (\d+) cases, (\d+) runs, (\d+) failures$", output, re.M).groups()
    )
    assert cases >= min_cases
    if isa in ("amx", "avx512_bf16"):  # every case in bfloat16, few in other dtypes
        assert cases < runs < 2 * cases
    else:
        fewest, most = dtypes
        assert fewest * cases <= runs <= most * cases
    assert failures == 0


@pytest.mark.parametrize("isa", KERNELS)
def test_memory_and_values(programs, isa):
    """The kernels access no memory outside a buffer, and return the values of the reference.

    On generic: 1 and 3 threads give the same bits. On generic and avx512_bf16: there is no undefined behaviour.
    """
    status, output = run(programs / "address", isa)
    if status == 77:
        assert isa not in ISAS, output
        pytest.skip(f"needs a CPU with {KERNELS[isa]}: {output.strip()}")
    # Each case in float32 and a 16-bit type, if its mask allows both. On generic some cases also in the other dtypes.
    assert_passed(output, status, isa, MIN_CASES, (2, 3) if isa in ("generic", "neon") else (1.8, 2))


@pytest.mark.parametrize("match", ["everything", "grouped heads"])
def test_no_data_race(programs, match):
    status, output = run(programs / "thread", "generic", match)
    assert_passed(output, status, "generic", 12, dtypes=(2, 2))


READ = "q, k, v, mask, slopes, dout, dlse, saved out, saved lse"
READ_BY_DERIVATIVES = "t_q, t_k, t_v, t_mask, t_slopes, saved t_out, saved t_lse"
WRITTEN = "out, lse, dq, dk, dv, dmask, dslopes"
WRITTEN_BY_DERIVATIVES = "jvp's out, jvp's lse, t_out, t_lse, hq, hk, hv, hmask, hslopes"


@pytest.mark.parametrize("name", f"{READ}, {READ_BY_DERIVATIVES}".split(", "))
def test_read_of_one_element_too_many_is_reported(programs, name):
    status, output = run(programs / "address", "generic", ONE_CASE, "--short", name)
    assert status != 0
    assert "ERROR: AddressSanitizer: heap-buffer-overflow" in output
    assert re.search("^READ of size", output, re.M)
    assert re.search(IN_A_KERNEL, output), output
    assert "while running: generic, float32, case " in output


def test_a_workspace_that_is_too_small_is_reported(programs):
    """The workspace ends before an array that this case fills."""
    status, output = run(programs / "address", "generic", ONE_CASE, "--short", "workspace")
    assert status != 0
    assert re.search("ERROR: AddressSanitizer: SEGV", output)
    assert re.search(IN_A_KERNEL, output), output
    assert "while running: generic, float" in output  # float32 or float64, depending on the last array


@pytest.mark.parametrize("name", f"{WRITTEN}, {WRITTEN_BY_DERIVATIVES}".split(", "))
def test_write_of_one_element_too_many_is_reported(programs, name):
    status, output = run(programs / "address", "generic", ONE_CASE, "--short", name)
    assert status != 0
    assert "ERROR: AddressSanitizer: heap-buffer-overflow" in output
    assert re.search(r"^WRITE of size", output, re.M)
    assert re.search(IN_A_KERNEL, output), output


@pytest.mark.parametrize(
    ("program", "fault", "report"),
    [
        ("address", "arena", "AddressSanitizer: use-after-poison"),
        ("address", "overflow", "runtime error: signed integer overflow"),
        ("address", "reference", "FAIL generic, float32, case "),
        ("thread", "race", "ThreadSanitizer: data race"),
    ],
)
def test_other_errors_are_reported(programs, program, fault, report):
    status, output = run(programs / program, "generic", ONE_CASE, "--break", fault)
    assert status != 0
    assert report in output


@pytest.mark.parametrize(
    ("fault", "report"),
    [
        ("tile pairs", "FAIL amx, bfloat16, case "),
        ("tile stride", "FAIL amx, bfloat16, case "),
        ("tile configuration", "FAIL emulated AMX: a tile instruction without a configuration"),
        ("tile release", "FAIL emulated AMX: configured twice"),
    ],
)
def test_a_wrong_emulation_of_amx_is_reported(programs, fault, report):
    """A wrong emulation of AMX, or a wrong use of it, gives wrong values or an error of the emulation."""
    status, output = run(programs / "address", "amx", ONE_CASE, "--break", fault)
    if status == 77:
        pytest.skip(f"needs a CPU with AVX-512 BF16, on which AMX is emulated: {output.strip()}")
    assert status != 0
    assert report in output
