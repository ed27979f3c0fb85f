"""Attention by index on the CUDA kernels' host build (tests/cuda_host): the tests of the CPU kernels, on smaller calls.

The tier simt is the only one for it.
"""

import math

import pytest
import test_indexed
import test_indexed_dropout
import torch
from cuda_host import library
from test_indexed import BOUND, check, make, make_indices, mask_of, run_both
from test_indexed_dropout import LENGTHS_K, LENGTHS_Q

from flash_attn_ext import flash_attn, flash_attn_varlen

pytestmark = pytest.mark.usefixtures("kernels")

test_empty = test_indexed.test_empty


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_matches_a_mask(dtype):
    tensors = make(b=2, h=4, h_kv=2, s_q=9, s_k=150, d=24, d_v=40, dtype=dtype)
    indices = make_indices(2, 1, 9, 150, 90)
    mask = mask_of(indices, (2, 4, 9, 150))
    check(*run_both(tensors, {"key_indices": indices.int()}, mask, causal="lower_right"), BOUND[dtype])


@pytest.mark.parametrize(
    ("heads", "h_kv", "d", "d_v"),
    [(1, 1, 16, 16), (40, 2, 8, 150), (3, 3, 140, 70), (16, 1, 300, 17), (2, 1, 1, 260)],
)
def test_heads_and_head_dimensions(heads, h_kv, d, d_v):
    tensors = make(b=1, h=heads, h_kv=h_kv, s_q=4, s_k=80, d=d, d_v=d_v, dtype=torch.float64)
    indices = make_indices(1, h_kv, 4, 80, 70)
    check(*run_both(tensors, {"key_indices": indices}, mask_of(indices, (1, heads, 4, 80))), BOUND[torch.float64])


def test_many_keys_and_queries():
    """More keys than one pass of the sort handles, and more queries than a key collects at a time."""
    tensors = make(b=1, h=2, h_kv=1, s_q=3, s_k=40000, d=4, d_v=4, dtype=torch.float64)
    indices = make_indices(1, 1, 3, 40000, 300)
    with torch.no_grad():
        check(
            *run_both(tensors, {"key_indices": indices}, mask_of(indices, (1, 2, 3, 40000)), grads=False),
            BOUND[torch.float64],
        )
    tensors = make(b=1, h=2, h_kv=1, s_q=300, s_k=5, d=4, d_v=4, dtype=torch.float64)
    indices = make_indices(1, 1, 300, 5, 3)
    check(*run_both(tensors, {"key_indices": indices}, mask_of(indices, (1, 2, 300, 5))), BOUND[torch.float64])


@pytest.mark.parametrize("block_size", [7, 100])
def test_blocks(block_size):
    tensors = make(b=1, h=4, h_kv=2, s_q=6, s_k=90, d=8, d_v=8, dtype=torch.float64)
    indices = make_indices(1, 2, 6, -(-90 // block_size), 4)
    given = {"key_block_indices": indices, "key_block_size": block_size}
    check(*run_both(tensors, given, mask_of(indices, (1, 4, 6, 90), block_size), causal="lower_right"), 1e-12)


def test_options_and_their_gradients():
    tensors = make(b=2, h=4, h_kv=2, s_q=8, s_k=70, d=8, d_v=8, dtype=torch.float64)
    indices = make_indices(2, 2, 8, 70, 40)
    bias = torch.randn(2, 4, 8, 70, dtype=torch.float64)
    bias[torch.rand(bias.shape) < 0.3] = -math.inf
    keys = torch.rand(2, 70) > 0.3
    mask = bias.masked_fill(~(mask_of(indices, (2, 4, 8, 70)) & keys[:, None, None]), -math.inf)
    extra = {"alibi_slopes": torch.rand(2, 4, dtype=torch.float64), "sink": torch.randn(4, dtype=torch.float64)}
    options = {"causal": "lower_right", "window": (50, 0), "softcap": 1.5, "scale": 0.7}
    leaves = [[t.clone().requires_grad_() for t in (*tensors, *extra.values())] for _ in range(2)]
    q, k, v, slopes, sink = leaves[0]
    ours = flash_attn(
        q, k, v, bias, enable_gqa=True, key_indices=indices, key_mask=keys, alibi_slopes=slopes, sink=sink,
        return_lse=True, **options,
    )  # fmt: skip
    q, k, v, slopes, sink = leaves[1]
    expected = test_indexed.dense(q, k, v, mask, alibi_slopes=slopes, sink=sink, **options)
    results = []
    for (out, lse), inputs in zip((ours, expected), leaves, strict=True):
        results.append([out, lse, *torch.autograd.grad((out.sin() + lse.sin()[..., None]).sum(), inputs)])
    check(*results, 1e-11)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_dropout(dtype):
    tensors, indices = make(b=2, h=4, h_kv=2, s_q=9, s_k=70, d=8, d_v=12, dtype=dtype), make_indices(2, 2, 9, 70, 40)
    mask = mask_of(indices, (2, 4, 9, 70))
    state = torch.tensor([3, 9, 37, 41, 2, 30])
    ours, expected = test_indexed.dropped_pair(tensors, indices, mask, state, 0.4, causal="lower_right")
    check(ours, [t.double() for t in expected], 2 * BOUND[dtype])


def test_numbers_outside_of_the_keys_name_no_key(kernels):
    """The kernels read nothing outside the tensors. On CPU the operator refuses these indices before a kernel runs."""
    tensors = make(b=1, h=2, h_kv=1, s_q=5, s_k=70, d=8, d_v=8)
    indices = make_indices(1, 1, 5, 70, 40)
    outside = torch.tensor([70, -2, 2**31, -(2**31), 2**63 - 1, -(2**63)]).expand(1, 1, 5, 6)
    both = torch.cat([outside, indices, outside], -1)
    results = [run_both(tensors, {"key_indices": n}, None)[0] for n in (indices, both)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_large_masks_keep_the_sum():
    """-1e9 rounds log l out of a float32 lse: the backward computes it again."""
    tensors = make(b=1, h=2, h_kv=1, s_q=5, s_k=70, d=8, d_v=8)
    indices = make_indices(1, 1, 5, 70, 40, none=0.0)
    q, k, v = (t.clone().requires_grad_() for t in tensors)
    out = flash_attn(q, k, v, torch.full((1, 1, 1, 70), -1e9), enable_gqa=True, key_indices=indices)
    dv = torch.autograd.grad(out.sum(), v)[0]
    seen = mask_of(indices, (1, 2, 5, 70)).double()
    expected = (seen / seen.sum(-1, keepdim=True).clamp(min=1)).sum((1, 2))  # uniform weights
    assert torch.allclose(dv[0, 0, :, 0].double(), expected[0], atol=1e-5)


def test_nan_outside_of_the_keys_stays_there():
    q, k, v = make(b=1, h=2, h_kv=1, s_q=5, s_k=70, d=8, d_v=8)
    indices = make_indices(1, 1, 5, 35, 20)
    key_mask = torch.ones(1, 70, dtype=torch.bool)
    key_mask[:, 20:25] = False
    k[:, :, 35:], v[:, :, 35:], k[:, :, 20:25], v[:, :, 20:25] = (math.nan,) * 4
    clean = [torch.nan_to_num(t) for t in (q, k, v)]
    got, expected = (run_both(t, {"key_indices": indices}, None, key_mask=key_mask)[0] for t in ((q, k, v), clean))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_same_bits_in_any_order(kernels):
    tensors = make(b=1, h=4, h_kv=2, s_q=6, s_k=90, d=8, d_v=8, dtype=torch.bfloat16)
    indices = make_indices(1, 2, 6, 90, 40)
    results = []
    for seed, numbers in enumerate((indices, torch.cat([indices.flip(-1), indices[..., :9]], -1))):
        kernels.seed_order(seed)
        results.append(run_both(tensors, {"key_indices": numbers}, None)[0])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_selector_says_why_no_faster_tier_runs(kernels):
    with kernels.on_gpu(9, 0):
        for params in (library.IndexedParams(), library.IndexedBackwardParams()):
            reasons = [f"{tier}: no attention by index" for tier in ("sm90", "sm80")]
            assert kernels.choice(params) == ("simt", reasons)


def test_dropout_of_packed_sequences():
    """Each row of query has a row in the padded call."""
    leaves, numbers = test_indexed_dropout.make(torch.float64, 0)
    cu = [test_indexed_dropout.offsets(lengths) for lengths in (LENGTHS_Q, LENGTHS_K)]
    state = torch.tensor([*test_indexed_dropout.SEED, 6, 4, 8, 32])
    given = dict(enable_gqa=True, dropout_p=0.4, causal="lower_right")
    out = flash_attn_varlen(*leaves, *cu, rng_state=state, **numbers, **given)
    del given["enable_gqa"]
    expected, _ = test_indexed_dropout.one_by_one(leaves, numbers, (6, 4, 8, 32), **given)
    for ours, theirs in zip(*(torch.autograd.grad(x.sin().sum(), leaves) for x in (out, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("step", ["jvp", "double_backward"])
@pytest.mark.parametrize(("family", "name"), [("indexed", "key_indices"), ("flex", "score_mod or mask_mod")])
def test_derivatives_without_a_kernel_raise_an_error(step, family, name):
    """Forward mode and second derivatives are for the CPU only. This calls the kernel of the CUDA key."""
    operator = getattr(torch.ops.flash_attn_ext, f"attention_{family}_{step}").default
    given = {a.name: torch.ones(1) if str(a.type) == "Tensor" else None for a in operator._schema.arguments}
    given = {a.name: given[a.name] for a in operator._schema.arguments if not a.has_default_value()}
    if "grad_mask" in given:
        given["grad_mask"] = [True] * (7 if family == "flex" else 6)
    with pytest.raises(NotImplementedError, match=f"with {name} on CUDA; allowed on CUDA: the first gradients"):
        operator.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), **given)
