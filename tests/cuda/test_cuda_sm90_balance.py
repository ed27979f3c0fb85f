"""How evenly the persistent blocks of the sm90 forward share the tasks of a call, on 132 multiprocessors."""

import ctypes

import pytest
from cuda_host import library

from benchmarks.gpu import time_model
from benchmarks.gpu.problem import COLUMNS, LENGTHS, TOKENS, Problem
from benchmarks.gpu.time_model import MULTIPROCESSORS, TILINGS, HeadDims

LEAST = 0.95
# These head dimensions have persistent blocks. Beyond them the hardware gives each block to a free multiprocessor.
HEAD_DIMS = [64, 96, 128]
CASES = {
    "causal": {},
    "causal, 4 heads to a key head": dict(group=4),
    "window of 1024": dict(left=1024),
    "window of 256": dict(left=256),
    "keys after the queries of a cache": dict(more_keys=1000),
}


@pytest.fixture(scope="module")
def library_on_host(built):
    return library.Library(built)


def dealt(loaded, length, head_dim, batches=1, heads=None, group=1, left=None, more_keys=0, causal=True):
    """The tiles of each task, in order, and the block that computes it."""
    heads = heads or COLUMNS // head_dim // group * group
    params = library.AttentionParams(
        sizes=library.Sizes(batch=batches, heads=heads, heads_kv=heads // group, seqlen_q=length,
                            seqlen_k=length + more_keys, head_dim=head_dim, head_dim_v=head_dim),
        scale=1.0,
    )  # fmt: skip
    params.band.diagonal = more_keys
    params.band.left = 1 << 60 if left is None else left
    params.band.right = 0 if causal else 1 << 60
    count = loaded.c.sm90_dealt_tasks(ctypes.byref(params), MULTIPROCESSORS, None, None)
    blocks, tiles = (ctypes.c_int * count)(*[-1] * count), (ctypes.c_int * count)()
    loaded.c.sm90_dealt_tasks(ctypes.byref(params), MULTIPROCESSORS, blocks, tiles)
    return list(tiles), list(blocks)


def balance(tiles, blocks):
    """The ideal time divided by the time of the busiest block. The time of a task: its tiles, and one more."""
    loads = [0] * MULTIPROCESSORS
    for count, block in zip(tiles, blocks, strict=True):
        loads[block] += count + 1
    return sum(loads) / MULTIPROCESSORS / max(loads)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("length", sorted(LENGTHS))
def test_blocks_share_the_tasks_evenly(library_on_host, length, head_dim, case):
    tiles, blocks = dealt(library_on_host, length, head_dim, TOKENS // length, **CASES[case])
    assert min(blocks) >= 0, "a task that no block computes"
    assert balance(tiles, blocks) >= LEAST


def test_many_rounds(library_on_host):
    """About 250 rounds, more than the table has rows."""
    tiles, blocks = dealt(library_on_host, 4096, 128, batches=64)
    assert min(blocks) >= 0
    assert balance(tiles, blocks) >= LEAST


def test_tasks_of_one_length_go_in_their_order(library_on_host):
    tiles, blocks = dealt(library_on_host, 4096, 128, batches=4, causal=False)
    assert len(set(tiles)) == 1
    assert blocks == [task % MULTIPROCESSORS for task in range(len(tiles))]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("length", [512, 16384])
def test_the_time_model_deals_alike(library_on_host, length, head_dim):
    problem = Problem(TOKENS // length, COLUMNS // head_dim, length, head_dim, True)
    dims = HeadDims(head_dim, head_dim)
    tiles, blocks = dealt(library_on_host, length, head_dim, problem.B)
    assert time_model.tasks_in_order(problem, TILINGS["forward", dims], dims) == tiles
    loads = [0.0] * MULTIPROCESSORS
    for count, block in zip(tiles, blocks, strict=True):
        loads[block] += count
    assert time_model.deal_in_rounds(tiles, [float(count) for count in tiles]) == loads
