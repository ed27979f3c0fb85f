"""Packed sequences on tensor cores (csrc/cuda/sm80) on the host. As test_cuda_varlen.py, which tests simt, with 16
bits. A sequence has the same bits alone and in any pack.

Tiles are 128 queries by 64 keys; in the backward 128 keys by 64 queries, 32 beyond a head dimension of 64,
and half of the keys beyond 128.
"""

import ctypes
from itertools import accumulate

import pytest
import torch
from cuda_host import library
from test_cuda_varlen import FEW, HEADS, HEADS_KV, LENGTHS, check, packed, run

from flash_attn_ext import new_rng_state

pytestmark = pytest.mark.usefixtures("kernels")

halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
orders = pytest.mark.parametrize("deterministic", [True, False], ids=["in turns", "in any order"])
hostile_offsets = pytest.mark.parametrize(
    "cu_seqlens", [(0, 70, 20, 20), (-9, 10, 500, 90), (90, 60, 30, 0), (0, 0, 0, 1 << 30)]
)
LONG = [(130, 140), (0, 40), (64, 128), (33, 0), (129, 129), (1, 150)]  # several tiles both ways
NAMES = ("out", "lse", "dq", "dk", "dv")


def check_on_tensor_cores(kernels, lengths, dtype=torch.bfloat16, **options):
    check(kernels, lengths, dtype, **options)
    assert kernels.flagged_tiles == 0


@orders
@pytest.mark.parametrize(("head_dim", "lower_right"), [(24, False), (128, True)])
@pytest.mark.parametrize("lengths", [LENGTHS, FEW], ids=["tiles", "splits"])
def test_each_sequence_is_its_own(kernels, lengths, lower_right, head_dim, deterministic):
    check_on_tensor_cores(
        kernels, lengths, head_dim=head_dim, causal=True, lower_right=lower_right, deterministic=deterministic
    )


@pytest.mark.parametrize(("head_dim", "deterministic"), [(192, False), (256, True)])
def test_wide_heads(kernels, head_dim, deterministic):
    check_on_tensor_cores(kernels, LONG, head_dim=head_dim, causal=True, lower_right=True, deterministic=deterministic)


@halves
@pytest.mark.parametrize("lengths", [LENGTHS, FEW], ids=["tiles", "splits"])
def test_all_options_together(kernels, lengths, dtype):
    longest_q, longest_k = (max(side) for side in zip(*lengths, strict=True))
    mask = torch.randn(1, HEADS, longest_q, longest_k).to(dtype)
    slopes, sink = torch.rand(len(lengths), HEADS), torch.randn(len(lengths), HEADS)
    check_on_tensor_cores(
        kernels, lengths, dtype, attn_mask=mask, slopes=slopes, sink=sink, softcap=2.0, causal=True, dropout_p=0.3,
        rng_state=new_rng_state(torch.device("cpu")), dtype_of_offsets=torch.int64,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(6, 1, 129, 130), (1, 1, 1, 130)])
def test_masks(kernels, shape):
    check_on_tensor_cores(kernels, LENGTHS, attn_mask=torch.randn(shape).bfloat16(), causal=True)


def test_a_mask_by_the_rows_of_a_packed_q(kernels):
    mask = torch.randn(1, HEADS, sum(n for n, _ in LENGTHS), 130).bfloat16()
    check_on_tensor_cores(kernels, LENGTHS, attn_mask=mask, mask_by_row=True)


def inputs_of(lengths, dtype=torch.bfloat16, head_dim=24):
    """q, k, v, dout."""
    queries, keys = zip(*lengths, strict=True)
    sides = ((queries, HEADS), (keys, HEADS_KV), (keys, HEADS_KV), (queries, HEADS))
    return [packed(rows, heads, dtype, head_dim) for rows, heads in sides]


def own_rows(results, lengths):
    """out, lse, dq, dk, dv of each sequence."""
    queries, keys = ([0, *accumulate(side)] for side in zip(*lengths, strict=True))
    for b in range(len(lengths)):
        q, k = slice(queries[b], queries[b + 1]), slice(keys[b], keys[b + 1])
        yield [results[0][q], results[1][:, q], results[2][q], results[3][k], results[4][k]]


@pytest.mark.parametrize(("head_dim", "causal"), [(24, False), (128, True)])
def test_a_sequence_has_the_same_bits_alone_and_in_any_pack(kernels, head_dim, causal):
    inputs = inputs_of(LONG, head_dim=head_dim)
    options = {"causal": causal, "lower_right": True, "deterministic": True}
    together = own_rows(run(kernels, *inputs, LONG, **options), LONG)
    parts = [t.split([n[side] for n in LONG]) for t, side in zip(inputs, (0, 1, 1, 0), strict=True)]
    for lengths, alone, ours in zip(LONG, zip(*parts, strict=True), together, strict=True):
        # With a longer sequence of zeros in the batch, the call is cut like the pack.
        longest = (130, 150)
        beside = [torch.zeros_like(t) for t in inputs_of([longest], head_dim=head_dim)]
        pair = [torch.cat(two) for two in zip(alone, beside, strict=True)]
        expected = next(own_rows(run(kernels, *pair, [lengths, longest], **options), [lengths, longest]))
        for name, a, b in zip(NAMES, ours, expected, strict=True):
            assert torch.equal(a, b), name


@orders
@pytest.mark.parametrize(("lengths", "poison"), [(LONG, torch.nan), (FEW, torch.inf)], ids=["tiles", "splits"])
def test_neighbours_never_enter_a_product(kernels, lengths, deterministic, poison):
    """One whole sequence is NaN or Inf. The other sequences keep their bits."""
    inputs = inputs_of(lengths)
    options = {"causal": True, "deterministic": deterministic}
    clean = list(own_rows(run(kernels, *inputs, lengths, **options), lengths))
    queries, keys = ([0, *accumulate(side)] for side in zip(*lengths, strict=True))
    poisoned = 4
    for t, rows in zip(inputs, (queries, keys, keys, queries), strict=True):
        t[rows[poisoned] : rows[poisoned + 1]] = poison
    found = list(own_rows(run(kernels, *inputs, lengths, **options), lengths))
    for b, (ours, expected) in enumerate(zip(found, clean, strict=True)):
        if b == poisoned:
            assert not torch.isfinite(ours[0]).any()
            continue
        for name, a, e in zip(NAMES, ours, expected, strict=True):
            if deterministic or name != "dq":
                assert torch.equal(a, e), name
            else:
                torch.testing.assert_close(a, e)


def check_rows_that_are_not_used(kernels, lengths, head_dim):
    """They are neither read nor written. `lengths`: of LONG's form."""
    used = ([100, 0, 64, 20, 129, 0], [135, 40, 0, 0, 129, 150])
    inputs = inputs_of(lengths, head_dim=head_dim)
    queries, keys = ([0, *accumulate(side)] for side in zip(*lengths, strict=True))
    for t, starts, side in zip(inputs, (queries, keys, keys, queries), (0, 1, 1, 0), strict=True):
        for b, start in enumerate(starts[:-1]):
            t[start + used[side][b] : starts[b + 1]] = torch.nan
    seqused = [torch.tensor(side, dtype=torch.int32) for side in used]
    results = run(kernels, *inputs, lengths, seqused=seqused, causal=True, lower_right=True)
    for b, (out, lse, dq, dk, dv) in enumerate(own_rows(results, lengths)):
        assert all(torch.isfinite(t).all() for t in (out, dq, dk, dv))
        for t, side in ((out, 0), (dq, 0), (dk, 1), (dv, 1)):
            assert not t[used[side][b] :].any()
        assert (lse[:, used[0][b] :] == -torch.inf).all()


def test_rows_that_are_not_used_are_neither_read_nor_written(kernels):
    check_rows_that_are_not_used(kernels, LONG, head_dim=24)


@orders
@pytest.mark.parametrize("few", [False, True], ids=["tiles", "splits"])
@hostile_offsets
def test_hostile_offsets_read_nothing_outside(kernels, cu_seqlens, few, deterministic):
    """The host run checks every access. The results are not compared."""
    inputs = inputs_of([(90, 90)])
    lengths = [(8 if few else 40, 40)] * 3
    run(kernels, *inputs, lengths, cu_seqlens=cu_seqlens, causal=True, lower_right=True, deterministic=deterministic)


def test_sums_of_dq_grow_with_all_rows_not_with_the_longest(kernels):
    """One long sequence and many short sequences. In the workspace only the counts of tiles are padded to the
    longest."""
    batch, longest, total, head_dim = 100, 10_000, 20_000, 64
    sizes = library.Sizes(batch, 1, 1, longest, longest, head_dim, head_dim)
    offsets = library.offsets(torch.zeros(batch + 1, dtype=torch.int32))
    rows = library.Tensor4(4096, 0, head_dim, head_dim)
    params = library.BackwardParams(
        dtype=library.DTYPES[torch.bfloat16], sizes=sizes, varlen=library.VarlenParams(offsets, offsets, total_q=total)
    )
    for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv"):
        setattr(params, name, rows)
    assert kernels.choice(params)[0] == "sm80"
    sums = 4 * head_dim * (total + 64 * batch)
    assert sums < kernels.c.backward_workspace(ctypes.byref(params)) < 1.1 * sums


def test_forward_mode_is_simt_s(kernels):
    """Its kernel has no registers left for a sequence's own call."""
    offsets = library.offsets(torch.tensor([0, 64], dtype=torch.int32))
    params = library.JvpParams(
        dtype=library.DTYPES[torch.bfloat16], sizes=library.Sizes(1, 1, 1, 64, 64, 64, 64),
        varlen=library.VarlenParams(offsets, offsets, total_q=64, total_k=64),
    )  # fmt: skip
    for name in ("q", "k", "v", "out", "t_out"):
        setattr(params, name, library.Tensor4(4096, 0, 64, 64))
    tier, why_not = kernels.choice(params)
    assert (tier, why_not[1]) == ("simt", "sm80: no forward mode of packed sequences")
