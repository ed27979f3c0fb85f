"""The kernels that run: reported, forced from Python, forced from the environment, and counted."""

import functools
import os
import pathlib
import subprocess
import sys

import pytest
import torch
from cases import KERNELS

from flash_attn_ext import (
    _ops,
    active_kernel,
    available_kernels,
    flash_attn,
    force_kernel,
)

VARIABLE = "FLASH_ATTN_EXT_ISA"


@pytest.fixture(autouse=True)
def detection(monkeypatch):
    """A test begins with the kernels that the CPU decides. After it, environment and CPU decide again."""
    monkeypatch.delenv(VARIABLE, raising=False)
    force_kernel(None)
    yield
    monkeypatch.undo()
    force_kernel(None)


@pytest.fixture(params=KERNELS)
def kernel(request):
    """Each instruction set. If this CPU lacks one: checks that it cannot be forced, and skips the test."""
    if request.param not in available_kernels():
        with pytest.raises(
            ValueError, match=f"got '{request.param}', which this CPU cannot run; allowed here: generic"
        ):
            force_kernel(request.param)
        pytest.skip(f"needs a CPU with {KERNELS[request.param]}")
    return request.param


def calls_during(action):
    """Returns how often forward and backward kernels ran, by instruction set."""
    before = _ops._C.kernel_calls()
    action()
    after = _ops._C.kernel_calls()
    return {isa: after[isa] - before[isa] for isa in after if after[isa] != before[isa]}


def forward_and_backward():
    q, k, v = (torch.randn(2, 3, 70, 20, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = flash_attn(q, k, v)
    out.sum().backward()


def intel_with_avx512_fp16():
    """Whether the CPU is a Sapphire Rapids or later, whose products of bfloat16 pairs are slower than widening."""
    text = pathlib.Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""
    return "GenuineIntel" in text and "avx512_fp16" in text


def test_detection_takes_the_best():
    available = available_kernels()
    slowest_first = list(KERNELS)
    if intel_with_avx512_fp16():
        slowest_first.remove("avx512_bf16")
        slowest_first.insert(slowest_first.index("avx512"), "avx512_bf16")
    assert available == [isa for isa in slowest_first if isa in available]
    assert available[0] == "generic"
    assert active_kernel() == available[-1]
    assert calls_during(forward_and_backward) == {available[-1]: 2}


def test_the_forced_kernel_runs(kernel):
    force_kernel(kernel)
    assert active_kernel() == kernel
    assert calls_during(forward_and_backward) == {kernel: 2}


def test_the_counter_tells_forward_from_backward(kernel):
    force_kernel(kernel)
    q = torch.randn(1, 1, 4, 8, dtype=torch.bfloat16, requires_grad=True)
    results = []
    assert calls_during(lambda: results.append(flash_attn(q, q, q))) == {kernel: 1}
    assert calls_during(results[0].sum().backward) == {kernel: 1}


@pytest.mark.parametrize(
    ("isa", "shared"), [("avx512_bf16", "avx512"), ("amx", "avx512"), ("neon_bf16", "neon")], ids=lambda name: name
)
def test_kernels_for_bfloat16_share_the_kernels_of_other_dtypes(isa, shared):
    if isa not in available_kernels():
        pytest.skip(f"needs a CPU that can run the kernels for {isa}")
    force_kernel(isa)
    for dtype in (torch.float32, torch.float64, torch.float16):
        q = torch.randn(1, 1, 4, 8, dtype=dtype)
        assert calls_during(functools.partial(flash_attn, q, q, q)) == {shared: 1}


def test_kernels_agree(kernel):
    """Every instruction set runs the same algorithm. Only rounding differs."""
    q, k, v = (torch.randn(1, 2, 65, 33, dtype=torch.float64) for _ in range(3))
    force_kernel("generic")
    expected = flash_attn(q, k, v, is_causal=True)
    force_kernel(kernel)
    torch.testing.assert_close(flash_attn(q, k, v, is_causal=True), expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", ["sse9", "AVX2", " generic", "generic "])
def test_an_unknown_name_is_an_error_and_changes_nothing(name):
    force_kernel("generic")
    with pytest.raises(ValueError, match="not an instruction set of this build") as error:
        force_kernel(name)
    assert f"got '{name}'" in str(error.value)
    assert str(error.value).endswith("allowed here: " + ", ".join(available_kernels()))
    assert active_kernel() == "generic"
    assert calls_during(forward_and_backward) == {"generic": 2}


@pytest.mark.parametrize("nothing", [None, ""])
def test_forcing_nothing_returns_to_detection(nothing):
    force_kernel("generic")
    force_kernel(nothing)
    assert active_kernel() == available_kernels()[-1]


def test_forcing_nothing_returns_to_the_environments_choice(kernel, monkeypatch):
    monkeypatch.setenv(VARIABLE, kernel)
    force_kernel(available_kernels()[-1])
    force_kernel(None)
    assert active_kernel() == kernel


def test_an_impossible_environment_is_an_error_that_changes_nothing(monkeypatch):
    force_kernel("generic")
    monkeypatch.setenv(VARIABLE, "sse9")
    with pytest.raises(ValueError, match=f"{VARIABLE}: got 'sse9'"):
        force_kernel(None)
    assert active_kernel() == "generic"


def import_with(value):
    """Imports the package in a new interpreter with the variable set."""
    code = "import flash_attn_ext as f; print(f.active_kernel(), f.available_kernels()[-1])"
    environment = {**os.environ, VARIABLE: value}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)


def test_environment_forces_at_import():
    done = import_with("generic")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["generic", available_kernels()[-1]]


def test_empty_environment_variable_is_as_none():
    done = import_with("")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [available_kernels()[-1]] * 2


def test_unknown_name_in_the_environment_raises_at_import():
    done = import_with("sse9")
    assert done.returncode != 0
    last_line = done.stderr.strip().splitlines()[-1]
    allowed = ", ".join(available_kernels())
    assert last_line == (
        f"ValueError: {VARIABLE}: got 'sse9', which is not an instruction set of this build; allowed here: {allowed}"
    )
