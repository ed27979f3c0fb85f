"""replace_attention: models of torch.nn's classes return the same results before and after."""

import copy
import math

import pytest
import torch
from model_helpers import PADDING, SRC, TGT, E, H, S, T, assert_same, causal_mask, encoder_layer, randomize
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn_ext import MultiheadAttention, replace_attention

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True"),
    pytest.mark.usefixtures("one_thread"),
]


ENCODER_INPUTS = {
    "plain": {"src": SRC},
    "padding": {"src": SRC, "src_key_padding_mask": PADDING},
    "padding, not left-aligned": {"src": SRC, "src_key_padding_mask": PADDING.flip(1)},
    "causal mask": {"src": SRC, "mask": causal_mask(S)},
    "causal hint": {"src": SRC, "mask": causal_mask(S), "is_causal": True},
    "bool mask": {"src": SRC, "mask": torch.eye(S).bool()},
    "causal mask, padding": {"src": SRC, "mask": causal_mask(S).isinf(), "src_key_padding_mask": PADDING},
    "unbatched": {"src": SRC[0]},
}

ENCODERS = {
    "default": lambda: nn.TransformerEncoder(encoder_layer(), 2),
    "norm first": lambda: nn.TransformerEncoder(encoder_layer(norm_first=True), 2, norm=nn.LayerNorm(E)),
    "gelu, final norm": lambda: nn.TransformerEncoder(encoder_layer(activation="gelu"), 2, norm=nn.LayerNorm(E)),
    "no nested": lambda: nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False),
    "no bias": lambda: nn.TransformerEncoder(encoder_layer(bias=False), 2),
    "sequence first": lambda: nn.TransformerEncoder(encoder_layer(batch_first=False), 2),
}


@pytest.mark.parametrize("mode", ["train", "eval, no grad"])
@pytest.mark.parametrize("inputs", ENCODER_INPUTS)
@pytest.mark.parametrize("encoder", ENCODERS)
def test_encoder(encoder, inputs, mode, calls):
    """Equal shapes and values, also at padded positions (0 where torch uses nested tensors)."""
    model = randomize(ENCODERS[encoder]()).train(mode == "train")
    arguments = dict(ENCODER_INPUTS[inputs])
    if encoder == "sequence first" and inputs != "unbatched":
        arguments["src"] = arguments["src"].transpose(0, 1)
    with torch.set_grad_enabled("no grad" not in mode):
        want = model(**arguments)
        assert not calls
        report = replace_attention(model)
        got = model(**arguments)
    assert report.replaced == ("layers.0.self_attn", "layers.1.self_attn")
    assert len(calls) == 2
    assert_same(got, want)


@pytest.mark.parametrize("inputs", ["plain", "padding", "causal hint", "causal mask, padding"])
def test_encoder_gradients(inputs):
    model = randomize(ENCODERS["default"]())
    swapped = copy.deepcopy(model)
    replace_attention(swapped)
    for module in (model, swapped):
        module(**ENCODER_INPUTS[inputs]).square().sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), swapped.parameters(), strict=True):
        # At least 1, because the exact gradient of a key bias is 0.
        scale = parameter.grad.abs().max().clamp_min(1)
        assert (other.grad - parameter.grad).abs().max() <= 1e-10 * scale, name


class CountOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inputs", ["plain", "padding"])
def test_our_operator_runs_instead_of_torchs_fused_path(inputs):
    """The dispatcher sees no fused operator of torch and no softmax after the replacement."""
    model = randomize(ENCODERS["default"]()).eval()
    fused = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention", "scaled_dot_product")
    with torch.no_grad(), CountOps() as before:
        model(**ENCODER_INPUTS[inputs])
    replace_attention(model)
    with torch.no_grad(), CountOps() as after:
        model(**ENCODER_INPUTS[inputs])
    assert sum(name.startswith("aten." + fused[0]) for name in before.names) == 2
    assert not [name for name in after.names if any(op in name for op in fused)]
    assert sum(name.startswith("flash_attn_ext.") for name in after.names) == 2
    assert not [name for name in after.names if "softmax" in name]


@pytest.mark.parametrize("inputs", ["plain", "padding", "padding, not left-aligned", "unbatched"])
def test_an_encoder_built_with_our_module(inputs, calls):
    """nn.TransformerEncoder inspects and clones a layer that already has our module."""
    model = randomize(ENCODERS["default"]()).eval()
    layer = encoder_layer().double()
    layer.self_attn = MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    by_hand = nn.TransformerEncoder(layer, 2).eval()
    by_hand.load_state_dict(model.state_dict())
    assert by_hand.use_nested_tensor
    with torch.no_grad():
        want, got = model(**ENCODER_INPUTS[inputs]), by_hand(**ENCODER_INPUTS[inputs])
    assert len(calls) == 2
    assert_same(got, want)


def test_a_fully_padded_sequence_in_eval(calls):
    """torch's fused path without nested tensors returns NaN for it."""
    model = randomize(ENCODERS["no nested"]()).eval()
    arguments = {"src": SRC, "src_key_padding_mask": torch.arange(S) >= torch.tensor([S, 4, 0]).unsqueeze(1)}
    with torch.no_grad():
        want = model(**arguments)
        assert want[2].isnan().all()
        with pytest.raises(ValueError, match=r"sample_input: .* has NaN"):
            replace_attention(model, sample_input=arguments)
        assert type(model.layers[0].self_attn) is nn.MultiheadAttention
        replace_attention(model)
        got = model(**arguments)
    assert got.isfinite().all()
    assert_same(got[:2], want[:2])


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_transformer(training, norm_first, batch_first, calls):
    """nn.Transformer: encoder and decoder with all kinds of masks."""
    model = nn.Transformer(E, H, 2, 2, 16, dropout=0.0, batch_first=batch_first, norm_first=norm_first)
    model = randomize(model).train(training)
    src, tgt = (x if batch_first else x.transpose(0, 1) for x in (SRC, TGT))
    arguments = {
        "tgt_mask": causal_mask(T),
        "memory_mask": torch.zeros(T, S).double().masked_fill(torch.eye(T, S).bool(), -math.inf),
        "src_key_padding_mask": PADDING,
        "tgt_key_padding_mask": torch.arange(T) >= torch.tensor([T, T, 2]).unsqueeze(1),
        "memory_key_padding_mask": torch.arange(S) >= torch.tensor([S, 4, 3]).unsqueeze(1),
    }
    for given in ({}, {"tgt_mask": causal_mask(T), "tgt_is_causal": True}, arguments):
        swapped = copy.deepcopy(model)
        report = replace_attention(swapped)
        assert len(report.replaced) == 6
        assert not report.skipped
        calls.clear()
        with torch.set_grad_enabled(training):
            assert_same(swapped(src, tgt, **given), model(src, tgt, **given))
        assert len(calls) == 6


def test_decoder(calls):
    layer = nn.TransformerDecoderLayer(E, H, 16, dropout=0.0, batch_first=True)
    model = randomize(nn.TransformerDecoder(layer, 2)).eval()
    sample = {"tgt": TGT, "memory": SRC, "tgt_mask": causal_mask(T), "memory_key_padding_mask": PADDING}
    report = replace_attention(model, sample_input=sample)
    assert report.replaced == tuple(f"layers.{i}.{name}" for i in (0, 1) for name in ("self_attn", "multihead_attn"))
    assert len(calls) == 4
    assert 0 <= report.max_difference < 1e-10
