"""The indexer's scores, loss and gradients on the CUDA kernels' host build (tests/cuda_host), against dense PyTorch.

The tier simt is the only one for it.
"""

import ctypes
import math

import indexer_reference as reference
import pytest
import test_indexer
import torch
from cuda_host import library
from helpers import leaves
from test_indexer import DTYPES, assert_close_to, make, make_main

from flash_attn_ext import _ops, indexer_loss, indexer_scores, indexer_topk

pytestmark = pytest.mark.usefixtures("kernels")

test_empty_sizes = test_indexer.test_empty_sizes
test_no_slots = test_indexer.test_no_slots
test_padded_heads_add_nothing_to_infinite_keys = test_indexer.test_padded_heads_add_nothing_to_infinite_keys
test_loss_is_zero_for_an_indexer_that_equals_the_attention = (
    test_indexer.test_loss_is_zero_for_an_indexer_that_equals_the_attention
)


def check_scores(inputs, indices):
    """Scores at `indices` and their gradients."""
    wanted_in = leaves(inputs, torch.float64)
    wanted = reference.at_chosen(reference.scores(*wanted_in), indices)
    scores = indexer_scores(*inputs, indices)
    tolerance = 1e-12 if scores.dtype == torch.float64 else 2e-5
    torch.testing.assert_close(scores.double(), wanted, rtol=tolerance, atol=10 * tolerance)
    grad = torch.randn_like(wanted)
    ours = torch.autograd.grad(scores, inputs, grad.to(scores.dtype))
    theirs = torch.autograd.grad(wanted.masked_fill(indices < 0, 0.0), wanted_in, grad)
    assert_close_to(ours, theirs, inputs[0].dtype)


def leaves_of(*sizes, dtype=torch.float64):
    return [t.requires_grad_() for t in make(*sizes, dtype)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scores_and_their_gradients(dtype):
    inputs = leaves_of(2, 19, 3, 70, 24, dtype=dtype)  # two tiles of heads and of slots
    check_scores(inputs, torch.randint(-1, 70, (2, 1, 3, 80)))  # some keys twice


@pytest.mark.parametrize("sizes", [(1, 1, 2, 3, 1), (1, 2, 2, 5, 300), (1, 16, 1, 64, 128)], ids=str)
def test_heads_and_head_dimensions(sizes):
    check_scores(leaves_of(*sizes), torch.randint(-1, sizes[3], (sizes[0], 1, sizes[2], 64)))


def test_many_slots_and_queries():
    """More slots of a row than threads of a block, and more queries of a key than a block collects at a time."""
    check_scores(leaves_of(1, 2, 2, 330, 4), torch.randint(-1, 330, (1, 1, 2, 600)))
    check_scores(leaves_of(1, 2, 300, 4, 4), torch.randint(-1, 4, (1, 1, 300, 3)))


def check_loss(inputs, main, band, indices=None, key_mask=None):
    """The loss and its gradients."""
    batch, seqlen_q, seqlen_k = len(inputs[0]), inputs[0].shape[2], inputs[1].shape[1]
    seen = reference.visible(seqlen_q, seqlen_k, key_mask=key_mask, batch=batch, **band)
    if indices is not None:
        row = torch.zeros(batch, seqlen_q, seqlen_k + 1, dtype=torch.bool)
        seen = row.scatter_(-1, indices[:, 0].long() % (seqlen_k + 1), value=True)[..., :-1] & seen
    loss = indexer_loss(*inputs, *main, indices=indices, key_mask=key_mask, reduction="none", **band)
    wanted_in = leaves(inputs, torch.float64)
    wanted = reference.loss(*wanted_in, *(t.double() for t in main), seen)
    tolerance = 1e-11 if loss.dtype == torch.float64 else 3e-5
    torch.testing.assert_close(loss.double(), wanted, rtol=tolerance, atol=10 * tolerance)
    grad = torch.randn_like(wanted)
    ours = torch.autograd.grad(loss, inputs, grad.to(loss.dtype))
    assert_close_to(ours, torch.autograd.grad(wanted, wanted_in, grad), inputs[0].dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "band", [{"is_causal": True}, {"window": (20, 3), "causal": "lower_right"}, {"window": (-2, 5), "diagonal": -1}],
    ids=str,
)  # fmt: skip
def test_loss_and_its_gradients(dtype, band):
    inputs = leaves_of(2, 3, 6, 75, 9, dtype=dtype)
    key_mask = torch.rand(2, 75) < 0.8
    main = make_main(2, 4, 2, 6, 75, 16, dtype, **band, key_mask=key_mask)
    check_loss(inputs, main, band, key_mask=key_mask)
    # Chosen without the masks: the loss hides the other keys.
    check_loss(inputs, main, band, indexer_topk(*inputs, 30), key_mask)


@pytest.mark.parametrize("main_sizes", [(40, 2, 8), (3, 3, 140), (34, 1, 5)], ids=str)
def test_heads_of_the_main_attention(main_sizes):
    heads, heads_kv, head_dim = main_sizes
    inputs = leaves_of(1, 18, 2, 66, 4)
    check_loss(inputs, make_main(1, heads, heads_kv, 2, 66, head_dim), {})


def test_parts_of_the_queries():
    """Without chosen keys 128 queries have gradients of their scores at a time."""
    for seqlen_q in (128, 129, 300):
        check_loss(leaves_of(1, 2, seqlen_q, 5, 3), make_main(1, 1, 1, seqlen_q, 5, 4), {})


def test_nothing_has_the_size_of_all_scores(kernels):
    """The workspace of a dense loss grows with the keys alone."""
    seqlen = 65536
    params = library.INDEXER_PARAMS[3](
        batch=1, heads=2, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=8, main_heads=1, main_heads_kv=1, main_head_dim=8
    )
    params.chosen.topk = -1
    assert kernels.c.indexer_loss_backward_workspace(ctypes.byref(params)) == 4 * seqlen * (128 + 8)


def test_numbers_outside_of_the_keys_name_no_key(kernels):
    """The kernels read nothing outside the tensors. On CPU the operators refuse these indices before a kernel runs."""
    q, k, weights = make(1, 2, 5, 70, 8)
    main = make_main(1, 2, 1, 5, 70, 8)
    outside = torch.tensor([70, -2, 2**31, -(2**31), 2**32, 2**63 - 1, -(2**63)]).expand(1, 1, 5, 7)
    inside = torch.randint(-1, 70, (1, 1, 5, 40)).sort(-1).values
    options = {"scale": 0.5, "main_scale": 0.4, "causal": True, "lower_right": True}

    def run(indices):
        grad = torch.ones(indices.shape, dtype=torch.float64)
        results = [kernels.operator("indexer_scores", q, k, weights, indices, scale=0.5)]
        results += kernels.operator("indexer_scores_backward", grad, q, k, weights, indices, scale=0.5)
        of_loss = kernels.operator("indexer_loss", q, k, weights, *main, indices, None, **options)
        return results, of_loss

    (scores, *grads), of_loss = run(inside)
    (more_scores, *more_grads), of_more = run(torch.cat([inside, outside], -1))
    assert torch.equal(more_scores[..., :40], scores)
    assert (more_scores[..., 40:] == -math.inf).all()
    assert all(map(torch.equal, grads, more_grads))
    assert all(map(torch.equal, of_loss, of_more))


def test_nan_in_hidden_rows_reaches_nothing():
    band = {"is_causal": True}
    q, k, weights = make(1, 3, 6, 70, 5)
    query, key, lse = make_main(1, 4, 2, 6, 70, 6, **band)
    key_mask = torch.ones(1, 70, dtype=torch.bool)
    key_mask[0, 3] = False
    hidden = [t.clone() for t in (k, key)]
    for t in hidden:
        t[..., 3, :] = torch.nan
        t[..., 6:, :] = torch.nan
    for indices in (None, indexer_topk(q, k, weights, 4, key_mask=key_mask, **band)):
        results = []
        for k_, key_ in ((k, key), hidden):
            inputs = [t.detach().requires_grad_() for t in (q, k_, weights)]
            loss = indexer_loss(*inputs, query, key_, lse, indices=indices, key_mask=key_mask, **band)
            results.append([loss, *torch.autograd.grad(loss, inputs)])
        assert all(map(torch.equal, *results))


def test_a_nan_query_reaches_only_its_row_and_the_keys_that_it_sees():
    q, k, weights = make(1, 3, 8, 10, 5)
    main = make_main(1, 4, 2, 8, 10, 6, is_causal=True)
    q[0, 1, 5] = torch.nan
    inputs = [t.requires_grad_() for t in (q, k, weights)]
    loss = indexer_loss(*inputs, *main, is_causal=True, reduction="none")
    assert loss.isnan().nonzero().tolist() == [[0, 5]]
    dq, dk, dweights = torch.autograd.grad(loss.sum(), inputs, retain_graph=True)
    assert not dk[0, 6:].isnan().any()
    assert dq.isnan().any(-1).any(1).nonzero().tolist() == [[0, 5]]
    assert dweights.isnan().any(-1).nonzero().tolist() == [[0, 5]]
    # A row without a gradient changes no result.
    grads = torch.autograd.grad(loss[:, :5].sum(), inputs)
    assert not any(t.isnan().any() for t in grads)


def test_same_bits_in_any_order_of_threads_and_batches(kernels):
    tensors, main = make(2, 18, 5, 70, 8, torch.float32), make_main(2, 4, 2, 5, 70, 8, torch.float32)
    indices = torch.randint(-1, 70, (2, 1, 5, 66))
    unique = indexer_topk(*tensors, 40)

    def run(n=slice(None)):
        inputs = [t[n].detach().requires_grad_() for t in tensors]
        rows = [t[n] for t in main]
        results = [indexer_scores(*inputs, indices[n]).clamp(min=-9)]
        results += [indexer_loss(*inputs, *rows, indices=i, reduction="none") for i in (None, unique[n])]
        return [*results, *(g for x in results for g in torch.autograd.grad(x.sin().sum(), inputs))]

    first = run()
    kernels.seed_order(7)
    assert all(map(torch.equal, run(), first))
    assert all(torch.equal(a, b[1:]) for a, b in zip(run(slice(1, 2)), first, strict=True))


def test_the_selector_says_why_no_faster_tier_runs(kernels):
    with kernels.on_gpu(9, 0):
        for params in library.INDEXER_PARAMS:
            assert kernels.choice(params()) == ("simt", ["sm90: no indexer", "sm80: no indexer"])
            pages = params(block_table=1)
            assert kernels.choice(pages)[0] == "simt: the indexer's scores and loss do not read pages"


def test_the_kernels_are_the_operators_of_cuda():
    for name in ("indexer_scores", "indexer_scores_backward", "indexer_loss", "indexer_loss_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"flash_attn_ext::{name}", "CUDA")
        assert hasattr(_ops, name)
