"""The declaration in csrc/ops/dense/attention.h and the arguments of flash_attn: options, tracing, masks."""

import inspect

import pytest
import torch
from reference import attention as reference
from reference import visible
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn_ext import _ops, explain, flash_attn, flash_attn_varlen, functional
from flash_attn_ext._call import Call
from flash_attn_ext._options import operator_options


def qkv(seqlen_q=5, seqlen_k=7, head_dim=8, head_dim_v=8, **options):
    torch.manual_seed(0)
    shapes = [(2, 4, seqlen_q, head_dim), (2, 4, seqlen_k, head_dim), (2, 4, seqlen_k, head_dim_v)]
    return [torch.randn(shape, **options) for shape in shapes]


def test_the_eager_call_and_the_call_object_have_the_names_and_the_order_of_the_schema(monkeypatch):
    """Every argument of flash_attn reaches the operator, unchanged or as the options of the band."""
    eager = []
    monkeypatch.setattr(_ops, "flash_attn_if_ordinary", lambda *arguments: None)
    monkeypatch.setattr(_ops, "attention_if_ordinary", lambda *arguments: eager.append(arguments))
    monkeypatch.setattr(functional, "attend", lambda call: (call, None))
    q, k, v = qkv()
    arguments = {name: None for name in inspect.signature(flash_attn).parameters}
    arguments |= {name: torch.ones(1) for name in _ops.DENSE.tensor_names} | {"query": q, "key": k, "value": v}
    arguments |= {"scale": 0.3, "softcap": 2.5, "dropout_p": 0.25, "num_splits": 3, "unified_max": 4.5, "diagonal": 5}
    arguments |= {"attention_chunk": 9, "first_key": 2}
    arguments |= {"deterministic": True, "is_causal": False, "enable_gqa": True, "return_lse": True}
    arguments |= {"causal": "lower_right", "window": (3, 4)}
    call, _ = flash_attn(**arguments)
    enable_gqa, _, *values = eager[0]
    schema = dict(zip(_ops.attention._schema.arguments, values, strict=True))
    tensors = {argument.name: value for argument, value in schema.items() if not argument.kwarg_only}
    options = {argument.name: value for argument, value in schema.items() if argument.kwarg_only}
    band = {"causal": True, "lower_right": True, "window_left": 3, "window_right": 4}
    assert options == band | {name: arguments[name] for name in options if name not in band}
    assert all(tensors[name] is arguments[name] for name in tensors)
    assert enable_gqa is call.enable_gqa is call.return_lse is True
    assert (call.tensors, call.options) == (tensors, options)
    assert call == Call.from_arguments(_ops.DENSE, **arguments)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
ORDINARY = [
    {},
    {"is_causal": True, "scale": 0.3, "enable_gqa": True},
    {"attn_mask": torch.tensor([[[[True, False, True, True, False, True, True]]]]), "return_lse": True},
    {"causal": "upper_left"},
    {"causal": "lower_right", "is_causal": True, "diagonal": -1},
    {"causal": None, "window": None, "alibi_slopes": None, "deterministic": None},
    {"window": 2},
    {"window": -1},
    {"window": (1, None), "causal": "upper_left"},
    {"window": (-1, 0), "is_causal": True},
    {"alibi_slopes": SLOPES},
    {"alibi_slopes": SLOPES, "is_causal": True},
    {"attention_chunk": 3},
    {"attention_chunk": 3, "causal": "upper_left", "first_key": 1},
    {"attention_chunk": 0},
    {"softcap": 1.5, "sink": torch.tensor([0.0, 1.0, 2.0, -3.0]), "deterministic": True},
    {"key_mask": torch.tensor([[True] * 6 + [False], [False] + [True] * 6]), "num_splits": 2, "unified_max": 4.0},
    {"dropout_p": 0.3, "rng_state": torch.tensor([3, 4])},
]


class OperatorCalls(TorchDispatchMode):
    """Records the arguments of each call of the operator, by name."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is _ops.attention:
            given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | (kwargs or {})
            defaults = {a.name: a.default_value for a in func._schema.arguments}
            self.calls.append(defaults | given)
        return func(*args, **(kwargs or {}))


def operator_call(function, *arguments, **options):
    with OperatorCalls() as recorded:
        result = function(*arguments, **options)
    assert len(recorded.calls) == 1
    return result, recorded.calls[0]


@pytest.mark.parametrize("deterministic_mode", [False, True])
@pytest.mark.parametrize("options", ORDINARY, ids=lambda options: ",".join(options) or "none")
def test_an_ordinary_call_is_the_call_in_python(options, deterministic_mode):
    """csrc/ops/keys/flash_attn_arguments.h reads the arguments as functional.py does."""
    q, k, v = qkv()
    by_position = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    keywords = {name: value for name, value in options.items() if name not in by_position}
    positional = [options.get(name, default) for name, default in by_position.items()]
    torch.use_deterministic_algorithms(deterministic_mode)
    try:
        direct, direct_call = operator_call(_ops.flash_attn_if_ordinary, q, k, v, *positional, keywords)
        public, public_call = operator_call(flash_attn, q, k, v, **options)
        in_python, python_call = operator_call(functional._flash_attn, q, k, v, **options)
    finally:
        torch.use_deterministic_algorithms(False)
    for result, call in ((direct, direct_call), (public, public_call)):
        torch.testing.assert_close(result, in_python, rtol=0, atol=0)
        assert call.keys() == python_call.keys()
        for name, value in python_call.items():
            assert call[name] is value if isinstance(value, torch.Tensor) else call[name] == value, name


@pytest.mark.parametrize(
    "options",
    [
        {"causal": "left"},
        {"causal": True},
        {"window": "2"},
        {"window": (1, 2, 3)},
        {"window": 1.5},
        {"window": torch.tensor(2)},
        {"attention_chunk": True},
        {"alibi_slopes": "steep"},
        {"quantize": None},
        {"score_mod": None},
        {"unknown": 1},
        {"window": 2, "nothing": None},
    ],
    ids=str,
)
def test_python_runs_a_call_with_another_argument_or_value(options):
    q, k, v = qkv()
    assert _ops.flash_attn_if_ordinary(q, k, v, None, 0.0, False, None, False, options) is None


def test_gradients_belong_to_the_first_tensors():
    assert _ops.DENSE.tensor_names[: len(_ops.DIFFERENTIABLE)] == tuple(_ops.DIFFERENTIABLE)
    for operator in (_ops.DENSE, _ops.VARLEN, _ops.CACHE, _ops.APPEND):
        names = [a.name for a in operator.forward._schema.arguments if not a.kwarg_only]
        assert names == list(operator.tensor_names)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"causal": "lower_right"}, {"window": (2, 1)}], ids=str)
def test_diagonal_makes_a_call_of_a_part_of_the_queries(options):
    """Queries from row 3 on, with all keys: their diagonal is 3 keys further to the right."""
    q, k, v = qkv(9, 9)
    slopes = torch.rand(4)
    whole = flash_attn(q, k, v, alibi_slopes=slopes, **options)
    diagonal = 3 if options.get("is_causal") else -4  # rows 3 and 4, counted from either corner
    part = (q[:, :, 3:5], k, v)
    ours = flash_attn(*part, alibi_slopes=slopes, diagonal=diagonal, **options)
    torch.testing.assert_close(ours, whole[:, :, 3:5])


def test_diagonal_in_vmap_packed_sequences_and_explain():
    q, k, v = qkv(5, 7)
    options = {"is_causal": True, "diagonal": 2}
    expected = flash_attn(q, k, v, **options)
    torch.testing.assert_close(torch.vmap(lambda *t: flash_attn(*t, **options))(q, k, v), expected)
    cu_seqlens = [torch.tensor([0, 5, 10]), torch.tensor([0, 7, 14])]
    packed = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
    out = flash_attn_varlen(*packed, *cu_seqlens, **options)
    torch.testing.assert_close(out, expected.transpose(1, 2).flatten(0, 1))
    long = torch.empty(1, 1, 4096, 8, device="meta")
    hidden, shown = (explain(long, long, long, is_causal=True, diagonal=d).forward.flops for d in (-4096, 4096))
    assert shown == explain(long, long, long).forward.flops
    assert hidden < shown / 1000


SIMILAR = [
    ({"softcap": 50}, {"softcap": 50.0}),
    ({"scale": 1}, {"scale": 1.0}),
    ({"unified_max": 10}, {"unified_max": 10.0}),
    ({"dropout_p": 1}, {"dropout_p": 1.0}),
]


@pytest.mark.parametrize(("options", "floats"), SIMILAR, ids=str)
def test_integers_are_numbers_and_take_the_short_path(options, floats, monkeypatch):
    expected = flash_attn(*qkv(), **floats)
    explain(*qkv(), **options)
    monkeypatch.setattr(_ops, "attention", None)  # the long path would call it
    assert torch.equal(flash_attn(*qkv(), **options), expected)


def test_an_integer_is_causal():
    assert torch.equal(flash_attn(*qkv(), is_causal=1), flash_attn(*qkv(), is_causal=True))
    assert str(explain(*qkv(), is_causal=1)) == str(explain(*qkv(), is_causal=True))


def test_a_number_in_a_tensor_is_a_number():
    q, k, v = qkv()
    scale = torch.tensor(0.3)
    assert torch.equal(flash_attn(q, k, v, scale=scale), flash_attn(q, k, v, scale=float(scale)))


WINDOWS = [(-2, 5), (5, -2), (-3, -3), (-4, 2), (-9, 9), (None, -2), (-2, None), (None, None), (3, None), (-2, -9)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("lengths", [(5, 7), (130, 70), (70, 200), (1, 300)])
def test_windows_that_exclude_the_diagonal(window, lengths):
    """flash-attention 4 has these options. Rows without a visible key are 0, forward and backward."""
    q, k, v = (t.double().requires_grad_() for t in qkv(*lengths))
    out, lse = flash_attn(q, k, v, window=window, return_lse=True)
    expected, expected_lse = reference(q, k, v, window=window)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    grads, expected_grads = (torch.autograd.grad(o.sin().sum(), (q, k, v)) for o in (out, expected))
    torch.testing.assert_close(grads, expected_grads)


@pytest.mark.parametrize("dims", [(0, 0), (0, 4), (4, 0)])
def test_head_dim_0(dims):
    q, k, v = (t.requires_grad_() for t in qkv(5, 7, *dims))
    out, lse = flash_attn(q, k, v, return_lse=True)
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, v))
    assert lse.shape == (2, 4, 5)
    (out.sum() + lse.sum()).backward()
    assert [t.grad.shape for t in (q, k, v)] == [t.shape for t in (q, k, v)]
    if dims[0] == 0:
        torch.testing.assert_close(lse, torch.full_like(lse, 7).log())


@pytest.mark.parametrize("bias", [causal_upper_left, causal_lower_right])
def test_causal_bias_is_not_read_as_a_mask(bias):
    q, k, v = qkv()
    mask = bias(5, 7)
    torch.testing.assert_close(flash_attn(q, k, v, mask), scaled_dot_product_attention(q, k, v, mask))
    assert str(explain(q, k, v, mask)) == str(explain(q, k, v, causal=bias.__name__.removeprefix("causal_")))
    with pytest.raises(ValueError, match="attn_mask: got a CausalBias with is_causal"):
        flash_attn(q, k, v, mask, is_causal=True)
    with pytest.raises(ValueError, match=r"attn_mask: got a CausalBias of \(4, 7\)"):
        flash_attn(q, k, v, bias(4, 7))


class Logged(torch.Tensor):
    seen = ()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen = (*cls.seen, func)
        return super().__torch_function__(func, types, args, kwargs)


def test_a_subclass_sees_the_call():
    q, k, v = qkv()
    mask = torch.randn(5, 7).as_subclass(Logged)
    Logged.seen = ()
    out = flash_attn(q, k, v, mask)
    assert flash_attn in Logged.seen
    assert isinstance(out, Logged)
    torch.testing.assert_close(out.as_subclass(torch.Tensor), flash_attn(q, k, v, mask.as_subclass(torch.Tensor)))


def causal(q, k, v):
    return flash_attn(q, k, v, is_causal=True)


def test_functionalize():
    inputs = qkv()
    assert torch.equal(torch.func.functionalize(causal)(*inputs), causal(*inputs))
    graph = make_fx(torch.func.functionalize(causal))(*inputs)
    assert "attention" in graph.code
    assert torch.equal(graph(*inputs), causal(*inputs))
    with pytest.raises(NotImplementedError, match=r"flash_attn: torch\.func\.functionalize around or inside"):
        torch.func.functionalize(torch.func.grad(lambda q: causal(q, *inputs[1:]).sum()))(inputs[0])


def test_symbolic_trace():
    inputs = qkv()
    graph = torch.fx.symbolic_trace(causal)
    assert any(node.target is flash_attn for node in graph.graph.nodes)
    assert torch.equal(graph(*inputs), causal(*inputs))
    graph = torch.fx.symbolic_trace(lambda q, k, v: flash_attn(q, k, v, softcap=5, window=2, return_lse=True)[1])
    assert torch.equal(graph(*inputs), flash_attn(*inputs, softcap=5, window=2, return_lse=True)[1])


def test_saved_tensors_may_come_back_in_other_strides():
    q, k, v = (t.requires_grad_() for t in qkv())
    expected = torch.autograd.grad(flash_attn(q, k, v).sum(), (q, k, v))

    def unpack(t):
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        out = flash_attn(q, k, v)
    for ours, theirs in zip(torch.autograd.grad(out.sum(), (q, k, v)), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def tiles_by_rows(seqlen_q, seqlen_k, window, tile):
    keep = visible(seqlen_q, seqlen_k, window=window)
    total = 0
    for i in range(0, seqlen_q, tile[0]):
        seen = keep[i : i + tile[0]].any(0).nonzero().flatten()
        if len(seen):
            total += int(seen[-1]) // tile[1] - int(seen[0]) // tile[1] + 1
    return total


@pytest.mark.parametrize("tile", [(1, 1), (3, 5), (48, 64), (64, 48), (500, 500)])
@pytest.mark.parametrize("window", [None, (0, 0), (-1, 0), (3, 4), (70, 10), (10, 70), (5, -3), (-30, 60)], ids=str)
def test_tiles_are_counted_in_closed_form(window, tile):
    for lengths in [(1, 1), (7, 300), (300, 7), (130, 130), (127, 260), (260, 127)]:
        q, k, v = qkv(*lengths)
        plan = _ops.plan_attention({"query": q, "key": k, "value": v}, operator_options(window=window))
        # A band is one interval of keys for each block of rows: hidden keys between two visible keys count too.
        assert plan.parts[0].visible_tiles(*tile) == tiles_by_rows(*lengths, window, tile)


def test_explain_of_a_very_long_sequence_and_without_data():
    q = torch.empty(1, 1, 2**33, 8, device="meta")
    said = explain(q, q, q, is_causal=True)
    assert said.forward.kernel is None
    assert said.forward.flops == pytest.approx((4 * 8 + 5) * 2**65, rel=0.01)  # 5 for the softmax of a score
