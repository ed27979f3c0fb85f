"""flash_attn_ext.layers.rotary: rotations, also in place, and the module with tables."""

import pytest
import torch
from cache_helpers import rotary_tables, rotated_pair

from flash_attn_ext.layers import rotary
from flash_attn_ext.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def test_apply_rotary_emb():
    x = torch.randn(2, 7, 3, 24, requires_grad=True)
    cos, sin = rotary_tables(50, 16)
    for interleaved in (False, True):
        out = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=torch.tensor([0, 9]))
        for b, first in ((0, 0), (1, 9)):
            for i in range(7):
                expected = rotated_pair(x[b, i, 1].detach(), first + i, 16, interleaved)
                torch.testing.assert_close(out[b, i, 1], expected, rtol=1e-4, atol=1e-5)
    packed = apply_rotary_emb(x.flatten(0, 1), cos, sin, cu_seqlens=torch.tensor([0, 7, 14]))
    torch.testing.assert_close(packed.unflatten(0, (2, 7)), apply_rotary_emb(x, cos, sin))
    assert torch.autograd.gradcheck(
        lambda x: apply_rotary_emb(x, cos.double(), sin.double()), x.detach().double().requires_grad_()
    )
    copy = x.detach().clone()
    assert apply_rotary_emb(copy, cos, sin, inplace=True) is copy
    torch.testing.assert_close(copy, apply_rotary_emb(x, cos, sin).detach())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("leaf", [True, False])
def test_in_place_has_the_gradient_of_the_values_before(leaf, interleaved):
    cos, sin = rotary_tables(50, 16)
    x = torch.randn(2, 7, 3, 24, requires_grad=True)
    copy = x.detach().clone().requires_grad_()
    expected = apply_rotary_emb(copy, cos, sin, interleaved)
    out = apply_rotary_emb(x if leaf else x * 1.0, cos, sin, interleaved, inplace=True)
    torch.testing.assert_close(out, expected)
    if leaf:
        assert out.data_ptr() == x.data_ptr()
    gradient = torch.randn_like(out)
    out.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(x.grad, copy.grad)


def test_autograd_sees_the_write_to_a_leaf():
    cos, sin = rotary_tables(50, 16)
    x = torch.randn(2, 7, 3, 24, requires_grad=True)
    loss = x.square().sum()
    apply_rotary_emb(x, cos, sin, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_leaf_in_place_and_tables_with_a_gradient():
    cos, sin = rotary_tables(50, 16)
    x = torch.randn(2, 7, 3, 24, requires_grad=True)
    with pytest.raises(NotImplementedError, match="sin: got a tensor that requires a gradient"):
        apply_rotary_emb(x, cos, sin.requires_grad_(), inplace=True)


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("own_tables_for_k", [False, True])
@pytest.mark.parametrize("num_heads_q", [None, 4])
def test_q_and_k_in_one_tensor(num_heads_q, own_tables_for_k, leaf):
    tables = rotary_tables(50, 16)
    tables_of_k = rotary_tables(60, 16)[::-1] if own_tables_for_k else (None, None)
    offsets = torch.tensor([0, 9])
    given = torch.randn(2, 7, 8, 24) if num_heads_q else torch.randn(2, 7, 3, 4, 24)
    q, k, v = given.clone().split([4, 2, 2], 2) if num_heads_q else given.clone().unbind(2)
    of_k = tables_of_k if own_tables_for_k else tables
    q, k = apply_rotary_emb(q, *tables, seqlen_offsets=offsets), apply_rotary_emb(k, *of_k, seqlen_offsets=offsets)
    expected = torch.cat((q, k, v), 2) if num_heads_q else torch.stack((q, k, v), 2)
    x = given.clone().requires_grad_()
    out = apply_rotary_emb_qkv_(x if leaf else x * 1.0, *tables, *tables_of_k, seqlen_offsets=offsets,
                                num_heads_q=num_heads_q)  # fmt: skip
    torch.testing.assert_close(out, expected)
    assert (out.data_ptr() == x.data_ptr()) == leaf
    gradient = torch.randn_like(out)
    out.backward(gradient)  # rotations are orthogonal: the gradient of the norm stays
    torch.testing.assert_close(x.grad.norm(), gradient.norm())
    of_v = (slice(None), slice(None), slice(6, 8) if num_heads_q else 2)
    assert torch.equal(x.grad[of_v], gradient[of_v])


def test_k_and_v_in_one_tensor():
    tables = rotary_tables(50, 16)
    kv = torch.randn(2, 7, 2, 3, 24)
    expected = torch.stack((apply_rotary_emb(kv[:, :, 0], *tables, True, seqlen_offsets=5), kv[:, :, 1]), 2)
    x = kv.clone()
    assert apply_rotary_emb_kv_(x, *tables, True, 5) is x
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("shape", [(2, 7, 4, 24), (2, 7, 2, 3, 24), (2, 7, 24)])
def test_shapes_of_qkv_that_are_not_allowed(shape):
    with pytest.raises(ValueError, match="qkv: got shape"):
        apply_rotary_emb_qkv_(torch.randn(shape), *rotary_tables(50, 16))
    with pytest.raises(ValueError, match="kv: got shape"):
        apply_rotary_emb_kv_(torch.randn(2, 7, 3, 3, 24), *rotary_tables(50, 16))


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_module(interleaved):
    module = RotaryEmbedding(16, interleaved=interleaved)
    qkv = torch.randn(2, 7, 3, 4, 24)
    out = module(qkv.clone(), seqlen_offset=3)
    assert torch.equal(out[:, :, 2], qkv[:, :, 2])
    for part in (0, 1):
        expected = rotated_pair(qkv[1, 4, part, 2], 7, 16, interleaved)
        torch.testing.assert_close(out[1, 4, part, 2], expected, rtol=1e-4, atol=1e-5)
    q, kv = module(qkv[:, :, 0].clone(), qkv[:, :, 1:].clone(), seqlen_offset=torch.tensor([3, 20]))
    torch.testing.assert_close(torch.cat((q[:1, :, None], kv[:1]), 2), out[:1])
    expected = rotated_pair(qkv[1, 4, 1, 2], 24, 16, interleaved)
    torch.testing.assert_close(kv[1, 4, 0, 2], expected, rtol=1e-4, atol=1e-5)


def test_the_modules_tables_grow_and_follow_dtype():
    module = RotaryEmbedding(16)
    assert not module.state_dict()
    for dtype, rows, expected in ((torch.float32, 7, 7), (torch.float32, 30, 30), (torch.bfloat16, 5, 5)):
        module(torch.randn(1, rows, 3, 2, 16, dtype=dtype))
        assert (len(module._cos_cached), module._cos_cached.dtype) == (expected, dtype)
    angles = module._cos_cached
    module.to(torch.bfloat16)(torch.randn(1, 40, 3, 2, 16, dtype=torch.bfloat16))
    assert torch.equal(module._cos_cached[:5], angles)  # angles stay float32
    with torch.inference_mode():
        module.eval()(torch.randn(1, 60, 3, 2, 16, dtype=torch.bfloat16))
    x = torch.randn(1, 7, 3, 2, 16, dtype=torch.bfloat16, requires_grad=True)
    module.train()(x).float().sum().backward()
    assert x.grad.isfinite().all()


def test_xpos_scores_depend_on_distances_alone():
    module = RotaryEmbedding(16, scale_base=8).double()
    q, k = torch.randn(2, 16, dtype=torch.float64)
    rows = torch.stack((q, k, k))[None, None, :, None].expand(1, 20, -1, -1, -1).clone()
    rotated = module(rows, max_seqlen=64)[0, :, :, 0]
    scores = rotated[:, 0] @ rotated[:, 1].T
    torch.testing.assert_close(scores[5:, 5:], scores[:-5, :-5], rtol=1e-5, atol=1e-6)
    zeta = (torch.arange(0, 16, 2) + 6.4) / 22.4
    expected = zeta ** ((3 - 32) / 8)
    torch.testing.assert_close(module._cos_cached[3].float(), torch.cos(3 * module.inv_freq.float()) * expected)
    torch.testing.assert_close(module._sin_k_cached[3].float(), torch.sin(3 * module.inv_freq.float()) / expected)


def test_the_older_name():
    assert rotary.apply_rotary_emb_func is apply_rotary_emb


X, TABLE = torch.randn(2, 7, 3, 24), torch.ones(50, 8)
WRONG = {
    "x, a list": (dict(x=[1.0]), TypeError, "x: got list; allowed: a torch.Tensor"),
    "x, 3-D": (dict(x=X[0]), ValueError, r"x: got shape \[7, 3, 24\]; allowed"),
    "x, packed and 4-D": (dict(cu_seqlens=torch.tensor([0, 2])), ValueError, r"x: got shape \[2, 7, 3, 24\]; allowed"),
    "cos": (dict(cos=1.0), TypeError, "cos: got float; allowed: a torch.Tensor"),
    "sin": (dict(sin=torch.ones(50, 7)), ValueError, r"sin: got shape \[50, 7\]; allowed: cos's shape"),
    "rotary_dim": (dict(cos=torch.ones(50, 13), sin=torch.ones(50, 13)), ValueError, "cos: got rotary_dim 26; allowed"),
    "offset, a float": (dict(seqlen_offsets=1.5), TypeError, "seqlen_offsets: got 1.5; allowed"),
    "offset, negative": (dict(seqlen_offsets=-1), ValueError, "cos: got positions -1 to 5; allowed: 0 to 49"),
    "offsets": (dict(seqlen_offsets=torch.zeros(3).int()), ValueError, r"seqlen_offsets: got shape \[3\]"),
    "offsets, floats": (dict(seqlen_offsets=torch.zeros(2)), ValueError, r"seqlen_offsets: got shape \[2\] of"),
    "cu_seqlens, a list": (dict(x=X[0], cu_seqlens=[0, 7]), TypeError, "cu_seqlens: got list; allowed"),
    "cu_seqlens, too short": (dict(x=X[0], cu_seqlens=torch.tensor([0, 6])), ValueError, r"cu_seqlens: got \[0, 6\]"),
    "cu_seqlens, floats": (dict(x=X[0], cu_seqlens=torch.tensor([0.0, 7.0])), ValueError, "cu_seqlens: got shape"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_errors_name_the_argument(case):
    changed, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        apply_rotary_emb(**dict(x=X, cos=TABLE, sin=TABLE) | changed)
