"""The indexer's functions in the rest of torch: opcheck, compile, autocast, gradcheck; errors by name; memory."""

import indexer_reference as reference
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from flash_attn_ext import _ops, flash_attn, indexer_loss, indexer_scores, indexer_topk

Q, K, WEIGHTS = torch.randn(2, 3, 5, 4), torch.randn(2, 9, 4), torch.randn(2, 5, 3)
QUERY, KEY = torch.randn(2, 4, 5, 6), torch.randn(2, 2, 9, 6)
LSE = flash_attn(QUERY, KEY, KEY, enable_gqa=True, return_lse=True)[1]
INDICES = indexer_topk(Q, K, WEIGHTS, 4)
LENGTHS = torch.tensor([3, 9])
PAGES = torch.randn(6, 3, 4)
TABLE = torch.tensor([[0, 1, 2], [5, 4, 3]])


def inputs(dtype=torch.float32):
    return [t.to(dtype, copy=True).requires_grad_() for t in (Q, K, WEIGHTS)]


def test_opcheck():
    band = {"causal": True, "window_left": 3, "diagonal": 1}
    key_mask = torch.rand(2, 9) < 0.8
    for k, mask, lengths, table in ((K, key_mask, None, None), (K, None, LENGTHS, None), (PAGES, None, LENGTHS, TABLE)):
        arguments = (Q, k, WEIGHTS, mask, lengths, table, 4)
        torch.library.opcheck(_ops.indexer_topk, arguments, {"scale": 0.5, "return_scores": True, **band})
    torch.library.opcheck(_ops.indexer_scores, (*inputs(), INDICES), {"scale": 0.5})
    grad = torch.randn(2, 1, 5, 4)
    torch.library.opcheck(_ops.indexer_scores_backward, (grad, Q, K, WEIGHTS, INDICES), {"scale": 0.5})
    options = {"scale": 0.5, "main_scale": 0.4, **band}
    for indices in (None, INDICES):
        arguments = (*inputs(), QUERY, KEY, LSE, indices, key_mask)
        torch.library.opcheck(_ops.indexer_loss, arguments, options)
        results = [t.detach() for t in _ops.indexer_loss(*arguments, **options)]
        arguments = [t.detach() if t is not None else None for t in arguments]
        torch.library.opcheck(_ops.indexer_loss_backward, (*results, *arguments), options)


def test_compiled_without_graph_breaks():
    def step(q, k, weights, query, key):
        indices = indexer_topk(q, k, weights, 4, is_causal=True)
        _, lse = flash_attn(query, key, key, is_causal=True, enable_gqa=True, return_lse=True)
        loss = indexer_loss(q, k, weights, query, key, lse, indices=indices, is_causal=True)
        return loss, indexer_scores(q, k, weights, indices).exp().sum()

    results = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        own = inputs()
        losses = function(*own, QUERY, KEY)
        results.append([*losses, *torch.autograd.grad(sum(losses), own)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_autocast_casts_rows_only():
    with torch.autocast("cpu", torch.bfloat16):
        indices, scores = indexer_topk(Q, K, WEIGHTS, 4, return_scores=True)
        at = indexer_scores(Q, K, WEIGHTS, indices)
        loss = indexer_loss(Q, K, WEIGHTS, QUERY, KEY, LSE)
    q, k = Q.bfloat16(), K.bfloat16()
    assert torch.equal(indices, indexer_topk(q, k, WEIGHTS, 4))
    assert torch.equal(at, indexer_scores(q, k, WEIGHTS, indices))
    torch.testing.assert_close(scores, at)
    assert torch.equal(loss, indexer_loss(q, k, WEIGHTS, QUERY.bfloat16(), KEY.bfloat16(), LSE))


def test_gradcheck():
    own = inputs(torch.float64)
    assert torch.autograd.gradcheck(lambda *t: indexer_scores(*t, INDICES), own)
    main = QUERY.double(), KEY.double(), LSE.double()
    for indices in (None, INDICES):
        assert torch.autograd.gradcheck(
            lambda *t, i=indices: indexer_loss(*t, *main, indices=i, causal="lower_right", reduction="none"), own
        )


def test_flops():
    own = inputs()
    with FlopCounterMode(display=False) as counter:
        indices = indexer_topk(*own, 4)
        loss = indexer_loss(*own, QUERY, KEY, LSE) + indexer_scores(*own, indices).sum()
    forward = counter.get_total_flops()
    assert forward == 2 * 2 * 5 * (9 * 12 + 9 * (12 + 4 * 6) + 4 * 12)
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    assert counter.get_total_flops() == 2 * 2 * 5 * (9 * (3 * 12 + 4 * 6) + 4 * 3 * 12)


def test_only_the_indexer_has_gradients():
    own = inputs()
    main = [t.clone().requires_grad_() for t in (QUERY, KEY, LSE)]
    indexer_loss(*own, *main).backward()
    assert all(t.grad is None for t in main)
    assert all(t.grad is not None for t in own)
    indices, scores = indexer_topk(*own, 4, return_scores=True)
    assert not indices.requires_grad
    assert not scores.requires_grad


def test_a_second_derivative_raises():
    own = inputs()
    for name, value in (
        ("indexer_scores", indexer_scores(*own, INDICES).sum()),
        ("indexer_loss", indexer_loss(*own, QUERY, KEY, LSE)),
    ):
        (grad, *_) = torch.autograd.grad(value, own, create_graph=True)
        with pytest.raises(NotImplementedError, match=f"{name}: got a second derivative"):
            grad.sum().backward()


def topk(q=Q, k=K, weights=WEIGHTS, count=4, **options):
    return lambda: indexer_topk(q, k, weights, count, **options)


def loss(query=QUERY, key=KEY, lse=LSE, **options):
    return lambda: indexer_loss(Q, K, WEIGHTS, query, key, lse, **options)


ERRORS = [
    (topk(q=3), TypeError, "q: got int; allowed: a torch.Tensor"),
    (topk(q=Q.to_sparse()), TypeError, "q: got a torch.sparse_coo tensor"),
    (topk(q=Q.int()), TypeError, "q: got dtype int32; allowed: float32"),
    (topk(q=Q[0]), ValueError, r"q: got shape \[3, 5, 4\]; allowed: \(batch, index heads"),
    (topk(q=Q[:, :0], weights=WEIGHTS[..., :0]), ValueError, "q: got shape .* at least one index head"),
    (topk(k=K.double()), TypeError, "k: got dtype float64; allowed: q's, float32"),
    (topk(k=K[:1]), ValueError, r"k: got shape \[1, 9, 4\], with size 1 in dimension 0; allowed there: 2"),
    (topk(k=K[..., :3]), ValueError, "k: .* in dimension 2; allowed there: 4"),
    (topk(weights=WEIGHTS.double()), TypeError, "weights: got dtype float64"),
    (topk(weights=WEIGHTS.mT), ValueError, "weights: .* in dimension 1; allowed there: 5"),
    (topk(count=-1), ValueError, "topk: got -1; allowed: 0 to"),
    (topk(count=2.5), TypeError, "topk: got 2.5; allowed: an int"),
    (topk(count=2**40), ValueError, "topk: got 1099511627776"),
    (topk(scale="1"), TypeError, "scale: got '1'; allowed: a number"),
    (topk(causal="left"), ValueError, "causal: got 'left'; allowed"),
    (topk(window=(1, 2, 3)), ValueError, "window: got"),
    (topk(diagonal=0.5), TypeError, "diagonal: got 0.5"),
    (topk(return_scores=1), TypeError, "return_scores: got 1"),
    (topk(key_mask=torch.ones(2, 9)), TypeError, "key_mask: got dtype float32; allowed: bool"),
    (topk(key_mask=torch.ones(2, 8).bool()), ValueError, "key_mask: .* in dimension 1; allowed there: 9"),
    (topk(cache_seqlens=LENGTHS + 1), ValueError, "cache_seqlens: got 10 at 1; allowed: 0 to 9"),
    (topk(cache_seqlens=LENGTHS.float()), TypeError, "cache_seqlens: got dtype float32"),
    (topk(cache_seqlens=LENGTHS[:1]), ValueError, "cache_seqlens: .*allowed there: 2"),
    (topk(block_table=TABLE), ValueError, "cache_seqlens: got None with block_table"),
    (topk(k=PAGES, block_table=TABLE + 1, cache_seqlens=LENGTHS), ValueError, "block_table: got 6 at 1; allowed: 0"),
    (topk(k=PAGES, block_table=TABLE[:1], cache_seqlens=LENGTHS), ValueError, "block_table: .*allowed there: 2"),
    (lambda: indexer_scores(Q, K, WEIGHTS, INDICES + 9), ValueError, "indices: got .*; allowed: -1 to 8"),
    (lambda: indexer_scores(Q, K, WEIGHTS, INDICES - 5), ValueError, "indices: got -.*; allowed: -1 to 8"),
    (lambda: indexer_scores(Q, K, WEIGHTS, INDICES[:, 0]), ValueError, "indices: got shape .*; allowed: "),
    (lambda: indexer_scores(Q, K, WEIGHTS, INDICES.float()), TypeError, "indices: got dtype float32"),
    (loss(query=QUERY.double()), TypeError, "query: got dtype float64"),
    (loss(query=QUERY[:, :3], lse=LSE[:, :3]), ValueError, "key: got 2 heads for 3 heads of query; allowed: a divisor"),
    (loss(key=KEY[..., :5]), ValueError, "key: .*in dimension 3; allowed there: 6"),
    (loss(lse=LSE.double()), TypeError, "lse: got dtype float64"),
    (loss(lse=LSE[:, :2]), ValueError, "lse: .*in dimension 1; allowed there: 4"),
    (loss(reduction="max"), ValueError, "reduction: got 'max'; allowed: 'mean', 'sum', 'none'"),
    (loss(indices=INDICES + 9), ValueError, "indices: got .*; allowed: -1 to 8"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "message"), ERRORS, ids=[message[:30] for *_, message in ERRORS])
def test_errors_name_the_argument(call, kind, message):
    with pytest.raises(kind, match=message):
        call()


def test_results_are_on_the_device_of_q():
    with FakeTensorMode():
        shapes = (1, 2, 3, 8), (1, 5, 8), (1, 3, 2), (1, 1, 5, 8), (1, 2, 3)
        q, k, weights, key, lse = (torch.empty(shape, device="cuda") for shape in shapes)
        chosen = indexer_topk(q, k, weights, 2)
        assert (chosen.device.type, chosen.dtype, chosen.shape) == ("cuda", torch.int32, (1, 1, 3, 2))
        scores, loss = indexer_scores(q, k, weights, chosen), indexer_loss(q, k, weights, q, key, lse)
        # Not by autograd: a CPU build of torch ends the process at the first derivative of a CUDA tensor.
        grads = _ops.indexer_scores_backward(scores, q, k, weights, chosen, scale=1.0)
        assert all(t.device.type == "cuda" for t in (scores, loss, *grads))
        for call in (
            lambda: indexer_topk(q, torch.empty(1, 5, 8), weights, 2),
            lambda: indexer_scores(q, torch.empty(1, 5, 8), weights, chosen),
        ):
            with pytest.raises(TypeError, match="k: got device cpu; allowed: q's device"):
                call()
        elsewhere = torch.empty(1, 2, 3, 8, device="xpu")
        with pytest.raises(NotImplementedError, match=r"q: got a tensor on xpu(:0)?; allowed: cpu, cuda"):
            indexer_topk(elsewhere, k, weights, 2)


def test_memory_that_was_freed_raises():
    q = Q.clone()
    q.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="q: got a tensor whose storage has 0 bytes"):
        indexer_topk(q, K, WEIGHTS, 4)


def test_numbers_of_any_size_do_not_crash():
    for diagonal in (2**62, -(2**62), 2**63 - 1, -(2**63)):
        for window in (None, (2**62, 2**62), (-(2**62), 2**40)):
            indices = indexer_topk(Q, K, WEIGHTS, 4, is_causal=True, window=window, diagonal=diagonal)
            assert ((indices >= -1) & (indices < 9)).all()


def test_no_array_of_queries_times_keys(monkeypatch):
    """The largest tensor of a step, as torch's profiler counts it, is far below S x S."""
    seqlen, topk_, heads = 2048, 32, 2
    q, k, weights = torch.randn(1, heads, seqlen, 8), torch.randn(1, seqlen, 8), torch.randn(1, seqlen, heads)
    query = torch.randn(1, 2, seqlen, 8)
    _, lse = flash_attn(query, query, query, is_causal=True, return_lse=True)
    own = [t.requires_grad_() for t in (q, k, weights)]
    with torch.profiler.profile(profile_memory=True) as profile:
        indices = indexer_topk(*own, topk_, is_causal=True)
        indexer_scores(*own, indices).masked_fill(indices < 0, 0.0).sum().backward()
        indexer_loss(*own, query, query, lse, is_causal=True).backward()
    most = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < most < seqlen * seqlen * 4 / 8


def test_fuzz():
    generator = torch.Generator().manual_seed(7)

    def number(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    for _ in range(60):
        batch, heads, seqlen_q, seqlen_k, head_dim = (number(1, n) for n in (3, 40, 40, 300, 20))
        q, k, weights = (
            torch.randint(-2, 3, shape, generator=generator).double()
            for shape in ((batch, heads, seqlen_q, head_dim), (batch, seqlen_k, head_dim), (batch, seqlen_q, heads))
        )
        band = {"causal": (None, "upper_left", "lower_right")[number(0, 3)], "diagonal": number(-9, 9)}
        if number(0, 2):
            band["window"] = (number(0, 90), number(0, 90))
        key_mask = torch.rand(batch, seqlen_k, generator=generator) < 0.7 if number(0, 2) else None
        dense = reference.scores(q, k, weights, 1.0)
        seen = reference.visible(seqlen_q, seqlen_k, key_mask=key_mask, batch=batch, **band)
        count = number(1, seqlen_k + 4)
        indices = indexer_topk(q, k, weights, count, scale=1.0, key_mask=key_mask, **band)
        assert torch.equal(indices, reference.topk(dense, seen, count))
