"""The sm75 tier's kernels as nvcc's PTX, executed, against the dense oracle: docs/design/ptx.md."""

import pytest
import torch
from cubins import NVCC
from helpers import check_against_reference, check_forward_against_reference, make_qkv
from ptx.kernels import WRONG, Fault, Kernels, Translated, translated

pytestmark = pytest.mark.skipif(not NVCC.exists(), reason=f"needs nvcc to compile the CUDA kernels; there is no {NVCC}")

TURING = (7, 5, "sm_75")
FORWARD = Kernels("75", "sm80/forward.cuh", ("forward_kernel<Config<In, 64, 64, 1, false, Turing>>",), "__half")
CONFIG = "<BackwardConfig<In, 128, BackwardForm::kPlain, Turing>>"
BACKWARD = Kernels("75", "sm80/launch_backward.cuh", (f"backward_kernel{CONFIG}", f"dq_kernel{CONFIG}"), "__half")
DECODE = Kernels("75", "sm80/decode.cuh", ("decode_kernel<DecodeConfig<In, 64, 1, 3, Turing>>",), "__half")
MMA = r"(mma\.sync\S+\s+\{[^}]*\}, )"
FAULTS = {
    "operands of A exchanged": (Fault(MMA + r"\{(\S+), (\S+)\}", r"\1{\3, \2}"), WRONG),
    "an ldmatrix without .trans": (Fault(r"x4\.trans", "x4"), WRONG),
    "halves of a pair exchanged": (Fault(r"\{low,high\}", "{high,low}", count=32), WRONG),
    "a missing barrier": (Fault(r"bar\.sync\s+0;", ""), "race|that nobody wrote"),
}


def make(*shape, **options):
    return [t.detach() for t in make_qkv(*shape, dtype=torch.float16, **options)]


@pytest.fixture(scope="module")
def translated_forward(built):
    return Translated(built, (FORWARD,), faults=[fault for fault, _ in FAULTS.values()])


@pytest.fixture
def forward(translated_forward):
    with translated_forward.running(*TURING) as loaded:
        yield loaded


CALLS = {
    "plain": dict(seqlens=(130, 150)),
    "causal": dict(seqlens=(150, 129), causal="lower_right"),
    "head dimension 40": dict(seqlens=(17, 70), head_dim=40, head_dim_v=24),
    "softcap": dict(seqlens=(33, 65), softcap=3.0, scale=-0.3),
    "dropout": dict(seqlens=(40, 70), dropout_p=0.3),
}


@pytest.mark.parametrize("case", CALLS)
def test_forward(forward, case):
    options = dict(CALLS[case])
    inputs = make(1, 1, *options.pop("seqlens"), options.pop("head_dim", 64), options.pop("head_dim_v", None))
    check_forward_against_reference(*inputs, **options)
    assert (forward.tier, forward.c.last_kernel().endswith(b"(PTX)")) == ("sm75", True)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(forward, fault):
    forward.seed_order(1)
    with forward.finding(FAULTS, fault):
        check_forward_against_reference(*make(1, 1, 150, 150, 64), causal="lower_right")


@pytest.mark.parametrize("deterministic", [True, False], ids=["in turns", "in any order"])
def test_backward(built, deterministic):
    with translated(built, BACKWARD, gpu=TURING) as loaded:
        loaded.deterministic = deterministic
        check_against_reference(*make_qkv(1, 2, 65, 129, 128, heads_kv=1, dtype=torch.float16), causal="lower_right")
        assert (loaded.tier, loaded.flagged_tiles, loaded.launches() >= 2) == ("sm75", 0, True)


def test_decode(built):
    with translated(built, DECODE, gpu=TURING) as loaded:
        loaded.num_splits = 3
        check_forward_against_reference(*make(2, 6, 2, 150, 64, heads_kv=2), causal="lower_right")
        assert (loaded.tier, loaded.launches()) == ("sm75", 1)
