"""MultiheadAttention as a module of a model: errors, state, copies, encoder layers, compile, autocast."""

import copy
import io
import pickle

import pytest
import torch
from module_helpers import (
    FORWARDS,
    RTOL,
    SK,
    SQ,
    B,
    E,
    H,
    assert_same,
    make_inputs,
    make_masks,
    make_pair,
    run_with_grads,
)
from torch import nn

from flash_attn_ext import MultiheadAttention

pytestmark = pytest.mark.usefixtures("one_thread")


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
    """The types are torch's. The text names the argument, its value and the allowed values."""
    changed, masks, message = ERRORS[case]
    inputs = make_inputs(dtype=torch.float32)
    inputs = [new if new is not None else old for new, old in zip((*changed, None, None, None), inputs, strict=False)]
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


# State and copies


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 5, "add_bias_kv": True}], ids=str)
def test_construction_and_state_dict(options):
    torch.manual_seed(7)
    torch_mha = nn.MultiheadAttention(E, H, **options)
    torch.manual_seed(7)
    ours = MultiheadAttention(E, H, **options)
    theirs_state, our_state = torch_mha.state_dict(), ours.state_dict()
    assert list(theirs_state) == list(our_state)
    assert all(torch.equal(theirs_state[name], our_state[name]) for name in our_state), "the same initial values"
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
        assert len(calls) == 1, "the copy has the hook that prevents torch's fused path"


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
def test_an_encoder_layer_does_not_use_the_fused_path(masks, norm_first, calls):
    """In eval without grad torch would read the parameters and never call the module."""
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


def test_compile():
    _, ours = make_pair(torch.float32, batch_first=True)
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
