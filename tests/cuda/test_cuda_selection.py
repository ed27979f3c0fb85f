"""Which CUDA tier runs a call, why no faster tier does, and the errors of a forced tier and of a build without its
code.

The selector is the real one, built for the host (tests/cuda_host), which sets the GPU and the build that it sees.
"""

import os
import subprocess
import sys

import pytest
import torch
from cuda_host import library
from helpers import make_qkv

from flash_attn_ext import _ops, flash_attn, force_cuda_tier

VARIABLE = "FLASH_ATTN_EXT_CUDA_TIER"
NOT_A_TIER = "got 'sm70'; allowed: simt, sm75, sm80, sm90"


@pytest.fixture
def kernels(built):
    loaded = library.Library(built)
    yield loaded
    loaded.force_tier("")


def params_of(kind=library.AttentionParams, dtype=torch.bfloat16, head_dim=64, seqlen=256, **changed):
    """A call that every tier can run, unless it is changed."""
    sizes = library.Sizes(1, 2, 2, seqlen, seqlen, head_dim, head_dim)
    rows = library.Tensor4(4096, 2 * seqlen * head_dim, seqlen * head_dim, head_dim)
    tensors = dict.fromkeys(("q", "k", "v", "out"), rows)
    return kind(dtype=library.DTYPES[dtype], sizes=sizes, scale=0.125, **tensors | changed)


def test_the_fastest_tier_that_can(kernels):
    with kernels.on_gpu(9, 0):
        assert kernels.choice(params_of()) == ("sm90", [])
        assert kernels.choice(params_of(softcap=5.0)) == ("sm90", [])
        slopes = library.AlibiParams(4096)
        assert kernels.choice(params_of(alibi=slopes)) == ("sm80", ["sm90: no ALiBi or dropout"])
        assert kernels.choice(params_of(dtype=torch.float32)) == (
            "simt",
            ["sm90: only float16 and bfloat16", "sm80: only float16 and bfloat16"],
        )


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 1)])
def test_hopper_code_is_for_hopper_only(kernels, capability):
    with kernels.on_gpu(*capability):
        tier, why_not = kernels.choice(params_of())
    assert tier == "sm80"
    version = f"{capability[0]}.{capability[1]}"
    assert why_not == [f"sm90: this GPU has compute capability {version}; wgmma and TMA need 9.0"]


@pytest.mark.parametrize("kind", [library.AttentionParams, library.BackwardParams])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_choice_has_a_reason_for_each_faster_tier(kernels, kind, dtype):
    tiers = ["sm90", "sm80", "simt"]
    for capability in [(8, 0), (9, 0)]:
        with kernels.on_gpu(*capability):
            tier, why_not = kernels.choice(params_of(kind, dtype))
        assert [reason.split(": ")[0] for reason in why_not] == tiers[: tiers.index(tier)]
        assert all(len(reason) > len("sm90: ") for reason in why_not)


@pytest.mark.parametrize("kind", [library.AttentionParams, library.BackwardParams])
def test_a_sequence_that_32_bits_cannot_count(kernels, kind):
    with kernels.on_gpu(9, 0):
        assert kernels.choice(params_of(kind, seqlen=2**31 - 1024))[0] == "sm80"
        tier, why_not = kernels.choice(params_of(kind, seqlen=2**31 - 1023))
    assert tier == "simt"
    assert why_not[1] == "sm80: only sequences of up to 2^31 - 1024 rows"


# The tiers of calls in float16 and bfloat16, by GPU, in a build for the GPU: docs/gpus.md has the same.
GPUS = {
    "T4": (7, 5, "sm_75", "sm75", "simt"), "V100": (7, 0, "sm_70", "simt", "simt"),
    "A100": (8, 0, "sm_80", "sm80", "sm80"), "A10": (8, 6, "sm_80", "sm80", "sm80"),
    "Orin": (8, 7, "sm_80", "sm80", "sm80"), "L4": (8, 9, "sm_80", "sm80", "sm80"),
    "RTX 4090": (8, 9, "sm_80", "sm80", "sm80"), "H100": (9, 0, "sm_80,sm_90a", "sm90", "sm90"),
    "H200": (9, 0, "sm_80,sm_90a", "sm90", "sm90"), "B200": (10, 0, "sm_80,compute_80", "sm80", "sm80"),
    "RTX 5090": (12, 0, "sm_80,compute_80", "sm80", "sm80"),
}  # fmt: skip


@pytest.mark.parametrize("gpu", GPUS)
def test_tiers_of_each_gpu(kernels, gpu):
    major, minor, code, *tiers = GPUS[gpu]
    with kernels.on_gpu(major, minor, code):
        assert [kernels.choice(params_of(dtype=dtype))[0] for dtype in (torch.float16, torch.bfloat16)] == tiers
        assert kernels.choice(params_of(dtype=torch.float32))[0] == "simt"


@pytest.mark.parametrize("code", ["compute_75", "sm_75,compute_75"])
def test_ptx_for_turing_is_no_code_of_sm80(kernels, code):
    """Its kernels of sm80 trap."""
    with kernels.on_gpu(8, 6, code):
        tier, why_not = kernels.choice(params_of())
    assert tier == "simt"
    assert why_not[1] == f"sm80: this build has no code for compute capability 8.6, only {code}"


class TestCodeOfTheBuild:
    @pytest.mark.parametrize("code", ["sm_80,compute_80", "sm_80,compute_80,sm_90", "sm_90", "compute_90"])
    def test_hopper_without_9_0a_takes_sm80(self, kernels, code):
        """9.0 has none of the instructions that 9.0a has."""
        with kernels.on_gpu(9, 0, code):
            tier, why_not = kernels.choice(params_of())
        assert tier == "sm80"
        assert why_not == [f"sm90: this build has no code for compute capability 9.0a, only {code}"]

    @pytest.mark.parametrize("code", ["sm_90a", "sm_80,compute_90a"])
    def test_9_0a_by_machine_code_or_ptx(self, kernels, code):
        with kernels.on_gpu(9, 0, code):
            assert kernels.choice(params_of())[0] == "sm90"

    @pytest.mark.parametrize(
        ("capability", "code", "runs"),
        [
            ((7, 5), "sm_80,compute_80,sm_90a", False),
            ((8, 0), "sm_80", True),
            ((8, 6), "sm_80", True),
            ((8, 0), "sm_86", False),
            ((9, 0), "sm_80", False),
            ((9, 0), "sm_80,compute_80", True),
            ((9, 0), "compute_90a", True),
            ((10, 0), "sm_90a", False),
            ((10, 0), "compute_90a", False),
            ((10, 3), "sm_100f", True),
            ((11, 0), "compute_100f", False),
            ((10, 3), "sm_100a", False),
            ((12, 0), "sm_80,compute_80", True),
            ((12, 1), "sm_120", True),
            ((12, 1), "sm_100,compute_100", True),
        ],
    )
    def test_what_runs_on_what(self, kernels, capability, code, runs):
        with kernels.on_gpu(*capability, code):
            answer, _ = kernels.choice(params_of(dtype=torch.float32))
        version = f"{capability[0]}.{capability[1]}"
        refusal = f"simt: this build has no code for compute capability {version}, only {code}"
        assert answer == ("simt" if runs else refusal)

    def test_an_old_gpu_is_an_error_before_any_launch(self, kernels):
        q, k, v = (t.detach() for t in make_qkv(1, 2, 20, 20, 64))
        with kernels.on_gpu(7, 5), library.as_cpu_kernels(kernels):
            with pytest.raises(library.KernelError, match=r"simt: this build has no code for compute capability 7\.5"):
                flash_attn(q, k, v)
            _, why_not = kernels.choice(params_of())
        assert why_not == [
            "sm90: this GPU has compute capability 7.5; wgmma and TMA need 9.0",
            "sm80: this GPU has compute capability 7.5; cp.async and mma.sync.m16n8k16 need 8.0",
            "sm75: this build has no code for compute capability 7.5, only sm_80,compute_80,sm_90a",
            "simt: this build has no code for compute capability 7.5, only sm_80,compute_80,sm_90a",
        ]


class TestForcedTier:
    @pytest.mark.parametrize("tier", ["simt", "sm80", "sm90"])
    def test_it_runs_and_nothing_else(self, kernels, tier):
        q, k, v = (t.detach() for t in make_qkv(1, 1, 20, 20, 64, dtype=torch.bfloat16))
        kernels.force_tier(tier)
        with kernels.on_gpu(9, 0), library.as_cpu_kernels(kernels):
            flash_attn(q, k, v)
            assert f"{tier}::".encode() in kernels.c.last_kernel()
            chosen, why_not = kernels.choice(params_of())
        faster = ["sm90", "sm80", "simt"][: ["sm90", "sm80", "simt"].index(tier)]
        assert (chosen, why_not) == (tier, [f"{name}: {tier} is forced" for name in faster])

    def test_an_impossible_call_is_an_error_with_its_reason(self, kernels):
        q, k, v = (t.detach() for t in make_qkv(1, 1, 20, 20, 64))
        kernels.force_tier("sm80")
        with (
            library.as_cpu_kernels(kernels),
            pytest.raises(library.KernelError, match=r"sm80: only float16 and bfloat16 \(sm80 is forced\)"),
        ):
            flash_attn(q, k, v)
        kernels.force_tier("sm90")  # on a GPU of 8.0
        refusal = "this GPU has compute capability 8.0; {} ({} is forced)"
        assert kernels.choice(params_of())[0] == "sm90: " + refusal.format("wgmma and TMA need 9.0", "sm90")
        kernels.force_tier("sm75")
        why = "its kernels of mma.sync.m16n8k8 are for 7.5"
        assert kernels.choice(params_of(dtype=torch.float16))[0] == "sm75: " + refusal.format(why, "sm75")
        kernels.force_tier("")
        assert kernels.choice(params_of(dtype=torch.float32))[0] == "simt"

    @pytest.mark.parametrize("name", ["sm70", "SIMT", " sm80"])
    def test_an_unknown_name_changes_nothing(self, kernels, name):
        kernels.force_tier("simt")
        with pytest.raises(ValueError, match=f"tier: got '{name}'; allowed: simt, sm75, sm80, sm90"):
            kernels.force_tier(name)
        assert kernels.choice(params_of())[0] == "simt"


class TestWithoutACudaHalf:
    """A build for the CPU cannot run any tier, and says so when a tier is forced."""

    pytestmark = pytest.mark.skipif(
        _ops._C.build_info()["cuda"], reason="needs a build without the CUDA half: FLASH_ATTN_EXT_CUDA=0"
    )

    def test_python(self):
        with pytest.raises(ValueError, match="tier: got 'sm80', but this build has no CUDA half"):
            force_cuda_tier("sm80")
        with pytest.raises(ValueError, match=f"tier: {NOT_A_TIER}"):
            force_cuda_tier("sm70")
        for nothing in (None, ""):
            force_cuda_tier(nothing)
        assert _ops._C.forced_cuda_tier() is None

    @pytest.mark.parametrize(
        ("value", "message"), [("sm80", "got 'sm80', but this build has no CUDA half"), ("sm70", NOT_A_TIER)]
    )
    def test_environment(self, value, message):
        done = import_with(value)
        assert done.returncode != 0
        assert done.stderr.strip().splitlines()[-1] == f"ValueError: {VARIABLE}: {message}"


def import_with(value):
    """A fresh interpreter with the variable set."""
    code = "import flash_attn_ext; print('imported')"
    environment = {**os.environ, VARIABLE: value}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)


def test_an_empty_environment_variable_is_as_none():
    done = import_with("")
    assert (done.returncode, done.stdout.strip()) == (0, "imported"), done.stderr


def test_the_environment_forces_a_tier(built):
    """Read when the library is first asked; set here after this build's own import, which would refuse it."""
    program = f"""
import os, sys
sys.path[:0] = {sys.path!r}
import test_cuda_selection as test
os.environ[{VARIABLE!r}] = "simt"
kernels = test.library.Library({str(built)!r})
for forced in (None, "sm80", ""):
    if forced is not None:
        kernels.force_tier(forced)
    print(kernels.choice(test.params_of())[0])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["simt", "sm80", "simt"], done.stderr
