"""flash_attn_ext.flash_attn_4: flash-attention 4's order of arguments, its results, and the arguments it refuses."""

import inspect

import pytest
import reference
import torch
from test_flash_attn_3 import assert_agrees, make_inputs

from flash_attn_ext import flash_attn_3 as fa3
from flash_attn_ext import flash_attn_4 as fa4

pytestmark = pytest.mark.usefixtures("one_thread")

MASKS = "score_mod=None, score_mod_bwd=None, mask_mod=None"
COMMON = (
    "softmax_scale=None, causal=False, window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, "
    f"pack_gqa=None, deterministic=False, {MASKS}"
)
SIGNATURES = {
    fa4.flash_attn_func: f"q, k, v, qv=None, gather_kv_indices=None, {COMMON}, aux_tensors=None, aux_scalars=None, "
    "block_sparse_tensors=None, block_sparse_tensors_bwd=None, return_lse=False",
    fa4.flash_attn_varlen_func: "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, "
    f"{COMMON}, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None, return_lse=False, "
    "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_arguments_in_their_order(function):
    parameters = inspect.signature(function).parameters.values()
    shown = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
    assert shown == SIGNATURES[function]


CASES = {
    "none": ({}, {}),
    "causal": ({"causal": True, "softmax_scale": 0.3, "softcap": None}, {"causal": "lower_right", "scale": 0.3}),
    "window": ({"window_size": (20, 3), "softcap": 2.0}, {"window": (20, 3), "softcap": 2.0}),
    "left": ({"window_size": (20, None)}, {"window": (20, None)}),
    "right": ({"window_size": (None, -4)}, {"window": (None, -4)}),
    "causal, left": ({"window_size": (9, -1), "causal": True}, {"window": (9, 0)}),
    "no keys left": ({"window_size": (-1, -1)}, {}),
    "hints": ({"num_splits": 3, "pack_gqa": True, "deterministic": True}, {}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sink", [False, True])
def test_dense(name, sink):
    options, expected = CASES[name]
    q, k, v = make_inputs()
    tensors = q, k, v
    options, expected = dict(options), dict(expected)
    if sink:
        tensors += (torch.randn(4, requires_grad=True),)
        options["learnable_sink"], expected["sink"] = tensors[3], tensors[3].double()
    out, lse = reference.attention(*(t.transpose(1, 2).double() for t in (q, k, v)), **expected)
    results = fa4.flash_attn_func(q, k, v, **options, return_lse=True)
    finite = lse.isfinite()
    assert torch.equal(results[1].isfinite(), finite)
    results, lse = (results[0], results[1].masked_fill(~finite, 0.0)), lse.masked_fill(~finite, 0.0)
    assert_agrees(results, tensors, (out.transpose(1, 2), lse), tensors)


def test_both_results_come_without_return_lse():
    q, k, v = make_inputs()
    for ours, theirs in zip(fa4.flash_attn_func(q, k, v), fa4.flash_attn_func(q, k, v, return_lse=True), strict=True):
        assert torch.equal(ours, theirs)


def test_positional_arguments_have_the_same_meaning():
    q, k, v = make_inputs()
    sink = torch.randn(4).bfloat16()
    out, _ = fa4.flash_attn_func(q, k, v, None, None, 0.3, True, (20, None), sink, 1.5, 1, None, False)
    expected, _ = fa4.flash_attn_func(q, k, v, softmax_scale=0.3, causal=True, window_size=(20, None),
                                      learnable_sink=sink, softcap=1.5)  # fmt: skip
    assert torch.equal(out, expected)


@pytest.mark.parametrize("packed_q", [False, True])
@pytest.mark.parametrize("packed_k", [False, True])
def test_sequences_packed_or_padded(packed_q, packed_k):
    q, k, v = make_inputs(20, 30)
    used_q, used_k = torch.tensor([20, 11], dtype=torch.int32), torch.tensor([7, 30], dtype=torch.int32)
    exact = [torch.zeros(2, 20, 4, 16, dtype=torch.float64), torch.full((2, 4, 20), 0.0, dtype=torch.float64)]
    for b in range(2):
        own_q = q[b : b + 1, : used_q[b]].transpose(1, 2).double()
        own_k, own_v = (t[b : b + 1, : used_k[b]].transpose(1, 2).double() for t in (k, v))
        out, lse = reference.attention(own_q, own_k, own_v, causal="lower_right")
        exact[0][b, : used_q[b]] = out[0].transpose(0, 1)
        exact[1][b, :, : used_q[b]] = lse[0].masked_fill(lse[0] == -torch.inf, 0.0)
    keep_q, keep_k = (torch.arange(n) < used[:, None] for n, used in ((20, used_q), (30, used_k)))
    offsets_q, offsets_k = torch.tensor([0, 20, 31]), torch.tensor([0, 7, 37])
    given = dict(q=q[keep_q], cu_seqlens_q=offsets_q, max_seqlen_q=20) if packed_q else dict(q=q, seqused_q=used_q)
    given |= dict(k=k[keep_k], v=v[keep_k]) if packed_k else dict(k=k, v=v)
    given |= dict(cu_seqlens_k=offsets_k, max_seqlen_k=30) if packed_k else dict(seqused_k=used_k)
    out, lse = fa4.flash_attn_varlen_func(**given, causal=True)
    if packed_q:
        exact = [exact[0][keep_q], exact[1].transpose(0, 1)[:, keep_q]]
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    assert_agrees((out, lse), (q, k, v), exact, (q, k, v))


def test_keys_in_pages():
    q, k, v = (t.detach() for t in make_inputs(5, 48))
    used = torch.tensor([20, 48], dtype=torch.int32)
    order = torch.randperm(6)
    table = torch.empty(6, dtype=torch.int32)
    table[order] = torch.arange(6, dtype=torch.int32)
    pages = [t.reshape(6, 16, 2, 16)[order] for t in (k, v)]
    expected = fa4.flash_attn_varlen_func(q, k, v, seqused_k=used, causal=True)
    for ours, theirs in zip(
        fa4.flash_attn_varlen_func(q, *pages, seqused_k=used, page_table=table.view(2, 3), causal=True), expected,
        strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="seqused_k: got page_table without seqused_k"):
        fa4.flash_attn_varlen_func(q, *pages, page_table=table.view(2, 3))


REFUSED = dict(
    qv=torch.ones(1), gather_kv_indices=torch.ones(1), score_mod=max, score_mod_bwd=max, mask_mod=max,
    aux_tensors=[torch.ones(1)], aux_scalars=(1,), block_sparse_tensors=(torch.ones(1),),
)  # fmt: skip


@pytest.mark.parametrize("name", [*REFUSED, "block_sparse_tensors_bwd"])
def test_an_argument_without_a_kernel_is_refused(name):
    x = torch.randn(1, 4, 2, 8)
    value = REFUSED.get(name, (torch.ones(1),))
    with pytest.raises(NotImplementedError, match=f"{name}: got .*; allowed: None"):
        fa4.flash_attn_func(x, x, x, **{name: value})
    if name in REFUSED:
        with pytest.raises(NotImplementedError, match=f"{name}: got .*; allowed: None"):
            fa4.flash_attn_varlen_func(x, x, x, **{name: value})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(window_size=5), TypeError, "window_size: got 5; allowed: two ints or None"),
        (dict(window_size=(4, -1)), ValueError, r"window_size: got \(4, -1\); allowed: ints other than -1"),
        (dict(window_size=(-1, 4)), ValueError, r"window_size: got \(-1, 4\); allowed: ints other than -1"),
        (dict(softcap=-1.0), ValueError, "softcap: got -1"),
        (dict(learnable_sink=torch.ones(3)), ValueError, "learnable_sink: got shape"),
    ],
)
def test_errors_name_the_argument(arguments, error, message):
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(error, match=f"^{message}"):
        fa4.flash_attn_func(x, x, x, **arguments)
    with pytest.raises(error, match=f"^{message}"):
        fa4.flash_attn_varlen_func(x, x, x, **arguments)


def test_a_3d_tensor_needs_offsets():
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=r"q: got shape \[4, 2, 8\]; allowed: .* or 3-D with its cu_seqlens"):
        fa4.flash_attn_varlen_func(x[0], x, x)
    with pytest.raises(ValueError, match=r"v: got shape \[4, 2, 8\]; allowed: .* or 3-D with its cu_seqlens"):
        fa4.flash_attn_varlen_func(x, x, x[0])


@pytest.mark.parametrize("module", [fa3, fa4], ids=lambda module: module.__name__.rsplit("_")[-1])
@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        (3, TypeError, r"^page_table: got int; allowed: a torch.Tensor"),
        (torch.zeros(2, 2), TypeError, r"^page_table: got dtype float32"),
        (torch.zeros(1, 2, dtype=torch.int32), ValueError, r"^page_table: got shape \[1, 2\]"),
        (torch.full((2, 2), 9, dtype=torch.int32), ValueError, r"^page_table: got 9 at 0"),
    ],
)
def test_an_error_of_a_page_table_has_its_name(module, table, error, message):
    q, pages, lengths = torch.randn(2, 3, 4, 8), torch.randn(4, 16, 2, 8), torch.tensor([5, 6], dtype=torch.int32)
    function, options = fa4.flash_attn_varlen_func, {"seqused_k": lengths}
    if module is fa3:
        function, options = fa3.flash_attn_with_kvcache, {"cache_seqlens": lengths}
    with pytest.raises(error, match=message):
        function(q, pages, pages, page_table=table, **options)


def test_a_sink_beside_pages_is_a_tensor():
    q, pages = torch.randn(2, 3, 4, 8), torch.randn(4, 16, 2, 8)
    table, lengths = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([5, 6], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"^learnable_sink: got int; allowed: a torch.Tensor"):
        fa4.flash_attn_varlen_func(q, pages, pages, page_table=table, seqused_k=lengths, learnable_sink=3)
