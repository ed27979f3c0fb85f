"""flash-attention's functions under their own names: layouts, defaults, meanings."""

import functools
import inspect

import pytest
import reference
import torch

from flash_attn_ext import flash_attn_3, flash_attn_4, flash_attn_with_kvcache
from flash_attn_ext import flash_attn_interface as interface
from flash_attn_ext.bert_padding import (
    index_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)
from flash_attn_ext.layers.rotary import (
    RotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_emb_kv_,
    apply_rotary_emb_qkv_,
)

pytestmark = pytest.mark.usefixtures("one_thread")

TAIL = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
SIGNATURES = {
    interface.flash_attn_func: f"q, k, v, {TAIL}",
    interface.flash_attn_kvpacked_func: f"q, kv, {TAIL}",
    interface.flash_attn_qkvpacked_func: f"qkv, {TAIL}",
    interface.flash_attn_varlen_func: f"q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, {TAIL}, "
    "block_table=None",
    interface.flash_attn_varlen_kvpacked_func: "q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, " + TAIL,
    interface.flash_attn_varlen_qkvpacked_func: f"qkv, cu_seqlens, max_seqlen, {TAIL}",
    flash_attn_with_kvcache: "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False",
    apply_rotary_emb: "x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, "
    "max_seqlen=None",
    unpad_input: "hidden_states, attention_mask, unused_mask=None",
    apply_rotary_emb_qkv_: "qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, "
    "num_heads_q=None",
    apply_rotary_emb_kv_: "kv, cos, sin, interleaved=False, seqlen_offsets=0",
    RotaryEmbedding: "dim, base=10000.0, interleaved=False, scale_base=None, device=None",
    unpad_input_for_concatenated_sequences: "hidden_states, attention_mask_in_length",
    pad_input: "hidden_states, indices, batch, seqlen",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_arguments_in_their_order(function):
    """The order is the order in flash-attention's documentation. Our additional arguments are keyword-only."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    shown = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
    assert shown == SIGNATURES[function]


def make(seqlen_q=70, seqlen_k=90, heads_kv=2):
    q = torch.randn(2, seqlen_q, 4, 16, requires_grad=True)
    return q, *(torch.randn(2, seqlen_k, heads_kv, 16, requires_grad=True) for _ in range(2))


def dense(q, k, v, **options):
    out, lse = reference.attention(*(t.transpose(1, 2).double() for t in (q, k, v)), **options)
    return out.transpose(1, 2), lse


@pytest.mark.parametrize(("options", "expected"), [
    ({}, {}),
    ({"causal": True}, {"causal": "lower_right"}),
    ({"window_size": (20, 3)}, {"window": (20, 3)}),
    ({"causal": True, "window_size": (20, -1)}, {"causal": "lower_right", "window": (20, -1)}),
    ({"softmax_scale": 0.3, "softcap": 2.0}, {"scale": 0.3, "softcap": 2.0}),
    ({"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}, {"alibi_slopes": torch.tensor([0.1, 0.2, 0.3, 0.4])}),
], ids=lambda options: "-".join(options) or "none")  # fmt: skip
def test_meanings(options, expected):
    q, k, v = make()
    out, lse, probs = interface.flash_attn_func(q, k, v, **options, return_attn_probs=True)
    exact, exact_lse = dense(q, k, v, **expected)
    assert probs is None
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-4, atol=1e-5)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(exact, (q, k, v), dout.double())
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_packed_forms_are_the_same_numbers():
    qkv = torch.randn(2, 50, 3, 4, 16, requires_grad=True)
    q, k, v = (t.detach().requires_grad_() for t in qkv.unbind(2))
    expected = interface.flash_attn_func(q, k, v, causal=True)
    grads = torch.autograd.grad(expected.sum(), (q, k, v))
    for out in (
        interface.flash_attn_qkvpacked_func(qkv, causal=True),
        interface.flash_attn_kvpacked_func(qkv[:, :, 0], qkv[:, :, 1:], causal=True),
    ):
        assert torch.equal(out, expected)
        assert torch.equal(torch.autograd.grad(out.sum(), qkv)[0], torch.stack(grads, 2))


def test_packed_sequences():
    cu_seqlens = torch.tensor([0, 30, 31, 100], dtype=torch.int32)
    qkv = torch.randn(100, 3, 4, 16)
    q, k, v = qkv.unbind(1)
    out, lse, _ = interface.flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 69, 69, causal=True,
                                                   return_attn_probs=True)  # fmt: skip
    assert lse.shape == (4, 100)
    for begin, end in ((0, 30), (30, 31), (31, 100)):
        exact, exact_lse = dense(*(t[None, begin:end] for t in (q, k, v)), causal="lower_right")
        torch.testing.assert_close(out[begin:end].double(), exact[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[:, begin:end].double(), exact_lse[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(interface.flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 69, causal=True), out)
    assert torch.equal(
        interface.flash_attn_varlen_kvpacked_func(q, qkv[:, 1:], cu_seqlens, cu_seqlens, 69, 69, causal=True), out
    )


def test_an_argument_without_a_kernel_is_refused():
    _, pages, table, (cu_seqlens_q, cu_seqlens_k) = make_pages()
    arguments = (torch.randn(13, 4, 16), *pages, cu_seqlens_q, cu_seqlens_k, 8, 64)
    with pytest.raises(NotImplementedError, match="seqused_q: got a tensor together with block_table"):
        interface.flash_attn_varlen_func(*arguments, block_table=table, seqused_q=torch.tensor([5, 8]))
    with pytest.raises(ValueError, match="page_table: got one together with block_table"):
        interface.flash_attn_varlen_func(*arguments, block_table=table, page_table=table)
    with pytest.raises(ValueError, match=r"dropout_p: got 0\.5; allowed with a cache: 0"):
        interface.flash_attn_varlen_func(*arguments, 0.5, block_table=table)
    with pytest.raises(ValueError, match=r"cu_seqlens_k: got lengths \[20, 70\]; allowed: 0 to 64"):
        interface.flash_attn_varlen_func(*arguments[:4], torch.tensor([0, 20, 90]), 8, 64, block_table=table)
    with pytest.raises(ValueError, match="block_table: got 99 at 1; allowed: 0 to 9"):
        interface.flash_attn_varlen_func(*arguments, block_table=torch.where(table == table[1, 0], 99, table))


ROWS, OFFSETS = torch.randn(5, 4, 8), torch.tensor([0, 5])
BAD_SHAPES = {
    "3-D": (lambda: interface.flash_attn_func(ROWS, ROWS, ROWS), "q: got shape .5, 4, 8.; allowed: .batch, seqlen, h"),
    "k": (lambda: interface.flash_attn_func(ROWS[None], ROWS, ROWS), "k: got shape .5, 4, 8.; allowed: .batch"),
    "qkv": (
        lambda: interface.flash_attn_qkvpacked_func(torch.randn(2, 5, 4, 4, 8)),
        "qkv: got shape .2, 5, 4, 4, 8",
    ),
    "kv": (lambda: interface.flash_attn_kvpacked_func(ROWS[None], ROWS[None]), "kv: got shape .1, 5, 4, 8.; allowed"),
    "packed, 4-D": (
        lambda: interface.flash_attn_varlen_func(ROWS[None], ROWS, ROWS, OFFSETS, OFFSETS, 5, 5),
        "q: got shape .1, 5, 4, 8.; allowed: .total_q, heads, head_dim",
    ),
    "packed qkv": (
        lambda: interface.flash_attn_varlen_qkvpacked_func(ROWS[:, :, None], OFFSETS, 5),
        "qkv: got shape .5, 4, 1, 8.; allowed: .total, 3, heads, head_dim",
    ),
    "packed kv": (
        lambda: interface.flash_attn_varlen_kvpacked_func(ROWS, ROWS, OFFSETS, OFFSETS, 5, 5),
        "kv: got shape .5, 4, 8.; allowed: .total_k, 2, heads_k, head_dim",
    ),
}


@pytest.mark.parametrize("case", BAD_SHAPES)
def test_another_shape_is_refused(case):
    """Tensors (S, H, D) gave the attention of other rows: they were read as (heads, head_dim, seqlen)."""
    call, message = BAD_SHAPES[case]
    with pytest.raises(ValueError, match=message):
        call()


def test_no_tensor_is_refused():
    with pytest.raises(TypeError, match="k: got list; allowed: a torch"):
        interface.flash_attn_func(ROWS[None], [1.0], ROWS[None])
    with pytest.raises(TypeError, match="qkv: got NoneType"):
        interface.flash_attn_qkvpacked_func(None)


B, P = torch.zeros(2, 8, 4, 16), torch.zeros(8, 4, 16)  # (batch, seqlen, heads, head_dim), (rows, heads, head_dim)


def packed_call(module, q, k, v, offsets):
    return module.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=8, max_seqlen_k=8
    )


BAD_VALUES = {
    "q's dtype": (lambda f: f.flash_attn_func(B.int(), B, B), "q: got dtype int32"),
    "k's dtype": (lambda f: f.flash_attn_func(B, B.double(), B), "k: got dtype float64; allowed: q's, float32"),
    "head_dim": (
        lambda f: f.flash_attn_func(B[..., :8], B, B),
        r"k: got shape \[2, 8, 4, 16\]; allowed: q's head_dim, 8$",
    ),
    "v's rows": (
        lambda f: f.flash_attn_func(B, B, B[:, :7]),
        r"v: got shape \[2, 7, 4, 16\]; allowed: k's without the head_dim, \[2, 8, 4\]$",
    ),
    "heads": (
        lambda f: f.flash_attn_func(B, B[:, :, :3], B[:, :, :3]),
        "k: got 3 heads for 4 heads of q; allowed: a divisor of 4$",
    ),
    "layout": (
        lambda f: f.flash_attn_func(B.transpose(1, 2), B[:, :6].transpose(1, 2), B[:, :6].transpose(1, 2)),
        r"k: got 6 heads for 8 heads of q; .* q, k and v are \(batch, seqlen, heads, head_dim\)$",
    ),
    "scale": (lambda f: f.flash_attn_func(B, B, B, softmax_scale=float("nan")), "softmax_scale: got nan"),
    "packed dtype": (lambda f: packed_call(f, P, P.int(), P, OFFSETS), "k: got dtype int32"),
    "packed rows": (
        lambda f: packed_call(f, P[:4], P, P, torch.tensor([0, 3, 8])),
        "cu_seqlens_q: got offsets from 0 to 8; allowed: from 0 to 4, the rows of q$",
    ),
    "packed heads": (
        lambda f: packed_call(f, P, P[:, :3], P[:, :3], OFFSETS), "k: got 3 heads for 4 heads of q",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_VALUES)
@pytest.mark.parametrize("module", [interface, flash_attn_3, flash_attn_4], ids=lambda m: m.__name__.rsplit("_", 1)[1])
def test_errors_have_flash_attentions_names_and_layout(case, module):
    call, message = BAD_VALUES[case]
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call(module)


def test_errors_about_a_sink_have_its_name():
    for module in (interface, flash_attn_4):
        with pytest.raises(ValueError, match=r"^learnable_sink: got shape \[3\]"):
            module.flash_attn_func(B, B, B, learnable_sink=torch.zeros(3))


def test_errors_of_pages_have_flash_attentions_names():
    pages, table = torch.zeros(3, 16, 4, 16), torch.zeros(2, 1, dtype=torch.int32)
    call = functools.partial(
        interface.flash_attn_varlen_func, cu_seqlens_q=OFFSETS, cu_seqlens_k=OFFSETS, max_seqlen_q=5, max_seqlen_k=5,
        block_table=table,
    )  # fmt: skip
    with pytest.raises(TypeError, match=r"^v: got dtype float64"):
        call(ROWS, pages, pages.double())
    with pytest.raises(ValueError, match=r"^softmax_scale: got nan"):
        call(ROWS, pages, pages, softmax_scale=float("nan"))


def make_pages():
    """Packed q, (k, v) in pages of 16, the table, offsets of 5 and 8 queries and of 20 and 64 keys."""
    pages = torch.randn(2, 10, 16, 2, 16)
    table = torch.randperm(10, dtype=torch.int32)[:8].view(2, 4)
    return torch.randn(13, 4, 16), pages, table, (torch.tensor([0, 5, 13]), torch.tensor([0, 20, 84]))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (10, 2)}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("sink", [False, True])
def test_keys_in_pages_of_packed_queries(options, sink):
    q, pages, table, (cu_seqlens_q, cu_seqlens_k) = make_pages()
    options = options | {"learnable_sink": torch.randn(4) if sink else None}
    out, lse, _ = interface.flash_attn_varlen_func(
        q, *pages, cu_seqlens_q, cu_seqlens_k, 8, 64, block_table=table, return_attn_probs=True, **options
    )
    rows = [t[table.long()].flatten(1, 2) for t in pages]
    k, v = (torch.cat([t[0, :20], t[1]]) for t in rows)
    expected = interface.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, 8, 64, return_attn_probs=True, **options
    )
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(lse, expected[1])
    used = interface.flash_attn_varlen_func(q, *pages, cu_seqlens_q, None, 8, 64, page_table=table,
                                            seqused_k=torch.tensor([20, 64]), **options)  # fmt: skip
    assert torch.equal(used, out)


def test_a_learnable_sink_is_the_sink():
    q, k, v = make()
    sink = torch.randn(4, requires_grad=True)
    out = interface.flash_attn_func(q, k, v, learnable_sink=sink, causal=True)
    exact, _ = dense(q, k, v, causal="lower_right", sink=sink.double())
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)
    dout = torch.randn_like(out)
    (ours,), (theirs,) = (torch.autograd.grad(o, sink, d) for o, d in ((out, dout), (exact, dout.double())))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_unpad_and_pad():
    x = torch.randn(3, 10, 4, requires_grad=True)
    lengths = torch.tensor([10, 0, 7])
    keep = torch.arange(10) < lengths[:, None]
    rows, indices, cu_seqlens, longest, seqused = unpad_input(x, keep)
    assert rows.shape == (17, 4)
    assert cu_seqlens.tolist() == [0, 10, 10, 17]
    assert (cu_seqlens.dtype, longest, seqused.tolist()) == (torch.int32, 10, [10, 0, 7])
    back = pad_input(rows, indices, 3, 10)
    assert torch.equal(back, x * keep[..., None])
    assert torch.equal(index_first_axis(x.flatten(0, 1), indices), rows)
    back.sum().backward()
    assert torch.equal(x.grad, keep[..., None].expand_as(x).float())
    unused = torch.zeros(3, 10, dtype=torch.int32)
    unused[1, :2] = 1
    rows, _, cu_seqlens, longest, seqused = unpad_input(x, keep.int(), unused)
    assert (len(rows), cu_seqlens.tolist(), seqused.tolist()) == (19, [0, 10, 12, 19], [10, 0, 7])


def test_several_short_sequences_in_one_row():
    x = torch.randn(3, 6, 4)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    rows, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert torch.equal(rows, torch.cat([x[0, :5], x[1, :5], x[2]]))
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16]
    assert (cu_seqlens.dtype, longest) == (torch.int32, 6)
    back = pad_input(rows, indices, 3, 6)
    assert torch.equal(back[2], x[2])
    assert back[:2, 5].eq(0).all()
