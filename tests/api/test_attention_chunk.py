"""flash_attn(..., attention_chunk=...): a query sees only keys in the chunk of its position. Every pass, every call."""

from itertools import pairwise

import pytest
import reference
import torch
from cache_helpers import check as check_cache
from cache_helpers import make as make_cache
from helpers import allocated_by, check_against_reference, check_jvp_against_reference, make_qkv
from test_attention_weights import dense_weights, operator_options
from varlen_helpers import LENGTHS, check_pack

from flash_attn_ext import _ops, explain, flash_attn, flash_attn_varlen, flash_attn_with_kvcache
from flash_attn_ext import flash_attn_3 as fa3
from flash_attn_ext.distributed._layout import Layout
from flash_attn_ext.distributed._tiles import Band, Geometry, all_tiles

# (S_q, S_k): inside a tile, across tiles of 64, few queries, more queries than keys: positions below 0.
SIZES = [(70, 130), (1, 300), (5, 260), (200, 96), (3, 2)]
# One key, no divisor of a tile, a tile, more than the sequence.
CHUNKS = [1, 48, 64, 1000]
BANDS = {
    "none": {},
    "upper_left": {"causal": "upper_left"},
    "lower_right": {"causal": "lower_right"},
    "window": {"window": (30, 7)},
    "causal window": {"causal": "lower_right", "window": (40, 0)},
}


def chunk_mask(seqlen_q, seqlen_k, chunk, diagonal=0, first_key=0):
    """From the definition; it shares no code with reference.visible()."""
    rows = [(i + diagonal + first_key) // chunk for i in range(seqlen_q)]
    columns = [(j + first_key) // chunk for j in range(seqlen_k)]
    return torch.tensor([[a == b for b in columns] for a in rows])


# Each size with each chunk, and with two of the bands in turn.
SAMPLE = [
    (*sizes, chunk, list(BANDS)[(n + m + third) % len(BANDS)])
    for n, sizes in enumerate(SIZES)
    for m, chunk in enumerate(CHUNKS)
    for third in (0, 2)
]


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "chunk", "band"), SAMPLE)
def test_forward_and_backward(isa, seqlen_q, seqlen_k, chunk, band):
    q, k, v = make_qkv(2, 4, seqlen_q, seqlen_k, 16, 8, heads_kv=2)
    check_against_reference(q, k, v, attention_chunk=chunk, **BANDS[band])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("seqlens", [(130, 190), (2, 300)], ids=str)
def test_dtypes(isa, dtype, seqlens):
    check_against_reference(*make_qkv(2, 2, *seqlens, 32, dtype=dtype), causal="lower_right", attention_chunk=40)


def test_with_all_other_options(isa):
    q, k, v = make_qkv(2, 4, 90, 110, 16, heads_kv=2)
    mask = (torch.randn(1, 4, 90, 110)).masked_fill(torch.rand(90, 110) < 0.2, -torch.inf).requires_grad_()
    slopes, sink = torch.rand(4).requires_grad_(), torch.randn(2, 4).requires_grad_()
    check_against_reference(
        q, k, v, mask, alibi_slopes=slopes, sink=sink, dropout_p=0.2, softcap=2.0, causal="lower_right",
        attention_chunk=37,
    )  # fmt: skip


@pytest.mark.parametrize(("diagonal", "first_key"), [(0, 13), (-50, 0), (25, -70), (9, 10**15)])
def test_a_part_of_a_larger_matrix(isa, diagonal, first_key):
    q, k, v = make_qkv(1, 2, 70, 90, 8)
    options = {"diagonal": diagonal, "first_key": first_key, "attention_chunk": 33, "return_lse": True}
    mask = chunk_mask(70, 90, 33, diagonal, first_key)
    ours = flash_attn(q, k, v, causal="upper_left", **options)
    theirs = flash_attn(q, k, v, mask & (torch.arange(90) <= torch.arange(70)[:, None] + diagonal), return_lse=True)
    grads = [torch.randn_like(ours[0]), torch.randn_like(ours[1]).masked_fill(ours[1] == -torch.inf, 0)]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(*(torch.autograd.grad(o, (q, k, v), grads) for o in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_the_reference_agrees_with_the_definition():
    for causal, diagonal in (("upper_left", 0), ("lower_right", 20)):
        expected = chunk_mask(70, 90, 33, diagonal) & reference.visible(70, 90, causal=causal)
        assert torch.equal(reference.visible(70, 90, causal=causal, attention_chunk=33), expected)


@pytest.mark.parametrize("band", ["none", "lower_right", "window"])
def test_forward_mode(isa, band):
    inputs = make_qkv(2, 2, 70, 130, 16)
    check_jvp_against_reference(inputs, attention_chunk=48, **BANDS[band])


def test_second_derivatives(isa):
    q, k, v = (t.detach().double().requires_grad_() for t in make_qkv(1, 2, 7, 9, 4))

    def run(q, k, v):
        return flash_attn(q, k, v, causal="lower_right", attention_chunk=4, return_lse=True)

    assert torch.autograd.gradcheck(run, (q, k, v), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, (q, k, v))


def test_second_derivatives_over_tiles(isa):
    q, k, v = (t.detach().double().requires_grad_() for t in make_qkv(1, 2, 150, 200, 8))
    mask, directions = chunk_mask(150, 200, 70, 50), [torch.randn_like(t) for t in (q, k, v)]

    def products(**options):
        grads = torch.autograd.grad(flash_attn(q, k, v, **options).square().sum(), (q, k, v), create_graph=True)
        return torch.autograd.grad(grads, (q, k, v), directions)

    torch.testing.assert_close(products(window=-1, attention_chunk=70), products(attn_mask=mask))


@pytest.mark.parametrize("band", ["none", "lower_right"])
def test_weights(isa, band):
    q, k, _ = make_qkv(2, 4, 70, 130, 8, heads_kv=2, dtype=torch.float64)
    options = operator_options(**BANDS[band], attention_chunk=48)
    lse = _ops.attention(q, k, torch.zeros_like(k), None, None, None, None, **options)[1].detach()
    weights = _ops.attention_weights(q, k, None, None, None, None, None, lse, **options)
    dense = dense_weights(q, k, attention_chunk=48, **BANDS[band])
    torch.testing.assert_close(weights, dense)
    grad = torch.randn_like(dense)
    for a, b in zip(*(torch.autograd.grad(w, (q, k), grad) for w in (weights, dense)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("chunk", [1, 48, 1000])
@pytest.mark.parametrize("band", ["none", "upper_left", "causal window"])
def test_packed_sequences(isa, band, chunk):
    check_pack(LENGTHS, attention_chunk=chunk, **BANDS[band])


@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize(("seqlen_q", "chunk"), [(1, 1), (1, 48), (3, 64), (50, 48)])
def test_caches(isa, page_size, seqlen_q, chunk):
    lengths = [70, 0, 200, 5, 129]
    q, k, v, table = make_cache(torch.float32, seqlen_q, page_size)
    leftpad = torch.tensor([10, 0, 63, 5, 0], dtype=torch.int32)
    for causal in (False, True):
        out, lse = flash_attn_with_kvcache(
            q, k, v, cache_seqlens=torch.tensor(lengths), block_table=table, causal=causal, attention_chunk=chunk,
            cache_leftpad=leftpad, return_softmax_lse=True,
        )  # fmt: skip
        check_cache(out, lse, q, k, v, lengths, table, leftpad=leftpad, causal=causal, attention_chunk=chunk)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_split_keys(isa, num_splits):
    check_against_reference(*make_qkv(1, 2, 6, 900, 16), num_splits=num_splits, attention_chunk=300)


def test_functions_of_the_user():
    q, k, v = make_qkv(1, 2, 70, 130, 8)
    out = flash_attn(q, k, v, score_mod=lambda s, *_: s * 0.5, attention_chunk=48)
    expected = flash_attn(q, k, v, chunk_mask(70, 130, 48, 60), score_mod=lambda s, *_: s * 0.5)
    torch.testing.assert_close(out, expected)
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_hidden_values_may_be_nan(isa):
    q, k, v = make_qkv(1, 2, 100, 100, 16)
    hidden = (torch.arange(100) // 40 == 1)[:, None]
    poisoned = [t.detach().masked_fill(hidden, torch.nan).requires_grad_() for t in (k, v)]
    out = flash_attn(q, *poisoned, attention_chunk=40)
    rows = torch.arange(100) // 40 != 1
    assert torch.equal(out[:, :, rows], flash_attn(q, k, v, attention_chunk=40)[:, :, rows])
    grads = torch.autograd.grad(out[:, :, rows].sum(), [q, *poisoned])
    assert all(g[:, :, rows].isfinite().all() for g in grads)


def test_transforms():
    def run(q, k, v):
        return flash_attn(q, k, v, is_causal=True, attention_chunk=5)

    q, k, v = (torch.randn(3, 2, 4, 12, 8) for _ in range(3))
    expected = torch.stack([run(*x) for x in zip(q, k, v, strict=True)])
    torch.testing.assert_close(torch.func.vmap(run)(q, k, v), expected)
    torch.testing.assert_close(torch.compile(run, backend="aot_eager", fullgraph=True)(q[0], k[0], v[0]), expected[0])
    leaf = q[0].clone().requires_grad_()
    grads = torch.autograd.grad(run(leaf, k[0], v[0]).square().sum(), leaf)
    torch.testing.assert_close(torch.func.grad(lambda x: run(x, k[0], v[0]).square().sum())(q[0]), grads[0])


@pytest.mark.parametrize("name", ["dense", "packed", "cache"])
def test_flash_attention_3(name):
    q, k, v = (torch.randn(2, 50, heads, 16) for heads in (4, 2, 2))
    heads_first = [t.transpose(1, 2).double() for t in (q, k, v)]
    exact = reference.attention(*heads_first, causal="lower_right", attention_chunk=16)[0].transpose(1, 2)
    options = {"causal": True, "attention_chunk": 16}
    if name == "dense":
        out = fa3.flash_attn_func(q, k, v, **options)
    elif name == "cache":
        out = fa3.flash_attn_with_kvcache(q, k, v, cache_seqlens=50, **options)
    else:
        cu = torch.tensor([0, 50, 100], dtype=torch.int32)
        out = fa3.flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), cu, cu, 50, 50, **options).view_as(q)
    torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)
    qkv = torch.stack([q, q, q], 2)
    once = fa3.flash_attn_func(q, q, q, **options)
    assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv, **options), once)


@pytest.mark.parametrize("chunk", [-1, -(2**40)])
def test_a_negative_chunk_is_refused(chunk):
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    cu, message = torch.tensor([0, 2]), rf"attention_chunk: got {chunk}; allowed: 0 \(off\) or more"
    with pytest.raises(ValueError, match=message):
        flash_attn(q, k, v, attention_chunk=chunk)
    with pytest.raises(ValueError, match=message):
        flash_attn_varlen(q[0], k[0], v[0], cu, cu, attention_chunk=chunk)
    with pytest.raises(ValueError, match=message):
        flash_attn_with_kvcache(q, k, v, attention_chunk=chunk)


@pytest.mark.parametrize("chunk", [1.5, None, "8", torch.tensor([3, 4])], ids=repr)
def test_another_type_is_refused(chunk):
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    with pytest.raises(TypeError, match=r"attention_chunk: got .*; allowed: an int"):
        flash_attn(q, k, v, attention_chunk=chunk)


@pytest.mark.parametrize("chunk", [2**62, 2**63 - 1])
def test_huge_numbers(chunk):
    q, k, v = (torch.randn(1, 2, 4, 8) for _ in range(3))
    assert torch.equal(flash_attn(q, k, v, attention_chunk=chunk), flash_attn(q, k, v))
    out = flash_attn(q, k, v, attention_chunk=chunk, diagonal=2**63 - 1, first_key=-(2**63))
    assert (out == 0).all()


def test_only_tiles_inside_the_chunks_are_counted():
    q, k, v = (torch.randn(1, 1, 4096, 64) for _ in range(3))
    counted = {n: explain(q, k, v, is_causal=True, attention_chunk=n).forward for n in (0, 512, 1000, 7)}
    block_q, block_k = counted[0].tiles

    def visited(chunk):  # causal: a block of queries sees the keys up to its last query
        blocks = [(i, min(i + block_q, 4096)) for i in range(0, 4096, block_q)]
        return sum((end - 1) // block_k - (chunk and i // chunk * chunk) // block_k + 1 for i, end in blocks)

    assert visited(512) < visited(0) / 6
    for n in (512, 1000, 7):  # FLOPs are linear in the number of tiles
        assert (counted[0].flops - counted[n].flops) * (visited(0) - visited(7)) == pytest.approx(
            (counted[0].flops - counted[7].flops) * (visited(0) - visited(n)), rel=1e-9
        )


def test_no_mask_is_stored():
    q, k, v = make_qkv(1, 1, 4096, 4096, 16)
    used, out = allocated_by(lambda: flash_attn(q, k, v, is_causal=True, attention_chunk=512))
    backward, _ = allocated_by(lambda: out.sum().backward())
    assert max(used, backward) < 4096 * 4096


@pytest.mark.parametrize("documents", [None, (0, 30, 37, 100)], ids=["one", "documents"])
@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize(("chunk", "first_key"), [(7, 0), (7, 3), (64, 0), (1, 0)])
def test_tiles_of_processes(documents, balanced, chunk, first_key):
    """The tiles of context parallelism show each visible pair once, and skip chunks that no query sees."""
    layout = Layout(100, 2, balanced)
    band = Band(20, 0, 0, chunk, first_key)
    geometry = Geometry(layout, layout, band, documents, True)
    whole = torch.zeros(100, 100, dtype=torch.bool)
    for begin, end in [(0, 100)] if documents is None else pairwise(documents):
        n = end - begin
        own = chunk_mask(n, n, chunk, 0, first_key) & reference.visible(n, n, causal="upper_left", window=(20, 0))
        whole[begin:end, begin:end] = own
    for rank in range(2):
        seen = torch.zeros(100, 100, dtype=torch.int64)
        rows = torch.cat([torch.arange(b, e) for b, e, _ in layout.pieces(rank)])
        for tile in all_tiles(geometry, rank):
            own = rows[tile.q_begin : tile.q_end]
            limits = tile.lengths or (0, tile.q_end - tile.q_begin)
            for begin, end in pairwise(limits):
                keys = (begin, end) if tile.lengths else (0, tile.k_end - tile.k_begin)
                shape = (end - begin, keys[1] - keys[0])
                shown = torch.ones(shape, dtype=torch.bool)
                if tile.bounded:
                    distance = torch.arange(shape[1]) - (torch.arange(shape[0])[:, None] + tile.diagonal)
                    shown = (distance >= -20) & (distance <= 0)
                    shown &= chunk_mask(*shape, chunk, tile.diagonal, first_key + tile.col)
                columns = torch.arange(tile.k_begin + keys[0], tile.k_begin + keys[1])
                seen[own[begin:end, None], columns] += shown
        assert torch.equal(seen[rows], whole[rows].long())


def test_chosen_keys():
    q, k, v = make_qkv(1, 4, 70, 90, 8, heads_kv=2)
    indices = torch.rand(1, 1, 70, 90).topk(20)[1]
    chosen = torch.zeros(1, 1, 70, 90, dtype=torch.bool).scatter(-1, indices, True)
    mask = chosen & chunk_mask(70, 90, 17, 20) & reference.visible(70, 90, causal="lower_right")
    ours = flash_attn(q, k, v, enable_gqa=True, key_indices=indices, causal="lower_right", attention_chunk=17)
    theirs = flash_attn(q, k, v, mask, enable_gqa=True)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(*(torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)
