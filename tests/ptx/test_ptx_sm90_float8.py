"""The sm90 kernel with products of float8 as nvcc's PTX, executed: docs/design/ptx.md. Planted faults are found."""

import pytest
import torch
from cubins import NVCC
from float8_helpers import check_values, decoded, make
from ptx.kernels import WRONG, Fault, Kernels, Translated

from flash_attn_ext import flash_attn

pytestmark = pytest.mark.skipif(not NVCC.exists(), reason=f"needs nvcc to compile the CUDA kernels; there is no {NVCC}")

KERNEL = Kernels("90a", "sm90/forward_float8.cuh", ("forward_float8_kernel<64>",))
FACTOR = r"ld\.f32\s+(%f\d+), \[\S+\];"
FAULTS = {
    "V not transposed": (Fault(r"(ldmatrix.*)\.trans", r"\1"), WRONG),
    "the keys of V^T in another order": (Fault(r"\b25632\b", str(0x6240)), WRONG),
    "the keys of P in another order": (
        Fault(r"(mov\.b32\s+%r\d+, )\{low, high\}", r"\1{high, low}", "m64n128k32", count=16),
        WRONG,
    ),
    "a factor left out": (Fault(FACTOR, r"mov.f32 \1, 0f3F800000;"), WRONG),
    "operands exchanged": (Fault(r"(m64n128k32.*\}), (%rd\d+), (%rd\d+), p", r"\1, \3, \2, p"), "reads|out of bounds"),
    "a missing proxy fence": (Fault(r"fence\.proxy\.async\.shared::cta;", ""), "no proxy fence"),
    "a missing wait for V": (Fault(r"bar\.warp\.sync\s+-1;", "", r"stmatrix"), "race|no proxy fence|not waited"),
}


@pytest.fixture(scope="module")
def translated(built):
    return Translated(built, (KERNEL,), faults=[fault for fault, _ in FAULTS.values()])


@pytest.fixture
def forward(translated):
    with translated.running(9, 0) as loaded:
        yield loaded


def check(seqlen_q, seqlen_k, heads=1, out_dtype=torch.bfloat16, **options):
    tensors, factors = make(1, heads, seqlen_q, seqlen_k, 64, heads_kv=1)
    out, lse = flash_attn(*tensors, enable_gqa=True, return_lse=True, out_dtype=out_dtype, **options, **factors)
    assert out.dtype == out_dtype
    check_values(out, lse, decoded(tensors, factors), **options)


CALLS = {
    "plain": ((200, 300), {}),
    "causal": ((250, 90), dict(causal="lower_right")),
    "window": ((70, 260), dict(window=(50, 9))),
    "float16": ((20, 40), dict(out_dtype=torch.float16)),
}


@pytest.mark.parametrize("case", CALLS)
def test_forward(forward, case):
    seqlens, options = CALLS[case]
    launches = forward.launches()
    check(*seqlens, heads=2, **options)
    assert forward.launches() == launches + 1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(forward, fault):
    torch.manual_seed(0)
    forward.seed_order(1)
    with forward.finding(FAULTS, fault):
        check(200, 300)
