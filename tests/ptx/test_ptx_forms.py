"""More forms of the kernels as nvcc's PTX, executed: options, packed sequences, few rows, forward mode, other head
dimensions, and simt. docs/design/ptx.md; test_ptx_sm80.py and test_ptx_sm90.py have the planted faults."""

import pytest
import torch
from cubins import NVCC
from helpers import check_against_reference, check_forward_against_reference, check_jvp_against_reference, make_qkv
from ptx import parse
from ptx.kernels import Kernels, translated
from test_cuda_varlen import check as check_packed

pytestmark = pytest.mark.skipif(not NVCC.exists(), reason=f"needs nvcc to compile the CUDA kernels; there is no {NVCC}")

LENGTHS = [(130, 140), (0, 40), (33, 0), (70, 129)]
SM80, SM90 = (8, 0), (9, 0)


def make(*shape, dtype=torch.bfloat16, **options):
    return [t.detach() for t in make_qkv(*shape, dtype=dtype, **options)]


def forward(*shape, heads=2, mask=None, dtype=torch.bfloat16, **options):
    def run(_):
        inputs = make(1, heads, *shape, heads_kv=1, dtype=dtype)
        check_forward_against_reference(*inputs, None if mask is None else torch.rand(mask) > 0.3, **options)

    return run


def few_rows(_):
    check_forward_against_reference(*make(1, 8, 20, 300, 64, heads_kv=1), causal="lower_right")


def backward(*shape, **options):
    return lambda _: check_against_reference(*make_qkv(1, 2, *shape, heads_kv=1, dtype=torch.bfloat16), **options)


def split_columns(_):
    inputs = make_qkv(1, 1, 70, 100, 192, head_dim_v=128, dtype=torch.bfloat16)
    check_against_reference(*inputs, causal="lower_right")


def packed(kernels):
    check_packed(kernels, LENGTHS, torch.bfloat16, head_dim=64, causal=True, lower_right=True, deterministic=True)


def packed_without_shared_tiles(kernels):
    check_packed(kernels, [*LENGTHS, (250, 129)], torch.bfloat16, head_dim=64, causal=True, deterministic=True)


def jvp(_):
    check_jvp_against_reference(make(1, 2, 130, 70, 64), causal="lower_right", softcap=3.0)


def sm90_forward(head_dim, head_dim_v, form):
    return Kernels("90a", "sm90/forward.cuh", (f"forward_kernel<In, {head_dim}, {head_dim_v}, Form::{form}>",))


def sm90_backward(head_dim, head_dim_v, plain):
    return Kernels("90a", "sm90/backward.cuh", (f"backward_kernel<In, {head_dim}, {head_dim_v}, {plain}>",))


def simt(rows):
    return Kernels("80", "simt/forward.cuh", (f"forward_kernel<float, {rows}, kNarrowSlice, false>",))


BACKWARD_PACKED = "backward_kernel<BackwardConfig<In, 64, BackwardForm::kPlainPacked>>"
MAKE_ROUNDS = Kernels("90a", "sm90/make_rounds.cu", ("make_rounds_kernel",))
# GPU, kernels, calls.
CASES = {
    "simt forward": (
        SM80, [simt("kRows")],
        [forward(70, 130, 24, dtype=torch.float32, causal="lower_right", softcap=3.0)],
    ),
    "simt decode": (
        SM80, [simt("kDecodeRows"), Kernels("80", "combine.cu", ("combine_kernel<float>",))],
        [forward(3, 130, 24, dtype=torch.float32, num_splits=2), forward(3, 40, 24, dtype=torch.float32, mask=(3, 40))],
    ),
    "sm80 packed": (
        SM80,
        [
            Kernels("80", "sm80/forward.cuh", ("forward_kernel<Config<In, 64, 128, 1, true, Ampere, true>>",)),
            Kernels("80", "sm80/launch_backward.cuh", (BACKWARD_PACKED,)),
        ],
        [packed],
    ),
    "sm80 dropout backward": (
        SM80, [Kernels("80", "sm80/launch_backward.cuh", (BACKWARD_PACKED.replace("kPlainPacked", "kDropout"),))],
        [backward(70, 140, 64, dropout_p=0.3)],
    ),
    "sm80 jvp": (SM80, [Kernels("80", "sm80/jvp.cuh", ("jvp_kernel<Config<In, 64, 64, 2>>",))], [jvp]),
    "sm90 options": (
        SM90, [sm90_forward(64, 64, "kOptions"), MAKE_ROUNDS, sm90_backward(64, 64, "false")],
        [backward(130, 150, 64, softcap=2.0), forward(200, 150, 64, mask=(1, 150)), packed_without_shared_tiles],
    ),
    "sm90 few rows": (SM90, [sm90_forward(64, 64, "kFewRows")], [few_rows]),
    "sm90 head dimension 128": (
        SM90, [sm90_forward(128, 128, "kPlain"), sm90_backward(128, 128, "true")],
        [backward(150, 140, 128, causal="lower_right"), forward(300, 300, 128, heads=1, window=(100, 9))],
    ),
    "sm90 head dimension 192": (SM90, [sm90_backward(192, 128, "true")], [split_columns]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_values(built, case):
    gpu, kernels, calls = CASES[case]
    with translated(built, *kernels, gpu=gpu) as loaded:
        for call in calls:
            loaded.num_splits = 0 if gpu == SM80 else 1
            call(loaded)
        for chosen in kernels:  # combine.cu has kernels for every dtype
            assert any(loaded.launches(name) for name in parse.entry_names(chosen.ptx().read_text())), chosen
