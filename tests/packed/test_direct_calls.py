"""Ordinary cached calls take the direct way, with the results and the errors of the operators' way."""

import pytest
import reference
import torch
from cache_helpers import DV, HK, LENGTHS, D, H, make, rows_of
from tolerances import assert_as_exact_as_torch
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn_ext import _ops, flash_attn_with_kvcache, kvcache

pytestmark = pytest.mark.usefixtures("one_thread")
B = len(LENGTHS)


@pytest.fixture
def direct(monkeypatch):
    """The results of the direct way, in order. None: the call went to the other way."""
    results, function = [], _ops.kvcache_if_ordinary
    monkeypatch.setattr(
        _ops, "kvcache_if_ordinary", lambda *arguments: results.append(function(*arguments)) or results[-1]
    )
    return results


def both_ways(monkeypatch, call):
    """Runs ``call`` the direct way and the other way. It returns a tuple of tensors."""
    taken = call()
    with monkeypatch.context() as patch:
        patch.setattr(_ops, "kvcache_if_ordinary", lambda *arguments: None)
        return taken, call()


LENGTHS_TENSOR = torch.tensor(LENGTHS, dtype=torch.int32)
ORDINARY = {
    "lengths": dict(),
    "causal": dict(causal=True),
    "window": dict(window_size=(40, 0)),
    "right window": dict(window_size=(-1, 3)),
    "lse": dict(return_softmax_lse=True),
    "an int for a float": dict(softmax_scale=1, softcap=20),
    "slopes": dict(alibi_slopes=torch.rand(H)),
    "sink": dict(sink=torch.randn(H)),
    "chunk": dict(attention_chunk=64),
    "splits": dict(num_splits=3),
    "one length": dict(cache_seqlens=5),
    "all rows": dict(cache_seqlens=None, cache_batch_idx=torch.zeros(B, dtype=torch.int32)),
    "left padding": dict(cache_leftpad=torch.tensor([3, 0, 9, 5, 0])),
    "other caches": dict(cache_batch_idx=torch.tensor([4, 1, 2, 0, 3]), cache_seqlens=5),
}  # fmt: skip


def test_a_call_without_keyword_arguments_has_the_defaults_of_the_others(monkeypatch):
    calls = []
    monkeypatch.setattr(_ops, "kvcache_if_ordinary", lambda *arguments: calls.append(arguments) or torch.ones(1))
    arguments = (*map(torch.tensor, range(11)), 0.5, True, (3, 4), 1.5, False, torch.tensor(16), 2, True)
    flash_attn_with_kvcache(*arguments)
    kvcache._flash_attn_with_kvcache(*arguments)
    for short, full in zip(*calls, strict=True):
        assert short is full if isinstance(full, torch.Tensor) else (type(short), short) == (type(full), full)


def test_errors_about_arguments_name_the_function():
    with pytest.raises(TypeError, match=r"^flash_attn_with_kvcache\(\) got an unexpected keyword argument 'window'$"):
        flash_attn_with_kvcache(*make()[:3], window=3)
    with pytest.raises(
        TypeError, match=r"^flash_attn_with_kvcache\(\) missing 1 required positional argument: 'v_cache'$"
    ):
        flash_attn_with_kvcache(torch.randn(1, 1, 4, 8), torch.randn(1, 3, 4, 8))


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("seqlen_q", [1, 3])
@pytest.mark.parametrize("case", ORDINARY)
def test_same_bits_both_ways(case, seqlen_q, page_size, direct, monkeypatch):
    arguments = {"cache_seqlens": LENGTHS_TENSOR, **ORDINARY[case]}
    if page_size:  # with a table, cache_batch_idx takes the other way
        arguments.pop("cache_batch_idx", None)
    q, k_cache, v_cache, block_table = make(torch.bfloat16, seqlen_q, page_size)
    if arguments["cache_seqlens"] is not LENGTHS_TENSOR:
        k_cache, v_cache = k_cache.nan_to_num(1.0), v_cache.nan_to_num(1.0)

    def call():
        result = flash_attn_with_kvcache(q, k_cache, v_cache, block_table=block_table, **arguments)
        return result if isinstance(result, tuple) else (result,)

    ours, theirs = both_ways(monkeypatch, call)
    assert [r is not None for r in direct] == [True]
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_the_reference(dtype, direct):
    q, k_cache, v_cache, block_table = make(dtype, 2, 16)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=LENGTHS_TENSOR, block_table=block_table)
    assert direct[0] is out
    for b, length in enumerate(LENGTHS):
        if length == 0:
            assert not out[b].any()
            continue
        inputs = [q[b].transpose(0, 1)[None], *(rows_of(c, block_table, b, 0, length) for c in (k_cache, v_cache))]
        exact, _ = reference.attention(*inputs)
        theirs = scaled_dot_product_attention(*inputs, enable_gqa=True)
        assert_as_exact_as_torch("out", out[b].transpose(0, 1)[None], theirs, exact, 2.0)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [None, 16])
def test_appends_the_same_rows(page_size, causal, rotary, direct, monkeypatch):
    q, k_cache, v_cache, block_table = make(torch.float32, 3, page_size)
    k, v = torch.randn(B, 3, HK, D), torch.randn(B, 3, HK, DV)
    tables = dict(rotary_cos=torch.rand(256, 8), rotary_sin=torch.rand(256, 8)) if rotary else {}

    def call():
        caches = k_cache.clone(), v_cache.clone()
        out, lse = flash_attn_with_kvcache(
            q, *caches, k, v, cache_seqlens=LENGTHS_TENSOR, block_table=block_table, causal=causal,
            rotary_interleaved=False, return_softmax_lse=True, **tables,
        )  # fmt: skip
        return out, lse, *(cache.nan_to_num(7.0) for cache in caches)

    ours, theirs = both_ways(monkeypatch, call)
    assert [r is not None for r in direct] == [True]
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert not torch.equal(ours[2], k_cache.nan_to_num(7.0))


def test_packed_queries_and_8_bit_caches(direct, monkeypatch):
    q = torch.randn(7, H, D)
    caches = [torch.randint(-100, 100, (2, 32, HK, d), dtype=torch.int8) for d in (D, DV)]
    offsets, lengths = torch.tensor([0, 2, 7]), torch.tensor([9, 32])
    for shape in ((HK,), (2, HK), (2, 32, HK)):
        scales = dict(k_descale=torch.rand(shape) / 50, v_descale=torch.rand(shape) / 50)
        ours, theirs = both_ways(
            monkeypatch,
            lambda scales=scales: flash_attn_with_kvcache(
                q,
                *caches,
                cache_seqlens=lengths,
                cu_seqlens_q=offsets,
                max_seqlen_q=5,
                return_softmax_lse=True,
                **scales,
            ),
        )
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert [r is not None for r in direct] == [True] * 3


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.names.append(function.overloadpacket.__name__)
        return function(*arguments, **(keywords or {}))


def test_a_dispatch_mode_sees_the_operator(direct):
    q, k_cache, v_cache, _ = make()
    with Seen() as seen:
        flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=LENGTHS_TENSOR)
    assert "attention_cache" in seen.names
    assert set(direct) == {None}


def test_a_function_mode_sees_the_calls(direct):
    class Mode(TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), keywords=None):
            return function(*arguments, **(keywords or {}))

    q, k_cache, v_cache, _ = make()
    with Mode():
        flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=LENGTHS_TENSOR)
    assert set(direct) == {None}


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v"])
def test_no_gradient_is_lost(name, direct):
    q, k_cache, v_cache, _ = make()
    tensors = dict(q=q, k_cache=k_cache, v_cache=v_cache, k=torch.ones(B, 1, HK, D), v=torch.ones(B, 1, HK, DV))
    tensors[name] = tensors[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"{name}: got a tensor that requires a gradient"):
        flash_attn_with_kvcache(**tensors, cache_seqlens=LENGTHS_TENSOR)
    assert set(direct) == {None}


@pytest.mark.parametrize("name", ["alibi_slopes", "sink"])
def test_no_gradient_of_slopes_or_sink_is_lost(name, direct):
    """The call computes, because a user may never need the gradient. Computing the gradient is an error."""
    q, k_cache, v_cache, _ = make()
    added = torch.rand(H, requires_grad=True)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=LENGTHS_TENSOR, **{name: added})
    assert set(direct) == {None}
    with pytest.raises(RuntimeError, match="derivative for flash_attn_ext::attention_cache is not implemented"):
        out.sum().backward()


WRONG = {
    "k_cache: got dtype": dict(k_cache=torch.zeros(B, 256, HK, D, dtype=torch.float16)),
    "cache_seqlens: got": dict(cache_seqlens=torch.tensor([1, 2, 3, 4, 257])),
    "block_table: got": dict(block_table=torch.full((B, 2), 99)),
    "cache_batch_idx: got": dict(cache_batch_idx=torch.tensor([0, 1, 2, 3, 9])),
    "softmax_scale: got inf": dict(softmax_scale=float("inf")),
    "num_splits: got -1": dict(num_splits=-1),
    "attention_chunk: got -1": dict(attention_chunk=-1),
    "causal: got 2": dict(causal=2),
    "k: got shape": dict(k=torch.ones(B, 1, HK, D + 1), v=torch.ones(B, 1, HK, DV)),
    "rotary_cos: got one without": dict(rotary_cos=torch.rand(64, 16)),
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_errors_have_the_names_of_the_caller(message):
    q, k_cache, v_cache, _ = make()
    arguments = dict(k_cache=k_cache, v_cache=v_cache, cache_seqlens=LENGTHS_TENSOR) | WRONG[message]
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        flash_attn_with_kvcache(q, **arguments)


def read_arguments(out=None):
    """Arguments of read_cache_if_ordinary: two sequences of one query each, with 5 and 9 keys."""
    q, keys, values = torch.randn(2, H, D), torch.randn(2, 16, HK, D), torch.randn(2, 16, HK, DV)
    offsets, lengths = torch.tensor([0, 1, 2]), torch.tensor([5, 9])
    out = torch.full((2, H, DV), torch.nan) if out is None else out
    tensors = [q, keys, values, None, None, offsets, lengths, *[None] * 10]
    return [out, *tensors, {"causal": True, "lower_right": True}]


def test_reads_a_cache_into_out():
    out, *tensors, options = read_arguments()
    assert _ops.read_cache_if_ordinary(out, *tensors, options) is True
    assert torch.equal(out, _ops.attention_cache(*tensors, **options)[0])
    tensors[6] = torch.tensor([0, 9])  # no key for the first sequence
    assert _ops.read_cache_if_ordinary(out, *tensors, options) is True
    assert not out[0].any()


@pytest.mark.parametrize("out", ["strides", "shape", "dtype", "memory of q", "gradient"])
def test_does_not_write_another_form_of_out(out):
    arguments = read_arguments()
    q = arguments[1]
    arguments[0] = {
        "strides": torch.zeros(H, 2, DV).transpose(0, 1), "shape": torch.zeros(3, H, DV),
        "dtype": torch.zeros(2, H, DV, dtype=torch.bfloat16), "memory of q": q.view(-1)[: 2 * H * DV].view(2, H, DV),
        "gradient": torch.zeros(2, H, DV, requires_grad=True),
    }[out]  # fmt: skip
    before = arguments[0].detach().clone()
    assert _ops.read_cache_if_ordinary(*arguments) is None
    assert torch.equal(arguments[0], before)


def test_reading_into_out_checks_its_arguments():
    arguments = read_arguments()
    arguments[7] = torch.tensor([5, 17])
    with pytest.raises(ValueError, match="cache_seqlens: got 17"):
        _ops.read_cache_if_ordinary(*arguments)


def test_writing_is_refused_under_a_mode():
    key, keys, values = torch.ones(2, HK, D), torch.zeros(2, 4, HK, D), torch.zeros(2, 4, HK, DV)
    offsets, rows = torch.tensor([0, 1, 2]), torch.tensor([1, 3])
    tensors = (key, key, torch.ones(2, HK, DV), keys, values, offsets, offsets, rows, *[None] * 12)
    with Seen():
        assert _ops.write_cache_if_ordinary(*tensors) is None
    assert not keys.any()
    assert _ops.write_cache_if_ordinary(*tensors) is True
    assert keys[0, 1].all()
    assert keys[1, 3].all()
    assert keys.sum() == 2 * HK * D


def test_a_lazy_negation_is_not_read_as_its_memory():
    arguments = read_arguments()
    query = arguments[1]
    arguments[1] = torch._neg_view(-query)
    assert _ops.read_cache_if_ordinary(*arguments) is None
    arguments[0], arguments[1] = torch._neg_view(arguments[0]), query
    assert _ops.read_cache_if_ordinary(*arguments) is None

    rows = torch.ones(1, HK, D)
    offsets = torch.tensor([0, 1])
    caches = torch.zeros(1, 4, HK, D), torch.zeros(1, 4, HK, D)
    tensors = (rows, torch._neg_view(rows), rows, *caches, offsets, offsets, torch.tensor([0]), *[None] * 12)
    assert _ops.write_cache_if_ordinary(*tensors) is None
    assert not caches[0].any()


def test_autograd_sees_that_out_was_written():
    arguments = read_arguments()
    version = arguments[0]._version
    assert _ops.read_cache_if_ordinary(*arguments) is True
    assert arguments[0]._version > version
