"""flash_attn_ext.MultiheadAttention against torch.nn.MultiheadAttention with the same weights."""

import copy
import io
import math
import pickle
import warnings

import pytest
import torch
from torch import nn

from flash_attn_ext import MultiheadAttention, modules

B, SQ, SK, E, H = 3, 7, 10, 12, 2

# Largest difference allowed, relative to the largest value of the reference.
RTOL = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}

FORWARDS = {
    "no_weights": {"need_weights": False},
    "averaged": {"need_weights": True},
    "per_head": {"need_weights": True, "average_attn_weights": False},
}

MASKS = ["none", "kpm_bool", "kpm_float", "attn2_bool", "attn2_float", "attn3_bool", "attn3_float"]
MASKS += ["kpm_bool+attn2_bool", "kpm_bool+attn3_bool", "kpm_float+attn2_float", "kpm_float+attn3_float"]
MASKS += ["kpm_bool+attn2_float", "kpm_float+attn3_bool", "causal", "causal+kpm_bool", "causal+kpm_float"]


@pytest.fixture(autouse=True)
def seed_and_one_thread():
    """One thread: these tensors are tiny, and on a busy machine two threads mostly wait for each other."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def calls(monkeypatch):
    """The keyword arguments, with q, k, v and the returned out, of every call of the kernel by the module."""
    made = []
    kernel = modules.flash_attn

    def record(q, k, v, **kwargs):
        out = kernel(q, k, v, **kwargs)
        made.append(dict(kwargs, q=q, k=k, v=v, out=out))
        return out

    monkeypatch.setattr(modules, "flash_attn", record)
    return made


def assert_same(got, want, rtol=None):
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    rtol = RTOL[want.dtype] if rtol is None else rtol
    if want.numel():
        scale = want.detach().abs().max().clamp_min(1e-3)
        difference = (got.detach() - want.detach()).abs().max()
        # "not <=" so that a NaN fails.
        assert difference <= rtol * scale, f"difference {difference:.3g} of largest value {scale:.3g}"


def make_pair(dtype=torch.float64, embed_dim=E, num_heads=H, **kwargs):
    """torch's module and ours with equal weights, none of them at a special initial value such as 0."""
    torch_mha = nn.MultiheadAttention(embed_dim, num_heads, dtype=dtype, **kwargs)
    for parameter in torch_mha.parameters():
        nn.init.normal_(parameter, std=0.4)
    ours = MultiheadAttention(embed_dim, num_heads, dtype=dtype, **kwargs)
    ours.load_state_dict(torch_mha.state_dict())
    return torch_mha, ours


def make_masks(kind, layout="batch_first", seqlen_q=SQ, seqlen_k=SK, dtype=torch.float64):
    """Keyword arguments of forward; every row keeps at least key 0, as torch would give NaN otherwise."""
    masks = {}
    batch = 1 if layout == "unbatched" else B
    for part in kind.split("+"):
        if part == "none":
            continue
        if part == "causal":
            masks["attn_mask"] = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool).triu(1)
            masks["is_causal"] = True
            continue
        name, polarity = part.split("_")
        shape = {
            "kpm": (batch, seqlen_k),
            "attn2": (seqlen_q, seqlen_k),
            "attn3": (batch * H, seqlen_q, seqlen_k),
        }
        mask = torch.rand(shape[name]) < 0.4
        mask[..., 0] = False
        if polarity == "float":
            mask = torch.randn(mask.shape, dtype=dtype).masked_fill(mask, -math.inf)
        if name == "kpm" and layout == "unbatched":
            mask = mask.squeeze(0)
        masks["key_padding_mask" if name == "kpm" else "attn_mask"] = mask
    if "causal+kpm_float" in kind:  # torch adds its bool attn_mask to it
        masks["attn_mask"] = torch.zeros(seqlen_q, seqlen_k, dtype=dtype).masked_fill(
            masks["attn_mask"], -math.inf
        )
    return masks


def make_inputs(layout="batch_first", dtype=torch.float64, kdim=E, vdim=E, seqlen_q=SQ, seqlen_k=SK):
    shape = {
        "batch_first": lambda s, e: (B, s, e),
        "seq_first": lambda s, e: (s, B, e),
        "unbatched": lambda s, e: (s, e),
    }[layout]
    sizes = ((seqlen_q, E), (seqlen_k, kdim), (seqlen_k, vdim))
    return [torch.randn(shape(*size), dtype=dtype) for size in sizes]


def run_with_grads(module, inputs, masks, forward):
    """out, weights and the gradients of a fixed random loss over both, by name."""
    inputs = {id(x): x for x in inputs}, [id(x) for x in inputs]  # one leaf for each distinct tensor
    leaves = {key: x.clone().requires_grad_() for key, x in inputs[0].items()}
    module.zero_grad()
    out, weights = module(*(leaves[key] for key in inputs[1]), **masks, **forward)
    generator = torch.Generator().manual_seed(1)
    loss = (out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum()
    if weights is not None:
        loss = loss + (weights * torch.randn(weights.shape, generator=generator, dtype=weights.dtype)).sum()
    loss.backward()
    results = {"out": out, "weights": weights}
    results |= {f"input {i}": leaf.grad for i, leaf in enumerate(leaves.values())}
    results |= {name: parameter.grad for name, parameter in module.named_parameters()}
    return results


def compare(torch_mha, ours, inputs, masks, forward):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched")
        want = run_with_grads(torch_mha, inputs, masks, forward)
        got = run_with_grads(ours, inputs, masks, forward)
    assert got.keys() == want.keys()
    for name in want:
        if want[name] is None:
            assert got[name] is None, name
        else:
            assert_same(got[name], want[name])


@pytest.mark.parametrize("layout", ["batch_first", "seq_first", "unbatched"])
@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize("masks", MASKS)
def test_masks(masks, forward, layout):
    pair = make_pair(batch_first=layout == "batch_first")
    compare(*pair, make_inputs(layout), make_masks(masks, layout), FORWARDS[forward])


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.parametrize(
    "masks", ["none", "kpm_bool", "attn3_float", "kpm_bool+attn2_bool", "causal", "causal+kpm_bool"]
)
@pytest.mark.parametrize("batch_first", [True, False])
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
    """Each has its own projection path, or must not get another's."""
    q, k, v = make_inputs(seqlen_q=SK)
    inputs = {"qkv": (q, q, q), "kv": (q, k, k), "qk": (q, q, v), "qv": (q, k, q), "": (q, k, v)}[same]
    for forward in FORWARDS.values():
        compare(
            *make_pair(batch_first=True, bias=bias), inputs, make_masks("attn2_float", seqlen_q=SK), forward
        )


@pytest.mark.parametrize("masks", MASKS)
def test_float32(masks):
    pair = make_pair(torch.float32, batch_first=True)
    for forward in FORWARDS.values():
        compare(*pair, make_inputs(dtype=torch.float32), make_masks(masks, dtype=torch.float32), forward)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masks", ["none", "kpm_bool+attn2_bool", "attn3_float"])
def test_16_bit(dtype, masks):
    """No further from float64 than twice torch's distance, plus a rounding of the output."""
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
    """nn.Transformer.generate_square_subsequent_mask makes float32 unless told otherwise."""
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


# What reaches the kernel


def expected_mask_shape(masks, layout):
    if "attn3" in masks:
        return (1 if layout == "unbatched" else B, H, SQ, SK)
    if "attn2" in masks:
        return (1 if layout == "unbatched" else B, 1, SQ, SK) if "kpm" in masks else (SQ, SK)
    return (1 if layout == "unbatched" else B, 1, 1, SK) if "kpm" in masks else None


@pytest.mark.parametrize("layout", ["batch_first", "seq_first", "unbatched"])
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_masks_reach_the_kernel_unexpanded(masks, layout, calls):
    _, ours = make_pair(batch_first=layout == "batch_first")
    given = make_masks(masks, layout)
    ours(*make_inputs(layout), **given, need_weights=False)
    (call,) = calls
    expected = expected_mask_shape(masks, layout)
    assert call["is_causal"] == ("causal" in masks)
    assert (call["attn_mask"] is None) if expected is None else (call["attn_mask"].shape == expected)
    if masks == "attn3_float":  # nor copied
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
    """A learned bias, such as a relative position table."""
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


def test_the_hint_is_taken_at_its_word():
    """As torch: with need_weights=False the values (and the shape) of attn_mask are not looked at."""
    torch_mha, ours = make_pair(batch_first=True)
    x = make_inputs()[0]
    masks = {"attn_mask": torch.zeros(1, 1, dtype=torch.bool), "is_causal": True}
    compare(torch_mha, ours, (x, x, x), masks, {"need_weights": False})
    causal = {"attn_mask": torch.ones(SQ, SQ, dtype=torch.bool).triu(1)}
    got = ours(x, x, x, **masks, need_weights=False)[0]
    assert_same(got, ours(x, x, x, **causal, need_weights=False)[0])
    # With weights the mask is needed, and its values count.
    masks["attn_mask"] = torch.zeros(SQ, SQ, dtype=torch.bool)
    compare(torch_mha, ours, (x, x, x), masks, {"need_weights": True})


# Dropout


def test_dropout_of_out_and_weights_is_the_same():
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
    assert not torch.equal(other, weights), "every call draws anew"
    torch.manual_seed(5)
    first = ours(*inputs, **masks)
    torch.manual_seed(5)
    second = ours(*inputs, **masks)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    torch.manual_seed(5)
    assert torch.equal(ours(*inputs, **masks, need_weights=False)[0], first[0])


def test_dropout_gradients():
    ours = MultiheadAttention(4, 2, dropout=0.4, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def function(x):
        torch.manual_seed(3)
        return ours(x, x, x, average_attn_weights=False)

    assert torch.autograd.gradcheck(function, (x,))


# Rows without any key


def padded_batch():
    """Four sequences of which the last is padding only, as at the end of an epoch with a fixed batch size."""
    x = torch.randn(4, 6, E)
    padding = torch.arange(6) >= torch.tensor([6, 4, 1, 0]).unsqueeze(1)
    return x, padding


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("as_float", [False, True])
def test_a_fully_padded_row_gives_zeros_where_torch_gives_nan(as_float, batch_first):
    x, padding = padded_batch()
    x = x.double()
    real = ~padding.all(dim=1)
    if as_float:
        padding = torch.zeros(padding.shape, dtype=x.dtype).masked_fill(padding, -math.inf)
    torch_mha, ours = make_pair(batch_first=batch_first)
    results = []
    for module in (torch_mha, ours):
        leaf = x.clone().requires_grad_()
        given = leaf if batch_first else leaf.transpose(0, 1)
        out, weights = module(given, given, given, key_padding_mask=padding)
        out = out if batch_first else out.transpose(0, 1)
        (out.square().sum() + weights.square().sum()).backward()
        results.append((out, weights, leaf.grad, module.in_proj_weight.grad))
    (torch_out, torch_weights, torch_grad, torch_weight_grad), (out, weights, grad, weight_grad) = results
    assert torch_out[3].isnan().all()
    assert torch_weights[3].isnan().all()
    assert torch_weight_grad.isnan().any(), "which is what ruins the training"
    assert (weights[3] == 0).all()
    assert_same(out[3], ours.out_proj.bias.expand_as(out[3]))
    assert (grad[3] == 0).all()
    assert weight_grad.isfinite().all()
    for got, want in ((out, torch_out), (weights, torch_weights), (grad, torch_grad)):
        assert_same(got[real], want[real])


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("forward", FORWARDS)
def test_fully_masked_queries(kind, forward):
    """By attn_mask, and by the two masks together; the other rows are as if the query were not there."""
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
    got = run_with_grads(
        ours, inputs, {"attn_mask": attn_mask, "key_padding_mask": padding}, FORWARDS[forward]
    )
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

    torch's parameters become NaN in the first step, ours learn.
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


# Nested tensors


def nest(x, lengths):
    return torch.nested.as_nested_tensor([row[:length] for row, length in zip(x, lengths, strict=True)])


@pytest.mark.parametrize("forward", FORWARDS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_self_attention(forward):
    torch_mha, ours = make_pair(torch.float32, batch_first=True)
    nested = nest(make_inputs(dtype=torch.float32)[0], [7, 1, 4])
    with torch.no_grad():
        want = torch_mha.eval()(nested, nested, nested, **FORWARDS[forward])
        got = ours.eval()(nested, nested, nested, **FORWARDS[forward])
    for x, y in zip(got[0].unbind(), want[0].unbind(), strict=True):
        assert_same(x, y)
    assert (got[1] is None) == (want[1] is None)
    if want[1] is not None:
        assert_same(got[1], want[1])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_cross_attention_trains():
    """Beyond torch, which takes nested inputs on its inference path only."""
    _, ours = make_pair(batch_first=True)
    q, k, v = make_inputs()
    lengths_q, lengths_k = [7, 2, 0], [3, 10, 4]
    out, _ = ours(nest(q, lengths_q), nest(k, lengths_k), nest(v, lengths_k), need_weights=False)
    sum(row.square().sum() for row in out.unbind()).backward()
    got = {name: parameter.grad.clone() for name, parameter in ours.named_parameters()}
    ours.zero_grad()
    for i, (n, m) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        expected, _ = ours(q[i, :n], k[i, :m], v[i, :m], need_weights=False)
        assert_same(out.unbind()[i], expected)
        expected.square().sum().backward()
    for name, parameter in ours.named_parameters():
        assert_same(got[name], parameter.grad)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_errors():
    _, ours = make_pair(batch_first=True)
    x = make_inputs()[0]
    nested = nest(x, [7, 1, 4])
    jagged = torch.nested.as_nested_tensor([x[0], x[1, :3]], layout=torch.jagged)
    with pytest.raises(AssertionError, match=r"^key: got a plain tensor"):
        ours(nested, x, x)
    with pytest.raises(AssertionError, match=r"^query: got a torch.jagged nested"):
        ours(jagged, jagged, jagged)
    with pytest.raises(AssertionError, match=r"^attn_mask: must be None"):
        ours(nested, nested, nested, attn_mask=torch.zeros(7, 7))
    with pytest.raises(AssertionError, match=r"^value: got sequence lengths"):
        ours(nested, nested, nest(x, [7, 2, 4]))
    with pytest.raises(AssertionError, match="batch_first"):
        make_pair()[1](nested, nested, nested)


# Errors


BAD = torch.zeros(SQ, SK, dtype=torch.int64)
ERRORS = {
    "query dim": ((torch.randn(E), None, None), {}, "query: got a 1-D"),
    "key dim": ((None, torch.randn(SK, E), None), {}, "key: got a 2-D tensor, must be 3-D"),
    "query features": (
        (torch.randn(B, SQ, 4), None, None),
        {},
        "query: got embedding dimension 4, must be 12",
    ),
    "key is not value": (
        (None, None, torch.randn(B, 9, E)),
        {},
        r"value: got sequence and batch sizes \(3, 9\)",
    ),
    "batch": (
        (None, torch.randn(2, SK, E), torch.randn(2, SK, E)),
        {},
        "key: got batch size 2, must be query's 3",
    ),
    "kpm dtype": ((), {"key_padding_mask": BAD[:B]}, "key_padding_mask: got torch.int64"),
    "attn dtype": ((), {"attn_mask": BAD}, "attn_mask: got torch.int64"),
    "kpm shape": (
        (),
        {"key_padding_mask": torch.zeros(B, SQ)},
        r"key_padding_mask: got shape \(3, 7\), must be \(3, 10\)",
    ),
    "kpm dim": ((), {"key_padding_mask": torch.zeros(SK)}, "key_padding_mask: got shape"),
    "attn2 shape": (
        (),
        {"attn_mask": torch.zeros(SK, SK)},
        r"attn_mask: got shape \(10, 10\), should be \(7, 10\)",
    ),
    "attn3 shape": ((), {"attn_mask": torch.zeros(B, SQ, SK)}, r"should be \(6, 7, 10\)"),
    "attn dim": ((), {"attn_mask": torch.zeros(SK)}, "attn_mask: got a 1-D"),
    "hint alone": ((), {"is_causal": True}, "Need attn_mask if specifying the is_causal hint"),
}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("case", ERRORS)
def test_errors(case, need_weights):
    """Of the types that torch raises, with the argument, what was got and what is allowed."""
    changed, masks, message = ERRORS[case]
    inputs = make_inputs(dtype=torch.float32)
    inputs = [
        new if new is not None else old
        for new, old in zip((*changed, None, None, None), inputs, strict=False)
    ]
    torch_mha, ours = make_pair(torch.float32, batch_first=True)
    with pytest.raises((AssertionError, RuntimeError)) as theirs:
        torch_mha(*inputs, **masks, need_weights=need_weights)
    with pytest.raises(theirs.type, match=message):
        ours(*inputs, **masks, need_weights=need_weights)


def test_errors_unbatched():
    torch_mha, ours = make_pair(torch.float32)
    inputs = make_inputs("unbatched", torch.float32)
    for masks in (
        {"attn_mask": torch.zeros(3, SQ, SK)},
        {"attn_mask": torch.zeros(SQ, SQ)},
        {"key_padding_mask": torch.zeros(1, SK)},
    ):
        with pytest.raises((AssertionError, RuntimeError)) as theirs:
            torch_mha(*inputs, **masks)
        with pytest.raises(theirs.type, match=next(iter(masks))):
            ours(*inputs, **masks)


def test_mismatched_mask_types_warn():
    _, ours = make_pair(batch_first=True)
    with pytest.warns(UserWarning, match="Support for mismatched key_padding_mask and attn_mask"):
        ours(*make_inputs(), **make_masks("kpm_bool+attn2_float"))


@pytest.mark.parametrize("args", [(0, 1), (8, 0), (8, 3)])
def test_constructor_errors(args):
    with pytest.raises((ValueError, AssertionError)) as theirs:
        nn.MultiheadAttention(*args)
    with pytest.raises(theirs.type):
        MultiheadAttention(*args)


# A module among modules


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 5, "add_bias_kv": True}], ids=str)
def test_construction_and_state_dict(options):
    torch.manual_seed(7)
    torch_mha = nn.MultiheadAttention(E, H, **options)
    torch.manual_seed(7)
    ours = MultiheadAttention(E, H, **options)
    theirs_state, our_state = torch_mha.state_dict(), ours.state_dict()
    assert list(theirs_state) == list(our_state)
    assert all(torch.equal(theirs_state[name], our_state[name]) for name in our_state), (
        "the same initial values"
    )
    for source, target in (
        (torch_mha, MultiheadAttention(E, H, **options)),
        (ours, nn.MultiheadAttention(E, H, **options)),
    ):
        file = io.BytesIO()
        torch.save(source.state_dict(), file)
        file.seek(0)
        target.load_state_dict(torch.load(file))
        assert all(torch.equal(x, target.state_dict()[name]) for name, x in source.state_dict().items())
    assert isinstance(ours, nn.MultiheadAttention)


def clones(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    yield copy.deepcopy(module)
    yield pickle.loads(pickle.dumps(module))
    yield torch.load(file, weights_only=False)


def test_deepcopy_and_pickle(calls):
    _, ours = make_pair(torch.float32, batch_first=True)
    x = make_inputs(dtype=torch.float32)[0]
    want = ours(x, x, x)
    for clone in clones(ours):
        assert type(clone) is MultiheadAttention
        assert clone.in_proj_weight is not ours.in_proj_weight
        assert torch.equal(clone(x, x, x)[0], want[0])
        layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True).eval()
        layer.self_attn = clone.eval()
        calls.clear()
        with torch.no_grad():
            layer(x)
        assert len(calls) == 1, "the copy too keeps torch's fused path out"


def test_from_torch():
    torch_mha, _ = make_pair(batch_first=True, add_bias_kv=True)
    seen = []
    torch_mha.register_forward_hook(lambda *_: seen.append(1))
    torch_mha.eval()
    ours = MultiheadAttention.from_torch(torch_mha)
    assert type(ours) is MultiheadAttention
    assert type(torch_mha) is nn.MultiheadAttention
    assert not ours.training
    assert dict(ours.named_parameters()).keys() == dict(torch_mha.named_parameters()).keys()
    assert all(x is y for x, y in zip(ours.parameters(), torch_mha.parameters(), strict=True))
    inputs = make_inputs()
    assert_same(ours(*inputs)[0], torch_mha(*inputs)[0])
    assert len(seen) == 2
    assert not torch_mha._forward_pre_hooks
    ours.register_buffer("only_here", torch.zeros(1))
    assert not hasattr(torch_mha, "only_here")

    class Other(nn.MultiheadAttention):
        pass

    for wrong in (Other(E, H), ours, nn.Linear(2, 2)):
        with pytest.raises(TypeError, match="mha: "):
            MultiheadAttention.from_torch(wrong)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masks", ["none", "kpm_bool", "attn2_bool"])
def test_in_an_encoder_layer_the_fused_path_is_not_taken(masks, norm_first, calls):
    """In eval without grad torch would take the weights and never call the module."""
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True, norm_first=norm_first).eval()
    x = make_inputs(dtype=torch.float32)[0]
    given = make_masks(masks, seqlen_k=SQ, dtype=torch.float32)
    names = {"key_padding_mask": "src_key_padding_mask", "attn_mask": "src_mask"}
    given = {names[name]: mask for name, mask in given.items()}
    with torch.no_grad():
        want = layer(x, **given)
        assert not calls
        layer.self_attn = MultiheadAttention.from_torch(layer.self_attn)
        assert_same(layer(x, **given), want)
        assert len(calls) == 1
        layer.self_attn._forward_pre_hooks.clear()
        with pytest.raises(RuntimeError, match="about to bypass flash_attn_ext"):
            layer(x, **given)


@pytest.mark.parametrize("training", [True, False])
def test_compile(training):
    _, ours = make_pair(torch.float32, batch_first=True)
    ours.train(training)
    inputs = make_inputs(dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for masks, forward in (("causal+kpm_bool", "no_weights"), ("kpm_bool+attn2_bool", "averaged")):
        given = make_masks(masks)
        want = run_with_grads(ours, inputs, given, FORWARDS[forward])
        got = run_with_grads(compiled, inputs, given, FORWARDS[forward])
        for (name, x), y in zip(want.items(), got.values(), strict=True):
            assert (x is None and y is None) or assert_same(y, x) is None, name
    x = inputs[0]
    assert_same(compiled(x, x, x)[0], ours(x, x, x)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True, "add_zero_attn": True}, {"kdim": 5}], ids=str)
def test_autocast(options, dtype, calls):
    pair = make_pair(torch.float32, batch_first=True, **options)
    inputs = make_inputs(dtype=torch.float32, kdim=options.get("kdim", E))
    masks = make_masks("attn2_float", dtype=torch.float32)
    for forward in FORWARDS.values():
        with torch.autocast("cpu", dtype):
            want, got = (run_with_grads(module, inputs, masks, forward) for module in pair)
        for name, x in want.items():
            if x is None:
                assert got[name] is None
            else:
                assert_same(got[name], x, rtol=RTOL[dtype])
    assert {call[name].dtype for call in calls for name in "qkv"} == {dtype}
