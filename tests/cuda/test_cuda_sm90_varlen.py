"""Packed sequences in the Hopper tier on the host (tests/cuda_host), against the dense oracle. TMA loads a sequence's
tiles from one map of all rows: the rows after the end of a sequence are the next sequence's rows.

Tiles: test_cuda_sm90.py; of the backward 64 queries by 128 keys, by 64 keys at head dimension 256.
"""

import ctypes

import pytest
import torch
from cuda_host import library
from test_cuda_sm80_varlen import NAMES, check_rows_that_are_not_used, hostile_offsets, inputs_of, orders, own_rows
from test_cuda_varlen import HEADS, LENGTHS, check, run

from flash_attn_ext import new_rng_state

LONG = [(130, 140), (0, 40), (64, 128), (33, 0), (193, 129), (1, 150)]  # several tiles both ways
head_dims = pytest.mark.parametrize("head_dim", [64, 128, 256])


@pytest.fixture(autouse=True)
def kernels(built):
    # test_cuda_sm90_few_rows.py tests splits of the keys.
    with library.on_hopper(built, num_splits=1) as loaded:
        yield loaded


def check_on_hopper(kernels, lengths, dtype=torch.bfloat16, **options):
    check(kernels, lengths, dtype, **options)
    assert b"sm90::" in kernels.c.last_kernel() or b"sink_gradient_kernel" in kernels.c.last_kernel()
    assert kernels.flagged_tiles == -1  # sm80's


@pytest.mark.parametrize(
    ("head_dim", "deterministic", "lower_right"),
    [(64, True, False), (64, False, True), (128, True, True), (256, True, False)],
)
def test_each_sequence_is_its_own(kernels, head_dim, deterministic, lower_right):
    check_on_hopper(kernels, LONG, head_dim=head_dim, causal=True, lower_right=lower_right, deterministic=deterministic)


@head_dims
def test_without_a_band(kernels, head_dim):
    check_on_hopper(kernels, LENGTHS, torch.float16, head_dim=head_dim)


def test_softcap_sink_and_mask(kernels):
    longest_k = max(n for _, n in LONG)
    mask = torch.rand(len(LONG), 1, 1, longest_k) > 0.3
    check_on_hopper(
        kernels, LONG, head_dim=64, sink=torch.randn(len(LONG), HEADS), softcap=2.0, causal=True,
        dtype_of_offsets=torch.int64,
    )  # fmt: skip
    inputs = inputs_of(LONG, head_dim=64)
    out, _, dq, dk, dv = run(kernels, *inputs, LONG, attn_mask=mask, causal=True)[:5]
    assert b"sm90::dq_kernel" in kernels.c.last_kernel()
    # The same for each padded sequence as a batch of one.
    kernels.c.set_compute_capability(8, 0)
    expected = run(kernels, *inputs, LONG, attn_mask=mask, causal=True)
    assert b"sm90" not in kernels.c.last_kernel()
    for ours, other in zip((out, dq, dk, dv), (expected[n] for n in (0, 2, 3, 4)), strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=0.02)


@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (128, False)])
def test_a_sequence_has_the_same_bits_alone_and_in_any_pack(kernels, head_dim, causal):
    inputs = inputs_of(LONG, head_dim=head_dim)
    options = {"causal": causal, "lower_right": True, "deterministic": True}
    together = own_rows(run(kernels, *inputs, LONG, **options), LONG)
    parts = [t.split([n[side] for n in LONG]) for t, side in zip(inputs, (0, 1, 1, 0), strict=True)]
    for lengths, alone, ours in zip(LONG, zip(*parts, strict=True), together, strict=True):
        if min(lengths) == 0 or lengths[0] <= 16:
            continue  # few queries alone go to sm80
        expected = next(own_rows(run(kernels, *alone, [lengths], **options), [lengths]))
        for name, a, b in zip(NAMES, ours, expected, strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("head_dim", "deterministic", "poison"),
    [(64, True, torch.nan), (64, False, torch.inf), (128, True, torch.inf), (256, False, torch.nan)],
)
def test_neighbours_never_enter_a_product(kernels, head_dim, deterministic, poison):
    """One whole sequence is NaN or Inf. It changes no other sequence, although TMA loads some of its rows for them."""
    lengths = [(70, 40), (20, 30), (30, 50)]
    inputs = inputs_of(lengths, head_dim=head_dim)
    options = {"causal": True, "lower_right": True, "deterministic": deterministic}
    clean = list(own_rows(run(kernels, *inputs, lengths, **options), lengths))
    poisoned, (queries, keys) = 1, lengths[0]
    for t, row, side in zip(inputs, (queries, keys, keys, queries), (0, 1, 1, 0), strict=True):
        t[row : row + lengths[1][side]] = poison
    found = list(own_rows(run(kernels, *inputs, lengths, **options), lengths))
    assert b"sm90::dq_kernel" in kernels.c.last_kernel()
    for b, (ours, expected) in enumerate(zip(found, clean, strict=True)):
        if b == poisoned:
            assert not torch.isfinite(ours[0]).any()
            continue
        for name, a, e in zip(NAMES, ours, expected, strict=True):
            torch.testing.assert_close(
                a, e, rtol=0.02, atol=0.02, msg=lambda text, name=name, b=b: f"{name} {b}: {text}"
            )


def test_rows_that_are_not_used_are_neither_read_nor_written(kernels):
    check_rows_that_are_not_used(kernels, LONG, head_dim=64)
    assert b"sm90::dq_kernel" in kernels.c.last_kernel()


@orders
@hostile_offsets
def test_hostile_offsets_read_nothing_outside(kernels, cu_seqlens, deterministic):
    """The host run checks every access. The results are not compared."""
    inputs = inputs_of([(90, 90)], head_dim=64)
    run(kernels, *inputs, [(40, 40)] * 3, cu_seqlens=cu_seqlens, causal=True, lower_right=True,
        deterministic=deterministic)  # fmt: skip
    assert b"sm90::dq_kernel" in kernels.c.last_kernel()


def params_of(kind, lengths, total, head_dim=64, **options):
    offsets = library.offsets(torch.zeros(len(lengths) + 1, dtype=torch.int32))
    longest = max(lengths)
    params = kind(
        dtype=library.DTYPES[torch.bfloat16], scale=0.125,
        sizes=library.Sizes(len(lengths), 1, 1, longest, longest, head_dim, head_dim),
        varlen=library.VarlenParams(offsets, offsets, total_q=total, total_k=total, **options),
    )  # fmt: skip
    for name in ("q", "k", "v", "out", *(("dout", "dq", "dk", "dv") if kind is library.BackwardParams else ())):
        setattr(params, name, library.Tensor4(4096, 0, head_dim, head_dim))
    return params


def test_sums_of_dq_grow_with_all_rows_not_with_the_longest(kernels):
    """One long sequence and many short sequences. In the workspace only the counts of tiles are padded to the
    longest."""
    params = params_of(library.BackwardParams, [10_000] + 99 * [100], 20_000)
    assert kernels.choice(params)[0] == "sm90"
    sums = 4 * 64 * (20_000 + 64 * 100)
    assert sums < kernels.c.backward_workspace(ctypes.byref(params)) < 1.1 * sums


def test_why_not(kernels):
    params = params_of(library.AttentionParams, [128, 128], 256)
    assert kernels.choice(params) == ("sm90", [])
    params.varlen.cu_seqlens_k = library.Offsets()
    assert kernels.choice(params)[1][0] == "sm90: no caches"
    params.varlen.cache.dtype = 2  # kFloat8E4M3
    assert "products of float8 only if query is float8 too" in kernels.choice(params)[1][0]
    assert kernels.choice(params_of(library.AttentionParams, [16, 16], 32))[0] == "sm80"
    state = new_rng_state(torch.device("cpu"))
    params = params_of(library.BackwardParams, [128, 128], 256)
    params.dropout = library.dropout_params(state, 0.5)
    assert kernels.choice(params)[1] == ["sm90: no ALiBi or dropout"]
