"""Ordinary calls of flash_attn_varlen take the direct way, with the results and the errors of the operator's way."""

import inspect

import pytest
import torch
from torch.overrides import TorchFunctionMode

from flash_attn_ext import _ops, flash_attn_varlen, new_rng_state, varlen
from flash_attn_ext._call import Call

pytestmark = pytest.mark.usefixtures("one_thread")
H, HK, D, DV = 4, 2, 16, 8
OFFSETS_Q, OFFSETS_K = torch.tensor([0, 3, 3, 10], dtype=torch.int32), torch.tensor([0, 5, 9, 21])
B, T_Q, T_K, LONGEST_Q, LONGEST_K = 3, 10, 21, 7, 12


@pytest.fixture
def direct(monkeypatch):
    """The results of the direct way, in order. None: the call went to the other way."""
    results, function = [], _ops.varlen_if_ordinary
    monkeypatch.setattr(
        _ops, "varlen_if_ordinary", lambda *arguments: results.append(function(*arguments)) or results[-1]
    )
    return results


@pytest.fixture
def only_other_way(monkeypatch):
    """Returns a function that calls flash_attn_varlen without the direct way."""

    def run(*arguments, **options):
        with monkeypatch.context() as patch:
            patch.setattr(_ops, "varlen_if_ordinary", lambda *_: None)
            return flash_attn_varlen(*arguments, **options)

    return run


def rows(dtype=torch.float32, heads_kv=HK, requires_grad=False):
    torch.manual_seed(0)
    shapes = [(T_Q, H, D), (T_K, heads_kv, D), (T_K, heads_kv, DV)]
    return [torch.randn(shape, dtype=dtype, requires_grad=requires_grad) for shape in shapes]


ORDINARY = {
    "nothing": dict(),
    "lengths": dict(max_seqlen_q=LONGEST_Q, max_seqlen_k=LONGEST_K),
    "is_causal": dict(is_causal=True),
    "lower right": dict(causal="lower_right"),
    "window": dict(window=(4, 2)),
    "one window": dict(window=3, diagonal=1),
    "an int for a float": dict(scale=1, softcap=20),
    "slopes": dict(alibi_slopes=torch.rand(B, H)),
    "sink": dict(sink=torch.randn(H)),
    "chunk": dict(attention_chunk=4, first_key=1),
    "rows in use": dict(seqused_q=torch.tensor([2, 0, 7]), seqused_k=torch.tensor([5, 4, 9])),
    "mask": dict(attn_mask=torch.rand(B, 1, 1, LONGEST_K) > 0.3, max_seqlen_k=LONGEST_K),
    "mask of rows": dict(attn_mask=torch.randn(H, T_Q, LONGEST_K), max_seqlen_k=LONGEST_K),
    "dropout": dict(dropout_p=0.5, rng_state=new_rng_state("cpu")),
    "deterministic": dict(deterministic=True),
    "splits": dict(num_splits=3, unified_max=1.0),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", ORDINARY)
def test_same_bits_both_ways(case, dtype, direct, only_other_way):
    options = ORDINARY[case] | {"enable_gqa": True, "return_lse": True}
    if case == "mask of rows":
        options["attn_mask"] = options["attn_mask"].to(dtype)
    tensors = rows(dtype, requires_grad=True)
    results = [f(*tensors, OFFSETS_Q, OFFSETS_K, **options) for f in (flash_attn_varlen, only_other_way)]
    assert direct[0] is results[0]
    gradients = [torch.autograd.grad([out.sum(), lse.nan_to_num(neginf=0.0).sum()], tensors) for out, lse in results]
    for ours, theirs in zip((*results[0], *gradients[0]), (*results[1], *gradients[1]), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("deterministic_mode", [False, True])
def test_a_call_without_keyword_arguments_has_the_defaults_of_the_others(monkeypatch, deterministic_mode):
    calls = []
    monkeypatch.setattr(_ops, "varlen_if_ordinary", lambda *arguments: calls.append(arguments) or torch.ones(1))
    mask = torch.ones(B, 1, 1, LONGEST_K, dtype=torch.bool)
    arguments = (*rows(), OFFSETS_Q, OFFSETS_K, LONGEST_Q, LONGEST_K, mask, 0.25, True, 0.5, True)
    torch.use_deterministic_algorithms(deterministic_mode)
    try:
        flash_attn_varlen(*arguments)
        varlen._flash_attn_varlen(*arguments)
    finally:
        torch.use_deterministic_algorithms(False)
    for short, full in zip(*calls, strict=True):
        assert short is full if isinstance(full, torch.Tensor) else (type(short), short) == (type(full), full)


def test_out_alone_without_a_gradient(direct):
    tensors = rows(heads_kv=H)
    with torch.no_grad():
        out = flash_attn_varlen(*tensors, OFFSETS_Q, OFFSETS_K)
    assert direct == [out]
    assert not out.requires_grad
    first = torch.nn.functional.scaled_dot_product_attention(
        tensors[0][:3].transpose(0, 1), *(t[:5].transpose(0, 1) for t in tensors[1:])
    )
    torch.testing.assert_close(out[:3].transpose(0, 1), first)


def test_the_direct_call_and_the_call_object_have_the_names_and_the_order_of_the_schema(monkeypatch):
    """Every argument of flash_attn_varlen reaches the operator, unchanged or as the options of the band."""
    eager = []
    monkeypatch.setattr(_ops, "varlen_if_ordinary", lambda *arguments: eager.append(arguments))
    monkeypatch.setattr(varlen, "attend", lambda call: (call, None))
    arguments = {name: None for name in inspect.signature(flash_attn_varlen).parameters}
    arguments |= {name: torch.ones(1) for name in _ops.VARLEN.tensor_names}
    arguments |= {"scale": 0.3, "softcap": 2.5, "dropout_p": 0.25, "num_splits": 3, "unified_max": 4.5, "diagonal": 5}
    arguments |= {"attention_chunk": 9, "first_key": 2, "max_seqlen_q": 7, "max_seqlen_k": 8}
    arguments |= {"deterministic": True, "is_causal": False, "enable_gqa": True, "return_lse": True}
    arguments |= {"causal": "lower_right", "window": (3, 4)}
    call, _ = flash_attn_varlen(**arguments)
    enable_gqa, return_lse, *values = eager[0]
    schema = dict(zip(_ops.attention_varlen._schema.arguments, values, strict=True))
    given = {argument.name: value for argument, value in schema.items()}
    band = {"causal": True, "lower_right": True, "window_left": 3, "window_right": 4}
    assert given == band | {name: arguments[name] for name in given if name not in band}
    assert enable_gqa is return_lse is True
    assert call.tensors | call.options == given
    assert call == Call.from_arguments(_ops.VARLEN, **{k: v for k, v in arguments.items() if k != "qv"})


class Subclass(torch.Tensor):
    pass


NOT_ORDINARY = {
    "a subclass": lambda q, k, v: flash_attn_varlen(q.as_subclass(Subclass), k, v, OFFSETS_Q, OFFSETS_K),
    "a mask of rows without heads": lambda q, k, v: flash_attn_varlen(
        q, k, v, OFFSETS_Q, OFFSETS_K, attn_mask=torch.zeros(T_Q, T_K)
    ),
    "a number tensor": lambda q, k, v: flash_attn_varlen(q, k, v, OFFSETS_Q, OFFSETS_K, scale=torch.tensor(0.25)),
    "vmap": lambda q, k, v: torch.vmap(lambda q: flash_attn_varlen(q, k, v, OFFSETS_Q, OFFSETS_K))(q[None])[0],
    "torch.func.grad": lambda q, k, v: torch.func.grad_and_value(
        lambda q: flash_attn_varlen(q, k, v, OFFSETS_Q, OFFSETS_K).sum(), has_aux=False
    )(q)[1],
}


@pytest.mark.parametrize("case", NOT_ORDINARY)
def test_other_calls_take_the_other_way(case, direct):
    tensors = rows(heads_kv=H)
    result = NOT_ORDINARY[case](*tensors)
    assert set(direct) == {None}
    expected = flash_attn_varlen(*tensors, OFFSETS_Q, OFFSETS_K)
    torch.testing.assert_close(torch.Tensor(result), expected.sum() if result.dim() == 0 else expected)


class Watching(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_function_modes_and_dropout_without_a_state_take_the_other_way(direct):
    tensors = rows(heads_kv=H)
    with Watching():
        flash_attn_varlen(*tensors, OFFSETS_Q, OFFSETS_K)
    flash_attn_varlen(*tensors, OFFSETS_Q, OFFSETS_K, dropout_p=0.5)
    assert set(direct) == {None}


WRONG = {
    "heads": dict(key=torch.ones(T_K, HK, D)),
    "dtype": dict(query=torch.ones(T_Q, H, D, dtype=torch.float64)),
    "dimensions": dict(query=torch.ones(1, T_Q, H, D)),
    "offsets": dict(cu_seqlens_q=torch.tensor([0, 11])),
    "descending offsets": dict(cu_seqlens_k=torch.tensor([0, 9, 5, 21])),
    "dtype of offsets": dict(cu_seqlens_q=OFFSETS_Q.float()),
    "lengths": dict(seqused_k=torch.tensor([1, 2])),
    "softcap": dict(softcap=-1.0),
    "a word": dict(softcap="20"),
    "window": dict(window="left"),
    "causal": dict(causal="lower"),
    "no tensor": dict(value=[1.0]),
    "max_seqlen_q": dict(max_seqlen_q=-1),
    "mask": dict(attn_mask=torch.ones(5, dtype=torch.bool)),
}


@pytest.mark.parametrize("case", WRONG)
def test_same_errors_both_ways(case, only_other_way):
    arguments = dict(zip(("query", "key", "value"), rows(heads_kv=H), strict=True))
    arguments |= {"cu_seqlens_q": OFFSETS_Q, "cu_seqlens_k": OFFSETS_K} | WRONG[case]
    errors = []
    for function in (flash_attn_varlen, only_other_way):
        with pytest.raises((TypeError, ValueError)) as raised:
            function(**arguments)
        errors.append(raised)
    assert (errors[0].type, str(errors[0].value)) == (errors[1].type, str(errors[1].value))
