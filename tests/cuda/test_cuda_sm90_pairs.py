"""The backward of sm90 in pairs of blocks on the host (tests/cuda_host), with FLASH_ATTN_EXT_SM90_BACKWARD_PAIRS on.

A pair has 128 keys, 64 for each block.
"""

import random

import pytest
import test_cuda_sm90_backward as single
import torch
from cuda_host import library, mutations_sm90

SOURCE = "sm90/backward_bfloat16.cu"
INSTANCE = """#define FLASH_ATTN_EXT_SM90_BACKWARD_PAIRS 1
#include "backward_launch.cuh"

namespace flash_attn_ext::cuda::sm90 {

cudaError_t backward_bfloat16(const BackwardParams& p, void* workspace, cudaStream_t stream) {
  return launch_backward_head_dim<__nv_bfloat16, 256>(p, workspace, stream);
}

}  // namespace flash_attn_ext::cuda::sm90
"""
PAIRED = b"Backward<__nv_bfloat16, 256, 256, true, false, true>"


@pytest.fixture(scope="module")
def built_pairs(built, tmp_path_factory):
    return mutations_sm90.build_changed(tmp_path_factory.mktemp("pairs"), built, {SOURCE: INSTANCE}, {})


@pytest.fixture
def pairs(built_pairs):
    with library.on_hopper(built_pairs, deterministic=False) as loaded:
        yield loaded
        assert loaded.deterministic or PAIRED in loaded.c.last_kernel()


def check(pairs, *shape, **options):
    single.check(pairs, *single.make(*shape, 256), **options)


# Less than a tile of a block, the tiles of one block, an odd number of tiles, whole pairs.
@pytest.mark.parametrize("seqlen_k", [1, 5, 63, 64, 65, 128, 129, 191, 193, 256])
@pytest.mark.parametrize("options", [{}, {"causal": "lower_right"}], ids=str)
def test_numbers_of_keys(pairs, seqlen_k, options):
    for seqlen_q in (1, 64, 130):
        check(pairs, 1, 1, seqlen_q, seqlen_k, **options)


@pytest.mark.parametrize("causal", ["upper_left", "lower_right"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(130, 130), (260, 97), (97, 260), (40, 200)])
def test_causal(pairs, causal, seqlen_q, seqlen_k):
    check(pairs, 1, 1, seqlen_q, seqlen_k, causal=causal)


@pytest.mark.parametrize("window", [(0, 0), (3, 100), (130, -1), (-1, 70), (10, 10)], ids=str)
def test_windows(pairs, window):
    single.test_windows(pairs, 256, window, deterministic=False)


@pytest.mark.parametrize("seed", range(6))
def test_any_band(pairs, seed):
    """Both blocks of a pair must visit the same tiles. Otherwise one of them would wait for ever."""
    generator = random.Random(seed)
    seqlen_q, seqlen_k = generator.randint(1, 400), generator.randint(1, 400)
    window = (generator.randint(-1, 200), generator.randint(-1, 200))
    causal = generator.choice([None, "upper_left", "lower_right"])
    check(pairs, 1, 1, seqlen_q, seqlen_k, window=window, causal=causal)


@pytest.mark.parametrize(("heads", "heads_kv"), [(4, 2), (3, 1), (2, 2)])
def test_heads_and_batches(pairs, heads, heads_kv):
    inputs = single.make(2, heads, 140, 150, 256, heads_kv=heads_kv)
    single.check(pairs, *inputs, causal="lower_right", scale=0.3)


def test_narrower_heads(pairs):
    single.check(pairs, *single.make(1, 1, 70, 150, 200, 216), causal="lower_right")


def test_sink(pairs):
    q, k, v = single.make(1, 2, 70, 150, 256)
    single.check_against_reference(q, k, v, sink=torch.randn(2).requires_grad_())
    assert b"sink_gradient_kernel" in pairs.c.last_kernel()
    single.check(pairs, q, k, v)


def test_rows_and_keys_that_see_nothing(pairs):
    single.test_rows_and_keys_that_see_nothing(pairs, 256)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", single.REACHED)
def test_poison_reaches_exactly_the_rows_that_depend_on_it(pairs, where, poison):
    """Each block reads the tiles that only the other block sees, so it multiplies more hidden values by 0."""
    single.test_poison_reaches_exactly_the_rows_that_depend_on_it(pairs, 256, where, poison)


@pytest.mark.parametrize("options", [{}, dict(causal="lower_right"), dict(window=(100, 50))], ids=str)
def test_results_are_those_of_single_blocks(built, pairs, options):
    """dK and dV have the same bits, in any order of blocks, threads and copies. The additions to dQ have no order."""
    inputs = single.make(1, 2, 200, 300, 256, heads_kv=1)
    grads = [torch.randn(1, 2, 200, 256).bfloat16()]
    found = []
    for seed in range(3):
        pairs.seed_order(seed)
        found.append(single.run(inputs, grads, **options))
    assert PAIRED in pairs.c.last_kernel()
    with library.on_hopper(built, deterministic=False) as alone:
        expected = single.run(inputs, grads, **options)
        assert PAIRED not in alone.c.last_kernel()
    for results in found:
        for n, (a, b) in enumerate(zip(results, expected, strict=True)):
            torch.testing.assert_close(a, b, rtol=0, atol=0.01 if n == 2 else 0.0)


def test_a_deterministic_call_runs_in_single_blocks(pairs):
    pairs.deterministic = True
    check(pairs, 1, 1, 130, 200, causal="lower_right")
    assert PAIRED not in pairs.c.last_kernel()
