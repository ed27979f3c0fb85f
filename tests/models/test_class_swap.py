"""replace_attention changes the class of modules: for which modules, under which wrappers, and back."""

import copy
import operator

import pytest
import torch
from module_helpers import assert_same
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from flash_attn_ext import MultiheadAttention, replace_attention

B, S, E, H = 2, 5, 12, 2
SRC = torch.randn(B, S, E, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view"),
    pytest.mark.usefixtures("one_thread"),
]


def attention(**kwargs):
    return nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **kwargs)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.scale = attention(), attention(), nn.Linear(E, E).double()

    def forward(self, x):
        x = x + self.first(x, x, x, need_weights=False)[0]
        out, weights = self.second(x, x, x)
        return self.scale(out), weights


# Modules without a kernel


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.MultiheadAttention(1040, 1), "its head dimension is 1040; the kernels take up to 1024"),
        (lambda: attention().to(torch.float8_e5m2), "its in_proj_weight is torch.float8_e5m2; the kernels take"),
    ],
)
def test_modules_without_a_kernel_are_skipped(make, reason):
    model = nn.ModuleList([make(), attention()])
    with pytest.warns(UserWarning, match=f"skipped '0': {reason}"):
        report = replace_attention(model)
    assert report.replaced == ("1",)
    assert reason in report.skipped["0"]
    assert type(model[0]) is nn.MultiheadAttention
    with pytest.raises(TypeError, match=f"mha: .*{reason}"):
        MultiheadAttention.from_torch(model[0])


def test_a_module_on_a_device_without_kernels_is_skipped(monkeypatch):
    module = attention()
    monkeypatch.setattr("flash_attn_ext.nn.class_swap.build_info", lambda: {"max_head_dim": 512, "cuda": True})
    module.in_proj_weight = nn.Parameter(module.in_proj_weight.detach().to("meta"))  # not loaded yet
    assert replace_attention(module).replaced == ("",)

    class Elsewhere(nn.Parameter):
        device = torch.device("xpu:0")

    module = attention()
    module.in_proj_weight = Elsewhere(torch.zeros(3 * E, E))
    with pytest.warns(
        UserWarning, match=r"its in_proj_weight is on xpu:0; this build has kernels for cpu and cuda only"
    ):
        assert not replace_attention(module).replaced


# Classes derived by torch


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def shard(model):
    """Calls fully_shard as a user of FSDP2 does: for each attention, then for the model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh)
    return model


def step(model):
    """The output and the gradients of one step."""
    out, weights = model(SRC)
    (out.square().sum() + weights.square().sum()).backward()
    return [out, weights, *(getattr(p.grad, "_local_tensor", p.grad) for p in model.parameters())]


@pytest.mark.parametrize("order", ["sharded, then replaced", "replaced, then sharded"])
def test_modules_under_fsdp2(order, process_group, calls):
    from torch.distributed.fsdp import FSDPModule

    model = Model()
    want = step(copy.deepcopy(model))
    if order == "replaced, then sharded":
        report = replace_attention(model)
        shard(model)
    else:
        shard(model)
        report = replace_attention(model)
    assert report.replaced == ("first", "second")
    assert not report.skipped
    for module in (model.first, model.second):
        assert isinstance(module, MultiheadAttention)
        assert isinstance(module, FSDPModule)
        assert type(module).__name__ == "FSDPMultiheadAttention"
    for got, expected in zip(step(model), want, strict=True):
        assert_same(got, expected)
    assert len(calls) == 2
    with pytest.raises(TypeError, match="fully_shard"):
        MultiheadAttention.from_torch(shard(Model()).first)

    report.undo()
    for module in (model.first, model.second):
        assert not isinstance(module, MultiheadAttention)
        assert isinstance(module, FSDPModule)
    model.zero_grad()
    for got, expected in zip(step(model), want, strict=True):
        assert_same(got, expected)
    assert len(calls) == 2


class Subclass(nn.MultiheadAttention):
    pass


def test_a_subclass_under_a_wrapper_is_skipped(process_group):
    model = Model()
    model.first = Subclass(E, H, dtype=torch.float64)
    shard(model)
    with pytest.warns(UserWarning, match="skipped 'first': it is a test_class_swap.Subclass"):
        assert replace_attention(model).replaced == ("second",)


# undo


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


def test_undo_restores_torchs_modules(calls):
    model = Model()
    parametrize.register_parametrization(model.second, "in_proj_weight", Double())
    model.first.register_forward_pre_hook(lambda *_: None)
    before = {name: (type(module), dict(module._forward_pre_hooks)) for name, module in model.named_modules()}
    parameters = dict(model.named_parameters())
    want = step(model)
    model.zero_grad()
    report = replace_attention(model)
    step(model)
    assert len(calls) == 2
    model.zero_grad()

    for _ in range(2):
        report.undo()
        after = {name: (type(module), dict(module._forward_pre_hooks)) for name, module in model.named_modules()}
        assert after == before
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    for got, expected in zip(step(model), want, strict=True):
        assert torch.equal(got, expected)
    assert len(calls) == 2
    assert replace_attention(model).replaced == ("first", "second")


def test_torchs_fused_path_runs_again_after_undo():
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True, dtype=torch.float64).eval()
    with torch.no_grad(), torch.profiler.profile() as profile:
        report = replace_attention(layer)
        layer(SRC)
        report.undo()
        layer(SRC)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["flash_attn_ext::attention"] == 1
    assert counts["aten::_transformer_encoder_layer_fwd"] == 1


def test_undo_after_the_classes_changed_again():
    model = Model()
    parametrize.register_parametrization(model.first, "in_proj_weight", Double())
    report = replace_attention(model)
    parametrize.remove_parametrizations(model.first, "in_proj_weight")
    parametrize.register_parametrization(model.second, "in_proj_weight", Double())
    want = step(model)
    report.undo()
    model.zero_grad()
    assert type(model.first) is nn.MultiheadAttention
    assert not isinstance(model.second, MultiheadAttention)
    assert parametrize.is_parametrized(model.second, "in_proj_weight")
    for got, expected in zip(step(model), want, strict=True):
        assert_same(got, expected)
    parametrize.remove_parametrizations(model.second, "in_proj_weight")
    assert type(model.second) is nn.MultiheadAttention


def test_undo_does_not_change_modules_that_were_ours_before():
    model = nn.ModuleList([MultiheadAttention(E, H), attention()])
    replace_attention(model).undo()
    assert type(model[0]) is MultiheadAttention
    assert type(model[1]) is nn.MultiheadAttention


# torch.fx


def test_symbolic_trace(calls):
    model = Model()
    want = model(SRC)
    replace_attention(model)
    calls.clear()
    traced = torch.fx.symbolic_trace(model)
    nodes = [node for node in traced.graph.nodes if node.op == "call_module"]
    assert [node.target for node in nodes] == ["first", "second", "scale"]
    assert not calls
    for got, expected in zip(traced(SRC), want, strict=True):
        assert_same(got, expected)
    assert len(calls) == 2


def test_symbolic_trace_of_a_call_with_constant_queries():
    """The query may be a parameter; then another argument is the traced one."""

    class Pool(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.query = attention(), torch.randn(B, 1, E, dtype=torch.float64)

        def forward(self, x, padding):
            return operator.getitem(self.attention(self.query, x, x, key_padding_mask=padding), 0)

    model = Pool()
    padding = torch.arange(S) >= torch.tensor([S, 2]).unsqueeze(1)
    want = model(SRC, padding)
    replace_attention(model)
    assert_same(torch.fx.symbolic_trace(model)(SRC, padding), want)


# The report


class CallsSdpa(nn.Module):
    """Like timm's Attention."""

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


class SwitchedOff(nn.Module):
    """Like timm's WindowAttention of Swin."""

    fused_attn = False

    def forward(self, x):
        if self.fused_attn:
            return F.scaled_dot_product_attention(x, x, x)
        return torch.softmax(x @ x.transpose(-2, -1), -1) @ x


class MatrixAttention(nn.Module):
    """Like torchvision's Swin: matrix products and a softmax."""

    def forward(self, x):
        return torch.softmax(x @ x.transpose(-2, -1), -1) @ x


class OuterAttention(nn.Module):
    """The report names the module inside."""

    def __init__(self):
        super().__init__()
        self.inner = MatrixAttention()

    def forward(self, x):
        return self.inner(x)


def test_the_report_is_a_table():
    model = nn.ModuleDict(
        {
            "replaced": attention(),
            "ours": MultiheadAttention(E, H),
            "sub": Subclass(E, H),
            "own": CallsSdpa(),
            "off": SwitchedOff(),
            "block": nn.ModuleDict({"inner": MatrixAttention()}),
            "outer": OuterAttention(),
            "linear": nn.Linear(2, 2),
        }
    )
    with pytest.warns(UserWarning, match="skipped 'sub'"):
        report = replace_attention(model)
    assert list(report.other_attention) == ["own", "off", "block.inner", "outer.inner"]
    lines = str(report).splitlines()
    assert lines[0].split() == ["replaced", "replaced"]
    assert lines[1].startswith("ours         already   it was")
    assert lines[2].startswith("sub          skipped   it is a test_class_swap.Subclass")
    prefix = "skipped   it is no nn.MultiheadAttention"
    assert lines[3].startswith(f"own          {prefix}; its forward mentions scaled_dot_product_attention, and flash")
    assert lines[4].startswith(f"off          {prefix}; its forward mentions")
    assert "but its fused_attn is False" in lines[4]
    assert lines[5].startswith(f"block.inner  {prefix}, and its forward does not mention scaled_dot_product_attention")
    assert len(lines) == 7
    single = attention()
    assert str(replace_attention(single, sample_input=(SRC, SRC, SRC))).startswith(
        "(the model)  replaced\nlargest diff"
    )


def test_reports_of_equal_models_are_equal():
    """And their repr does not contain modules."""
    reports = [replace_attention(Model()) for _ in range(2)]
    assert reports[0] == reports[1]
    assert "Linear" not in repr(reports[0])
