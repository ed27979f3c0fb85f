"""The sm90 tier's kernels as nvcc's PTX, executed, against the dense oracle: docs/design/ptx.md."""

import pytest
import torch
from cubins import NVCC
from helpers import check_against_reference, check_forward_against_reference, make_qkv
from ptx.kernels import WRONG, Fault, Kernels, Translated

pytestmark = pytest.mark.skipif(not NVCC.exists(), reason=f"needs nvcc to compile the CUDA kernels; there is no {NVCC}")


def forward_kernels(head_dim, form="kPlain"):
    return Kernels("90a", "sm90/forward.cuh", (f"forward_kernel<In, {head_dim}, {head_dim}, Form::{form}>",))


def backward_kernels(head_dim):
    sizes = f"In, {head_dim}, {head_dim}, true"
    rest = (f"{name}_kernel<In, Backward<{sizes}>>" for name in ("row_terms", "dq"))
    return Kernels("90a", "sm90/backward.cuh", (f"backward_kernel<{sizes}>", *rest))


WAIT = r"(mbarrier\.try_wait\.parity\S+\s+\S+ \S+), %r\d+;"
CONSUMER = r"setmaxnreg\.inc"
K_MAJOR = 1 << 62 | 1024 // 16 << 32  # the constant part of a descriptor: 128-byte swizzle, stride 1024
ELSEWHERE = "out of bounds|that nobody wrote"
FAULTS = {
    "the left operand transposed": (Fault(r"p, 1, 1, 0, 0;", "p, 1, 1, 1, 0;"), WRONG),
    "the right operand transposed": (Fault(r"p, 1, 1, 0, 0;", "p, 1, 1, 0, 1;"), WRONG),
    "V not transposed": (Fault(r", 1, 1, 1, 1;", ", 1, 1, 1, 0;"), WRONG),
    "a negative scale": (Fault(r"p, 1, 1, 0, 0;", "p, 1, -1, 0, 0;"), WRONG),
    "the first product added to nothing": (Fault(r"setp\.ne\.b32 p, %r\d+, 0", "setp.eq.b32 p, 0, 0"), WRONG),
    "operands exchanged": (Fault(r"(m64n128k16.*\}), (%rd\d+), (%rd\d+), p", r"\1, \3, \2, p"), ELSEWHERE),
    "bfloat16 as float16": (Fault(r"f32\.bf16\.bf16", "f32.f16.f16"), WRONG),
    "a descriptor's stride": (
        Fault(r"4611686293305294848", str(0x4000004000000000 + (8 << 32))),
        ELSEWHERE,
    ),
    "a descriptor's swizzle": (Fault(str(K_MAJOR), str(K_MAJOR + (1 << 62))), "swizzle"),
    "a descriptor's address": (Fault(r"(add\.s32\s+%r\d+, %r\d+), \d+;", r"\1, 128;", r"wgmma\.mma"), ELSEWHERE),
    "a missing wgmma.fence": (Fault(r"wgmma\.fence\.sync\.aligned;", ""), "without a fence"),
    "a missing wait for wgmma": (Fault(r"wgmma\.wait_group\.sync\.aligned 0;", ""), "wgmma still reads"),
    "a wait for too few wgmma": (
        Fault(r"(wgmma\.wait_group\.sync\.aligned) 0;", r"\1 1;"),
        "wgmma still reads|TMA overwrites",
    ),
    "a missing commit": (Fault(r"wgmma\.commit_group\.sync\.aligned;", ""), "wgmma still reads"),
    "a wrong parity of the consumer": (Fault(WAIT, r"\1, 1;", CONSUMER), "have not landed|has not waited|nobody wrote"),
    "a wrong parity of the producer": (Fault(WAIT, r"\1, 0;", r"expect_tx"), "deadlock"),
    "a missing fence of the barriers": (Fault(r"fence\.mbarrier_init\.release\.cluster;", ""), "for want of a fence"),
    "a missing proxy fence": (Fault(r"fence\.proxy\.async\.shared::cta;", ""), "no proxy fence"),
    "fewer bytes expected": (Fault(r"(expect_tx.*\]), %r\d+;", r"\1, 16;"), "deadlock"),
    "a corner's coordinates exchanged": (Fault(r"(shared::cluster.*\{\S+), (\S+), (\S+),", r"\1, \3, \2,"), WRONG),
    "a missing predicate": (Fault(r"@%p\d+ bra\s+\S+;", "", r"mov\.u32\s+%r\d+, %tid\.x"), "race|mbarrier"),
    "halves of a pair exchanged": (Fault(r"(cvt\.rn\.bf16x2\.f32\s+\S+), (\S+), (\S+);", r"\1, \3, \2;"), WRONG),
    "too few registers": (Fault(r"(setmaxnreg\.dec\S+) 32", r"\1 200"), "setmaxnreg"),
    "a store that is not waited for": (Fault(r"cp\.async\.bulk\.wait_group\.read 0;", ""), "bulk copy still reads"),
    "another barrier": (
        Fault(r"(mbarrier\.arrive\.release.*)\[(%r\d+)\]", r"\1[\2+8]", CONSUMER),
        "deadlock",
    ),
}


def make(*shape, dtype=torch.bfloat16, **options):
    return [t.detach() for t in make_qkv(*shape, dtype=dtype, **options)]


@pytest.fixture(scope="module")
def translated_forward(built):
    loaded = Translated(built, (forward_kernels(64),), faults=[fault for fault, _ in FAULTS.values()])
    loaded.num_splits = 1
    return loaded


@pytest.fixture
def forward(translated_forward):
    with translated_forward.running(9, 0) as loaded:
        yield loaded


CALLS = {
    "plain": dict(seqlens=(200, 150)),
    "causal": dict(seqlens=(250, 300), causal="lower_right"),
    "window": dict(seqlens=(200, 300), window=(70, 20)),
    "head dimension 40": dict(seqlens=(17, 140), head_dim=40, head_dim_v=24),
    "grouped heads": dict(seqlens=(230, 40), heads=2, heads_kv=1),
    "rows that see nothing": dict(seqlens=(250, 90), causal="lower_right"),
}


@pytest.mark.parametrize("case", CALLS)
def test_forward(forward, case):
    options = dict(CALLS[case])
    seqlens, heads = options.pop("seqlens"), options.pop("heads", 1)
    head_dim, head_dim_v = options.pop("head_dim", 64), options.pop("head_dim_v", None)
    inputs = make(1, heads, *seqlens, head_dim, head_dim_v, heads_kv=options.pop("heads_kv", heads))
    launches = forward.launches()
    check_forward_against_reference(*inputs, **options)
    assert forward.launches() == launches + 1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(forward, fault):
    inputs = make(1, 10, 250, 700, 64)  # more tasks of a block and more tiles of keys than the pipelines have stages
    forward.seed_order(1)
    with forward.finding(FAULTS, fault):
        check_forward_against_reference(*inputs, causal="lower_right")


@pytest.fixture(scope="module")
def translated_backward(built):
    return Translated(built, (backward_kernels(64),))


@pytest.fixture
def backward(translated_backward):
    with translated_backward.running(9, 0) as loaded:
        yield loaded


@pytest.mark.parametrize("deterministic", [True, False], ids=["in turns", "in any order"])
@pytest.mark.parametrize(
    ("seqlens", "options"),
    [((130, 129), {}), ((70, 150), dict(causal="lower_right")), ((150, 140), dict(window=(30, 9)))],
    ids=["plain", "causal", "window"],
)
def test_backward(backward, deterministic, seqlens, options):
    backward.deterministic = deterministic
    launches = backward.launches()
    check_against_reference(*make_qkv(1, 2, *seqlens, 64, heads_kv=1, dtype=torch.bfloat16), **options)
    assert backward.launches() >= launches + 3
