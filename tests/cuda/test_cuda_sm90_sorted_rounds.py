"""Persistent blocks of the sm90 forward for packed sequences and key masks: a kernel makes their rounds of tasks
(csrc/cuda/sm90/sorted_rounds.h). Their balance on 132 multiprocessors, and results with several tasks for each block.
"""

import ctypes
import heapq
import itertools
import math
import random

import pytest
import torch
from cuda_host import library
from helpers import check_forward_against_reference, make_qkv
from test_cuda_sm90_options import padding
from test_cuda_sm90_varlen import params_of
from test_cuda_varlen import check, packed, run

from benchmarks.gpu.problem import TOKENS
from benchmarks.gpu.time_model import MULTIPROCESSORS
from flash_attn_ext import flash_attn

LEAST = 0.95
KEYS, L2 = 128, 24 << 20
SHAPES = {  # head dimension, heads, key heads
    "D 64": (64, 32, 8),
    "D 128": (128, 16, 16),
    "D 128, shared keys": (128, 32, 8),
}
RNG = random.Random(0)


def lengths_of(draw, total):
    lengths = []
    while sum(lengths) < total:
        lengths.append(min(draw(), total - sum(lengths)))
    return lengths


PACKS = {
    "uniform": lengths_of(lambda: RNG.randint(1, 2048), TOKENS),
    "lognormal": lengths_of(lambda: max(1, round(RNG.lognormvariate(math.log(1024) - 0.5, 1))), TOKENS),
    "long lognormal": lengths_of(lambda: max(1, round(RNG.lognormvariate(math.log(4096) - 0.5, 1))), 4 * TOKENS),
    "one long, many short": [TOKENS // 2] + TOKENS // 256 * [128],
    "equal": TOKENS // 1024 * [1024],
    "many": lengths_of(lambda: RNG.randint(1, 1024), 4 * TOKENS),
    "some empty": [0, 0, *lengths_of(lambda: RNG.choice([0, 0, 700, 1900]), TOKENS), 0],
}


@pytest.fixture
def on_132(built):
    """For one test: other tests of this file set other numbers of multiprocessors."""
    loaded = library.Library(built)
    with loaded.on_gpu(9, 0):
        loaded.c.set_multiprocessors(MULTIPROCESSORS)
        yield loaded


def rows_of(head_dim):
    return 192 if head_dim == 64 else 128


def tiles_of(lengths, rows, causal):
    """The tiles of each sequence's blocks of rows."""
    return [
        [-(-(min(length, first + rows) if causal else length) // KEYS) for first in range(0, length, rows)]
        for length in lengths
    ]


def rounds_of(loaded, lengths, head_dim, heads, heads_kv, causal):
    """The task of each block in each round: head and block of rows."""
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    params = params_of(library.AttentionParams, lengths, sum(lengths), head_dim)
    params.sizes.heads, params.sizes.heads_kv = heads, heads_kv
    params.varlen.cu_seqlens_q = params.varlen.cu_seqlens_k = library.offsets(offsets)
    params.band.left, params.band.right = 1 << 60, 0 if causal else 1 << 60
    workspace = library.empty_workspace(loaded.c.forward_workspace(ctypes.byref(params)))
    loaded.show({"cu_seqlens": offsets, "workspace": workspace}, outputs=("workspace",))
    found = torch.empty(2, workspace.numel(), dtype=torch.int32)
    at = [ctypes.c_void_p(t.data_ptr()) for t in (workspace, *found)]
    count = loaded.c.sm90_sorted_tasks(ctypes.byref(params), *at)
    assert count > 0
    tasks = found[:, : count * MULTIPROCESSORS].T.reshape(count, MULTIPROCESSORS, 2).tolist()
    return [[None if head < 0 else (head, block) for head, block in row] for row in tasks]


def balance(loads):
    return sum(loads) / len(loads) / max(loads)


def balance_by_hardware(lengths, tiles, shape):
    """Blocks start in the order of schedule.h, each on the first free multiprocessor. Groups of heads have the L2 for
    heads of the longest sequence. Blocks without rows cost nothing."""
    head_dim, heads, heads_kv = shape
    group = max(1, L2 // (4 * max(lengths) * head_dim)) * (heads // heads_kv)
    all_heads, loads = [b for b in range(len(lengths)) for _ in range(heads)], [0] * MULTIPROCESSORS
    for first in range(0, len(all_heads), group):
        for row_block in reversed(range(max(map(len, tiles)))):
            for b in all_heads[first : first + group]:
                if row_block < len(tiles[b]):
                    heapq.heapreplace(loads, loads[0] + 1 + tiles[b][row_block])
    return balance(loads)


def balances(loaded, pack, shape, causal):
    """Of persistent blocks, and of blocks that the hardware starts. The time of a task: its tiles, and one more."""
    lengths, (head_dim, heads, heads_kv) = PACKS[pack], SHAPES[shape]
    tiles = tiles_of(lengths, rows_of(head_dim), causal)
    rounds = rounds_of(loaded, lengths, head_dim, heads, heads_kv, causal)
    tasks = sorted(task for row in rounds for task in row if task)
    assert tasks == [
        (b * heads + h, n) for b in range(len(lengths)) for h in range(heads) for n in range(len(tiles[b]))
    ]
    loads = [
        sum(1 + tiles[head // heads][n] for head, n in filter(None, column)) for column in zip(*rounds, strict=True)
    ]
    return balance(loads), balance_by_hardware(lengths, tiles, SHAPES[shape])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pack", PACKS)
def test_blocks_share_packed_sequences_evenly(on_132, pack, shape, causal):
    assert balances(on_132, pack, shape, causal)[0] >= LEAST


def test_groups_come_one_after_the_other(on_132):
    """So the keys of a group stay in L2. The longest tasks of a group come first."""
    lengths = 64 * [1024]
    rounds = rounds_of(on_132, lengths, 128, 16, 16, True)
    firsts = [min(head for head, _ in filter(None, row)) for row in rounds]
    lasts = [max(head for head, _ in filter(None, row)) for row in rounds]
    starts = [n for n in range(1, len(rounds)) if firsts[n] > lasts[n - 1]]
    assert len(starts) >= 5
    for begin, end in itertools.pairwise([0, *starts, len(rounds)]):
        blocks = [[n for _, n in filter(None, row)] for row in rounds[begin:end]]
        assert all(min(a) >= max(b) for a, b in itertools.pairwise(blocks))


@pytest.mark.parametrize(("total", "is_sorted"), [(4096, False), (8192, True)])
def test_few_tasks_are_not_sorted(on_132, total, is_sorted):
    """With fewer than four rounds, the hardware starts a block for each task, and no kernel runs before."""
    params = params_of(library.AttentionParams, total // 1024 * [1024], total, 128)
    params.sizes.heads = params.sizes.heads_kv = 16
    assert (on_132.c.forward_workspace(ctypes.byref(params)) > 0) == is_sorted


# ---- results


@pytest.fixture
def kernels(built):
    with library.on_hopper(built, num_splits=1) as loaded:
        loaded.c.set_multiprocessors(1)
        loaded.workspaces, launch = [], loaded.launch

        def record(kind, params, *tensors):
            if kind == "forward":
                loaded.workspaces.append(loaded.c.forward_workspace(ctypes.byref(params)))
            launch(kind, params, *tensors)

        loaded.launch = record
        yield loaded


def are_sorted(kernels):
    """Whether a kernel has sorted the tasks of each call so far: else a packed call needs no workspace."""
    return min(kernels.workspaces) > 0


# With one multiprocessor a group has eight tasks at least. The longest sequence has nearly a multiple of 128 queries:
# with a few more queries, heads would share tiles, and another kernel would run.
RAGGED = [(130, 140), (0, 40), (64, 128), (33, 0), (193, 129), (1, 150), (500, 300), (7, 7), (0, 0), (250, 390)]


@pytest.mark.parametrize(
    ("head_dim", "dtype", "options"),
    [
        (64, torch.bfloat16, dict(causal=True, lower_right=True, dtype_of_offsets=torch.int64)),
        (64, torch.float16, dict(softcap=3.0)),
        (96, torch.bfloat16, dict(causal=True)),
        (128, torch.float16, dict(lower_right=True, causal=True)),
        (128, torch.bfloat16, dict()),
    ],
)
def test_several_groups_of_packed_sequences(kernels, head_dim, dtype, options):
    check(kernels, RAGGED, dtype, head_dim=head_dim, **options)
    assert are_sorted(kernels)


def test_a_group_without_rows(kernels):
    check(kernels, [*5 * [(0, 5)], *4 * [(250, 150)]], torch.bfloat16, head_dim=64, causal=True)
    assert are_sorted(kernels)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_groups_of_heads_of_one_sequence(kernels, head_dim):
    check(kernels, [(1100, 200)], torch.bfloat16, head_dim=head_dim, causal=True, lower_right=True)
    assert are_sorted(kernels)


@pytest.mark.parametrize("multiprocessors", [1, 2, 3])
def test_results_do_not_depend_on_the_number_of_blocks(kernels, multiprocessors):
    """With 100 multiprocessors each block has one task."""
    inputs = [packed(side, heads, torch.bfloat16, 64) for side, heads in zip(
        (*zip(*RAGGED, strict=True), [n for _, n in RAGGED]), (4, 2, 2), strict=True)]  # fmt: skip
    inputs.append(torch.zeros_like(inputs[0]))
    found = []
    for count in (100, multiprocessors):
        kernels.c.set_multiprocessors(count)
        found.append(run(kernels, *inputs, RAGGED, causal=True, deterministic=True)[:2])
    assert [size > 0 for size in kernels.workspaces] == [False, True]
    for ours, expected in zip(found[1], found[0], strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_used_lengths(kernels, head_dim):
    """Rows after a sequence's used length are neither read nor written."""
    lengths, used = [(200, 200), (250, 300), (150, 150)], [(200, 130), (77, 300), (0, 10)]
    q, k, v = (
        packed([n[side] for n in lengths], heads, torch.bfloat16, head_dim) for side, heads in ((0, 4), (1, 2), (1, 2))
    )
    seqused = [torch.tensor(side, dtype=torch.int32) for side in zip(*used, strict=True)]
    out = run(kernels, q, k, v, torch.zeros_like(q), lengths, seqused=seqused, causal=True)[0]
    assert are_sorted(kernels)
    for first, first_k, (queries, keys) in zip((0, 200, 450), (0, 200, 500), used, strict=True):
        ours = out[first : first + queries].transpose(0, 1)[None]
        own = [
            t[at : at + n].transpose(0, 1)[None]
            for t, at, n in ((q, first, queries), (k, first_k, keys), (v, first_k, keys))
        ]
        if queries:
            kernels.c.set_compute_capability(8, 0)
            expected = flash_attn(*own, is_causal=True, enable_gqa=True)
            kernels.c.set_compute_capability(9, 0)
            torch.testing.assert_close(ours, expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_hidden_values_of_other_tasks(kernels, head_dim, poison):
    """Rows with a NaN are repaired after all tasks of a block. Its other rows do not change."""
    lengths = 4 * [(250, 250)]
    inputs = [packed([250] * 4, heads, torch.bfloat16, head_dim) for heads in (4, 2, 2, 4)]
    clean = run(kernels, *inputs, lengths, causal=True)[0]
    inputs[2][2 * 250 + 100, :, 5] = poison  # seen by the queries 100 to 249 of sequence 2
    found = run(kernels, *inputs, lengths, causal=True)[0]
    assert are_sorted(kernels)
    sees = torch.zeros(4 * 250, dtype=torch.bool)
    sees[2 * 250 + 100 : 3 * 250] = True
    torch.testing.assert_close(found[~sees], clean[~sees], rtol=0, atol=0.02)
    assert not found[sees][:, :, 5].isfinite().any()


@pytest.mark.parametrize(
    ("head_dim", "case", "dtype"),
    [(64, "holes", torch.bfloat16), (64, "nothing or one", torch.float16), (96, "left", torch.bfloat16),
     (128, "right", torch.float16), (128, "random", torch.bfloat16)],
)  # fmt: skip
def test_key_masks(kernels, head_dim, case, dtype):
    q, k, v = (t.detach() for t in make_qkv(5, 2, 400, 300, head_dim, dtype=dtype))
    check_forward_against_reference(q, k, v, padding(5, 300, case), causal="lower_right", softcap=4.0)
    check_forward_against_reference(q, k, v, padding(5, 300, case), window=(100, 50))
    assert min(kernels.workspaces) > 320, "the bits of the mask alone"


@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_softcap_alone_is_dealt_by_the_host(kernels, head_dim):
    q, k, v = (t.detach() for t in make_qkv(2, 2, 500, 300, head_dim, dtype=torch.bfloat16))
    check_forward_against_reference(q, k, v, softcap=4.0, causal="upper_left")
    assert kernels.workspaces == [0]
