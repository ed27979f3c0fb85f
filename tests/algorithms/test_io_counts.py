"""The theorems of the papers, on counts that the algorithms make as they run.

The closed forms stand here once. flash_attn_ext.reference and flash_attn_ext.iomodel know none of them: they count.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from block_masks import BLOCK_MASKS

from flash_attn_ext import new_rng_state
from flash_attn_ext.reference import (
    block_sparse,
    flash1,
    flash2,
    flash3_schedule,
    flash_decoding,
    flash_decoding_pp,
    softmax,
    standard,
)
from flash_attn_ext.reference.dropout import Dropout
from flash_attn_ext.reference.memory import SlowMemory

pytestmark = pytest.mark.usefixtures("one_thread")


def shapes(*sizes, dtype=torch.float16):
    """Tensors without values: the algorithms run on shapes alone and count the same."""
    return [torch.empty(size, dtype=dtype, device="meta") for size in sizes]


def count_standard(N, d, M=None):
    forward, backward = SlowMemory(M), SlowMemory(M)
    q, k, v, dout = shapes(*[(N, d)] * 4)
    _, saved = standard.forward(q, k, v, M=M, memory=forward)
    standard.backward(q, k, v, dout, saved, M=M, memory=backward)
    return forward, backward


def count_flash1(N, d, M):
    forward, backward = SlowMemory(), SlowMemory()
    q, k, v, dout = shapes(*[(N, d)] * 4)
    out, l, m = flash1.forward(q, k, v, M=M, memory=forward)
    flash1.backward(q, k, v, out, dout, l, m, M=M, memory=backward)
    return forward, backward


def count_block_sparse(N, d, M, block_mask):
    forward, backward = SlowMemory(), SlowMemory()
    q, k, v, dout = shapes(*[(N, d)] * 4)
    out, l, m = block_sparse.forward(q, k, v, block_mask, M=M, memory=forward)
    block_sparse.backward(q, k, v, out, dout, l, m, block_mask, M=M, memory=backward)
    return forward, backward


def every_nth_block(shape, n):
    """A block mask with a share of 1 / n of the blocks; n = 0: none."""
    numbers = torch.arange(shape[0] * shape[1]).view(shape)
    return numbers % n == 0 if n else torch.zeros(shape, dtype=torch.bool)


def count_flash2(N, d, block_q=64, block_k=64, M=None):
    forward, backward = SlowMemory(M), SlowMemory(M)
    q, k, v, dout = shapes(*[(N, d)] * 4)
    out, lse = flash2.forward(q, k, v, block_q=block_q, block_k=block_k, memory=forward)
    flash2.backward(q, k, v, out, dout, lse, block_q=block_q, block_k=block_k, memory=backward)
    return forward, backward


def slope(xs, ys):
    """The exponent e of y ~ x^e, between the two largest x."""
    return math.log(ys[-1] / ys[-2]) / math.log(xs[-1] / xs[-2])


class TestCountedEqualsPredicted:
    """Elements read and written, exactly, over N, d and M; N is no multiple of the blocks."""

    @pytest.mark.parametrize("N", [1, 100, 1000])
    @pytest.mark.parametrize("d", [16, 64])
    def test_standard(self, N, d):
        forward, backward = count_standard(N, d)
        # S, P: written and read once each. q, k, v, out once each.
        assert forward.accesses == 4 * N * N + 4 * N * d
        # dV reads P; dP is written; dS reads P and dP and is written; dQ and dK read dS.
        # q, k, v once, dout twice (dV, dP), three results.
        assert backward.accesses == 7 * N * N + 8 * N * d
        assert forward.chip.matmul_flops == 2 * 2 * N * N * d
        assert backward.chip.matmul_flops == 4 * 2 * N * N * d
        # scale 1; max, subtract, exp, sum, divide 5
        assert forward.chip.other_flops == 6 * N * N
        # delta 2, subtract 1, multiply by P 1; the scale on dq and dk
        assert backward.chip.other_flops == 4 * N * N + 2 * N * d
        assert (forward.extra_elements, backward.extra_elements) == (2 * N * N, 2 * N * N)

    def test_standard_as_five_kernels(self):
        """With mask and dropout: mask reads and writes S, dropout reads P and writes it and Z, and so backwards."""
        N, d = 100, 16
        q, k, v, mask = shapes((N, d), (N, d), (N, d), (N, N))
        dropout = Dropout(0.1, new_rng_state())
        forward, backward = SlowMemory(), SlowMemory()
        _, saved = standard.forward(q, k, v, mask=mask, dropout=dropout, memory=forward)
        standard.backward(q, k, v, v, saved, dropout=dropout, memory=backward)
        assert forward.traffic["Z"].itemsize == 1
        assert forward.accesses == (4 + 3 + 3) * N * N + 4 * N * d  # mask itself is read too
        assert backward.accesses == (7 + 3) * N * N + 8 * N * d

    @pytest.mark.parametrize("N", [1, 100, 1000])
    @pytest.mark.parametrize("d", [16, 64])
    @pytest.mark.parametrize("M", [1000, 30_000, 10**6])
    def test_flash1(self, N, d, M):
        forward, backward = count_flash1(N, d, M)
        T_c = math.ceil(N / math.ceil(M / (4 * d)))
        # k and v once; for each block of k one round of q, out, l and m; the first values. A round reads and writes
        # out, l and m.
        assert forward.accesses == 2 * N * d + T_c * (3 * N * d + 4 * N) + N * d + 2 * N
        # k, v, dk, dv once; a round of q, dout, out, dq (read and written), l and m; dq's zeros.
        assert backward.accesses == 4 * N * d + T_c * (5 * N * d + 2 * N) + N * d
        assert forward.chip.matmul_flops == 2 * 2 * N * N * d
        assert backward.chip.matmul_flops == 5 * 2 * N * N * d
        assert (forward.extra_elements, backward.extra_elements) == (2 * N, 0)

    @pytest.mark.parametrize("N", [1, 100, 1000])
    @pytest.mark.parametrize("d", [16, 64])
    @pytest.mark.parametrize("M", [4000, 30_000])
    @pytest.mark.parametrize("block_mask_of", BLOCK_MASKS.values(), ids=BLOCK_MASKS)
    def test_block_sparse(self, N, d, M, block_mask_of):
        block_mask = block_mask_of(block_sparse.grid(N, N, d, M))
        forward, backward = count_block_sparse(N, d, M, block_mask)
        B_c, B_r = flash1.block_sizes(M, d)
        queries = torch.tensor([min(B_r, N - start) for start in range(0, N, B_r)])
        keys = torch.tensor([min(B_c, N - start) for start in range(0, N, B_c)])
        visits = int((queries[:, None] * block_mask).sum())  # of a query by a block of keys
        scores = int((queries[:, None] * keys * block_mask).sum())
        # flash1's counts; T_c N becomes `visits`, and N N becomes `scores`
        assert forward.accesses == 2 * N * d + visits * (3 * d + 4) + N * d + 2 * N
        assert backward.accesses == 4 * N * d + visits * (5 * d + 2) + N * d
        assert forward.chip.matmul_flops == 2 * 2 * scores * d
        assert backward.chip.matmul_flops == 5 * 2 * scores * d
        # A score: scale, max, exp 2, sum, multiply. A visit: correct and divide O; 9 for m and l.
        assert forward.chip.other_flops == 6 * scores + visits * (2 * d + 9)
        # A score: scale, exp 2, divide, subtract, multiply, scale. A visit: delta.
        assert backward.chip.other_flops == 7 * scores + visits * 2 * d
        assert (forward.extra_elements, backward.extra_elements) == (2 * N, 0)
        assert forward.traffic["k"].reads == N * d, "K is loaded once, whatever the block mask hides"

    @pytest.mark.parametrize("N", [1, 100, 1000])
    @pytest.mark.parametrize("d", [16, 64])
    @pytest.mark.parametrize(("block_q", "block_k"), [(48, 64), (64, 48), (9, 7), (2000, 2000)])
    def test_flash2(self, N, d, block_q, block_k):
        forward, backward = count_flash2(N, d, block_q, block_k)
        T_r, T_c = math.ceil(N / block_q), math.ceil(N / block_k)
        # q and out once; a round of k and v for each block of q; lse.
        assert forward.accesses == 2 * N * d + T_r * 2 * N * d + N
        # delta: dout, out, delta; k, v, dk, dv once; a round of q, dout, dq (twice), lse, delta; dq's zeros.
        assert backward.accesses == 2 * N * d + N + 4 * N * d + T_c * (4 * N * d + 2 * N) + N * d
        assert forward.chip.matmul_flops == 2 * 2 * N * N * d
        assert backward.chip.matmul_flops == 5 * 2 * N * N * d
        assert (forward.extra_elements, backward.extra_elements) == (N, N)

    @pytest.mark.parametrize("n", [1, 1000, 5000])
    def test_softmax(self, n):
        """Reads + writes of an element: 3 + 1 in the safe softmax, 2 + 1 in the online and the naive softmax."""
        for function, passes in ((softmax.naive_softmax, 2), (softmax.safe_softmax, 3), (softmax.online_softmax, 2)):
            memory = SlowMemory(256 + 16)  # a block and its scratch: nothing grows with n
            function(*shapes((3, n)), block=256, memory=memory)
            assert (memory.reads, memory.writes) == (passes * 3 * n, 3 * n)

    @pytest.mark.parametrize("splits", [1, 4, 8])
    def test_decoding(self, splits):
        """k and v once, q once a split, and partial results that do not depend on the number of keys."""
        n, N, d = 2, 4096, 64
        q, k, v = shapes((n, d), (N, d), (N, d))
        memory = SlowMemory()
        flash_decoding.decode(q, k, v, num_splits=splits, memory=memory)
        assert memory.accesses == 2 * N * d + splits * n * d + splits * 2 * (n * d + n) + n * d + n
        memory = SlowMemory()
        flash_decoding_pp.decode(q, k, v, num_splits=splits, memory=memory)
        assert memory.accesses == 2 * N * d + splits * n * d + splits * 2 * (n * d + 2 * n) + n * d + 2 * n

    @pytest.mark.parametrize("schedule", flash3_schedule.SCHEDULES)
    def test_flash3(self, schedule):
        """No schedule changes the results. The warpgroups of a block share one copy of k and v."""
        N, d = 512, 64
        memory = SlowMemory()
        flash3_schedule.forward(*shapes(*[(N, d)] * 3), schedule=schedule, block_q=128, memory=memory)
        assert memory.accesses == count_flash2(N, d, block_q=128)[0].accesses
        assert memory.chip.matmul_flops == 4 * N * N * d


def test_unified_maximum_rescales_nothing():
    """FlashDecoding++ needs no maximum, no rescaling exp and no multiplication of O: fewer FLOPs outside the GEMMs."""
    q, k, v = shapes((4, 64), (8192, 64), (8192, 64))
    counts = []
    for module in (flash_decoding, flash_decoding_pp):
        memory = SlowMemory()
        module.decode(q, k, v, num_splits=8, memory=memory)
        counts.append(memory.chip)
    assert counts[0].matmul_flops == counts[1].matmul_flops
    assert counts[1].exponentials == 4 * 8192 < counts[0].exponentials


class TestTheorems:
    """N, d and M vary, and the exponents are fitted to the counts."""

    @pytest.mark.parametrize("count", [count_standard, lambda N, d: count_flash1(N, d, 16384), count_flash2])
    def test_flops_grow_as_N2_d(self, count):
        lengths = [1024, 2048, 4096]
        total = [sum(m.flops for m in count(N, 64)) for N in lengths]
        assert slope(lengths, total) == pytest.approx(2, abs=0.01)
        dims = [64, 128, 256]  # the softmax's part does not grow with d
        products = [sum(m.chip.matmul_flops for m in count(1024, d)) for d in dims]
        assert slope(dims, products) == 1

    def test_extra_memory_is_linear_in_N_and_not_with_the_standard_algorithm(self):
        lengths = [1024, 2048, 4096]
        for count in (lambda N: count_flash1(N, 64, 16384), lambda N: count_flash2(N, 64)):
            assert slope(lengths, [sum(m.extra_elements for m in count(N)) for N in lengths]) == 1
        assert slope(lengths, [sum(m.extra_elements for m in count_standard(N, 64)) for N in lengths]) == 2

    @pytest.mark.parametrize("d", [16, 64, 128])
    @pytest.mark.parametrize("M", [3 * 128 * 128, 10**6])
    def test_standard_accesses_are_Nd_plus_N2(self, d, M):
        """Theta: the ratio stays between two constants, for every chip that holds d x d elements."""
        for N in (256, 1024, 4096):
            for memory, least in zip(count_standard(N, d, M), (4, 7), strict=True):
                assert least <= memory.accesses / (N * d + N * N) <= 5 * least

    @pytest.mark.parametrize("d", [16, 64, 128])
    def test_flash_accesses_are_N2_d2_over_M(self, d):
        """Theta, for M from 8 d to N d: one lower and one upper constant hold for all N and M."""
        ratios = []
        for N in (512, 2048):
            for M in (d * 64, N * d // 4, N * d):
                for memory in count_flash1(N, d, M):
                    ratios.append(memory.accesses / (N * N * d * d / M))
        assert min(ratios) >= 12
        assert max(ratios) <= 40

    @pytest.mark.parametrize("d", [16, 64, 128])
    def test_block_sparse_accesses_are_Nd_plus_s_N2_d2_over_M(self, d):
        """Proposition 4. Theta: one lower and one upper constant hold for all N, M and s, also for s = 0."""
        ratios = []
        for N in (512, 2048):
            for M in (d * 64, N * d // 4, N * d):
                for n in (0, 1, 2, 8, 32):
                    block_mask = every_nth_block(block_sparse.grid(N, N, d, M), n)
                    s = block_mask.double().mean().item()
                    for memory in count_block_sparse(N, d, M, block_mask):
                        ratios.append(memory.accesses / (N * d + s * N * N * d * d / M))
        assert min(ratios) >= 3
        assert max(ratios) <= 40

    def test_block_sparse_counts_are_proportional_to_s(self):
        """Exactly: FLOPs are s times the FLOPs of all blocks. Accesses are, too, after the accesses without blocks."""
        N, d, M = 2048, 64, 16384
        shape = block_sparse.grid(N, N, d, M)
        nothing, everything = (count_block_sparse(N, d, M, every_nth_block(shape, n)) for n in (0, 1))
        dense = count_flash1(N, d, M)
        for n in (2, 4, 16, 64):
            counted = count_block_sparse(N, d, M, every_nth_block(shape, n))
            for some, none, every in zip(counted, nothing, everything, strict=True):
                assert n * some.flops == every.flops
                assert n * (some.accesses - none.accesses) == every.accesses - none.accesses
        assert [memory.flops for memory in nothing] == [0, 0]
        for every, flash in zip(everything, dense, strict=True):
            assert (every.accesses, every.flops, every.chip.peak) == (flash.accesses, flash.flops, flash.chip.peak)

    def test_flash_accesses_fall_as_one_over_M(self):
        N, d = 8192, 64
        sizes = [2**13, 2**14, 2**15]
        for which in (0, 1):
            accesses = [count_flash1(N, d, M)[which].accesses for M in sizes]
            assert slope(sizes, accesses) == pytest.approx(-1, abs=0.07)

    def test_flash_accesses_grow_as_N2_and_d2(self):
        lengths, dims, M = [2048, 4096, 8192], [32, 64, 128], 2**14
        for which in (0, 1):
            assert slope(lengths, [count_flash1(N, 64, M)[which].accesses for N in lengths]) == pytest.approx(
                2, abs=0.05
            )
            assert slope(dims, [count_flash1(4096, d, M)[which].accesses for d in dims]) == pytest.approx(2, abs=0.05)

    def test_flash_accesses_less_than_standard_if_d2_is_small_against_M(self):
        N, d, M = 1024, 64, 65536
        for flash, dense in zip(count_flash1(N, d, M), count_standard(N, d), strict=True):
            assert flash.accesses < dense.accesses / 4


class TestTheChip:
    def test_flash1_needs_M_up_to_a_constant(self):
        """B_c = M / 4d fits k, v, q and out into M. The score tile needs further memory if d >= sqrt(M) / 2."""
        forward, backward = count_flash1(1024, 64, 65536)
        assert forward.chip.peak <= 65536
        for d in (32, 64, 128):
            for M in (16384, 65536):
                forward, backward = count_flash1(1024, d, M)
                assert forward.chip.peak <= 1.3 * M + 8 * d
                assert backward.chip.peak <= 2.6 * M + 8 * d

    def test_tiles_that_exceed_it_are_refused(self):
        with pytest.raises(MemoryError, match=r"tiles: got \d+ elements; allowed: 16500, the on-chip size M"):
            count_flash2(1024, 64, block_q=64, block_k=64, M=16_500)
        count_flash2(1024, 64, block_q=64, block_k=64, M=38_000)

    @pytest.mark.parametrize("M", [3000, 20_000])
    def test_standard_keeps_to_it(self, M):
        for memory in count_standard(500, 64, M):
            assert memory.chip.peak <= M

    def test_it_is_empty_afterwards(self):
        sparse = count_block_sparse(100, 16, 2000, every_nth_block(block_sparse.grid(100, 100, 16, 2000), 3))
        for memory in (*count_standard(100, 16), *count_flash1(100, 16, 2000), *sparse, *count_flash2(100, 16)):
            assert memory.chip.in_use == 0
            assert memory.chip.peak > 0

    def test_a_tile_of_the_wrong_shape_is_refused(self):
        memory = SlowMemory()
        t = memory.put("t", torch.zeros(4, 4))
        with pytest.raises(ValueError, match=r"tile: got shape \(4, 4\); allowed: \(2, 4\)"):
            t.store(t.load(), slice(0, 2))
        with pytest.raises(ValueError, match="the same inner size"):
            t.load() @ t.load(slice(0, 2))
        with pytest.raises(ValueError, match="x: got 3 dimensions; allowed: 2"):
            memory.put("x", torch.zeros(1, 1, 1))


def test_shapes_alone_count_as_values_do():
    """Every algorithm, with mask and dropout: on the meta device and on numbers."""
    dropout = Dropout(0.2, new_rng_state())

    def count(real):
        def tensor(*size):
            return torch.randn(size) if real else torch.empty(size, device="meta")

        q, k, v, dout, mask = tensor(70, 16), tensor(90, 16), tensor(90, 12), tensor(70, 12), tensor(70, 90)
        memories = [SlowMemory() for _ in range(11)]
        a, b, c, d, e, f, g, h, n, r, s = memories
        x = SimpleNamespace(mask=mask, dropout=dropout)
        options = vars(x)
        _, saved = standard.forward(q, k, v, M=500, memory=a, **options)
        standard.backward(q, k, v, dout, saved, M=500, dropout=dropout, memory=b)
        out, l, m = flash1.forward(q, k, v, M=1000, memory=c, **options)
        flash1.backward(q, k, v, out, dout, l, m, M=1000, memory=d, **options)
        sparse = options | {"M": 1000, "block_mask": every_nth_block(block_sparse.grid(70, 90, 16, 1000), 3)}
        out, l, m = block_sparse.forward(q, k, v, memory=r, **sparse)
        block_sparse.backward(q, k, v, out, dout, l, m, memory=s, **sparse)
        out, lse = flash2.forward(q, k, v, memory=e, block_q=32, **options)
        flash2.backward(q, k, v, out, dout, lse, memory=f, block_q=32, **options)
        flash3_schedule.forward(q, k, v, mask=mask, memory=g)
        flash_decoding.decode(q, k, v, num_splits=3, mask=mask, memory=h)
        flash_decoding_pp.decode(q, k, v, num_splits=3, mask=mask, memory=n)
        return [(m.traffic, m.flops, m.chip.exponentials, m.chip.peak, m.extra_elements) for m in memories]

    assert count(real=True) == count(real=False)
