"""The sm80 tier's kernels as nvcc's PTX, executed, against the dense oracle: docs/design/ptx.md."""

import pytest
import torch
from cubins import NVCC
from helpers import check_against_reference, check_forward_against_reference, make_qkv
from ptx.kernels import WRONG, Fault, Kernels, Translated

from flash_attn_ext import flash_attn

pytestmark = pytest.mark.skipif(not NVCC.exists(), reason=f"needs nvcc to compile the CUDA kernels; there is no {NVCC}")

# Row terms and repair are not on tensor cores; the host's kernels run them.
BACKWARD = Kernels(
    "80",
    "sm80/launch_backward.cuh",
    tuple(
        f"{name}_kernel<BackwardConfig<In, 64, BackwardForm::{form}>>"
        for name, form in (("backward", "kPlain"), ("backward", "kOptions"), ("dq", "kPlain"), ("dq", "kPlainPacked"))
    ),
)
DECODE = Kernels("80", "sm80/decode.cuh", ("decode_kernel<DecodeConfig<In, 64, 1, 7>>",))
FORWARD = Kernels(
    "80",
    "sm80/forward.cuh",
    tuple(f"forward_kernel<Config<In, 64, {form}>>" for form in ("64, 2, false", "128, 1, false, Ampere, true")),
)
MMA = r"(mma\.sync\S+\s+\{[^}]*\}, )"
FAULTS = {
    "operands of A exchanged": (Fault(MMA + r"\{(\S+), (\S+), ", r"\1{\3, \2, "), WRONG),
    "operands of B exchanged": (Fault(MMA + r"(\{[^}]*\}), \{(\S+), (\S+)\}", r"\1\2, {\4, \3}"), WRONG),
    "accumulators exchanged": (Fault(r"(mma\.sync\S+\s+)\{(\S+), (\S+), ", r"\1{\3, \2, "), WRONG),
    "bfloat16 as float16": (Fault(r"f32\.bf16\.bf16\.f32", "f32.f16.f16.f32"), WRONG),
    "an ldmatrix without .trans": (Fault(r"x4\.trans", "x4"), WRONG),
    "halves of a pair exchanged": (Fault(r"(cvt\.rn\.bf16x2\.f32\s+\S+), (\S+), (\S+);", r"\1, \3, \2;"), WRONG),
    "another shuffle": (Fault(r"shfl\.sync\.bfly", "shfl.sync.idx"), WRONG),
    "an empty copy": (Fault(r"(cp\.async\.cg.*), 16, %r\d+;", r"\1, 16, 0;"), WRONG),
    "a missing predicate": (Fault(r"@%p\d+ (bra\s+\$L)", r"\1", r"cp\.async\.wait_group"), "that nobody wrote"),
    "a missing wait": (Fault(r"cp\.async\.wait_group \d;", ""), "touched in flight"),
    "a wait for too few": (Fault(r"(cp\.async\.wait_group) 1", r"\1 2"), "touched in flight"),
    "a missing barrier": (Fault(r"bar\.sync\s+0;", "", r"cp\.async\.wait_group"), "race|that nobody wrote"),
    "another state space": (Fault(r"ld\.shared\.v4", "ld.global.v4", count=7), "out of bounds"),
    "another offset": (Fault(r"(ldmatrix.*)\[(%r\d+)\]", r"\1[\2+8]"), "misaligned"),
}


def make(*shape, dtype=torch.bfloat16, **options):
    return [t.detach() for t in make_qkv(*shape, dtype=dtype, **options)]


@pytest.fixture(scope="module")
def translated_forward(built):
    return Translated(built, (FORWARD,), faults=[fault for fault, _ in FAULTS.values()])


@pytest.fixture
def forward(translated_forward):
    with translated_forward.running() as loaded:
        yield loaded


def check(kernels, *inputs, **options):
    results = check_forward_against_reference(*inputs, **options)
    assert kernels.c.last_kernel().endswith(b"(PTX)")
    return results


CALLS = {
    "plain": dict(seqlens=(130, 150)),
    "causal": dict(seqlens=(150, 129), causal="lower_right"),
    "window": dict(seqlens=(129, 200), window=(70, 20)),
    "head dimension 40": dict(seqlens=(17, 70), head_dim=40, head_dim_v=24),
    "softcap": dict(seqlens=(33, 65), softcap=3.0, scale=-0.3),
    "grouped heads": dict(seqlens=(20, 40), heads=4, heads_kv=2),
    "dropout": dict(seqlens=(40, 70), dropout_p=0.3),
    "sink and ALiBi": dict(seqlens=(40, 70), heads=2, sink=True, alibi_slopes=True),
    "bool mask": dict(seqlens=(70, 131), mask="bool"),
    "float mask": dict(seqlens=(70, 131), mask="float", causal="upper_left"),
}


@pytest.mark.parametrize("case", CALLS)
def test_forward(forward, case):
    options = dict(CALLS[case])
    seqlens, heads, mask = options.pop("seqlens"), options.pop("heads", 1), options.pop("mask", None)
    head_dim, head_dim_v = options.pop("head_dim", 64), options.pop("head_dim_v", None)
    inputs = make(1, heads, *seqlens, head_dim, head_dim_v, heads_kv=options.pop("heads_kv", heads))
    if mask == "bool":
        inputs.append(torch.rand(seqlens) > 0.3)
    elif mask == "float":
        inputs.append(torch.randn(seqlens).bfloat16().masked_fill(torch.rand(seqlens) < 0.2, -torch.inf))
    for name in ("sink", "alibi_slopes"):
        if name in options:
            options[name] = torch.rand(heads)
    check(forward, *inputs, **options)


def test_hidden_values_that_are_not_finite(forward):
    q, k, v = make(1, 1, 100, 100, 64)
    expected = flash_attn(q, k, v, is_causal=True)
    k[:, :, 90:, 3], v[:, :, 90:, 5] = torch.inf, torch.nan
    assert torch.equal(flash_attn(q, k, v, is_causal=True)[:, :, :90], expected[:, :, :90])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(forward, fault):
    inputs = make(1, 1, 150, 150, 64)
    forward.seed_order(1)
    with forward.finding(FAULTS, fault):
        check(forward, *inputs, causal="lower_right", softcap=30.0)  # not plain: copies are in flight during products


@pytest.fixture(scope="module")
def translated_backward(built):
    return Translated(built, (BACKWARD,))


@pytest.fixture
def backward(translated_backward):
    with translated_backward.running() as loaded:
        yield loaded


@pytest.mark.parametrize("deterministic", [True, False], ids=["in turns", "in any order"])
@pytest.mark.parametrize(
    ("seqlens", "options"),
    [((65, 129), {}), ((70, 150), dict(causal="lower_right", softcap=3.0)), ((150, 140), dict(window=(30, 9)))],
    ids=["plain", "causal", "window"],
)
def test_backward(backward, deterministic, seqlens, options):
    backward.deterministic = deterministic
    launches = backward.launches()
    check_against_reference(*make_qkv(1, 2, *seqlens, 64, heads_kv=1, dtype=torch.bfloat16), **options)
    assert backward.flagged_tiles == 0
    assert backward.launches() >= launches + 2


@pytest.fixture(scope="module")
def translated_decode(built):
    return Translated(built, (DECODE,))


@pytest.fixture
def decode(translated_decode):
    with translated_decode.running() as loaded:
        yield loaded


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("options", [{}, dict(causal="lower_right", window=(100, 0)), dict(dropout_p=0.3)], ids=str)
def test_decode(decode, num_splits, options):
    decode.num_splits = num_splits
    launches = decode.launches()
    check_forward_against_reference(*make(2, 6, 2, 150, 64, heads_kv=2), **options)
    assert decode.launches() == launches + 1
