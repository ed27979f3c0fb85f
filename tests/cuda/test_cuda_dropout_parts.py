"""Dropout of a part of the score matrix, as a process of context parallelism has it, in the CUDA kernels on the host.

Each process drops the elements that one process with the whole sequence would drop. It counts an element's position
in the whole (csrc/core/params.h, DropoutParams).
"""

import math

import pytest
import torch

from flash_attn_ext import dropout_mask
from flash_attn_ext.distributed._sharded_call import rng_state_at

STATE, P = torch.tensor([123456789, 42]), 0.4
BATCH, HEADS, ROWS, COLUMNS = 2, 4, 150, 170  # the whole
# (first row, first column, first head), and (rows, columns, heads). Tiles are 64 queries, or 16 of few, by 64 keys.
PARTS = {
    "first": ((0, 0, 0), (40, 50, 2)),
    "odd place": ((37, 41, 1), (70, 67, 2)),
    "few queries": ((111, 3, 2), (5, 130, 1)),
    "last": ((86, 105, 0), (64, 65, 4)),
}


def of_whole(part):
    """Returns the elements of the part that dropout keeps on one process."""
    (row, col, head), (rows, columns, heads) = PARTS[part]
    kept = dropout_mask(STATE, BATCH, HEADS, ROWS, COLUMNS, P)
    return kept[:, head : head + heads, row : row + rows, col : col + columns]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_drops_the_elements_that_the_whole_drops(kernels, part, dtype):
    """Forward and backward against the dense formula with the dropout mask of the whole.

    One wrong element would show.
    """
    kept = of_whole(part)
    (row, col, head), (rows, columns, heads) = PARTS[part]
    q = torch.randn(BATCH, heads, rows, 8, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(BATCH, heads, columns, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    place = rng_state_at(STATE, row, col, head, HEADS)
    out, lse = torch.ops.flash_attn_ext.attention(q, k, v, None, None, None, place, dropout_p=P)
    scores = q.double() @ k.double().mT / math.sqrt(8)
    expected = (scores.softmax(-1) * kept / (1 - P)) @ v.double(), scores.logsumexp(-1)
    upstream = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), upstream)
    wanted = torch.autograd.grad(expected[0], (q, k, v), upstream.double())
    for got, want in zip((out, lse, *grads), (*expected, *wanted), strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=2e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("part", PARTS)
def test_the_bits_of_a_part(kernels, part):
    """With an identity as value, out is the row's weights; dropped weights are 0."""
    kept = of_whole(part)
    (row, col, head), (rows, columns, heads) = PARTS[part]
    q, k = torch.randn(BATCH, heads, rows, 8), torch.randn(BATCH, heads, columns, 8)
    identity = torch.eye(columns).expand(BATCH, heads, columns, columns)
    place = rng_state_at(STATE, row, col, head, HEADS)
    weights, _ = torch.ops.flash_attn_ext.attention(q, k, identity, None, None, None, place, dropout_p=P)
    assert torch.equal(weights != 0, kept)
