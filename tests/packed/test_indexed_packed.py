"""Packed sequences and caches by index, against dense calls of one sequence."""

import math

import pytest
import torch

from flash_attn_ext import explain_varlen, flash_attn, flash_attn_varlen, flash_attn_with_kvcache

LENGTHS_Q, LENGTHS_K = [5, 0, 17, 1], [30, 9, 70, 4]


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def make(dtype=torch.float64):
    g = torch.Generator().manual_seed(0)
    sizes = ((sum(LENGTHS_Q), 4, 24), (sum(LENGTHS_K), 2, 24), (sum(LENGTHS_K), 2, 16))
    return [torch.randn(size, generator=g, dtype=torch.float64).to(dtype) for size in sizes]


def make_indices(heads, n=12, block=1):
    g = torch.Generator().manual_seed(1)
    rows = []
    for length_q, length_k in zip(LENGTHS_Q, LENGTHS_K, strict=True):
        rows.append(torch.randint(-1, -(-length_k // block), (heads, length_q, n), generator=g))
    return torch.cat(rows, 1)


def one_by_one(q, k, v, numbers, **options):
    """Each sequence by a dense call."""
    outs, lses = [], []
    starts_q, starts_k = offsets(LENGTHS_Q).tolist(), offsets(LENGTHS_K).tolist()
    (name,) = [n for n in numbers if n.endswith("indices")]
    for b in range(len(LENGTHS_Q)):
        rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        tensors = [t[part].transpose(0, 1)[None] for t, part in ((q, rows), (k, keys), (v, keys))]
        own = numbers | {name: numbers[name][None, :, rows]}
        out, lse = flash_attn(*tensors, enable_gqa=True, return_lse=True, **own, **options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


CASES = {
    "plain": {},
    "causal": {"causal": "lower_right"},
    "upper left": {"is_causal": True},
    "window": {"window": (9, 3), "softcap": 2.0},
    "chunks": {"causal": "lower_right", "attention_chunk": 8},
    "diagonal": {"causal": "lower_right", "diagonal": -2, "scale": 0.3},
    "sink": {"sink": torch.tensor([0.5, -1.0, 2.0, -math.inf], dtype=torch.float64)},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("block", [0, 7])
def test_packed_matches_each_sequence(case, heads, block):
    results = []
    indices = make_indices(heads, 4 if block else 12, max(block, 1))
    numbers = {"key_block_indices": indices, "key_block_size": block} if block else {"key_indices": indices}
    for packed in (True, False):
        leaves = [t.requires_grad_() for t in make()]
        if packed:
            cu = (offsets(LENGTHS_Q), offsets(LENGTHS_K))
            out, lse = flash_attn_varlen(*leaves, *cu, enable_gqa=True, return_lse=True, **numbers, **CASES[case])
        else:
            out, lse = one_by_one(*leaves, numbers, **CASES[case])
        loss = out.square().sum() + lse.masked_fill(lse == -math.inf, 0).sum()
        results.append([out, lse, *torch.autograd.grad(loss, leaves)])
    for ours, expected in zip(*results, strict=True):
        assert torch.allclose(ours, expected, atol=1e-12)


def test_rows_in_use():
    q, k, v = make()
    indices = make_indices(1).clamp(max=3)
    used_q, used_k = torch.tensor([3, 0, 17, 1]), torch.tensor([20, 9, 4, 4])
    cu = (offsets(LENGTHS_Q), offsets(LENGTHS_K))
    given = {"enable_gqa": True, "return_lse": True, "causal": "lower_right"}
    out, lse = flash_attn_varlen(q, k, v, *cu, seqused_q=used_q, seqused_k=used_k, key_indices=indices, **given)
    mask = torch.zeros(23, 70, dtype=torch.bool).scatter(1, indices[0] % 70, indices[0] >= 0)
    expected, expected_lse = flash_attn_varlen(
        q, k, v, *cu, 17, 70, attn_mask=mask, seqused_q=used_q, seqused_k=used_k, **given
    )
    seen = indices[0].ge(0).any(1)
    assert seen.all()
    assert torch.allclose(out, expected, atol=1e-12)
    assert torch.allclose(lse, expected_lse, atol=1e-12)


@pytest.mark.parametrize("kind", ["pages", "caches", "batch_idx and leftpad"])
@pytest.mark.parametrize(("block", "chunk"), [(0, 0), (8, 0), (0, 5)])
def test_caches_match_a_mask(kind, block, chunk):
    """A cache call with the mask of all its keys is a packed call of its rows."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(3, 4, 8, 32, generator=g, dtype=torch.float64)
    lengths = torch.tensor([40, 7, 25])
    k_cache, v_cache = (torch.randn(12, 16, 2, d, generator=g, dtype=torch.float64) for d in (32, 24))
    given, leftpad = {}, torch.zeros(3, dtype=torch.int64)
    if kind == "pages":
        table = torch.randperm(12, generator=g)[:9].view(3, 3)
        given = {"block_table": table.int()}
        keys, values = (c[table].flatten(1, 2) for c in (k_cache, v_cache))
    else:
        k_cache, v_cache = (c.view(4, 48, *c.shape[2:]) for c in (k_cache, v_cache))
        which = torch.arange(3)
        if kind != "caches":
            which, leftpad = torch.tensor([2, 0, 3]), torch.tensor([11, 2, 0])
            given = {"cache_batch_idx": which, "cache_leftpad": leftpad}
        keys, values = k_cache[which], v_cache[which]
    n = 6 if block else 20
    numbers = torch.stack([torch.randint(-1, -(-int(s) // max(block, 1)), (1, 4, n), generator=g) for s in lengths])
    indices = {"key_block_indices": numbers, "key_block_size": block} if block else {"key_indices": numbers}
    out, lse = flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=lengths,
        causal=True,
        return_softmax_lse=True,
        attention_chunk=chunk,
        **given,
        **indices,
    )
    for b in range(3):
        rows = slice(int(leftpad[b]), int(lengths[b]))
        tensors = [t.transpose(0, 1)[None] for t in (q[b], keys[b, rows], values[b, rows])]
        size = max(block, 1)
        seen = torch.zeros(4, 60 // size + 1, dtype=torch.bool).scatter(
            1, numbers[b, 0] % (60 // size + 1), numbers[b, 0] >= 0
        )
        seen = seen.repeat_interleave(size, 1)[:, rows] & (numbers[b, 0] >= 0).any(1, keepdim=True)
        expected, expected_lse = flash_attn(
            *tensors, enable_gqa=True, attn_mask=seen, causal="lower_right", return_lse=True, attention_chunk=chunk
        )
        assert torch.allclose(out[b], expected[0].transpose(0, 1), atol=1e-12)
        assert torch.allclose(lse[b], expected_lse[0], atol=1e-12)


def test_a_cache_appends_first():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, h, 16, generator=g) for h in (4, 2, 2))
    caches = [torch.randn(2, 20, 2, 16, generator=g) for _ in range(2)]
    copies = [c.clone() for c in caches]
    indices = torch.tensor([[[[9, 1, 3]]], [[[4, 9, 9]]]])
    out = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=9, key_indices=indices, causal=True)
    for cache, new in zip(copies, (k, v), strict=True):
        cache[:, 9] = new[:, 0]
    mask = torch.zeros(2, 1, 1, 10, dtype=torch.bool).scatter(3, indices, True)
    expected = flash_attn(
        *(t.transpose(1, 2) for t in (q, copies[0][:, :10], copies[1][:, :10])), enable_gqa=True, attn_mask=mask
    )
    assert torch.allclose(out, expected.transpose(1, 2), atol=1e-6)
    assert torch.equal(caches[0], copies[0])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"key_indices": torch.full((1, 23, 2), 30)}, ValueError, "key_indices: got 30 for row 0 of query"),
        ({"key_indices": torch.full((1, 23, 2), -2)}, ValueError, "key_indices: got -2"),
        ({"key_indices": torch.zeros(1, 22, 2, dtype=torch.int64)}, ValueError, "key_indices: got shape"),
        ({"key_indices": torch.zeros(1, 23, 2)}, TypeError, "key_indices: got dtype"),
        ({"key_block_indices": torch.ones(1, 23, 2).int()}, ValueError, "key_block_indices: got 1 for row 0"),
        ({"key_indices": make_indices(1), "alibi_slopes": torch.ones(4)}, NotImplementedError, "alibi_slopes"),
        ({"key_indices": make_indices(1), "attn_mask": torch.ones(23, 70) > 0}, NotImplementedError, "attn_mask"),
        ({"key_indices": make_indices(1), "dropout_p": 1.5}, ValueError, "dropout_p"),
        (
            {"key_indices": make_indices(1), "dropout_p": 0.5, "rng_state": torch.zeros(4).long()},
            ValueError,
            r"rng_state: got shape \[4\]",
        ),
    ],
)
def test_errors(given, error, message):
    with pytest.raises(error, match=message):
        flash_attn_varlen(*make(), offsets(LENGTHS_Q), offsets(LENGTHS_K), enable_gqa=True, **given)


def test_unsupported_arguments_raise_an_error():
    q, caches = torch.randn(1, 1, 2, 16), [torch.zeros(1, 8, 2, 16, dtype=torch.int16) for _ in range(2)]
    indices = torch.zeros(1, 1, 1, 2, dtype=torch.int64)
    with pytest.raises(TypeError, match=r"k_cache: got dtype int16"):
        flash_attn_with_kvcache(q, *caches, key_indices=indices)
    caches = [torch.zeros(1, 8, 2, 16) for _ in range(2)]
    with pytest.raises(ValueError, match="k_descale: got a tensor with a cache of"):
        flash_attn_with_kvcache(q, *caches, key_indices=indices, k_descale=torch.ones(2))
    pages = dict(block_table=torch.tensor([[7]]), key_indices=indices)
    with pytest.raises(ValueError, match="got"):
        flash_attn_with_kvcache(q, *(c.to(torch.int8) for c in caches), **pages)
    with pytest.raises(ValueError, match="got"):
        flash_attn_with_kvcache(q, *(c.to(torch.int8) for c in caches), **pages | {"block_table": torch.tensor([[-3]])})
    with pytest.raises(NotImplementedError, match="key_indices"):
        explain_varlen(*make(), offsets(LENGTHS_Q), offsets(LENGTHS_K), enable_gqa=True, key_indices=make_indices(1))
    strided = torch.randn(1, 8, 2, 16).transpose(0, 1)
    with pytest.raises(ValueError, match="k_cache: got strides"):
        flash_attn_with_kvcache(
            torch.randn(8, 1, 2, 16),
            torch.randn(2, 8, 2, 16).transpose(0, 1).expand(8, 2, 2, 16)[:, :1].expand(8, 3, 2, 16),
            strided.expand(8, 3, 2, 16),
            key_indices=torch.zeros(8, 1, 1, 2, dtype=torch.int64),
        )
