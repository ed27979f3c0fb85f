"""Models of torchvision and timm: the report of replace_attention, and the calls that activate() runs."""

import importlib.util

import pytest
import torch
from module_helpers import assert_same
from torch import nn

from benchmarks.libraries import import_beside_torchvision
from flash_attn_ext import activated, activation_report, replace_attention

pytestmark = [
    pytest.mark.usefixtures("one_thread", "torch_again"),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("torchvision", "timm")),
        reason="needs timm and torchvision, pip install '.[vision]', in an environment of their own",
    ),
]


@pytest.fixture(scope="module")
def torchvision():
    return import_beside_torchvision("torchvision.models")


@pytest.fixture
def timm(torchvision):
    import timm

    return timm


def make(build):
    model = build().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)  # some are 0 initially, so the output would be 0
    return model


def results(model, image):
    """The output, and the gradients of all parameters that have one."""
    model.zero_grad()
    out = model(image)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_all_same(got, want):
    largest = max(t.abs().max() for t in want[1:])
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= 1e-4 * max(b.abs().max(), 1e-2 * largest)


IMAGE = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_torchvisions_vit_is_replaced(torchvision):
    model = make(lambda: torchvision.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=10))
    want = results(model, IMAGE)
    report = replace_attention(model, sample_input=IMAGE)
    assert report.replaced == tuple(f"encoder.layers.encoder_layer_{n}.self_attention" for n in range(2))
    assert (report.skipped, report.other_attention) == ({}, {})
    assert_all_same(results(model, IMAGE), want)
    report.undo()
    assert all(torch.equal(a, b) for a, b in zip(results(model, IMAGE), want, strict=True))
    with activated():
        assert_all_same(results(model, IMAGE), want)
    assert activation_report().taken == {"scaled_dot_product_attention": 2}


def test_torchvisions_swin_attends_by_matrix_products(torchvision):
    model = make(
        lambda: torchvision.swin_transformer.SwinTransformer([4, 4], 24, [1, 1], [2, 4], [4, 4], num_classes=10)
    )
    want = results(model, IMAGE)
    with pytest.raises(ValueError, match=r"contains no torch\.nn\.MultiheadAttention") as error:
        replace_attention(model)
    assert "\nfeatures.1.0.attn: it is no nn.MultiheadAttention, and its forward does not mention" in str(error.value)
    with activated():
        assert all(torch.equal(a, b) for a, b in zip(results(model, IMAGE), want, strict=True))
    assert not activation_report().taken
    assert not activation_report().left


SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 5}
# Name, options, and how many calls of scaled_dot_product_attention.
TIMM = {
    "vit": ("vit_tiny_patch16_224", SMALL, 2),
    "vit with attention pooling": ("vit_base_patch16_siglip_224", SMALL, 3),
    "eva": ("eva02_tiny_patch14_224", SMALL, 2),
    "beit with a relative position bias": ("beit_base_patch16_224", SMALL, 2),
    "cait": ("cait_xxs24_224", SMALL, 2),
}


@pytest.mark.parametrize("name", TIMM)
def test_timms_models_run_while_active(name, timm):
    architecture, options, count = TIMM[name]
    model = make(lambda: timm.create_model(architecture, **options))
    want = results(model, IMAGE)
    with pytest.raises(ValueError, match=r"flash_attn_ext\.activate") as error:
        replace_attention(model)
    assert "its forward mentions scaled_dot_product_attention, and flash_attn_ext.activate() runs" in str(error.value)
    with activated():
        assert_all_same(results(model, IMAGE), want)
    assert activation_report().taken == {"scaled_dot_product_attention": count}
    assert not activation_report().left


@pytest.mark.parametrize("fused", [False, True])
def test_timms_swin_runs_if_its_switch_is_on(fused, timm):
    """Its forward mentions scaled_dot_product_attention in both cases, and calls it in one."""
    timm.layers.set_fused_attn(True, experimental=fused)
    try:
        options = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 4)}
        model = make(lambda: timm.create_model("swin_tiny_patch4_window7_224", num_classes=5, **options))
    finally:
        timm.layers.set_fused_attn(True)
    with pytest.raises(ValueError, match=r"layers\.0\.blocks\.0\.attn: .* mentions scaled_dot") as error:
        replace_attention(model)
    assert ("its fused_attn is False" in str(error.value)) == (not fused)
    with activated():
        model(IMAGE)
    assert activation_report().taken == ({"scaled_dot_product_attention": 2} if fused else {})


def test_a_model_with_both_kinds_of_attention_reports_both(timm):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.MultiheadAttention(32, 4, batch_first=True)
            self.of_timm = timm.layers.Attention(32, num_heads=4)

        def forward(self, x):
            return self.of_timm(self.own(x, x, x, need_weights=False)[0])

    model, x = Both().eval(), torch.randn(2, 9, 32)
    want = model(x)
    report = replace_attention(model, sample_input=x)
    assert report.replaced == ("own",)
    assert list(report.other_attention) == ["of_timm"]
    assert "of_timm  skipped" in str(report)
    assert_same(model(x), want)
