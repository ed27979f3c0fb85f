"""Dropout of packed sequences by index: the elements that a dense call of the padded sequences drops."""

import pytest
import torch

from flash_attn_ext import dropout_mask, flash_attn, flash_attn_varlen

LENGTHS_Q, LENGTHS_K, HEADS = [5, 0, 17, 3], [30, 9, 70, 6], 4
SEED = [123, 456]


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def make(dtype, block, heads_kv=2):
    g = torch.Generator().manual_seed(0)
    sizes = ((sum(LENGTHS_Q), HEADS, 24), (sum(LENGTHS_K), heads_kv, 24), (sum(LENGTHS_K), heads_kv, 16))
    leaves = [torch.randn(size, generator=g).to(dtype).requires_grad_() for size in sizes]
    numbers = [
        torch.randint(-1, -(-k // max(block, 1)), (1, q, 4 if block else 20), generator=g)
        for q, k in zip(LENGTHS_Q, LENGTHS_K, strict=True)
    ]
    numbers = torch.cat(numbers, 1)
    return leaves, {"key_block_indices": numbers, "key_block_size": block} if block else {"key_indices": numbers}


def rows_of_sequences():
    starts_q, starts_k = offsets(LENGTHS_Q).tolist(), offsets(LENGTHS_K).tolist()
    for b in range(len(LENGTHS_Q)):
        yield b, slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])


def one_by_one(leaves, numbers, place, **options):
    """Each sequence by a dense call. ``place``: (row, column, head, heads) of the packed call in a larger call."""
    outs, lses = [], []
    row, column, head, heads = place
    (name,) = [n for n in numbers if n.endswith("indices")]
    for b, rows, keys in rows_of_sequences():
        tensors = [t[part].transpose(0, 1)[None] for t, part in zip(leaves, (rows, keys, keys), strict=True)]
        state = torch.tensor([*SEED, row, column, b * heads + head, heads])
        own = numbers | {name: numbers[name][None, :, rows]}
        out, lse = flash_attn(*tensors, enable_gqa=True, return_lse=True, rng_state=state, **own, **options)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block", [0, 8])
@pytest.mark.parametrize("place", [None, (6, 4, 8, 32)])
def test_equals_dense_calls(isa, dtype, block, place):
    leaves, numbers = make(dtype, block)
    options = {"dropout_p": 0.4, "causal": "lower_right"}
    cu = (offsets(LENGTHS_Q), offsets(LENGTHS_K))
    state = torch.tensor([*SEED, *(place or ())])
    packed = flash_attn_varlen(*leaves, *cu, enable_gqa=True, return_lse=True, rng_state=state, **numbers, **options)
    expected = one_by_one(leaves, numbers, place or (0, 0, 0, HEADS), **options)
    cotangent = torch.randn(packed[0].shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    for ours, theirs in zip(packed, expected, strict=True):
        assert torch.equal(ours, theirs)
    grads = [torch.autograd.grad(out, leaves, cotangent) for out, _ in (packed, expected)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)
    replay = flash_attn_varlen(*leaves, *cu, enable_gqa=True, rng_state=state, **numbers, **options)
    assert torch.equal(replay, packed[0])
    without = flash_attn_varlen(*leaves, *cu, enable_gqa=True, **numbers, **options | {"dropout_p": 0.0})
    assert not torch.equal(without, packed[0])


@pytest.mark.parametrize("heads_kv", [1, 4])
def test_drops_the_elements_of_dropout_mask(heads_kv):
    (q, k, v), numbers = make(torch.float64, 0, heads_kv)
    indices, state, p = numbers["key_indices"], torch.tensor(SEED), 0.3
    given = dict(enable_gqa=True, rng_state=state, dropout_p=p)
    out = flash_attn_varlen(q, k, v, offsets(LENGTHS_Q), offsets(LENGTHS_K), **numbers, **given)
    mask = dropout_mask(state, len(LENGTHS_Q), HEADS, max(LENGTHS_Q), max(LENGTHS_K), p)
    for b, rows, keys in rows_of_sequences():
        length_q, length_k = LENGTHS_Q[b], LENGTHS_K[b]
        k_b, v_b = (t[keys].transpose(0, 1).repeat_interleave(HEADS // heads_kv, 0) for t in (k, v))
        chosen = torch.zeros(length_q, length_k + 1, dtype=torch.bool)
        chosen.scatter_(1, indices[0, rows] % (length_k + 1), True)
        scores = q[rows].transpose(0, 1) @ k_b.mT / 24**0.5
        probs = scores.masked_fill(~chosen[:, :length_k], -torch.inf).softmax(-1).nan_to_num()
        kept = mask[b, :, :length_q, :length_k] / (1 - p)
        torch.testing.assert_close(out[rows].transpose(0, 1), (probs * kept) @ v_b)


def test_second_derivatives():
    leaves, numbers = make(torch.float64, 0)
    cu = (offsets(LENGTHS_Q), offsets(LENGTHS_K))
    results = []
    for packed in (True, False):
        if packed:
            given = dict(enable_gqa=True, rng_state=torch.tensor(SEED), dropout_p=0.4)
            out = flash_attn_varlen(*leaves, *cu, **numbers, **given)
        else:
            out, _ = one_by_one(leaves, numbers, (0, 0, 0, HEADS), dropout_p=0.4)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        results.append([*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected)


def test_draws_a_state():
    leaves, numbers = make(torch.float32, 0)
    cu = (offsets(LENGTHS_Q), offsets(LENGTHS_K))
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(flash_attn_varlen(*leaves, *cu, enable_gqa=True, dropout_p=0.5, **numbers))
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
