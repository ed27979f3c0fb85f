"""How evenly 132 multiprocessors share the blocks of the sm90 kernels with block masks.

The kernel that orders the tasks runs on the host. A multiprocessor that is free takes the next block.
"""

import ctypes
import heapq

import pytest
import torch
from cuda_host import library

from benchmarks.gpu.problem import COLUMNS, TOKENS
from benchmarks.gpu.time_model import MULTIPROCESSORS

LEAST = 0.95
STEP = 32  # the masks are constant on squares of this size, but for the diagonal
DOCUMENTS = torch.tensor([0.4, 0.05, 0.25, 0.03, 0.02, 0.15, 0.1])  # the documents' shares of a sequence
MASKS = {
    "causal": lambda i, j, length: i >= j,
    "document": lambda i, j, length: (i >= j) & (document(i, length) == document(j, length)),
    "whole documents": lambda i, j, length: document(i, length) == document(j, length),
    "window": lambda i, j, length: (i >= j) & (i - j < 1024),
    "prefix_lm": lambda i, j, length: (i >= j) | (j < length // 4),
}


@pytest.fixture(scope="module")
def library_on_host(built):
    loaded = library.Library(built)
    loaded.c.set_multiprocessors(MULTIPROCESSORS)
    yield loaded
    loaded.c.set_multiprocessors(2)


def document(positions, length):
    return torch.bucketize(positions, (DOCUMENTS.cumsum(0) * length / STEP).round() * STEP, right=True)


def tiles_of(head_dim, backward):
    """The sizes of a block and of the tiles that it visits."""
    if backward:
        return 128 if head_dim == 64 else 64, 64
    return 128, 64 if head_dim == 256 else 128


def lengths_of(mask, length, head_dim, backward):
    """The number of tiles that each block of a head visits."""
    block, tile = tiles_of(head_dim, backward)
    at = torch.arange(0, length, STEP)
    shown = MASKS[mask](at[:, None], at, length)
    shown = (shown.T if backward else shown).reshape(length // block, block // STEP, length // tile, tile // STEP)
    return shown.any(3).any(1).sum(1)


def tasks_of(loaded, mask, length, head_dim, backward, batches=None, heads=None, group=1):
    """The tiles of each task, and the tasks in the order in which they begin."""
    batches, heads = batches or TOKENS // length, heads or COLUMNS // head_dim
    lengths = lengths_of(mask, length, head_dim, backward)
    tiles = length // tiles_of(head_dim, backward)[1]
    sizes = library.Sizes(batch=batches, heads=heads, heads_kv=heads // group, seqlen_q=length, seqlen_k=length,
                          head_dim=head_dim, head_dim_v=head_dim)  # fmt: skip
    words = torch.zeros(len(lengths), 1 + tiles, dtype=torch.int32)
    words[:, 0] = lengths
    tasks = batches * heads // (group if backward else 1) * len(lengths)
    order, found = (torch.full((tasks,), -1, dtype=torch.int32) for _ in range(2))
    loaded.show({"words": words, "order": order}, outputs=("order",))
    at = [ctypes.c_void_p(t.data_ptr()) for t in (words, order, found)]
    params = ctypes.byref(library.BackwardParams(sizes=sizes, scale=1.0))
    loaded.check(loaded.c.sm90_task_order(params, backward, at[0], len(lengths), tiles, *at[1:]))
    assert sorted(order.tolist()) == list(range(tasks))
    return found.tolist(), order.tolist()


def balance(tiles):
    """The least possible time divided by the time of the busiest multiprocessor. The time of a task: its tiles, and one
    more."""
    loads = [0] * MULTIPROCESSORS
    for count in tiles:
        heapq.heapreplace(loads, loads[0] + count + 1)
    # Of the longest 132 n + 1 tasks, a multiprocessor has n + 1 at least.
    longest = sorted(tiles, reverse=True)[::MULTIPROCESSORS]
    whole_tasks = max((n + 1) * (count + 1) for n, count in enumerate(longest))
    return max(sum(loads) / MULTIPROCESSORS, whole_tasks) / max(loads)


PASSES = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])


@PASSES
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("length", [4096, 16384])
@pytest.mark.parametrize("mask", MASKS)
def test_multiprocessors_share_the_blocks_evenly(library_on_host, mask, length, head_dim, backward):
    tiles, order = tasks_of(library_on_host, mask, length, head_dim, backward)
    assert balance([tiles[n] for n in order]) >= LEAST


@PASSES
def test_the_order_matters(library_on_host, backward):
    """Without it, some multiprocessors would wait."""
    tiles, order = tasks_of(library_on_host, "document", 4096, 256, backward, heads=8 if not backward else 4)
    assert balance(tiles) < LEAST <= balance([tiles[n] for n in order])


@PASSES
def test_order_in_groups(library_on_host, backward):
    """Longest first. Tasks of the same length keep their order. All key heads of these calls fit in L2."""
    tiles, order = tasks_of(library_on_host, "document", 4096, 64, backward, batches=2, heads=8, group=2)
    assert order == sorted(range(len(tiles)), key=lambda n: -tiles[n])


def test_heads_that_do_not_fit_in_l2_come_group_after_group(library_on_host):
    """The keys and values of 6 heads fit. Each head has 128 tasks."""
    _, order = tasks_of(library_on_host, "causal", 16384, 64, False)
    of_group = 6 * 128
    for first in range(0, 4 * of_group, of_group):
        assert sorted(order[first : first + of_group]) == list(range(first, first + of_group))
