"""flash_attn(..., key_mask=...): a second mask with one element for each key. It combines with any attn_mask."""

import math

import pytest
import torch
from helpers import gradients, leaves, make_qkv
from reference import attention as reference
from tolerances import assert_as_exact_as_torch

from flash_attn_ext import explain, flash_attn
from flash_attn_ext.nn.attention_weights import merge_masks

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


def key_masks(batch, seqlen_k, dtype=None):
    """The first batch element ends early, the second has holes; all keys of the last are masked."""
    keep = torch.rand(batch, seqlen_k) > 0.3
    keep[0] = torch.arange(seqlen_k) < seqlen_k * 2 // 3
    keep[-1] = False
    return keep if dtype is None else torch.randn(batch, seqlen_k, dtype=dtype).masked_fill(~keep, -math.inf)


def float_mask(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype).masked_fill(torch.rand(shape) < 0.3, -math.inf)


MASKS = {
    "none": lambda q, k: None,
    "bool": lambda q, k: torch.rand(q, k) > 0.3,
    "bool_per_head": lambda q, k: torch.rand(3, 4, q, k) > 0.3,
    "float": lambda q, k: float_mask(1, 4, q, k).requires_grad_(),
    "rows_alone": lambda q, k: float_mask(q, 1).requires_grad_(),
    "transposed": lambda q, k: (torch.rand(k, q) > 0.3).T,
}


def check(q, k, v, mask, key_mask, **options):
    """As exact as torch with the two masks merged, in fp64 and in the same dtype: out, lse and all gradients."""
    inputs = [q, k, v, mask]

    def dense(dtype):
        *tensors, mask_ = leaves(inputs, dtype)
        keys = key_mask if key_mask.dtype == torch.bool else key_mask.to(dtype)
        both = keys[:, None, None] if mask_ is None else merge_masks(mask_, keys)
        return reference(*tensors, both, **options), [*tensors, mask_]

    ours_in = leaves(inputs)
    ours = flash_attn(*ours_in, key_mask=key_mask, enable_gqa=True, return_lse=True, **options)
    exact, exact_in = dense(torch.float64)
    theirs, theirs_in = dense(q.dtype)
    slack = 1e-2 if q.dtype.itemsize == 2 else 0.0
    for name, a, b, c in zip(("out", "lse"), ours, theirs, exact, strict=True):
        assert_as_exact_as_torch(name, a, b, c, 2, slack)
    grads = [torch.randn_like(exact[0]), torch.randn_like(exact[1]).masked_fill(exact[1] == -math.inf, 0.0)]
    results = [gradients(o, i, grads) for o, i in ((ours, ours_in), (theirs, theirs_in), (exact, exact_in))]
    for n, (a, b, c) in enumerate(zip(*results, strict=True)):
        assert_as_exact_as_torch(f"gradient {n}", a, b, c, 3, slack)
    return ours


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(70, 130), (3, 9), (1, 300)])
def test_both_masks_apply(isa, masks, kind, seqlen_q, seqlen_k):
    q, k, v = make_qkv(3, 4, seqlen_q, seqlen_k, 16, heads_kv=2)
    key_mask = key_masks(3, seqlen_k, None if kind == "bool" else torch.float32)
    out, lse = check(q, k, v, MASKS[masks](seqlen_q, seqlen_k), key_mask)
    assert (out[2] == 0).all()
    assert (lse[2] == -math.inf).all()


@dtypes
@pytest.mark.parametrize("kind", ["bool", "own", "float32"])
def test_dtypes(isa, dtype, kind):
    q, k, v = make_qkv(2, 2, 40, 60, 16, dtype=dtype)
    key_mask = key_masks(2, 60, {"bool": None, "own": dtype, "float32": torch.float32}[kind])
    check(q, k, v, float_mask(40, 60, dtype=dtype).requires_grad_(), key_mask)


@pytest.mark.parametrize(
    "options", [{"causal": "lower_right"}, {"causal": "upper_left", "window": (9, 0), "softcap": 2.0}], ids=str
)
def test_with_a_band(isa, options):
    check(*make_qkv(2, 2, 50, 70, 16), torch.rand(2, 1, 50, 70) > 0.2, key_masks(2, 70), **options)


def test_masked_keys_may_be_nan(isa):
    q, k, v = make_qkv(2, 2, 20, 40, 8)
    keep = torch.arange(40) < 30
    mask = torch.randn(20, 40).masked_fill(~keep, math.nan)
    poisoned = [t.detach().masked_fill(~keep[:, None], math.nan).requires_grad_() for t in (k, v)]
    out = flash_attn(q, *poisoned, mask, key_mask=keep.expand(2, 40))
    assert torch.equal(out, flash_attn(q, k, v, mask.nan_to_num(), key_mask=keep.expand(2, 40)))
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), [q, *poisoned]))


def test_other_numbers_of_dimensions():
    q, k, v = (torch.randn(2, 3, 4, 6, 8) for _ in range(3))
    keys = torch.rand(2, 3, 6) > 0.3
    out = flash_attn(q, k, v, key_mask=keys)
    torch.testing.assert_close(out[1, 2], flash_attn(q[1, 2], k[1, 2], v[1, 2], key_mask=keys[1, 2]))
    torch.testing.assert_close(out[1, 2, 0], flash_attn(*(t[1, 2, 0] for t in (q, k, v)), key_mask=keys[1, 2]))


def test_transforms():
    q, k, v = (torch.randn(3, 2, 4, 6, 8) for _ in range(3))
    keys = torch.rand(3, 2, 6) > 0.3

    def run(q, k, v, keys):
        return flash_attn(q, k, v, torch.ones(6, 6, dtype=torch.bool).tril(), key_mask=keys)

    expected = torch.stack([run(*x) for x in zip(q, k, v, keys, strict=True)])
    torch.testing.assert_close(torch.func.vmap(run)(q, k, v, keys), expected)
    got = torch.func.vmap(run, in_dims=(0, 0, 0, None))(q, k, v, keys[0])
    torch.testing.assert_close(got[0], expected[0])
    leaf = q[0].clone().requires_grad_()
    grads = torch.autograd.grad(run(leaf, k[0], v[0], keys[0]).square().sum(), leaf)
    torch.testing.assert_close(torch.func.grad(lambda x: run(x, k[0], v[0], keys[0]).square().sum())(q[0]), grads[0])
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q[0], k[0], v[0], keys[0]), expected[0])


def test_forward_and_second_derivatives():
    q, k, v = (t.double().detach().requires_grad_() for t in make_qkv(2, 2, 5, 7, 4))
    mask, keys = torch.randn(5, 7, dtype=torch.float64, requires_grad=True), key_masks(2, 7)

    def run(q, k, v, mask):
        return flash_attn(q, k, v, mask, key_mask=keys)

    assert torch.autograd.gradcheck(run, (q, k, v, mask), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, (q, k, v, mask))


def test_it_is_explained():
    q, k, v = make_qkv(2, 2, 5, 7, 4)
    assert explain(q, k, v, torch.zeros(5, 7), key_mask=torch.zeros(2, 7)).forward.kernel


def test_errors():
    q, k, v = make_qkv(2, 2, 5, 7, 4)
    with pytest.raises(ValueError, match=r"key_mask: got shape \[1, 7\]"):
        flash_attn(q, k, v, key_mask=torch.zeros(1, 7))
    with pytest.raises(TypeError, match=r"key_mask: got dtype int64"):
        flash_attn(q, k, v, key_mask=torch.zeros(2, 7, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"key_mask: got list"):
        flash_attn(q, k, v, key_mask=[[True] * 7] * 2)
    jagged = torch.nested.nested_tensor_from_jagged(torch.randn(4, 2, 4), torch.tensor([0, 4])).transpose(1, 2)
    with pytest.raises(ValueError, match=r"key_mask: got a tensor with nested query"):
        flash_attn(jagged, jagged, jagged, key_mask=torch.zeros(1, 4))


def test_a_gradient_that_is_not_there_is_an_error():
    q, k, v = make_qkv(2, 2, 5, 7, 4)
    keys = torch.zeros(2, 7)
    with pytest.raises(ValueError, match=r"key_mask: got a tensor that needs a gradient; allowed: one that does not"):
        flash_attn(q, k, v, key_mask=keys.clone().requires_grad_())
    with pytest.raises(ValueError, match=r"key_mask: got a tensor that needs a gradient"):
        torch.func.grad(lambda m: flash_attn(q, k, v, key_mask=m).sum())(keys)
    with pytest.raises(ValueError, match=r"key_mask: got a tensor that needs a gradient"):
        torch.func.jvp(lambda m: flash_attn(q, k, v, key_mask=m), (keys,), (keys,))
