"""The indexer against dense PyTorch in float64: the choice, the scores at chosen keys, and the loss."""

import indexer_reference as reference
import pytest
import torch
from helpers import leaves

from flash_attn_ext import flash_attn, indexer_loss, indexer_scores, indexer_topk

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
BANDS = (
    {},
    {"is_causal": True},
    {"causal": "lower_right"},
    {"window": (20, 3)},
    {"is_causal": True, "window": (9, 0), "diagonal": 2},
    {"window": (-2, 5), "diagonal": -4},
)
# Sizes around the tiles: 8 or 16 queries, 64 keys, the lanes of heads.
SIZES = (
    (1, 1, 1, 1, 1),
    (2, 3, 7, 5, 4),
    (1, 4, 17, 65, 16),
    (2, 16, 9, 130, 33),
    (1, 33, 33, 64, 8),
    (1, 8, 3, 200, 7),
)
MAIN_SIZES = ((1, 1, 1), (4, 2, 5), (2, 2, 16), (20, 1, 40), (3, 3, 8), (34, 2, 24))  # heads, key heads, columns


def make(batch, heads, seqlen_q, seqlen_k, head_dim, dtype=torch.float64, *, whole=False):
    """q, k, weights. `whole`: small whole numbers. Their scores are exact and have many ties."""
    shapes = (batch, heads, seqlen_q, head_dim), (batch, seqlen_k, head_dim), (batch, seqlen_q, heads)
    if whole:
        return [torch.randint(-2, 3, shape).to(dtype) for shape in shapes]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def make_main(batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, dtype=torch.float64, **options):
    query = torch.randn(batch, heads, seqlen_q, head_dim, dtype=dtype)
    key = torch.randn(batch, heads_kv, seqlen_k, head_dim, dtype=dtype)
    _, lse = flash_attn(query, key, key, enable_gqa=True, return_lse=True, **options)
    return query, key, lse


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_topk_is_the_stable_topk_of_the_dense_scores(dtype, band):
    for size in SIZES:
        q, k, weights = make(*size, dtype, whole=True)
        dense = reference.scores(q.double(), k.double(), weights.double(), 0.5)
        key_mask = torch.rand(size[0], size[3]) < 0.8
        for mask in (None, key_mask):
            seen = reference.visible(size[2], size[3], key_mask=mask, batch=size[0], **band)
            for count in (1, 5, 64, size[3] + 2):
                indices, scores = indexer_topk(
                    q, k, weights, count, scale=0.5, key_mask=mask, return_scores=True, **band
                )
                assert torch.equal(indices, reference.topk(dense, seen, count))
                assert torch.equal(scores.double(), reference.at_chosen(dense, indices))
                assert torch.equal(indexer_topk(q, k, weights, count, scale=0.5, key_mask=mask, **band), indices)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_keys_are_chosen_piece_by_piece(isa, dtype):
    """More candidates than the buffer holds, and keys split over tasks: one query of many keys."""
    for batch, heads, seqlen_q, seqlen_k, count in ((1, 4, 2, 7000, 100), (2, 16, 1, 5000, 33), (1, 2, 300, 700, 64)):
        q, k, weights = make(batch, heads, seqlen_q, seqlen_k, 8, dtype, whole=True)
        dense = reference.scores(q.double(), k.double(), weights.double(), 1.0)
        seen = reference.visible(seqlen_q, seqlen_k, causal="lower_right", batch=batch)
        wanted = torch.where(seen, dense, -torch.inf)
        wanted = wanted.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(-1).values
        indices = indexer_topk(q, k, weights, count, scale=1.0, causal="lower_right")
        assert torch.equal(indices[:, 0].long(), wanted)


def test_topk_of_random_scores_equals_torch_topk():
    q, k, weights = make(2, 32, 40, 500, 64, torch.float32)
    dense = reference.scores(q.double(), k.double(), weights.double())
    wanted = dense.topk(32, -1).indices.sort(-1).values
    assert torch.equal(indexer_topk(q.double(), k.double(), weights.double(), 32)[:, 0].long(), wanted)
    chosen = dense.gather(-1, indexer_topk(q, k, weights, 32)[:, 0].long()).min(-1).values
    assert (chosen >= dense.topk(32, -1).values[..., -1] - 1e-4).all()  # float32 may exchange near ties


def test_nan_and_infinite_scores():
    q, k, weights = make(1, 3, 4, 90, 4, whole=True)
    k[0, 70] = torch.nan
    weights[0, 1] = -torch.inf
    q[0, :, 2, 0] = torch.inf
    dense = reference.scores(q, k, weights)
    for count in (1, 3, 88):
        seen = reference.visible(4, 90)
        assert torch.equal(indexer_topk(q, k, weights, count), reference.topk(dense, seen, count))
    # A NaN in a hidden key changes nothing.
    clean = k.nan_to_num(5.0)
    mask = torch.ones(1, 90, dtype=torch.bool)
    mask[0, 70] = False
    assert torch.equal(indexer_topk(q, k, weights, 5, key_mask=mask), indexer_topk(q, clean, weights, 5, key_mask=mask))
    assert torch.equal(
        indexer_topk(q, k, weights, 5, window=(60, -21)), indexer_topk(q, clean, weights, 5, window=(60, -21))
    )


def test_padded_heads_add_nothing_to_infinite_keys():
    q, k, weights = torch.ones(1, 3, 1, 4), torch.zeros(1, 5, 4), torch.ones(1, 1, 3)
    k[0, 2, 1] = torch.inf
    _, scores = indexer_topk(q, k, weights, 2, return_scores=True)
    assert scores.flatten().tolist() == [0.0, torch.inf]
    assert indexer_scores(q, k, weights, torch.full((1, 1, 1, 1), 2)).item() == torch.inf


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_caches_and_pages(dtype):
    lengths = torch.tensor([130, 1, 0, 77])
    q, k, weights = make(4, 5, 3, 160, 8, dtype, whole=True)
    for page in (1, 16, 80, 160):
        blocks = 160 // page
        table = torch.randperm(4 * blocks).view(4, blocks)
        pages = torch.empty(4 * blocks, page, 8, dtype=dtype)
        pages[table.flatten()] = k.view(4 * blocks, page, 8)
        for band in ({}, {"causal": "lower_right"}, {"is_causal": True}, {"causal": "lower_right", "window": 40}):
            of_cache = indexer_topk(q, k, weights, 9, cache_seqlens=lengths, **band)
            of_pages = indexer_topk(q, pages, weights, 9, cache_seqlens=lengths.int(), block_table=table.int(), **band)
            assert torch.equal(of_cache, of_pages)
            for b, length in enumerate(lengths.tolist()):
                one = indexer_topk(q[b : b + 1], k[b : b + 1, :length], weights[b : b + 1], 9, **band)
                assert torch.equal(of_cache[b : b + 1], one)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_at_chosen_keys_and_their_gradients(isa, dtype):
    for size in SIZES:
        inputs = [t.requires_grad_() for t in make(*size, dtype)]
        indices = torch.randint(-1, size[3], (size[0], 1, size[2], 70))
        wanted_in = leaves(inputs, torch.float64)
        wanted = reference.at_chosen(reference.scores(*wanted_in), indices)
        scores = indexer_scores(*inputs, indices)
        tolerance = 1e-12 if dtype == torch.float64 else 2e-5
        torch.testing.assert_close(scores.double(), wanted, rtol=tolerance, atol=10 * tolerance)
        grad = torch.randn_like(wanted)
        ours = torch.autograd.grad(scores, inputs, grad.to(scores.dtype))
        theirs = torch.autograd.grad(wanted.masked_fill(indices < 0, 0.0), wanted_in, grad)
        assert_close_to(ours, theirs, dtype)


def assert_close_to(ours, theirs, dtype):
    tolerance = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype
        most = other.abs().max().item() if other.numel() else 0.0
        torch.testing.assert_close(mine.double(), other, rtol=tolerance, atol=tolerance * max(most, 1e-30))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("band", BANDS[:4], ids=str)
def test_loss_and_gradients(isa, dtype, band):
    for size, (heads, heads_kv, head_dim) in zip(SIZES, MAIN_SIZES, strict=True):
        batch, _, seqlen_q, seqlen_k, _ = size
        inputs = [t.requires_grad_() for t in make(*size, dtype)]
        key_mask = torch.rand(batch, seqlen_k) < 0.8
        query, key, lse = make_main(
            batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, dtype, **band, key_mask=key_mask
        )
        seen = reference.visible(seqlen_q, seqlen_k, key_mask=key_mask, batch=batch, **band)
        for count in (None, 13, seqlen_k + 3):
            indices, row = None, seen
            if count is not None:
                indices = indexer_topk(*inputs, count, key_mask=key_mask, **band)
                row = torch.zeros(batch, seqlen_q, seqlen_k + 1, dtype=torch.bool)
                row = row.scatter_(-1, indices[:, 0].long() % (seqlen_k + 1), value=True)[..., :-1] & seen
            loss = indexer_loss(*inputs, query, key, lse, indices=indices, key_mask=key_mask, reduction="none", **band)
            wanted_in = leaves(inputs, torch.float64)
            wanted = reference.loss(*wanted_in, query.double(), key.double(), lse.double(), row)
            tolerance = 1e-11 if dtype == torch.float64 else 3e-5
            torch.testing.assert_close(loss.double(), wanted, rtol=tolerance, atol=10 * tolerance)
            grad = torch.randn_like(wanted)
            ours = torch.autograd.grad(loss, inputs, grad.to(loss.dtype))
            theirs = torch.autograd.grad(wanted, wanted_in, grad)
            assert_close_to(ours, theirs, dtype)


def test_loss_is_zero_for_an_indexer_that_equals_the_attention():
    """One head with positive scores: the indexer's softmax is the attention."""
    q, k = torch.rand(1, 1, 20, 8, dtype=torch.float64), torch.rand(1, 20, 8, dtype=torch.float64)
    _, lse = flash_attn(q, k[:, None], k[:, None], is_causal=True, return_lse=True)
    weights = torch.ones(1, 20, 1, dtype=torch.float64)
    assert indexer_loss(q, k, weights, q, k[:, None], lse, is_causal=True).abs() < 1e-14
    assert indexer_loss(q, k, 2 * weights, q, k[:, None], lse, is_causal=True) > 1e-3


def test_reductions():
    q, k, weights = make(2, 3, 10, 12, 4)
    query, key, lse = make_main(2, 4, 2, 10, 12, 8)
    rows = indexer_loss(q, k, weights, query, key, lse, reduction="none")
    assert torch.equal(indexer_loss(q, k, weights, query, key, lse, reduction="sum"), rows.sum())
    assert torch.equal(indexer_loss(q, k, weights, query, key, lse), rows.mean())


def test_nan_in_hidden_rows_reaches_nothing():
    band = {"is_causal": True}
    q, k, weights = make(1, 3, 40, 80, 5)
    query, key, lse = make_main(1, 4, 2, 40, 80, 6, **band)
    key_mask = torch.ones(1, 80, dtype=torch.bool)
    key_mask[0, 3] = False
    hidden = [t.clone() for t in (k, key)]
    for t in hidden:
        t[..., 3, :] = torch.nan
        t[..., 45:, :] = torch.nan
    for indices in (None, indexer_topk(q, k, weights, 7, key_mask=key_mask, **band)):
        results = []
        for k_, key_ in ((k, key), hidden):
            inputs = [t.detach().requires_grad_() for t in (q, k_, weights)]
            loss = indexer_loss(*inputs, query, key_, lse, indices=indices, key_mask=key_mask, **band)
            results.append([loss, *torch.autograd.grad(loss, inputs)])
        assert all(map(torch.equal, *results))


def test_a_nan_query_reaches_only_its_row_and_the_keys_that_it_sees():
    q, k, weights = make(1, 3, 40, 80, 5)
    query, key, lse = make_main(1, 4, 2, 40, 80, 6, is_causal=True)
    q[0, 1, 30] = torch.nan
    inputs = [t.requires_grad_() for t in (q, k, weights)]
    loss = indexer_loss(*inputs, query, key, lse, is_causal=True, reduction="none")
    assert loss.isnan().nonzero().tolist() == [[0, 30]]
    dq, dk, dweights = torch.autograd.grad(loss.sum(), inputs)
    assert not dk[0, 31:].isnan().any()
    assert dq.isnan().any(-1).any(1).nonzero().tolist() == [[0, 30]]
    assert dweights.isnan().any(-1).nonzero().tolist() == [[0, 30]]


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4, 5), (1, 2, 0, 4, 5), (1, 2, 3, 0, 5)], ids=str)
def test_empty_sizes(sizes):
    inputs = [t.requires_grad_() for t in make(*sizes)]
    indices, scores = indexer_topk(*inputs, 6, return_scores=True)
    assert indices.shape == scores.shape == (sizes[0], 1, sizes[2], 6)
    assert (indices == -1).all()
    assert (scores == -torch.inf).all()
    query, key, lse = make_main(sizes[0], 2, 1, sizes[2], sizes[3], 4)
    for chosen in (None, indices):
        loss = indexer_loss(*inputs, query, key, lse, indices=chosen, reduction="none")
        assert torch.equal(loss, torch.zeros(sizes[0], sizes[2], dtype=torch.float64))
        assert all((g == 0).all() for g in torch.autograd.grad(loss.sum(), inputs))
    at = indexer_scores(*inputs, indices)
    assert (at == -torch.inf).all()
    assert all((g == 0).all() for g in torch.autograd.grad(at.sum(), inputs))
    assert indexer_topk(*inputs, 0).shape == (sizes[0], 1, sizes[2], 0)


def test_no_slots():
    """With chosen keys but zero slots a query has no keys, not all keys."""
    inputs = [t.requires_grad_() for t in make(1, 2, 3, 4, 5)]
    indices = torch.empty(1, 1, 3, 0, dtype=torch.int32)
    loss = indexer_loss(*inputs, *make_main(1, 2, 1, 3, 4, 4), indices=indices, reduction="none")
    scores = indexer_scores(*inputs, indices)
    assert torch.equal(loss, torch.zeros(1, 3, dtype=torch.float64))
    assert all((g == 0).all() for g in torch.autograd.grad(loss.sum() + scores.sum(), inputs))


def test_results_do_not_depend_on_threads_or_the_batch():
    q, k, weights = make(3, 5, 200, 300, 24, torch.float32)
    query, key, lse = make_main(3, 4, 2, 200, 300, 16, torch.float32, is_causal=True)

    def all_results(n=slice(None)):
        inputs = [t[n].detach().requires_grad_() for t in (q, k, weights)]
        indices, scores = indexer_topk(*inputs, 40, is_causal=True, return_scores=True)
        at = indexer_scores(*inputs, indices)
        loss = indexer_loss(*inputs, query[n], key[n], lse[n], is_causal=True, reduction="none")
        grads = torch.autograd.grad((at.masked_fill(indices < 0, 0).sum(), loss.sum()), inputs)
        return indices, scores, at, loss, *grads

    threads = torch.get_num_threads()
    first = all_results()
    try:
        torch.set_num_threads(3)
        assert all(map(torch.equal, all_results(), first))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b[1:2]) for a, b in zip(all_results(slice(1, 2)), first, strict=True))


def test_strided_tensors_and_dtypes_of_weights():
    q, k, weights = make(2, 3, 12, 20, 6, torch.bfloat16)
    wanted = indexer_topk(q, k, weights, 4, return_scores=True)
    odd = torch.empty(2, 12, 3, 7, dtype=q.dtype)[..., 1:].transpose(1, 2).copy_(q)
    columns = torch.empty(2, 6, 20, dtype=q.dtype).mT.copy_(k)
    for result in (
        indexer_topk(odd, columns, weights.float(), 4, return_scores=True),
        indexer_topk(q.expand(2, -1, -1, -1), k, weights.mT.contiguous().mT, 4, return_scores=True),
    ):
        assert all(map(torch.equal, result, wanted))
    assert torch.equal(
        indexer_scores(odd, columns, weights.float(), wanted[0]), indexer_scores(q, k, weights, wanted[0].long())
    )
    weights = weights.float().requires_grad_()
    indexer_scores(q, k, weights, wanted[0]).sum().backward()
    assert weights.grad.dtype == torch.float32
