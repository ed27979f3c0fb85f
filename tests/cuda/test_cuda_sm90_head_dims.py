"""Head dimensions other than 64, 128 and 256 in the Hopper tier on the host (tests/cuda_host), against the dense
oracle: multiples of 8, also different for query and value. TMA fills the columns after the last column with zeros.
There are tiles for 96, 192, and 192 with 128 for value.

"""

import pytest
import torch
from cuda_host import library
from helpers import check_against_reference, check_forward_against_reference, make_qkv
from test_cuda_sm90_options import check, padding
from test_cuda_sm90_varlen import LONG
from test_cuda_varlen import check as check_packed

from flash_attn_ext import flash_attn


@pytest.fixture(autouse=True)
def kernels(built):
    # test_cuda_sm90_few_rows.py tests splits of the keys.
    with library.on_hopper(built, num_splits=1, deterministic=True) as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(8, 8), (40, 64), (64, 24), (72, 72), (96, 96), (32, 128), (128, 56), (192, 192), (192, 128), (136, 8), (16, 256)],
)
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "with options"])
def test_head_dims(kernels, head_dim, head_dim_v, plain):
    dtype = torch.float16 if head_dim % 32 else torch.bfloat16
    q, k, v = make_qkv(1, 2, 70, 135, head_dim, heads_kv=1, head_dim_v=head_dim_v, dtype=dtype)
    if plain:
        check(kernels, q, k, v, causal="lower_right")
    else:
        check(kernels, q, k, v, padding(1, 135, "left"), softcap=3.0, window=(60, 20))


# By head dimensions that have them: query rows and keys.
OWN_TILES = {(96, 96): (128, 128), (192, 128): (128, 128), (192, 192): (128, 112)}


@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("dims", OWN_TILES, ids=str)
def test_tile_edges_of_the_forward(kernels, dims, edge):
    """Heads share keys; several tasks a block where it is persistent; bands that end within a tile."""
    kernels.c.set_multiprocessors(2)
    rows, keys = OWN_TILES[dims]
    dtype, name = (torch.float16, "__half") if edge else (torch.bfloat16, "__nv_bfloat16")
    for seqlen_q, seqlen_k, heads_kv, options in (
        (rows + edge, keys + edge, 4, {}),
        (2 * rows + edge, 2 * keys + edge, 4, {"causal": "lower_right"}),
        (64 + edge, 3 * keys - 1 + edge, 4, {"causal": "upper_left"}),
        (rows, 2 * keys + 1, 2, {"window": (keys + edge, 5)}),
    ):
        head_dim, head_dim_v = dims[0] - 8 * (edge > 0), dims[1] - 8 * (edge < 0)
        inputs = make_qkv(1, 4, seqlen_q, seqlen_k, head_dim, heads_kv=heads_kv, head_dim_v=head_dim_v, dtype=dtype)
        check_forward_against_reference(*(t.detach() for t in inputs), **options)
        assert f"sm90::forward_kernel<{name}, {dims[0]}, {dims[1]}," in kernels.c.last_kernel().decode()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dims", OWN_TILES, ids=str)
def test_tile_edges_of_the_backward(kernels, dims, deterministic):
    """Tiles of 64 queries, and of 128 keys at 96 and 64 keys beyond. Columns of the last panel may not exist."""
    kernels.deterministic = deterministic
    keys, edge = 128 if dims[0] == 96 else 64, 1 if deterministic else -1
    dtype, name = (torch.float16, "__half") if deterministic else (torch.bfloat16, "__nv_bfloat16")
    for seqlen_q, seqlen_k, options in (
        (64 + edge, keys + edge, {}),
        (128 + edge, 2 * keys + edge, {"causal": "lower_right"}),
        (192, 2 * keys + 1, {"window": (keys + edge, 5)}),
    ):
        head_dim, head_dim_v = dims[0] - 8 * deterministic, dims[1] - 8 * (not deterministic)
        q, k, v = make_qkv(1, 2, seqlen_q, seqlen_k, head_dim, heads_kv=1, head_dim_v=head_dim_v, dtype=dtype)
        check_against_reference(q, k, v, **options)
        ran = kernels.c.last_kernel().decode()
        assert f"sm90::dq_kernel<{name}, " in ran
        assert f"Backward<{name}, {dims[0]}, {dims[1]}, true, false, false>" in ran


@pytest.mark.parametrize("head_dim", [96, 192])
def test_packed_sequences(kernels, head_dim):
    check_packed(kernels, LONG, torch.bfloat16, head_dim=head_dim, causal=True)
    assert b"sm90::dq_kernel" in kernels.c.last_kernel()


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(96, 96), (192, 128), (192, 192)])
@pytest.mark.parametrize("where", ["q", "k", "v", "dout"])
def test_poison_reaches_exactly_the_rows_that_depend_on_it(kernels, head_dim, head_dim_v, where):
    """As in test_cuda_sm90_backward.py: repairs read no column after the last column."""
    tensors = [t.detach() for t in make_qkv(1, 1, 150, 150, head_dim, head_dim_v=head_dim_v, dtype=torch.bfloat16)]
    inputs = dict(zip(("q", "k", "v", "dout"), (*tensors, torch.randn(1, 1, 150, head_dim_v).bfloat16()), strict=True))

    def run():
        leaves = [inputs[name].clone().requires_grad_() for name in "qkv"]
        out = flash_attn(*leaves, window=(20, 0))
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs["dout"])]

    clean = run()
    inputs[where][..., 100, -1] = torch.nan
    found = run()
    assert b"sm90::dq_kernel" in kernels.c.last_kernel()
    far = (torch.arange(150) < 80) | (torch.arange(150) > 120)
    for ours, expected in zip(found, clean, strict=True):
        torch.testing.assert_close(ours[:, :, far], expected[:, :, far], rtol=0, atol=0.02)
    assert any(ours[:, :, ~far].isnan().any() for ours in found)


def test_calls_that_are_not_supported(kernels):
    for head_dim, head_dim_v in ((100, 100), (64, 65), (264, 64)):
        with torch.no_grad():
            flash_attn(*make_qkv(1, 1, 20, 30, head_dim, head_dim_v=head_dim_v, dtype=torch.bfloat16))
        assert b"sm90" not in kernels.c.last_kernel()
