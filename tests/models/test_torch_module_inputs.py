"""Our class on PyTorch's own test inputs for its attention modules (module_db).

The inputs are part of torch's wheel. docs/module.md lists the differences that torch's test suite shows.
"""

import copy
import warnings

import pytest
import torch
from module_helpers import assert_same
from torch.utils._pytree import tree_leaves, tree_map

from flash_attn_ext import replace_attention

module_db = pytest.importorskip("torch.testing._internal.common_modules").module_db

NAMES = (
    "nn.MultiheadAttention",
    "nn.Transformer",
    "nn.TransformerDecoderLayer",
    "nn.TransformerEncoder",
    "nn.TransformerEncoderLayer",
)
INFOS = {info.name: info for info in module_db if info.name in NAMES}

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:enable_nested_tensor is True", "ignore:Support for mismatched", "ignore:The PyTorch"
    ),
]


def cases(info, training):
    """Module and arguments of torch's inputs; of nn.Transformer every fourth, as its layers have inputs too."""
    with torch.random.fork_rng():
        made = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=training)
    for case in made[:: 4 if info.name == "nn.Transformer" else 1]:
        given = case.constructor_input
        module = info.module_cls(*given.args, **given.kwargs).double().train(training)
        yield module, case.forward_input.args, case.forward_input.kwargs


def run(module, args, kwargs, grad):
    """The outputs, and the gradients of inputs and parameters."""

    def leaf(x):
        return x.detach().clone().requires_grad_(x.is_floating_point()) if isinstance(x, torch.Tensor) else x

    args, kwargs = tree_map(leaf, (args, kwargs))
    with torch.set_grad_enabled(grad):
        outputs = [x for x in tree_leaves(module(*args, **kwargs)) if isinstance(x, torch.Tensor)]
    if not grad:
        return outputs
    sum(x.square().sum() for x in outputs).backward()
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    return [*outputs, *(x.grad for x in (*inputs, *module.parameters()) if x.requires_grad)]


@pytest.mark.parametrize("mode", ["train", "eval, no grad"])
@pytest.mark.parametrize("name", NAMES)
def test_torchs_inputs(name, mode):
    count = 0
    for module, args, kwargs in cases(INFOS[name], mode == "train"):
        ours = copy.deepcopy(module)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # of replace_attention, for modules that it skips
            assert replace_attention(ours).replaced
        want, got = (run(m, args, kwargs, "no grad" not in mode) for m in (module, ours))
        for x, y in zip(got, want, strict=True):
            assert (x is None) == (y is None)
            if y is not None:
                assert_same(x, y, rtol=1e-10)  # also for gradients that cancel
        count += 1
    assert count >= 16


@torch.no_grad()
def test_a_bias_of_another_dtype():
    module = torch.nn.MultiheadAttention(4, 4, batch_first=True, dtype=torch.float64).eval()
    module.in_proj_bias = torch.nn.Parameter(torch.randn(12, dtype=torch.float16))
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    want = module(x, x, x)
    replace_attention(module)
    for got, expected in zip(module(x, x, x), want, strict=True):
        assert_same(got, expected)


def test_an_encoder_with_padding_compiles_in_one_graph():
    layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True, dtype=torch.float64)
    encoder = torch.nn.TransformerEncoder(layer, 1).eval()
    x, padding = torch.randn(2, 9, 16, dtype=torch.float64), torch.arange(9) >= torch.tensor([9, 4]).unsqueeze(1)
    replace_attention(encoder)
    compiled = torch.compile(encoder, fullgraph=True, backend="aot_eager")
    want = encoder(x, src_key_padding_mask=padding)
    assert_same(compiled(x, mask=None, src_key_padding_mask=padding), want)
