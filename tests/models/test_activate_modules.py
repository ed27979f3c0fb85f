"""activate: nn.MultiheadAttention and nn.TransformerEncoder, in training and in torch's fused inference path."""

import pytest
import reference
import torch
import torch.nn.functional as F
from activate_helpers import NATIVE_MHA, SDPA, make
from torch import nn

from flash_attn_ext import activate, activated, activation_report

pytestmark = pytest.mark.usefixtures("one_thread", "torch_again")


def assert_module_is_same(module, operators, *args, **kwargs):
    def call(x):
        got = module(x, *args, **kwargs)
        return got[0] if isinstance(got, tuple) else got

    x = torch.randn(2, 20, 32)
    expected = call(x)
    with activated():
        got = call(x)
    report = activation_report(reset=True)
    assert set(report.taken) == operators, report
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def padding(*lengths, longest=20):
    return torch.arange(longest) >= torch.tensor(lengths)[:, None]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "masks",
    [
        {},
        {"key_padding_mask": padding(20, 7)},
        {"attn_mask": nn.Transformer.generate_square_subsequent_mask(20), "is_causal": True},
        {"attn_mask": torch.ones(20, 20, dtype=torch.bool).triu(1)},
        {"attn_mask": torch.ones(20, 20, dtype=torch.bool).triu(1), "key_padding_mask": padding(20, 7)},
        {"attn_mask": torch.ones(8, 20, 20, dtype=torch.bool).triu(1)},
    ],
    ids=["plain", "padding", "hint", "causal", "both", "per_head"],
)
def test_multihead_attention(masks, training):
    module = nn.MultiheadAttention(32, 4, batch_first=True).train(training)
    with torch.set_grad_enabled(training):
        assert_module_is_same(
            lambda x: module(x, x, x, need_weights=False, **masks),
            # With the hint torch does not use its fused path.
            {SDPA} if training or "is_causal" in masks else {NATIVE_MHA},
        )


def test_multihead_attention_with_weights_is_left_to_torch():
    module = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(2, 20, 32)
    with torch.no_grad():
        expected = module(x, x, x)
        with activated():
            got = module(x, x, x)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert activation_report().left == {(NATIVE_MHA, "the attention weights are asked for (need_weights)"): 1}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_encoder_in_its_fused_inference_path(padded, norm_first):
    """With padding torch converts the batch to nested tensors (unless norm_first). Our kernels support them."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).eval()
    with torch.no_grad():
        masks = {"src_key_padding_mask": padding(20, 7)} if padded else {}
        assert_module_is_same(encoder, {NATIVE_MHA}, **masks)


def test_encoder_training():
    torch.manual_seed(1)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 1)
    x = make(2, 20, 32)
    gradients = []
    for active in (False, True):
        if active:
            activate()
        encoder.zero_grad()
        encoder(x, src_key_padding_mask=padding(20, 7)).square().sum().backward()
        gradients.append([p.grad.clone() for p in encoder.parameters()])
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert activation_report().taken == {SDPA: 1}


def test_the_fused_inference_path_returns_zero_where_torch_returns_nan():
    module = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(1, 20, 32)
    mask = torch.zeros(20, 20, dtype=torch.bool)
    mask[5] = True
    with activated(), torch.no_grad():
        out, _ = module(x, x, x, attn_mask=mask, need_weights=False)
    assert activation_report().taken == {NATIVE_MHA: 1}
    torch.testing.assert_close(out[0, 5], module.out_proj.bias)
    exact, _ = reference.attention(*[t.unflatten(-1, (4, 8)).transpose(1, 2) for t in projections(module, x)], ~mask)
    torch.testing.assert_close(out, module.out_proj(exact.transpose(1, 2).flatten(2)), atol=1e-5, rtol=1e-5)


def projections(module, x):
    return F.linear(x, module.in_proj_weight, module.in_proj_bias).detach().chunk(3, -1)
