"""flash_attn_ext.MultiheadAttention against torch.nn.MultiheadAttention with the same parameters."""

import math

import pytest
import torch
from module_helpers import (
    FORWARDS,
    MASKS,
    SK,
    SQ,
    B,
    E,
    H,
    assert_same,
    compare,
    make_inputs,
    make_masks,
    make_pair,
    run_with_grads,
)
from torch import nn

from flash_attn_ext import MultiheadAttention

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("layout", ["batch_first", "seq_first", "unbatched"])
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("masks", MASKS)
def test_masks(masks, forward, layout):
    pair = make_pair(batch_first=layout == "batch_first")
    compare(*pair, make_inputs(layout), make_masks(masks, layout), FORWARDS[forward])


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize(
    ("masks", "batch_first"),
    [*[(m, True) for m in ("none", "attn3_float", "kpm_bool+attn2_bool", "causal+kpm_bool")], ("causal", False)],
)
@pytest.mark.parametrize(
    "options",
    [
        {"bias": False},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"add_bias_kv": True, "add_zero_attn": True, "bias": False},
        {"kdim": 5, "vdim": 9},
        {"kdim": 5, "bias": False, "add_bias_kv": True},
    ],
    ids=lambda options: ",".join(options),
)
def test_constructor_options(options, batch_first, masks, forward):
    pair = make_pair(batch_first=batch_first, **options)
    layout = "batch_first" if batch_first else "seq_first"
    inputs = make_inputs(layout, kdim=options.get("kdim", E), vdim=options.get("vdim", E))
    compare(*pair, inputs, make_masks(masks), FORWARDS[forward])


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 5}], ids=str)
def test_constructor_options_unbatched(options):
    inputs = make_inputs("unbatched", kdim=options.get("kdim", E))
    for forward in FORWARDS.values():
        compare(*make_pair(**options), inputs, make_masks("kpm_bool+attn3_bool", "unbatched"), forward)


@pytest.mark.parametrize("same", ["qkv", "kv", "qk", "qv", ""])
@pytest.mark.parametrize("bias", [True, False])
def test_which_inputs_are_the_same_tensor(same, bias):
    """Equal inputs share a projection: for "qkv" and "kv". The other cases must not share one."""
    q, k, v = make_inputs(seqlen_q=SK)
    inputs = {"qkv": (q, q, q), "kv": (q, k, k), "qk": (q, q, v), "qv": (q, k, q), "": (q, k, v)}[same]
    for forward in FORWARDS.values():
        compare(*make_pair(batch_first=True, bias=bias), inputs, make_masks("attn2_float", seqlen_q=SK), forward)


@pytest.mark.parametrize("masks", ["none", "kpm_float+attn2_float", "kpm_bool+attn3_bool", "causal+kpm_bool"])
def test_float32(masks):
    pair = make_pair(torch.float32, batch_first=True)
    for forward in FORWARDS.values():
        compare(*pair, make_inputs(dtype=torch.float32), make_masks(masks, dtype=torch.float32), forward)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masks", ["none", "kpm_bool+attn2_bool", "attn3_float"])
def test_16_bit(dtype, masks):
    """The error against float64 is at most twice torch's error, plus one rounding of the output."""
    exact, _ = make_pair(batch_first=True)
    exact = exact.to(dtype).double()
    torch_mha, ours = make_pair(dtype, batch_first=True)
    torch_mha.load_state_dict(exact.state_dict())
    ours.load_state_dict(exact.state_dict())
    inputs, masks = make_inputs(dtype=dtype), make_masks(masks, dtype=dtype)
    wide_masks = {name: x.double() if x.is_floating_point() else x for name, x in masks.items()}
    for forward in FORWARDS.values():
        want = exact(*(x.double() for x in inputs), **wide_masks, **forward)
        theirs, got = (module(*inputs, **masks, **forward) for module in (torch_mha, ours))
        for x, y, z in zip(want, theirs, got, strict=True):
            if x is None:
                assert z is None
                continue
            assert z.dtype == y.dtype == dtype
            assert z.shape == y.shape
            error, torch_error = ((a.double() - x).abs().max() for a in (z, y))
            assert error <= 2 * torch_error + torch.finfo(dtype).eps * x.abs().max()


def test_float32_mask_in_a_16_bit_model():
    """nn.Transformer.generate_square_subsequent_mask makes float32 by default."""
    _, ours = make_pair(torch.bfloat16, batch_first=True)
    x = make_inputs(dtype=torch.bfloat16)[0]
    mask = nn.Transformer.generate_square_subsequent_mask(SQ)
    for forward in FORWARDS.values():
        want = ours(x, x, x, attn_mask=mask.bfloat16(), **forward)
        for got, expected in zip(ours(x, x, x, attn_mask=mask, **forward), want, strict=True):
            assert (got is None) == (expected is None)
            if got is not None:
                assert_same(got, expected)


@pytest.mark.parametrize(("batch", "seqlen_q", "seqlen_k"), [(0, 4, 5), (2, 0, 5), (2, 1, 1)])
def test_empty_and_single(batch, seqlen_q, seqlen_k):
    torch_mha, ours = make_pair(batch_first=True)
    q, k = torch.randn(batch, seqlen_q, E).double(), torch.randn(batch, seqlen_k, E).double()
    for forward in FORWARDS.values():
        compare(torch_mha, ours, (q, k, k), {}, forward)
        padding = torch.zeros(batch, seqlen_k, dtype=torch.bool)  # torch fails on it for batch 0
        assert_same(ours(q, k, k, padding, **forward)[0], torch_mha(q, k, k)[0])


# Arguments of the kernel


def expected_mask_shapes(masks, layout):
    """The shapes of attn_mask and key_mask in the kernel's call."""
    batch = 1 if layout == "unbatched" else B
    attn_mask = (batch, H, SQ, SK) if "attn3" in masks else (SQ, SK) if "attn2" in masks else None
    return {"attn_mask": attn_mask, "key_mask": (batch, SK) if "kpm" in masks else None}


@pytest.mark.parametrize("layout", ["batch_first", "seq_first", "unbatched"])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_masks_reach_the_kernel_unexpanded(masks, layout, calls):
    _, ours = make_pair(batch_first=layout == "batch_first")
    given = make_masks(masks, layout)
    ours(*make_inputs(layout), **given, need_weights=False)
    (call,) = calls
    assert call["is_causal"] == ("causal" in masks)
    for name, expected in expected_mask_shapes(masks, layout).items():
        assert (call[name] is None) if expected is None else (call[name].shape == expected)
    if masks == "attn3_float":  # not copied
        assert call["attn_mask"].data_ptr() == given["attn_mask"].data_ptr()


@pytest.mark.parametrize("layout", ["batch_first", "seq_first", "unbatched"])
def test_heads_are_views_of_one_projection(layout, calls):
    _, ours = make_pair(batch_first=layout == "batch_first")
    x = make_inputs(layout)[0]
    ours(x, x, x, need_weights=False)
    (call,) = calls
    storages = {call[name].untyped_storage().data_ptr() for name in "qkv"}
    assert len(storages) == 1, "one GEMM, split and reshaped without copies"
    assert all(call[name].shape == (1 if layout == "unbatched" else B, H, SQ, E // H) for name in "qkv")
    joined = ours._join_heads(call["out"], layout != "unbatched")
    assert joined.data_ptr() == call["out"].data_ptr(), "the output's heads are joined without a copy"


def test_strided_inputs():
    torch_mha, ours = make_pair(batch_first=True)
    wide = torch.randn(SQ, B, 2 * E, dtype=torch.float64)
    x = wide.transpose(0, 1)[..., ::2]
    for forward in FORWARDS.values():
        compare(torch_mha, ours, (x, x, x), {}, forward)


@pytest.mark.parametrize("kind", ["kpm_float", "attn2_float", "attn3_float", "kpm_float+attn2_float"])
@pytest.mark.parametrize("forward", FORWARDS)
def test_float_masks_get_gradients(kind, forward):
    """For example a learned table of relative positions."""
    grads = []
    inputs, masks = make_inputs(), make_masks(kind)
    for module in make_pair(batch_first=True):
        leaves = {name: x.clone().requires_grad_() for name, x in masks.items()}
        out, weights = module(*inputs, **leaves, **FORWARDS[forward])
        (out.square().sum() + (0 if weights is None else weights.square().sum())).backward()
        grads.append({name: x.grad for name, x in leaves.items()})
    for name, want in grads[0].items():
        assert want.abs().max() > 0
        assert_same(grads[1][name], want)


def test_the_causal_hint_replaces_the_mask():
    """As in torch: with need_weights=False the values (and the shape) of attn_mask are not read."""
    torch_mha, ours = make_pair(batch_first=True)
    x = make_inputs()[0]
    masks = {"attn_mask": torch.zeros(1, 1, dtype=torch.bool), "is_causal": True}
    compare(torch_mha, ours, (x, x, x), masks, {"need_weights": False})
    causal = {"attn_mask": torch.ones(SQ, SQ, dtype=torch.bool).triu(1)}
    got = ours(x, x, x, **masks, need_weights=False)[0]
    assert_same(got, ours(x, x, x, **causal, need_weights=False)[0])
    # With weights the values of the mask are read.
    masks["attn_mask"] = torch.zeros(SQ, SQ, dtype=torch.bool)
    compare(torch_mha, ours, (x, x, x), masks, {"need_weights": True})


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("padding", ["none", "given"])
def test_the_causal_hint_with_a_mask_that_hides_more(padding, kind, forward, calls):
    """With a key_padding_mask torch reads attn_mask despite the hint, so no element may be ignored."""
    torch_mha, ours = make_pair(batch_first=True)
    inputs, masks = make_inputs(), make_masks("causal" if padding == "none" else "causal+kpm_bool")
    masks["attn_mask"][4, 1] = True
    if kind == "float":
        for name in masks.keys() - {"is_causal"}:
            masks[name] = torch.zeros(masks[name].shape).double().masked_fill(masks[name], -math.inf)
    compare(torch_mha, ours, inputs, masks, FORWARDS[forward])
    assert calls[0]["is_causal"] == (padding == "none" and forward == "no_weights")


def test_the_causal_hint_with_padding_uses_the_band_if_the_mask_is_causal(calls):
    """The comparison with the causal mask runs in several blocks. Masks are 2-D and 3-D."""
    _, ours = make_pair(batch_first=True)
    size = 300
    x, padding = torch.randn(B, size, E).double(), torch.rand(B, size) < 0.3
    causal = torch.ones(size, size, dtype=torch.bool).triu(1)
    for mask in (causal, causal.expand(B * H, size, size)):
        ours(x, x, x, padding, False, mask, is_causal=True)
        assert calls[-1]["is_causal"]
        assert calls[-1]["attn_mask"] is None
        assert calls[-1]["key_mask"].shape == (B, size)
        almost = mask.clone()
        almost[..., 299, 280] = True
        ours(x, x, x, padding, False, almost, is_causal=True)
        assert not calls[-1]["is_causal"]


# Dropout


def test_dropout_drops_the_same_elements_of_output_and_weights():
    p = 0.3
    ours = MultiheadAttention(E, H, dropout=p, batch_first=True, dtype=torch.float64)
    inputs, masks = make_inputs(), make_masks("kpm_bool")
    ours.eval()
    clean_out, clean = ours(*inputs, **masks, average_attn_weights=False)
    again = ours(*inputs, **masks, average_attn_weights=False)
    assert torch.equal(clean, again[1])
    assert torch.equal(clean_out, again[0])
    ours.train()
    out, weights = ours(*inputs, **masks, average_attn_weights=False)

    v = ours._split_heads(nn.functional.linear(inputs[2], ours.in_proj_weight[2 * E :]), True)
    expected = ours.out_proj(ours._join_heads(weights @ v, True))
    assert_same(out, expected)
    attended = clean > 0
    kept = weights[attended] > 0
    assert_same(weights[attended][kept], (clean / (1 - p))[attended][kept])
    assert 0.5 < kept.double().mean() < 0.9
    assert (weights[~attended] == 0).all()
    averaged = {bool((ours(*inputs)[1] == 0).any()) for _ in range(3)}
    assert averaged <= {True, False}
    other = ours(*inputs, **masks, average_attn_weights=False)[1]
    assert not torch.equal(other, weights), "every call draws new random numbers"
    torch.manual_seed(5)
    first = ours(*inputs, **masks)
    torch.manual_seed(5)
    second = ours(*inputs, **masks)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    torch.manual_seed(5)
    assert torch.equal(ours(*inputs, **masks, need_weights=False)[0], first[0])


@pytest.mark.parametrize("p", [0.4, 1.0])
def test_dropout_gradients(p):
    ours = MultiheadAttention(4, 2, dropout=p, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def function(x):
        torch.manual_seed(3)
        return ours(x, x, x, average_attn_weights=False)

    assert torch.autograd.gradcheck(function, (x,))


# Rows without any key


def padded_batch():
    """Four sequences; the last sequence is only padding, as at the end of an epoch with a fixed batch size."""
    x = torch.randn(4, 6, E)
    padding = torch.arange(6) >= torch.tensor([6, 4, 1, 0]).unsqueeze(1)
    return x, padding


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("as_float", [False, True])
def test_a_fully_padded_row_returns_zeros_where_torch_returns_nan(as_float, batch_first):
    x, padding = padded_batch()
    x = x.double()
    real = ~padding.all(dim=1)
    if as_float:
        padding = torch.zeros(padding.shape, dtype=x.dtype).masked_fill(padding, -math.inf)
    torch_mha, ours = make_pair(batch_first=batch_first)
    results = []
    for module in (torch_mha, ours):
        leaf = x.clone().requires_grad_()
        inputs = [leaf if batch_first else leaf.transpose(0, 1)] * 3
        out, weights = module(*inputs, key_padding_mask=padding)
        out = out if batch_first else out.transpose(0, 1)
        (out.square().sum() + weights.square().sum()).backward()
        results.append((out, weights, leaf.grad, module.in_proj_weight.grad))
    (torch_out, torch_weights, torch_grad, torch_weight_grad), (out, weights, grad, weight_grad) = results
    assert torch_out[3].isnan().all()
    assert torch_weights[3].isnan().all()
    assert torch_weight_grad.isnan().any(), "this ruins the training"
    assert (weights[3] == 0).all()
    assert_same(out[3], ours.out_proj.bias.expand_as(out[3]))
    assert (grad[3] == 0).all()
    assert weight_grad.isfinite().all()
    for got, want in ((out, torch_out), (weights, torch_weights), (grad, torch_grad)):
        assert_same(got[real], want[real])


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("forward", FORWARDS)
def test_fully_masked_queries(kind, forward):
    """Masked by attn_mask, and by both masks together. The masked query does not change the other rows."""
    _, ours = make_pair(batch_first=True)
    inputs = make_inputs()
    attn_mask = torch.zeros(SQ, SK, dtype=torch.bool)
    attn_mask[2] = True
    attn_mask[4, :5] = True
    padding = torch.zeros(B, SK, dtype=torch.bool)
    padding[1, 5:] = True
    if kind == "float":
        attn_mask, padding = (
            torch.zeros(m.shape, dtype=torch.float64).masked_fill(m, -math.inf) for m in (attn_mask, padding)
        )
    got = run_with_grads(ours, inputs, {"attn_mask": attn_mask, "key_padding_mask": padding}, FORWARDS[forward])
    assert all(x is None or x.isfinite().all() for x in got.values())
    bias = ours.out_proj.bias
    assert_same(got["out"][:, 2], bias.expand(B, E))
    assert_same(got["out"][1, 4], bias)
    assert (got["input 0"][:, 2] == 0).all()
    assert (got["input 0"][1, 4] == 0).all()
    if got["weights"] is not None:
        weights = got["weights"] if got["weights"].dim() == 4 else got["weights"].unsqueeze(1)
        assert (weights[:, :, 2] == 0).all()
        assert (weights[1, :, 4] == 0).all()
        assert_same(weights[0].sum(-1)[:, 5:], torch.ones(weights.size(1), 2, dtype=torch.float64))


def test_padded_batches_train():
    """The default call (need_weights=True) on a batch with a fully padded sequence.

    torch's parameters become NaN in the first step. Our module learns.
    """
    target = torch.randn(4, 6, E)

    def train(module, steps):
        x, padding = padded_batch()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            out, _ = module(x, x, x, key_padding_mask=padding)
            # The loss masks padded positions, as users do; 0 * NaN is still NaN in the gradient.
            loss = (out - target).square()[~padding].mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    torch_mha, ours = make_pair(torch.float32, batch_first=True)
    train(torch_mha, 1)
    assert torch_mha.in_proj_weight.isnan().any()
    losses = train(ours, 8)
    assert all(p.isfinite().all() and p.grad.isfinite().all() for p in ours.parameters())
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < 0.9 * losses[0]
