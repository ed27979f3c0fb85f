"""The sm80 backward above head dimension 128 (csrc/cuda/sm80/backward.cuh) on the host.

Tiles are 64 keys by 32 queries, and two warps share 16 keys. Up to 192 Q has two buffers; beyond, one, and the last 64
columns of V lie in registers.
"""

import ctypes

import pytest
import torch
from cuda_host import library
from helpers import check_against_reference, make_qkv
from test_cuda_sm80_backward import run_in_order

from flash_attn_ext import flash_attn

pytestmark = pytest.mark.usefixtures("kernels")

head_dims = pytest.mark.parametrize("head_dim", [192, 256])
orders = pytest.mark.parametrize("deterministic", [True, False], ids=["in turns", "in any order"])


def make(*shape, dtype=torch.bfloat16, **options):
    return make_qkv(*shape, dtype=dtype, **options)


@head_dims
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "deterministic"),
    [(1, 1, True), (31, 63, False), (32, 64, True), (33, 65, False), (15, 129, True), (70, 17, False)],
)
def test_tile_edges(check, kernels, deterministic, head_dim, seqlen_q, seqlen_k):
    kernels.deterministic = deterministic
    check(*make(1, 1, seqlen_q, seqlen_k, head_dim))


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "dtype"),
    [
        (136, 136, torch.float16),
        (192, 128, torch.bfloat16),
        (72, 160, torch.float16),
        (200, 8, torch.bfloat16),  # nothing in the last columns of V
        (8, 248, torch.float16),
        (256, 200, torch.bfloat16),
        (256, 256, torch.float16),
    ],
)
def test_head_dims(check, head_dim, head_dim_v, dtype):
    check(*make(1, 2, 40, 70, head_dim, head_dim_v, dtype=dtype))


@orders
@pytest.mark.parametrize(("head_dim", "causal"), [(144, "upper_left"), (256, "lower_right")])
def test_grouped_queries_and_bands(check, kernels, head_dim, causal, deterministic):
    kernels.deterministic = deterministic
    check(*make(1, 4, 70, 150, head_dim, heads_kv=2), causal=causal)
    check(*make(1, 2, 100, 90, head_dim, heads_kv=1), causal=causal, window=(40, 10))


@pytest.mark.parametrize(("head_dim", "dtype"), [(192, torch.bfloat16), (256, torch.float16)])
def test_all_options_together(check, head_dim, dtype):
    q, k, v = make(2, 2, 70, 131, head_dim, 216, heads_kv=1, dtype=dtype)
    mask = torch.randn(1, 2, 70, 131, dtype=dtype).masked_fill(torch.rand(1, 2, 70, 131) < 0.2, -torch.inf)
    slopes = torch.rand(2, 2, dtype=dtype).requires_grad_()
    check(
        q, k, v, mask.requires_grad_(), alibi_slopes=slopes, causal="lower_right", window=(80, 100), softcap=5.0,
        dropout_p=0.2,
    )  # fmt: skip


@pytest.mark.parametrize("wanted", [[0], [1, 2]], ids=["dq", "dk and dv"])
def test_each_gradient_alone(kernels, wanted):
    kernels.deterministic = True
    inputs = make(1, 1, 70, 70, 256)
    out = flash_attn(*inputs)
    grad = torch.randn_like(out)
    every = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    some = torch.autograd.grad(out, [inputs[n] for n in wanted], grad)
    assert all(torch.equal(g, every[n]) for n, g in zip(wanted, some, strict=True))


@head_dims
def test_strided_tensors(kernels, head_dim):
    """Rows that are slices of wider rows. The other columns are NaN."""
    inputs = [t.detach() for t in make(1, 2, 40, 70, head_dim)]
    grad = torch.randn(1, 2, 40, head_dim, dtype=torch.bfloat16)

    def run(tensors, grad):
        tensors = [t.detach().requires_grad_() for t in tensors]
        return torch.autograd.grad(flash_attn(*tensors, is_causal=True), tensors, grad)

    def sliced(t):
        return torch.nn.functional.pad(t, (8, 16), value=torch.nan)[..., 8:-16]

    expected = run(inputs, grad)
    for a, b in zip(expected, run([sliced(t) for t in inputs], sliced(grad)), strict=True):
        assert torch.equal(a, b)
    assert kernels.flagged_tiles == 0


@head_dims
def test_deterministic(kernels, head_dim):
    """In turns, the bits do not depend on the order of threads and blocks."""
    kernels.deterministic = True
    inputs = make(1, 2, 70, 150, head_dim, heads_kv=1)
    grads = [torch.randn(1, 2, 70, head_dim), torch.randn(1, 2, 70)]
    first, *repeated = (run_in_order(kernels, seed, inputs, grads) for seed in range(3))
    for other in repeated:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("column", [5, 250])
def test_a_nan_of_v_reaches_the_gradients_that_depend_on_it(column):
    """In one column of value row 40: a column in shared memory and a column in registers."""
    q, k, v = make(1, 1, 70, 100, 256)
    with torch.no_grad():
        v[:, :, 40, column] = torch.nan
    dq, dk, dv = torch.autograd.grad(flash_attn(q, k, v, is_causal=True), (q, k, v), torch.randn_like(q))
    rows = torch.arange(70)
    assert torch.equal(dq.isnan().all(-1)[0, 0], rows >= 40)
    assert torch.equal(dq.isnan().any(-1)[0, 0], rows >= 40)
    assert dk[:, :, :70].isnan().all()
    assert not dk[:, :, 70:].any()
    assert torch.isfinite(dv).all()


@pytest.mark.parametrize(("head_dim", "padded"), [(136, 192), (256, 256)])
def test_the_workspace_holds_dq_in_fp32(kernels, head_dim, padded):
    """Of whole tiles of 32 queries."""
    sizes = library.Sizes(1, 2, 1, 70, 300, head_dim, head_dim)
    params = library.BackwardParams(dtype=library.DTYPES[torch.bfloat16], sizes=sizes)
    for name in ("q", "k", "v", "out", "dout", "dk", "dv"):
        setattr(params, name, library.Tensor4(4096, 0, 0, head_dim))
    assert kernels.choice(params)[0] == "sm80"
    without = kernels.c.backward_workspace(ctypes.byref(params))
    params.dq = params.q
    assert kernels.c.backward_workspace(ctypes.byref(params)) - without == 2 * 96 * padded * 4


def test_larger_ones_are_left_to_simt(kernels):
    check_against_reference(*make(1, 1, 20, 40, 264))
    assert kernels.flagged_tiles == -1
