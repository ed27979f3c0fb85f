"""The CUDA kernels, compiled for the host (tests/cuda_host), against the dense oracle.

A run fails on a wrong value, and on a race, an access out of bounds, memory that nobody wrote, or a deadlock.
"""

import ctypes
import re

import pytest
import test_contract
import test_hypothesis
import torch
from cuda_host import library
from helpers import check_against_reference, gradients, leaves, make_qkv
from hypothesis import given, settings

from flash_attn_ext import dropout_mask, flash_attn, new_rng_state

pytestmark = pytest.mark.usefixtures("kernels")

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_the_operators_run_the_cuda_kernels(kernels, monkeypatch, requires_grad):
    def refuse(*_, **__):
        raise library.KernelError("called")

    monkeypatch.setattr(kernels, "launch", refuse)
    q = torch.randn(1, 1, 4, 8, requires_grad=requires_grad)
    with pytest.raises(library.KernelError, match="called"):
        flash_attn(q, q, q)


# The CPU kernels' tests of hidden values, which must not reach a result, and of empty inputs.
test_a_partly_visible_nan = test_contract.test_a_partly_visible_nan_reaches_exactly_the_rows_that_see_it
test_a_nan_query_or_gradient = test_contract.test_a_nan_query_or_gradient_reaches_only_keys_that_it_attends_to
test_large_finite_mask_values = test_contract.test_large_finite_mask_values_are_not_minus_infinity
test_empty = test_contract.test_empty


@settings(max_examples=30)
@given(test_hypothesis.calls())
def test_any_call(call):
    test_hypothesis.test_any_call.hypothesis.inner_test(call)


# Tiles are 64 queries (16 with few of them) by 64 keys.
EDGES = [1, 2, 15, 16, 17, 63, 64, 65, 129]
LENGTHS = sorted({(n, n) for n in EDGES} | {(n, 70) for n in EDGES} | {(70, n) for n in EDGES})


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), LENGTHS)
def test_tile_edges(seqlen_q, seqlen_k):
    check_against_reference(*make_qkv(1, 1, seqlen_q, seqlen_k, 8), causal="lower_right")


# Chunks of 16 columns; slices of 64 up to 64 columns, of 128 beyond.
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(1, 1), (15, 16), (17, 3), (64, 64), (65, 63), (32, 128), (129, 130), (512, 257), (576, 512), (1024, 1000)],
)
def test_head_dims(head_dim, head_dim_v):
    check_against_reference(*make_qkv(1, 1, 20, 70, head_dim, head_dim_v))


@dtypes
@pytest.mark.parametrize("causal", ["upper_left", "lower_right"])
def test_all_options_together(dtype, causal):
    q, k, v = make_qkv(2, 4, 70, 131, 24, 40, heads_kv=2, dtype=dtype)
    mask = torch.randn(1, 4, 70, 131, dtype=dtype).masked_fill(torch.rand(1, 4, 70, 131) < 0.2, -torch.inf)
    slopes = torch.rand(2, 4, dtype=dtype).requires_grad_()
    check_against_reference(
        q, k, v, mask.requires_grad_(), alibi_slopes=slopes, causal=causal, window=(80, 100), softcap=5.0, dropout_p=0.2
    )


@dtypes
@pytest.mark.parametrize("seqlens", [(70, 131), (3, 131), (130, 67)], ids=str)
def test_sink(kernels, dtype, seqlens):
    """By every tier that can run the call: sm80 runs 16 bits. Some rows have no column but the sink."""
    q, k, v = make_qkv(2, 4, *seqlens, 16, heads_kv=2, dtype=dtype)
    mask = torch.rand(2, 1, *seqlens) > 0.3
    mask[:, :, 0] = False
    for sink in (torch.randn(4), torch.randn(2, 4, dtype=dtype)):
        check_against_reference(q, k, v, mask, causal="lower_right", sink=sink.requires_grad_())


def test_sink_of_split_keys(kernels):
    kernels.num_splits = 3
    check_against_reference(*make_qkv(1, 2, 4, 300, 32), sink=torch.randn(2).requires_grad_())


MASKS = [(70, 131), (1, 131), (70, 1), (1, 1), (2, 1, 1, 131), (2, 2, 1, 131), (1, 2, 1, 1)]


@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_mask_shapes(shape):
    q, k, v = make_qkv(2, 2, 70, 131, 8)
    check_against_reference(q, k, v, torch.rand(shape) > 0.3)
    check_against_reference(q, k, v, torch.randn(shape).requires_grad_())


class TestPartsOfABroadcastMasksGradient:
    """If many scores share each of few mask elements, blocks share the sum."""

    @staticmethod
    def workspace(kernels, sizes, mask_shape):
        params = library.BackwardParams(dtype=library.DTYPES[torch.float32], sizes=library.Sizes(*sizes))
        if mask_shape:
            params.dmask = library.MaskGrad(4096, *mask_shape)
        return kernels.c.backward_workspace(ctypes.byref(params)) // 4

    @pytest.mark.parametrize(
        ("shape", "parts"),
        [
            ((1, 1, 1, 1), 256),  # 2 * 8 * 64 * 64 tiles of scores
            ((1, 1, 1, 4096), 4),  # 64 tiles of the mask, 2 * 8 * 64 each
            ((2, 1, 1, 4096), 2),
            ((1, 1, 4096, 1), 4),
            ((1, 8, 1, 1), 32),
            ((1, 1, 4096, 4096), 0),  # enough blocks without sharing
            ((2, 8, 4096, 4096), 0),
        ],
    )
    def test_how_many(self, kernels, shape, parts):
        sizes = (2, 8, 8, 4096, 4096, 64, 64)
        extra = self.workspace(kernels, sizes, shape) - self.workspace(kernels, sizes, None)
        assert extra == parts * torch.Size(shape).numel()

    @pytest.mark.parametrize("shape", [(1, 1), (1, 200), (150, 1), (2, 3, 1, 1), (2, 1, 1, 200)], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def test_gradient(self, kernels, shape, dtype):
        full = (1,) * (4 - len(shape)) + shape
        sizes = (2, 3, 3, 150, 200, 8, 8)
        assert self.workspace(kernels, sizes, full) > self.workspace(kernels, sizes, None)
        q, k, v = make_qkv(2, 3, 150, 200, 8, dtype=dtype)
        mask = torch.randn(shape, dtype=dtype).requires_grad_()
        check_against_reference(q, k, v, mask, causal="lower_right", window=(90, 0), dropout_p=0.1)

    def test_the_same_bits_in_any_order(self, kernels):
        q, k, v = (t.detach() for t in make_qkv(2, 3, 150, 200, 8))
        mask, grad = torch.randn(1, 200).requires_grad_(), torch.randn(2, 3, 150, 8)
        results = []
        for seed in range(3):
            kernels.seed_order(seed)
            results += torch.autograd.grad(flash_attn(q, k, v, mask), mask, grad)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_float32_mask_on_other_inputs(dtype):
    q, k, v = make_qkv(1, 2, 20, 70, 8, dtype=dtype)
    mask = torch.randn(2, 20, 70)
    expected = flash_attn(q, k, v, mask.to(dtype) if dtype == torch.float64 else mask.to(dtype).float())
    given = mask if dtype == torch.float64 else mask.to(dtype)
    torch.testing.assert_close(flash_attn(q, k, v, given), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["causal", "bool", "float"])
def test_masked_values_cannot_poison(isa, dtype, kind, poison):
    test_contract.test_masked_values_cannot_poison(isa, dtype, poison, "both", kind)


def test_each_gradient_alone():
    q, k, v = make_qkv(1, 2, 20, 70, 8)
    slopes = torch.rand(2).requires_grad_()
    inputs = [q, k, v, slopes]
    out = flash_attn(q, k, v, alibi_slopes=slopes)
    grad = torch.randn_like(out)
    every = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    for wanted in ([0], [1], [2], [3], [1, 3]):
        some = torch.autograd.grad(out, [inputs[n] for n in wanted], grad, retain_graph=True)
        assert all(torch.equal(g, every[n]) for n, g in zip(wanted, some, strict=True))


@pytest.mark.parametrize("layout", ["B S H D", "S B H D", "slice of a wider row", "last dimension strided"])
def test_strided_inputs(layout):
    inputs = [t.detach() for t in make_qkv(2, 3, 20, 70, 24)]
    grad = torch.randn(2, 3, 20, 24)

    def run(tensors):
        tensors = [t.detach().requires_grad_() for t in tensors]
        out = flash_attn(*tensors, is_causal=True)
        return [out, *torch.autograd.grad(out, tensors, grad)]

    strided = [dict(test_contract.strided_versions(t))[layout] for t in inputs]
    for a, b in zip(run(inputs), run(strided), strict=True):
        assert torch.equal(a, b)


class TestTensorCores:
    """The sm80 tier: fp16 and bf16 from 17 queries on, head dimensions up to 256 in eights."""

    halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])

    @pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(17, 1), (127, 63), (128, 64), (129, 65), (130, 200)])
    @pytest.mark.parametrize("causal", ["upper_left", "lower_right"])
    def test_tile_edges(self, seqlen_q, seqlen_k, causal):
        check_against_reference(*make_qkv(1, 1, seqlen_q, seqlen_k, 64, dtype=torch.bfloat16), causal=causal)

    @halves
    @pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 8), (64, 64), (72, 16), (40, 128), (128, 128)])
    def test_head_dims(self, dtype, head_dim, head_dim_v):
        check_against_reference(*make_qkv(1, 4, 70, 150, head_dim, head_dim_v, heads_kv=2, dtype=dtype))

    @halves
    @pytest.mark.parametrize("causal", ["upper_left", "lower_right"])
    def test_all_options_together(self, dtype, causal):
        q, k, v = make_qkv(2, 4, 150, 131, 24, 40, heads_kv=2, dtype=dtype)
        mask = torch.randn(1, 4, 150, 131, dtype=dtype).masked_fill(torch.rand(1, 4, 150, 131) < 0.2, -torch.inf)
        slopes = torch.rand(2, 4, dtype=dtype)
        check_against_reference(
            q, k, v, mask, alibi_slopes=slopes, causal=causal, window=(80, 100), softcap=5.0, dropout_p=0.2
        )

    @pytest.mark.parametrize("poison", [torch.nan, torch.inf])
    def test_a_partly_visible_value_reaches_exactly_the_rows_that_see_it(self, poison):
        q, k, v = (t.detach() for t in make_qkv(1, 2, 150, 150, 64, dtype=torch.bfloat16))
        v[:, :, 40] = poison
        out = flash_attn(q, k, v, is_causal=True)
        clean = flash_attn(q, k, v.nan_to_num(0, 0, 0), is_causal=True)
        assert torch.equal(out[:, :, :40], clean[:, :, :40])
        assert not torch.isfinite(out[:, :, 40:]).any()

    def test_simt_runs_the_other_calls(self):
        """An odd head dimension and rows that are not aligned to 16 bytes give the same, by the other tier."""
        q, k, v = make_qkv(1, 2, 70, 150, 63, dtype=torch.float16)
        check_against_reference(q, k, v)
        wide = [torch.nn.functional.pad(t.detach(), (1, 1)) for t in make_qkv(1, 2, 70, 150, 64, dtype=torch.float16)]
        shifted = [t[..., 1:65] for t in wide]
        close = {"rtol": 0, "atol": 2e-3}
        torch.testing.assert_close(flash_attn(*shifted), flash_attn(*(t.contiguous() for t in shifted)), **close)


class TestDecode:
    """Few queries: the heads that share keys share a tile, and the keys are split over blocks."""

    @pytest.mark.parametrize("num_splits", [0, 1, 2, 3, 100])
    @pytest.mark.parametrize(("seqlen_q", "heads", "heads_kv"), [(1, 4, 1), (1, 2, 2), (5, 4, 2), (16, 3, 1)])
    def test_splits(self, kernels, num_splits, seqlen_q, heads, heads_kv):
        kernels.num_splits = num_splits
        check_against_reference(*make_qkv(1, heads, seqlen_q, 200, 32, heads_kv=heads_kv), causal="lower_right")

    def test_many_queries_are_split_too(self, kernels):
        kernels.num_splits = 3
        check_against_reference(*make_qkv(1, 2, 70, 300, 32, 130))

    @dtypes
    def test_options(self, kernels, dtype):
        kernels.num_splits = 4
        q, k, v = make_qkv(2, 4, 3, 250, 16, heads_kv=2, dtype=dtype)
        mask = torch.rand(2, 1, 3, 250) > 0.5
        mask[0, 0, 1] = False  # nothing visible
        mask[1, 0, :, 100:] = False  # whole splits with nothing visible
        check_against_reference(q, k, v, mask, window=(200, -1), softcap=3.0, alibi_slopes=torch.rand(4, dtype=dtype))

    def test_a_nan_crosses_no_split(self, kernels):
        kernels.num_splits = 4
        q, k, v = (t.detach() for t in make_qkv(1, 1, 2, 256, 16))
        k[:, :, 255] = v[:, :, 255] = torch.nan  # upper left: no query sees it
        assert torch.isfinite(flash_attn(q, k, v, causal="upper_left")).all()
        out = flash_attn(q, k, v, causal="lower_right")  # the last row sees it
        assert torch.isfinite(out[:, :, 0]).all()
        assert out[:, :, 1].isnan().all()

    def test_the_shape_decides(self, kernels):
        """One head and many keys: several splits, so a workspace; many heads: none."""
        sizes = {"heads": 1, "heads_kv": 1, "seqlen_q": 1, "seqlen_k": 8192, "head_dim": 64, "head_dim_v": 64}
        few, many = (library.AttentionParams(sizes=library.Sizes(batch=b, **sizes)) for b in (1, 512))
        assert kernels.c.forward_workspace(ctypes.byref(few)) > 0
        assert kernels.c.forward_workspace(ctypes.byref(many)) == 0


def test_dropout_mask_is_the_one_of_the_cpu():
    """Every device draws the same numbers."""
    state = new_rng_state()
    kept = dropout_mask(state, 2, 3, 40, 70, 0.3)[1, 2]
    expected = [[rule_keeps(state, 5, row, col, 0.3) for col in range(70)] for row in range(40)]
    assert torch.equal(kept, torch.tensor(expected))


def rule_keeps(state, head_index, row, col, p):
    """The rule of csrc/core/philox.h, from its text, in Python's integers."""
    low = 0xFFFFFFFF
    seed, offset = (int(x) & 0xFFFFFFFFFFFFFFFF for x in state)
    *key, last, _ = philox([offset & low, 0, 0, offset >> 32], [seed & low, seed >> 32])
    words = philox([col >> 1, (row >> 4) * 8 + (row & 7), head_index, last], key)
    return words[(row >> 3 & 1) * 2 + (col & 1)] >= round(p * 2**32)


def philox(counter, key):
    """Philox4x32-10."""
    low = 0xFFFFFFFF
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(second >> 32) ^ counter[1] ^ key[0], second & low, (first >> 32) ^ counter[3] ^ key[1], first & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter


def test_a_launch_that_is_too_large_is_an_error(kernels):
    sizes = library.Sizes(batch=1 << 23, heads=1 << 10, seqlen_q=64, seqlen_k=64)
    dropout = library.DropoutParams()
    with pytest.raises(library.KernelError, match="launch error"):
        kernels.check(kernels.c.dropout_mask(ctypes.byref(dropout), ctypes.byref(sizes), None))


def test_results_do_not_depend_on_the_order_of_threads_and_blocks(kernels):
    q, k, v = make_qkv(1, 4, 70, 131, 24, heads_kv=2)
    mask = torch.randn(1, 1, 1, 131).requires_grad_()
    slopes = torch.rand(4).requires_grad_()
    results = []
    for seed in range(3):
        kernels.seed_order(seed)
        inputs = leaves([q, k, v, mask, slopes])
        out = flash_attn(*inputs[:4], alibi_slopes=inputs[4], enable_gqa=True)
        results.append([out, *gradients([out], inputs, [torch.ones_like(out)])])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


# The kernels of tests/cuda_host/faulty.cu, and the reports that they must give.
FAULTS = {
    "missing_barrier_after_write": "race: |nobody wrote",
    "missing_barrier_before_overwrite": "race: ",
    "warp_barrier_between_warps": "race: |nobody wrote",
    "shuffle_taken_for_a_barrier": "race: ",
    "unwritten_shared_memory": "read of memory that nobody wrote: .* of shared memory",
    "shared_memory_out_of_bounds": "out of bounds: .* thread 63 writes 4 bytes",
    "write_out_of_bounds": "out of bounds: .* of|race between blocks",
    "read_out_of_bounds": "out of bounds: .* reads 4 bytes",
    "blocks_write_the_same": "race between blocks: .* of out",
    "divergent_barrier": "divergent barrier: .* faulty.cu:",
    "barrier_not_reached_by_all": r"deadlock .* thread 7 has ended; .*62 more waits in __syncthreads at faulty.cu:",
    "lane_outside_of_its_mask": "a lane is not in its own mask: __shfl_xor_sync at faulty.cu:",
    "shuffle_from_outside_of_the_mask": r"reads lane \d+, which is not in the mask: __shfl_xor_sync at faulty.cu:",
    "masks_that_differ": "meet with different masks: __syncwarp at faulty.cu:",
    "misaligned": "misaligned: ",
    "atomic_adds_to_unwritten_memory": "read of memory that nobody wrote",
    "atomic_adds_without_barrier": "race: |nobody wrote",
    "atomic_adds_and_plain_reads": "race: ",
    "async_copy_without_wait": "touched in flight: .* of shared memory",
    "async_copy_without_barrier": "touched in flight: |race: |nobody wrote",
    "async_copy_at_the_end": "the block ended before a copy by cp.async had been waited for",
    "copy_not_waited_for": "the block ended before a copy by TMA had landed",
    "bytes_that_never_come": "the block ended before an mbarrier had the bytes that it expects",
    "addition_without_proxy_fence": "a bulk copy reads bytes that a thread wrote, with no proxy fence",
    "proxy_fence_after_barrier": "with no proxy fence|race: a bulk copy reads bytes that its thread has not waited for",
    "addition_not_waited_for": "the block ended before a bulk copy had read its source",
    "addition_source_overwritten": "a thread overwrites bytes that a bulk copy still reads",
    "sums_read_by_a_block_that_adds": "race: .* of sums .*, which blocks of this launch change atomically",
    "turn_not_waited_for": "additions in no fixed order: .* 256 bytes",
    "turn_passed_too_early": "a turn ends before the added values are there",
    "turn_not_passed": "deadlock: waits for turn 1, it is turn 0",
    "turn_of_a_block_that_cannot_begin": "deadlock: waits for turn .*faulty_hopper.h:.*, block ",
    "registers_not_released": r"deadlock .* more waits in setmaxnreg.inc at faulty_hopper.h:",
    "registers_claimed_by_a_part": r"deadlock .* waits in setmaxnreg.dec at faulty_hopper.h:",
    "wgmma_fence_without_a_lane": "divergent barrier: .* wgmma(_fence)? at faulty_hopper.h:",
    "wgmma_without_a_lane": "divergent barrier: .* wgmma(_commit)? at faulty_hopper.h:",
    "wgmma_at_two_places": "divergent barrier: .* wgmma at faulty_hopper.h:.* wgmma at faulty_hopper.h:",
    "registers_released_to_more": "setmaxnreg.dec at line .* to more registers than 168",
    "pair_that_begins_alone": "mbarrier used before its initialisation is known",
    "pair_that_ends_alone": "a block may end before another block has arrived at its mbarrier",
    "other_block_not_waited_for": "TMA writes where another copy has not landed|race: TMA overwrites bytes",
    "mask_without_the_other_block": "deadlock .* in barrier_wait at faulty_cluster.h:",
    "mask_without_this_block": "deadlock .* in barrier_wait at faulty_cluster.h:",
    "mask_of_too_many_blocks": "the cluster has not all blocks of the mask 7",
    "bytes_of_one_half_expected": "touched in flight: .* of shared memory",
    "arrival_at_no_block": "the cluster has no block 2",
    "memory_of_the_other_block": "out of bounds: .* reads 4 bytes",
    "named_barrier_of_too_many": "deadlock .* thread 0 and 63 more waits in named_barrier_sync at faulty_hopper.h:",
}


CORRECT = ["", "_async_copy", "_atomic_adds", "_copy", "_turns", "_turns_by_number", "_named_barrier", "_registers"]
CORRECT += ["_pair"]


class TestReports:
    """The host run reports the fault of each kernel in faulty.cu."""

    @pytest.fixture
    def run(self, built):
        faulty = ctypes.CDLL(str(built.parent / "libfaulty.so"))
        faulty.run_faulty.restype = ctypes.c_char_p
        faulty.run_faulty.argtypes = [ctypes.c_char_p, ctypes.c_uint64]
        faulty.require_ordered_adds(True)

        def run(name, seed):
            return faulty.run_faulty(name.encode(), seed).decode()

        run.library = faulty
        return run

    @pytest.mark.parametrize("name", CORRECT)
    def test_a_correct_kernel_passes(self, run, name):
        assert [run(f"correct{name}", seed) for seed in range(5)] == [""] * 5

    def test_additions_in_any_order_pass_where_they_may(self, run):
        assert "no fixed order" in run("correct_addition", 0)
        run.library.require_ordered_adds(False)
        assert run("correct_addition", 0) == ""

    @pytest.mark.parametrize("fault", FAULTS)
    def test_fault_is_found_in_any_order(self, run, fault):
        for seed in range(5):
            assert re.search(FAULTS[fault], run(fault, seed))
