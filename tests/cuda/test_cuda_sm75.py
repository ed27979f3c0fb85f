"""The sm75 tier (compute capability 7.5: T4) on the host: sm80's kernels with tiles for 64 KB of shared memory.

The files of sm80 test the text that both tiers share. Here each kernel, and each way through it, runs once.
"""

import pytest
import torch
from helpers import check_against_reference, check_forward_against_reference, make_qkv
from varlen_helpers import check_pack, make_pack

from flash_attn_ext import flash_attn

HALF = torch.float16


@pytest.fixture(autouse=True)
def turing(kernels):
    """A T4, which has 64 KB of shared memory for a block."""
    with kernels.on_gpu(7, 5, "sm_75"):
        yield kernels


def make(*shape, **options):
    return make_qkv(*shape, dtype=HALF, **options)


def runs(turing, name):
    assert (turing.tier, f"sm80::{name}_kernel".encode() in turing.c.last_kernel()) == ("sm75", True)


# Tiles have 128 queries by 64 keys up to a head dimension of 64, by 32 keys beyond.
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 4, 130, 150, 64), dict(heads_kv=2)),
        ((1, 1, 129, 65, 128), {}),
        ((1, 1, 20, 31, 40, 24), {}),
        ((1, 1, 33, 70, 128, 72), {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("causal", [None, "lower_right"])
def test_forward(turing, shape, options, causal):
    q, k, v = (t.detach() for t in make(*shape, **options))
    check_forward_against_reference(q, k, v, causal=causal)
    runs(turing, "forward")


OPTIONS = {
    "window": dict(window=(40, 9)),
    "softcap": dict(softcap=3.0, scale=-0.3),
    "sink and ALiBi": dict(sink=True, alibi_slopes=True, causal="upper_left"),
    "dropout": dict(dropout_p=0.3),
    "bool mask": dict(mask="bool"),
    "float mask": dict(mask="float"),
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("case", OPTIONS)
def test_options_and_their_gradients(turing, case, head_dim):
    options = dict(OPTIONS[case])
    inputs = [*make(1, 2, 70, 131, head_dim, heads_kv=1)]
    mask = options.pop("mask", None)
    if mask == "bool":
        inputs.append(torch.rand(70, 131) > 0.3)
    elif mask == "float":
        bias = torch.randn(1, 2, 70, 131).to(HALF).masked_fill(torch.rand(1, 2, 70, 131) < 0.2, -torch.inf)
        inputs.append(bias.requires_grad_())
    for name in ("sink", "alibi_slopes"):
        if name in options:
            options[name] = torch.rand(2).requires_grad_()
    check_against_reference(*inputs, **options)
    assert (turing.tier, turing.flagged_tiles) == ("sm75", 0)


@pytest.mark.parametrize("deterministic", [False, True], ids=["in any order", "in turns"])
@pytest.mark.parametrize("shape", [(1, 2, 65, 129, 64), (1, 2, 100, 70, 128), (1, 1, 33, 130, 40, 104)], ids=str)
def test_backward(turing, shape, deterministic):
    turing.deterministic = deterministic
    check_against_reference(*make(*shape), causal="lower_right")
    assert (turing.tier, turing.flagged_tiles) == ("sm75", 0)


def test_packed_sequences(turing):
    lengths = [(70, 130), (0, 5), (8, 200)]
    tensors = make_pack(lengths, head_dim=64, head_dim_v=64, dtype=HALF)
    check_pack(lengths, HALF, tensors=tensors, causal="lower_right")
    assert turing.tier == "sm75"


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [4, 20])
def test_decode(turing, heads, head_dim, num_splits):
    turing.num_splits = num_splits
    q, k, v = (t.detach() for t in make(2, heads, 2, 150, head_dim, heads_kv=1))
    check_forward_against_reference(q, k, v, causal="lower_right")
    assert (turing.tier, b"forward_kernel" in turing.c.last_kernel()) == ("sm75", False)


def test_hidden_values_that_are_not_finite(turing):
    q, k, v = (t.detach() for t in make(1, 1, 100, 100, 64))
    expected = flash_attn(q, k, v, is_causal=True)
    k[:, :, 90:, 3], v[:, :, 90:, 5] = torch.inf, torch.nan
    assert torch.equal(flash_attn(q, k, v, is_causal=True)[:, :, :90], expected[:, :, :90])


def test_a_hidden_nan_does_not_reach_gradients(turing):
    q, k, v = make(1, 1, 100, 100, 64)
    with torch.no_grad():
        k[:, :, 90:, 3] = torch.nan
    out = flash_attn(q, k, v, is_causal=True)
    (dq,) = torch.autograd.grad(out[:, :, :90].sum(), q)
    assert turing.flagged_tiles > 0, "0 x NaN is NaN; such rows are repaired"
    assert torch.isfinite(dq[:, :, :90]).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_rest_runs_by_simt_within_64_kb(turing, dtype):
    q, k, v = make_qkv(1, 2, 40, 70, 16, heads_kv=1, dtype=dtype)
    check_against_reference(q, k, v, softcap=3.0, dropout_p=0.2)
    assert turing.tier == "simt"
    if dtype == torch.float64:
        out = flash_attn(q[:, :, :9, :4], k[:, :, :9, :4], v[:, :, :9, :4])
        (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        torch.autograd.grad(dq.square().sum(), (q, k, v))
        torch.func.jvp(flash_attn, (q.detach(), k.detach(), v.detach()), (q.detach(), k.detach(), v.detach()))
        assert turing.tier == "simt"


REFUSED = {
    "head dimension 136": ((1, 1, 4, 4, 136), {}, "only head dimensions up to 128"),
    "attention_chunk": ((1, 1, 4, 4, 64), dict(attention_chunk=4), "no attention_chunk"),
    "unaligned": ((1, 1, 4, 4, 63), {}, "not aligned"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_it_refuses(turing, case):
    shape, options, reason = REFUSED[case]
    flash_attn(*(t.detach() for t in make(*shape)), **options)
    assert turing.tier == "simt"
    assert turing.why_not[-1].startswith("sm75: ")
    assert reason in turing.why_not[-1]
