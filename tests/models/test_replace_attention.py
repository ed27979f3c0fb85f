"""replace_attention: the results that do not change, the skipped modules, and the comparison on a sample input."""

import copy
import math

import pytest
import torch
from model_helpers import PADDING, SRC, TGT, B, E, H, S, assert_same, encoder_layer, randomize
from torch import nn
from torch.nn.utils import parametrize

from flash_attn_ext import MultiheadAttention, replace_attention
from flash_attn_ext.nn import multihead_attention

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:enable_nested_tensor is True"),
    pytest.mark.usefixtures("one_thread"),
]


def test_only_the_class_changes():
    """Modules and Parameters are the same objects, with the same state_dict and flags, so optimizers continue."""
    model = randomize(nn.Transformer(E, H, 1, 1, 16, dropout=0.1, batch_first=True))
    model.decoder.eval()
    for parameter in model.encoder.layers[0].self_attn.parameters():
        parameter.requires_grad_(False)
    before_modules, before_parameters = dict(model.named_modules()), dict(model.named_parameters())
    before_state, flags = list(model.state_dict()), {n: m.training for n, m in model.named_modules()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    replace_attention(model, sample_input=(SRC, TGT))
    assert all(before_modules[name] is module for name, module in model.named_modules())
    assert all(before_parameters[name] is parameter for name, parameter in model.named_parameters())
    assert before_state == list(model.state_dict())
    assert flags == {n: m.training for n, m in model.named_modules()}
    attention = model.decoder.layers[0].self_attn
    assert isinstance(attention, MultiheadAttention)
    assert attention.dropout == 0.1
    assert not attention.training
    assert not model.encoder.layers[0].self_attn.in_proj_weight.requires_grad
    old = attention.in_proj_weight.detach().clone()
    model(SRC, TGT).square().sum().backward()
    optimizer.step()
    assert not torch.equal(attention.in_proj_weight, old)


def test_a_model_that_is_the_attention():
    model = nn.MultiheadAttention(E, H, batch_first=True).double()
    reference = copy.deepcopy(model)
    report = replace_attention(model, sample_input=(SRC, SRC, SRC, PADDING))
    assert report.replaced == ("",)
    assert report.max_difference < 1e-10
    assert type(model) is MultiheadAttention
    for got, want in zip(model(TGT, SRC, SRC), reference(TGT, SRC, SRC), strict=True):
        assert_same(got, want)


def test_tied_modules_stay_tied():
    attention = nn.MultiheadAttention(E, H)
    model = nn.ModuleDict({"a": attention, "b": nn.ModuleList([attention, nn.MultiheadAttention(E, H)])})
    assert replace_attention(model).replaced == ("a", "b.1")
    assert model["a"] is model["b"][0] is attention
    assert type(attention) is MultiheadAttention


def test_hooks_and_their_handles_continue_to_work():
    model = nn.Sequential(nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64))
    seen = []
    handles = [
        model[0].register_forward_hook(lambda *_: seen.append("forward")),
        model[0].register_forward_pre_hook(lambda *_: seen.append("pre")),
        model[0].register_full_backward_hook(lambda *_: seen.append("backward")),
        model[0].register_load_state_dict_post_hook(lambda *_: seen.append("load")),
    ]
    replace_attention(model)
    x = SRC.clone().requires_grad_()
    model[0](x, x, x)[0].sum().backward()
    model.load_state_dict(model.state_dict())
    assert sorted(seen) == ["backward", "forward", "load", "pre"]
    for handle in handles:
        handle.remove()
    model[0](x, x, x)[0].sum().backward()
    assert len(seen) == 4


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


def test_parametrized_modules():
    model = nn.Sequential(nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64))
    parametrize.register_parametrization(model[0], "in_proj_weight", Double())
    reference = copy.deepcopy(model)
    assert replace_attention(model).replaced == ("0",)
    assert isinstance(model[0], MultiheadAttention)
    assert parametrize.is_parametrized(model[0], "in_proj_weight")
    assert_same(model[0](SRC, SRC, SRC)[0], reference[0](SRC, SRC, SRC)[0])
    model[0](SRC, SRC, SRC)[0].sum().backward()
    assert model[0].parametrizations.in_proj_weight.original.grad.abs().max() > 0
    parametrize.remove_parametrizations(model[0], "in_proj_weight")
    assert type(model[0]) is MultiheadAttention
    assert_same(model[0](SRC, SRC, SRC)[0], reference[0](SRC, SRC, SRC)[0])


def test_dtypes_and_deepcopy_afterwards(calls):
    model = nn.TransformerEncoder(encoder_layer(), 2).bfloat16().eval()
    replace_attention(model, sample_input=SRC.bfloat16())
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    calls.clear()
    with torch.no_grad():
        copy.deepcopy(model).float()(SRC.float())
    assert len(calls) == 2


# Skipped modules


class Subclass(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_subclasses_are_skipped_and_reported():
    model = nn.ModuleList([Subclass(E, H), nn.MultiheadAttention(E, H), MultiheadAttention(E, H)])
    with pytest.warns(UserWarning, match="skipped '0': it is a test_replace_attention.Subclass"):
        report = replace_attention(model)
    assert type(model[0]) is Subclass
    assert report.replaced == ("1",)
    assert report.already == ("2",)
    assert list(report.skipped) == ["0"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_quantizable_attention_is_skipped():
    model = nn.ModuleList([torch.ao.nn.quantizable.MultiheadAttention(E, H)])
    with pytest.warns(UserWarning, match="quantizable.* may compute something else"):
        report = replace_attention(model)
    assert not report.replaced
    assert list(report.skipped) == ["0"]


def test_a_module_with_a_forward_on_the_instance_is_skipped():
    """accelerate's hooks assign a forward to the instance. It would call torch's forward for any class."""
    model = nn.MultiheadAttention(E, H)
    model.forward = model.forward
    with pytest.warns(UserWarning, match="skipped 'the model': its forward was replaced"):
        report = replace_attention(model)
    assert report.skipped
    assert type(model) is nn.MultiheadAttention


def test_nothing_to_replace():
    with pytest.raises(ValueError, match=r"model: Linear contains no torch.nn.MultiheadAttention"):
        replace_attention(nn.Linear(2, 2))
    model = nn.MultiheadAttention(E, H)
    replace_attention(model)
    again = replace_attention(model)
    assert again.replaced == ()
    assert again.already == ("",)
    assert len(model._forward_pre_hooks) == 1


# The comparison on sample_input


class Model(nn.Module):
    """Difficult outputs: random, infinite, nested, integer, None, and a buffer that each call overwrites."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(E, H, dropout=0.5, batch_first=True, dtype=torch.float64)
        self.register_buffer("last", torch.zeros(B, S, E, dtype=torch.float64))

    def forward(self, x, *, scale=1.0):
        out, weights = self.attention(x, x, x)
        self.last.copy_(out * scale)
        self.last[-1, -1, -1] = math.inf
        nested = torch.nested.as_nested_tensor([out[0], out[1, :2]])
        return {
            "out": self.last,
            "others": [nested, weights, torch.rand(3), torch.arange(3), "text", 3, None],
        }


@pytest.mark.parametrize("sample", [SRC, (SRC,), {"x": SRC, "scale": 3.0}], ids=["one", "tuple", "dict"])
def test_sample_input(sample):
    model = Model()
    rng = torch.get_rng_state()
    report = replace_attention(model, sample_input=sample)
    assert report.replaced == ("attention",)
    assert 0 <= report.max_difference < 1e-10
    assert model.training
    assert torch.equal(torch.get_rng_state(), rng)


def check_untouched(model, hooks=0):
    assert type(model.attention) is nn.MultiheadAttention
    assert model.training
    assert model.attention.training
    assert len(model.attention._forward_pre_hooks) == hooks


def test_a_different_result_raises_and_undoes_the_replacement(monkeypatch):
    model = Model()
    model.attention.register_forward_pre_hook(lambda *_: None)
    kernel = multihead_attention.flash_attn

    def wrong(*args, **kwargs):
        out, lse = kernel(*args, **kwargs)
        out[0, 0, 0, 0] += 0.5
        return out, lse

    monkeypatch.setattr(multihead_attention, "flash_attn", wrong)
    nn.init.eye_(model.attention.out_proj.weight)
    for tolerance in ({}, {"atol": 0.4}, {"atol": 0.0, "rtol": 1e-3}):
        with pytest.raises(RuntimeError, match=r"output tensor 0 would change by up to 0\.5, .* nothing was replaced"):
            replace_attention(model, sample_input=SRC, **tolerance)
        check_untouched(model, hooks=1)
    assert replace_attention(model, sample_input=SRC, atol=0.6).max_difference == pytest.approx(0.5)
    assert type(model.attention) is MultiheadAttention


def test_a_new_nan_is_a_difference(monkeypatch):
    model = Model()
    monkeypatch.setattr(
        multihead_attention, "flash_attn", lambda q, *_, **__: (torch.full_like(q, math.nan), q[..., 0])
    )
    with pytest.raises(RuntimeError, match="by up to nan"):
        replace_attention(model, sample_input=SRC, atol=1e9)
    check_untouched(model)


def test_an_error_of_the_model_undoes_the_replacement(monkeypatch):
    model = Model()

    def fails(*args, **kwargs):
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(multihead_attention, "flash_attn", fails)
    with pytest.raises(NotImplementedError, match="no kernel"):
        replace_attention(model, sample_input=SRC)
    check_untouched(model)
    with pytest.raises(RuntimeError, match="embed_dim 12"):  # torch's, before anything is replaced
        replace_attention(model, sample_input=SRC[..., :3])
    check_untouched(model)


def test_a_sample_without_tensors():
    class NoTensor(Model):
        def forward(self, x):
            return 3

    model = NoTensor()
    with pytest.raises(ValueError, match=r"sample_input: the model returns no tensor"):
        replace_attention(model, sample_input=SRC)
    check_untouched(model)
