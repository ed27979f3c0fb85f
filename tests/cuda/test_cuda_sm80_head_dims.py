"""The sm80 forward above head dimension 128 (csrc/cuda/sm80/forward.cuh) on the host.

Tiles are 128 queries by 32 keys; up to 192 K and V have two buffers each, beyond one. Plain calls beyond 192 have 64
keys, on GPUs with 163 KB of shared memory.
"""

import pytest
import test_contract
import torch
from helpers import check_forward_against_reference, make_qkv

from flash_attn_ext import flash_attn

pytestmark = pytest.mark.usefixtures("kernels")

halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
head_dims = pytest.mark.parametrize("head_dim", [192, 256])


def make(*shape, dtype=torch.bfloat16, **options):
    return [t.detach() for t in make_qkv(*shape, dtype=dtype, **options)]


def check(kernels, *inputs, **options):
    """out and lse by the kernel under test, against the oracle."""
    results = check_forward_against_reference(*inputs, **options)
    assert b"sm80::forward_kernel" in kernels.c.last_kernel()
    return results


@head_dims
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [(17, 1), (127, 31), (128, 32), (129, 33), (127, 63), (128, 64), (129, 65), (130, 100), (17, 0)],
)
@pytest.mark.parametrize("causal", ["upper_left", "lower_right"])
def test_tile_edges(kernels, head_dim, seqlen_q, seqlen_k, causal):
    check(kernels, *make(1, 1, seqlen_q, seqlen_k, head_dim), causal=causal)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)], ids=["163 KB", "99 KB"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(127, 127), (128, 128), (129, 129), (260, 300)])
def test_plain_calls_by_the_shared_memory_of_the_gpu(kernels, capability, head_dim, seqlen_q, seqlen_k):
    with kernels.on_gpu(*capability):
        check(kernels, *make(1, 1, seqlen_q, seqlen_k, head_dim), causal="lower_right")
    keys = {64: 128, 128: 64, 256: 64} if capability == (8, 0) else {64: 128, 128: 32, 256: 32}
    assert f", {head_dim}, {keys[head_dim]}, 1, false".encode() in kernels.c.last_kernel()


@halves
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(136, 136), (192, 64), (64, 192), (200, 200), (256, 8), (8, 248), (256, 256)]
)
def test_head_dims(kernels, dtype, head_dim, head_dim_v):
    check(kernels, *make(1, 4, 70, 90, head_dim, head_dim_v, heads_kv=2, dtype=dtype))


@halves
@head_dims
def test_all_options_together(kernels, head_dim, dtype):
    q, k, v = make(2, 2, 140, 131, head_dim, 152, heads_kv=1, dtype=dtype)
    mask = torch.randn(1, 2, 140, 131, dtype=dtype).masked_fill(torch.rand(1, 2, 140, 131) < 0.2, -torch.inf)
    mask[0, 1, 130] = -torch.inf  # a row without a visible key
    check(
        kernels, q, k, v, mask, alibi_slopes=torch.rand(2, 2, dtype=dtype), causal="lower_right", window=(80, 100),
        softcap=5.0, dropout_p=0.2,
    )  # fmt: skip


@head_dims
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_partly_visible_value_reaches_exactly_the_rows_that_see_it(kernels, head_dim, poison):
    q, k, v = make(1, 2, 150, 150, head_dim)
    v[:, :, 40] = poison
    out = flash_attn(q, k, v, is_causal=True)
    clean = flash_attn(q, k, v.nan_to_num(0, 0, 0), is_causal=True)
    assert torch.equal(out[:, :, :40], clean[:, :, :40])
    assert not torch.isfinite(out[:, :, 40:]).any()


@head_dims
def test_strided_inputs(kernels, head_dim):
    inputs = make(2, 2, 20, 70, head_dim)
    expected = flash_attn(*inputs)
    strided = [dict(test_contract.strided_versions(t))["B S H D"].detach() for t in inputs]
    assert torch.equal(check(kernels, *strided)[0], expected)


@head_dims
def test_results_do_not_depend_on_the_order_of_threads_and_blocks(kernels, head_dim):
    inputs = make(1, 1, 150, 100, head_dim)
    results = []
    for seed in range(3):
        kernels.seed_order(seed)
        results.append(flash_attn(*inputs, is_causal=True))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_larger_ones_go_elsewhere(kernels):
    check_forward_against_reference(*make(1, 1, 20, 30, 264))
    assert b"simt::forward_kernel" in kernels.c.last_kernel()
