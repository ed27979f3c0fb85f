"""Every check of csrc/ops/checks and of functional.py: bad input raises a message that names the argument."""

import inspect
import re

import numpy as np
import pytest
import torch

from flash_attn_ext import _ops, dropout_mask, explain, flash_attn, new_rng_state


def qkv(**changed):
    shapes = {"query": (2, 4, 5, 8), "key": (2, 4, 7, 8), "value": (2, 4, 7, 6)}
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    return {**tensors, **changed}


BAD_CALLS = {
    # name: (arguments, exception, parts of the message in order)
    "query dtype": (
        {n: torch.zeros(2, 4, 5, 8, dtype=torch.int32) for n in ("query", "key", "value")},
        TypeError,
        ["query", "int32", "float32, float64, bfloat16, float16"],
    ),
    "complex query": (
        {n: torch.zeros(2, 4, 5, 8, dtype=torch.complex64) for n in ("query", "key", "value")},
        TypeError,
        ["query", "complex64", "float32"],
    ),
    "key dtype": ({"key": torch.zeros(2, 4, 7, 8).double()}, TypeError, ["key", "float64", "query's", "float32"]),
    "value dtype": ({"value": torch.zeros(2, 4, 7, 6).half()}, TypeError, ["value", "float16", "query's", "float32"]),
    "key device": (
        {"key": torch.zeros(2, 4, 7, 8, device="meta")},
        TypeError,
        ["key", "meta", "query's device", "cpu"],
    ),
    "sparse": ({"value": torch.zeros(2, 4, 7, 6).to_sparse()}, TypeError, ["value", "torch.sparse_coo", "dense"]),
    "sparse mask": ({"attn_mask": torch.ones(5, 7).to_sparse()}, TypeError, ["attn_mask", "torch.sparse_coo", "dense"]),
    "slopes device": ({"alibi_slopes": torch.zeros(4, device="meta")}, TypeError, ["alibi_slopes", "meta", "cpu"]),
    "rng_state device": (
        {"dropout_p": 0.5, "rng_state": torch.zeros(2, dtype=torch.int64, device="meta")},
        TypeError,
        ["rng_state", "meta", "cpu"],
    ),
    "slopes not a tensor": ({"alibi_slopes": [0.5, 0.25]}, TypeError, ["alibi_slopes", "list", "torch.Tensor"]),
    "1-D query": ({"query": torch.zeros(8)}, ValueError, ["query", "[8]", "at least 2 dimensions"]),
    "0-D key": ({"key": torch.zeros(())}, ValueError, ["key", "[]", "at least 2 dimensions"]),
    "batches": ({"key": torch.zeros(3, 4, 7, 8)}, ValueError, ["batch", "[2], [3], [2]", "broadcast"]),
    "heads without GQA": ({"key": torch.zeros(2, 2, 7, 8)}, ValueError, ["2 and 4 heads", "enable_gqa=True"]),
    "heads that broadcast badly": (
        {"key": torch.zeros(2, 1, 7, 8), "value": torch.zeros(2, 3, 7, 6)},
        ValueError,
        ["heads", "[4], [1], [3]"],
    ),
    "heads not a divisor": (
        {"key": torch.zeros(2, 3, 7, 8), "value": torch.zeros(2, 3, 7, 6), "enable_gqa": True},
        ValueError,
        ["key", "3 heads for 4", "divisor"],
    ),
    "no key heads": (
        {"key": torch.zeros(2, 0, 7, 8), "value": torch.zeros(2, 0, 7, 6), "enable_gqa": True},
        ValueError,
        ["key", "0 heads for 4"],
    ),
    "value heads": (
        {"value": torch.zeros(2, 2, 7, 6), "enable_gqa": True},
        ValueError,
        ["value", "2", "dimension 1", "4", "key's"],
    ),
    "value length": ({"value": torch.zeros(2, 4, 9, 6)}, ValueError, ["value", "9", "dimension 2", "7", "key's"]),
    "key head_dim": ({"key": torch.zeros(2, 4, 7, 9)}, ValueError, ["key", "9", "dimension 3", "8", "query's"]),
    "head_dim 1025": (
        {"query": torch.zeros(2, 4, 5, 1025), "key": torch.zeros(2, 4, 7, 1025)},
        ValueError,
        ["head_dim 1025", "1 to 1024"],
    ),
    "head_dim_v 1025": ({"value": torch.zeros(2, 4, 7, 1025)}, ValueError, ["value", "head_dim_v 1025", "1 to 1024"]),
    "mask shape": (
        {"attn_mask": torch.zeros(5, 8)},
        ValueError,
        ["attn_mask", "[5, 8]", "dimension 1", "1 or 7", "seqlen_k"],
    ),
    "mask heads": (
        {"attn_mask": torch.zeros(2, 3, 5, 7)},
        ValueError,
        ["attn_mask", "3", "dimension 1", "1 or 4", "heads"],
    ),
    "mask dimensions": ({"attn_mask": torch.zeros(1, 1, 1, 5, 7)}, ValueError, ["attn_mask", "at most the 4"]),
    "mask dtype": (
        {"attn_mask": torch.zeros(5, 7, dtype=torch.int64)},
        TypeError,
        ["attn_mask", "int64", "bool", "float32"],
    ),
    "half mask": ({"attn_mask": torch.zeros(5, 7).half()}, TypeError, ["attn_mask", "float16", "float32"]),
    "mask device": ({"attn_mask": torch.zeros(5, 7, device="meta")}, TypeError, ["device", "meta"]),
    "slopes shape": ({"alibi_slopes": torch.zeros(3)}, ValueError, ["alibi_slopes", "[3]", "[4]", "[2, 4]"]),
    "slopes dimensions": ({"alibi_slopes": torch.zeros(2, 4, 1)}, ValueError, ["alibi_slopes", "[2, 4, 1]"]),
    "slopes dtype": ({"alibi_slopes": torch.zeros(4).half()}, TypeError, ["alibi_slopes", "float16", "float32"]),
    "dropout_p": ({"dropout_p": 1.5}, ValueError, ["dropout_p", "1.5", "0 to 1"]),
    "negative dropout_p": ({"dropout_p": -0.1}, ValueError, ["dropout_p", "-0.1", "0 to 1"]),
    "dropout_p NaN": ({"dropout_p": float("nan")}, ValueError, ["dropout_p", "nan", "0 to 1"]),
    "scale": ({"scale": float("inf")}, ValueError, ["scale", "inf", "finite"]),
    "softcap": ({"softcap": -1.0}, ValueError, ["softcap", "-1", "positive"]),
    "softcap NaN": ({"softcap": float("nan")}, ValueError, ["softcap", "nan", "positive"]),
    "causal": ({"causal": "upper"}, ValueError, ["causal", "'upper'", "'upper_left'", "'lower_right'"]),
    "causal bool": ({"causal": True}, ValueError, ["causal", "True", "'upper_left'"]),
    "window type": ({"window": "wide"}, ValueError, ["window", "'wide'", "two of them"]),
    "window length": ({"window": (1, 2, 3)}, ValueError, ["window", "(1, 2, 3)", "two of them"]),
    "rng_state dtype": (
        {"dropout_p": 0.5, "rng_state": torch.zeros(2)},
        TypeError,
        ["rng_state", "float32", "int64"],
    ),
    "rng_state shape": (
        {"dropout_p": 0.5, "rng_state": torch.zeros(3, dtype=torch.int64)},
        ValueError,
        ["rng_state", "[3]", "2 elements"],
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_arguments(name):
    changed, exception, words = BAD_CALLS[name]
    with pytest.raises(exception, match=".*".join(re.escape(w) for w in words)):
        flash_attn(**qkv(**changed))


@pytest.mark.parametrize("name", [n for n in BAD_CALLS if "device" not in n and "sparse" not in n])
def test_the_same_words_while_tracing(name):
    """The Meta kernels run the same checks, so torch.compile and torch.export see them too."""
    changed, exception, words = BAD_CALLS[name]
    arguments = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in qkv(**changed).items()}
    with pytest.raises(exception, match=".*".join(re.escape(w) for w in words)):
        flash_attn(**arguments)


def test_dropout_through_the_operator_needs_a_state():
    with pytest.raises(ValueError, match="rng_state: got none"):
        _ops.attention(*qkv().values(), dropout_p=0.5)


def test_operator_wants_4_dimensions():
    with pytest.raises(ValueError, match=r"query: got a tensor of shape \[4, 5, 8\].*4-D"):
        _ops.attention(*(t[0] for t in qkv().values()))
    with pytest.raises(ValueError, match=r"attn_mask: got a tensor of shape \[5, 7\].*4-D"):
        _ops.attention(*qkv().values(), torch.zeros(5, 7))


def backward_arguments(**changed):
    tensors = qkv()
    out, lse = _ops.attention(*tensors.values())
    arguments = {
        "grad_out": torch.zeros_like(out),
        "grad_lse": torch.zeros_like(lse),
        **tensors,
        "attn_mask": None,
        "alibi_slopes": None,
        "sink": None,
        "rng_state": None,
        "key_mask": None,
        "out": out,
        "lse": lse,
        "grad_mask": wanted("query", "key", "value"),
    }
    return {**arguments, **changed}


def wanted(*names):
    return [name in names for name in _ops.DIFFERENTIABLE]


BAD_BACKWARD_CALLS = {
    "out shape": ({"out": torch.zeros(2, 4, 5, 7)}, ValueError, ["out", "7", "dimension 3", "6"]),
    "out dimensions": ({"out": torch.zeros(2, 4, 5)}, ValueError, ["out", "4-D"]),
    "out dtype": ({"out": torch.zeros(2, 4, 5, 6).double()}, TypeError, ["out", "float64", "query's"]),
    "lse shape": ({"lse": torch.zeros(2, 4, 6)}, ValueError, ["lse", "6", "dimension 2", "5"]),
    "lse dimensions": ({"lse": torch.zeros(2, 4)}, ValueError, ["lse", "3-D", "(batch, heads, seqlen_q)"]),
    "lse dtype": ({"lse": torch.zeros(2, 4, 5).double()}, TypeError, ["lse", "float64", "float32"]),
    "grad_out shape": ({"grad_out": torch.zeros(2, 4, 5, 1)}, ValueError, ["grad_out", "1", "dimension 3", "6"]),
    "grad_out dtype": ({"grad_out": torch.zeros(2, 4, 5, 6).half()}, TypeError, ["grad_out", "float16", "query's"]),
    "grad_lse shape": ({"grad_lse": torch.zeros(2, 4, 1)}, ValueError, ["grad_lse", "1", "dimension 2", "5"]),
    "mask gradient": ({"grad_mask": wanted("attn_mask")}, ValueError, ["attn_mask", "float attn_mask"]),
    "slopes gradient": ({"grad_mask": wanted("alibi_slopes")}, ValueError, ["alibi_slopes"]),
    "sink gradient": ({"grad_mask": wanted("sink")}, ValueError, ["sink"]),
}


@pytest.mark.parametrize("name", BAD_BACKWARD_CALLS)
def test_bad_backward_arguments(name):
    changed, exception, words = BAD_BACKWARD_CALLS[name]
    with pytest.raises(exception, match=".*".join(re.escape(w) for w in words)):
        _ops.attention_backward(**backward_arguments(**changed))


def test_dropout_mask_arguments():
    with pytest.raises(ValueError, match="seqlen_q: got -1; allowed: 0 or more"):
        dropout_mask(new_rng_state(), 1, 1, -1, 1, 0.5)
    with pytest.raises(ValueError, match="dropout_p: got 2; allowed: 0 to 1"):
        dropout_mask(new_rng_state(), 1, 1, 1, 1, 2.0)
    with pytest.raises(TypeError, match="rng_state: got dtype"):
        dropout_mask(torch.zeros(2), 1, 1, 1, 1, 0.5)


def test_not_tensors():
    with pytest.raises(TypeError, match=r"query: got list; allowed: a torch\.Tensor"):
        flash_attn([1.0], torch.zeros(1, 1), torch.zeros(1, 1))
    with pytest.raises(TypeError, match="attn_mask: got str"):
        flash_attn(**qkv(attn_mask="causal"))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors():
    """Strided nested tensors, and jagged tensors of a shape other than (batch, heads, j, head_dim)."""
    for layout, error, words in (
        (torch.strided, TypeError, "query: got a nested tensor; allowed: dense tensors"),
        (torch.jagged, ValueError, "query: got a tensor of shape .*; allowed with nested tensors: jagged ones"),
    ):
        nested = torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(2, 8)], layout=layout)
        with pytest.raises(error, match=words):
            flash_attn(nested, nested, nested)


@pytest.mark.parametrize("window", [(1 << 62, 1 << 62), (0, 1 << 62), (2**63 - 1, -1), (2**63 - 1, 0)], ids=str)
def test_huge_windows_do_not_overflow(window):
    q, k, v = qkv(query=torch.randn(2, 4, 5, 8)).values()
    capped = tuple(min(n, 1000) for n in window)
    torch.testing.assert_close(flash_attn(q, k, v, window=window), flash_attn(q, k, v, window=capped))


def test_absurd_sizes_raise_and_do_not_crash():
    one = torch.zeros(1, 1, 1, 8)
    with pytest.raises(RuntimeError, match=r"memory|overflow|storage size"):
        flash_attn(
            one.expand(1 << 30, 1 << 10, 1 << 20, 8),
            one.expand(1 << 30, 1 << 10, 1, 8),
            one.expand(1 << 30, 1 << 10, 1, 8),
        )


WRONG_TYPES = {
    "scale": ["x", "1", True, torch.zeros(2), [1.0]],
    "softcap": ["x", None, 1j],
    "unified_max": ["x"],
    "dropout_p": ["x", None],
    "is_causal": ["yes", None, 0.5],
    "enable_gqa": ["yes", None],
    "num_splits": ["x", 1.5, None, 2**63],
    "deterministic": ["x"],
    "window": [(2**70, 1), (1.5, 0), (True, 1)],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in WRONG_TYPES.items() for v in values], ids=str)
@pytest.mark.parametrize("function", [flash_attn, explain])
def test_options_of_a_wrong_type_are_named(function, name, value):
    with pytest.raises((TypeError, ValueError), match=f"^{name}: got .*; allowed: "):
        function(**qkv(), **{name: value})


@pytest.mark.parametrize(
    "window",
    [[3, 1], np.array([3, 1]), torch.tensor([3, 1]), (np.int64(3), torch.tensor(1)), (torch.tensor([3]), 1)],
    ids=repr,
)
def test_a_window_may_be_two_numbers_of_any_kind(window):
    assert torch.equal(flash_attn(**qkv(), window=window), flash_attn(**qkv(), window=(3, 1)))


@pytest.mark.parametrize("window", [np.int32(2), np.array(2), torch.tensor(2)], ids=repr)
def test_a_window_may_be_one_number_of_any_kind(window):
    assert torch.equal(flash_attn(**qkv(), window=window), flash_attn(**qkv(), window=2))


@pytest.mark.parametrize(
    "window", [np.array([1, 2, 3]), torch.tensor([1.0, 2.0]), torch.tensor([True, False]), [1, 2.5], np.zeros((1, 1))],
    ids=repr,
)  # fmt: skip
def test_other_windows_are_refused(window):
    with pytest.raises(ValueError, match=r"^window: got .*; allowed: None, an int, or two of them"):
        flash_attn(**qkv(), window=window)


@pytest.mark.parametrize(("name", "ours"), [("window_size", "window"), ("softmax_scale", "scale")])
@pytest.mark.parametrize("function", [flash_attn, explain])
def test_names_of_flash_attention_are_answered_with_ours(function, name, ours):
    message = f"^{name}: got an argument that flash_attn does not have; allowed: {ours}$"
    with pytest.raises(TypeError, match=message):
        function(**qkv(), **{name: None})
    with pytest.raises(TypeError, match=r"flash_attn\(\) got an unexpected keyword argument 'wide'"):
        function(**qkv(), wide=1)
    assert "unknown" not in inspect.signature(function).parameters


@pytest.mark.parametrize(
    ("leading", "mask", "message"),
    [
        ((2, 4), (4, 5, 8), r"got shape \[4, 5, 8\], with size 8 in dimension 2; allowed there: 1 or 7"),
        ((2, 4), (2, 1, 9, 7), r"got shape \[2, 1, 9, 7\], with size 9 in dimension 2; allowed there: 1 or 5"),
        ((), (5, 8), r"got shape \[5, 8\], with size 8 in dimension 1; allowed there: 1 or 7"),
        ((4,), (3, 5, 7), r"got shape \[3, 5, 7\], with size 3 in dimension 0; allowed there: 1 or 4 .*heads"),
        (
            (2, 3, 4),
            (5, 1, 5, 7),
            r"got shape \[5, 1, 5, 7\], with size 5 in dimension 0; allowed there: 1 or 3 .*batch",
        ),
    ],
)
def test_a_mask_is_reported_in_the_shape_that_was_passed(leading, mask, message):
    q, k = torch.zeros(*leading, 5, 8), torch.zeros(*leading, 7, 8)
    with pytest.raises(ValueError, match=f"^attn_mask: {message}"):
        flash_attn(q, k, k, torch.zeros(mask))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_gqa": True},
        {"attn_mask": torch.zeros(100, 120)},
        {"key_mask": torch.ones(2, 120)},
        {"alibi_slopes": torch.zeros(8)},
    ],
    ids=str,
)
def test_the_layout_of_flash_attention_is_recognized(options):
    q, k = torch.zeros(2, 100, 8, 16), torch.zeros(2, 120, 8, 16)
    with pytest.raises(ValueError, match=r"did you mean transpose\(1, 2\)\? query, key and value are \(batch, heads,"):
        flash_attn(q, k, k, **options)


@pytest.mark.parametrize(
    "wrong",
    [{"softcap": -1.0}, {"attn_mask": torch.zeros(9, 9)}, {"key": torch.zeros(2, 4, 7, 9)}, {"dropout_p": 2.0}],
    ids=str,
)
def test_other_errors_say_nothing_of_the_layout(wrong):
    with pytest.raises(ValueError, match="allowed") as error:
        flash_attn(**qkv() | wrong)
    assert "transpose" not in str(error.value)


def test_nested_slopes_are_named():
    slopes = torch.nested.nested_tensor([torch.zeros(4)], layout=torch.jagged)
    with pytest.raises(TypeError, match="alibi_slopes: got a nested tensor; allowed: dense tensors"):
        flash_attn(**qkv(), alibi_slopes=slopes)


def freed(shape, **options):
    t = torch.zeros(shape, **options)
    t.untyped_storage().resize_(0)
    return t


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", "alibi_slopes", "rng_state"])
def test_freed_storage_is_an_error(name):
    """FSDP frees the storage of parameters that are in use elsewhere only by mistake."""
    shapes = {"attn_mask": (5, 7), "alibi_slopes": (4,), "rng_state": (2,)}
    shape = shapes.get(name) or tuple(qkv()[name].shape)
    options = {"dropout_p": 0.5, "rng_state": new_rng_state()}
    broken = freed(shape, dtype=torch.int64 if name == "rng_state" else torch.float32)
    with pytest.raises(ValueError, match=f"{name}: got a tensor whose storage has 0 bytes"):
        flash_attn(**{**qkv(), **options, name: broken})


def test_half_a_storage_is_an_error():
    k = torch.zeros(2, 4, 7, 8)
    k.untyped_storage().resize_(k.nbytes - 1)
    with pytest.raises(ValueError, match="key: got a tensor whose storage"):
        flash_attn(**qkv(key=k))


@pytest.mark.parametrize("name", ["query", "out", "lse", "grad_out"])
def test_freed_storage_in_the_backward_is_an_error(name):
    arguments = backward_arguments()
    arguments[name].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=f"{name}: got a tensor whose storage"):
        _ops.attention_backward(**arguments)


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask", "alibi_slopes"])
def test_zero_tensors_of_forward_mode_are_zeros(name):
    shape = {"attn_mask": (5, 7), "alibi_slopes": (4,)}.get(name) or tuple(qkv()[name].shape)
    torch.manual_seed(0)
    given = qkv(**{n: torch.randn(t.shape) for n, t in qkv().items()})
    zeros = torch._efficientzerotensor(shape)
    assert zeros._is_zerotensor()
    out = flash_attn(**{**given, name: zeros})
    assert torch.equal(out, flash_attn(**{**given, name: torch.zeros(shape)}))
