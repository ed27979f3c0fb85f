"""Kernels with functions of the user as nvcc's PTX, executed, against dense references: docs/design/ptx.md.

The kernels call the interpreter of programs, so these tests run functions and calls of PTX.
"""

import pytest
import test_flex_attention as cpu
import torch
from cubins import NVCC
from flex_gallery import mask_mods, score_mods
from ptx.kernels import WRONG, Fault, Kernels, Translated

pytestmark = pytest.mark.skipif(not NVCC.exists(), reason=f"needs nvcc to compile the CUDA kernels; there is no {NVCC}")

FORWARD = Kernels("80", "sm80/flex_forward.cuh", ("forward_kernel<Config<In, 64, 64, 2, true>, WithFunctions>",))
BACKWARD = Kernels(
    "80",
    "sm80/flex_backward.cuh",
    ("backward_kernel<BackwardConfig<In, 64, BackwardForm::kOptions>, FunctionsWith<ScoreFunction::kNone>>",),
)
SCORE_BACKWARD = Kernels(
    "80",
    "sm80/flex_backward.cuh",
    ("backward_kernel<BackwardConfig<In, 192, BackwardForm::kOptions>, FunctionsWith<ScoreFunction::kOne>>",),
)
HOPPER_BACKWARD = Kernels(
    "90a",
    "sm90/score_backward.cuh",
    ("backward_kernel<In, 128, 128, false, ScoreBackward<In, 128>>",),
)
HOPPER = Kernels(
    "90a",
    "sm90/flex_forward.cuh",
    ("forward_kernel<In, 64, 64, Form::kScores>",),
    also=("sm90/score_function.cuh",),
)
SIMT = Kernels("80", "simt/flex_backward.cuh", ("dq_kernel<FlexPass<In>, 128, In>",), "float")
FAULTS = {
    "the result of a call replaced": (
        Fault(r"ld\.param\.b32\s+(%r\d+), \[retval0\+0\];", r"mov.u32 \1, 1;", count=2),
        WRONG,
    ),
    "another parameter": (Fault(r"\[param1\+0\], %rd\d+;", "[param1+0], 0;"), "out of bounds|unknown memory"),
    "a parameter never written": (
        Fault(r"st\.param\.b64\s+\[param2\+0\], %rd\d+;", ""),
        "out of bounds|unknown memory",
    ),
    "no result": (Fault(r"st\.param\.b32\s+\[func_retval0\+0\], %r\d+;", ""), WRONG),
    "a parameter out of bounds": (Fault(r"(st\.param\.b64\s+\[param2)\+0", r"\1+4"), "out of bounds of a call"),
    "a comparison of the program": (Fault(r"setp\.le\.s32", "setp.ge.s32", r"run_programI\w+\($"), WRONG),
}


def mask_of(name):
    return mask_mods(1, 140, 200)[name]


@pytest.fixture(scope="module")
def translated_forward(built):
    return Translated(built, (FORWARD,), faults=[fault for fault, _ in FAULTS.values()])


@pytest.fixture
def forward(translated_forward):
    with translated_forward.running() as loaded:
        yield loaded


def check_forward(kernels, score_mod, mask_mod, block_size):
    launches = kernels.launches()
    cpu.check_forward((1, 2, 1, 140, 200, 64), torch.bfloat16, score_mod, mask_mod, block_size, mask_heads=2)
    assert kernels.launches() == launches + 1


@pytest.mark.parametrize(
    ("score", "mask", "block_size"),
    [
        (None, "document", 64),
        (None, "window", (48, 100)),
        ("everything", "prefix_lm", (64, 48)),
        ("integers", None, 64),
    ],
)
def test_forward(forward, score, mask, block_size):
    score_mod = score_mods(2, 140, 200, torch.float64)[score][0] if score else None
    check_forward(forward, score_mod, mask_of(mask) if mask else None, block_size)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(forward, fault):
    with forward.finding(FAULTS, fault):
        check_forward(forward, None, mask_of("window"), (48, 100))


def test_scores_on_hopper(built):
    """The call of the interpreter lies between products of wgmma."""
    translated = Translated(built, (HOPPER,))
    score_mod, _ = score_mods(2, 140, 200, torch.float64)["everything"]
    with translated.running(9, 0):
        check_forward(translated, score_mod, mask_of("prefix_lm"), (64, 48))


def test_gradients_of_masks(built):
    translated = Translated(built, (BACKWARD,))
    with translated.running():
        cpu.check((1, 2, 1, 130, 300, 64), torch.bfloat16, None, mask_mods(1, 130, 300)["window"], block_size=(48, 100))
        assert translated.launches() == 1


@pytest.mark.parametrize(("kernels", "gpu"), [(SCORE_BACKWARD, (8, 0)), (HOPPER_BACKWARD, (9, 0))], ids=["80", "90a"])
def test_gradients_of_score_functions(built, kernels, gpu):
    """Two launches, because the gradients of captured tensors need two passes."""
    translated = Translated(built, (kernels,))
    score_mod, captured = score_mods(2, 70, 90, torch.float64)["relative_table"]
    with translated.running(*gpu):
        cpu.check((1, 2, 1, 70, 90, 64), torch.bfloat16, score_mod, mask_mods(1, 70, 90)["window"], captured, 64)
        assert translated.launches() == 2


def test_gradients_of_captured_tensors(built):
    """Sums of integers by atomic instructions of 64 bits."""
    translated = Translated(built, (SIMT,))
    score_mod, captured = score_mods(2, 70, 90, torch.float64)["everything"]
    with translated.running():
        cpu.check((1, 2, 1, 70, 90, 64), torch.float32, score_mod, None, captured)
        assert translated.launches() == 1
