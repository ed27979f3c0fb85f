"""Forward mode on tensor cores (csrc/cuda/sm80/jvp.cuh), on the host.

Tiles are 128 queries by 64 keys, 32 beyond a head dimension of 64; up to 64 tiles of keys have two buffers each, beyond
one.
"""

import pytest
import test_contract
import torch
from cuda_host import library
from helpers import ADDED, check_jvp_against_reference, make_qkv

from flash_attn_ext import flash_attn

pytestmark = pytest.mark.usefixtures("kernels")

halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
head_dims = pytest.mark.parametrize("head_dim", [64, 128])


def make(*shape, dtype=torch.bfloat16, **options):
    return [t.detach() for t in make_qkv(*shape, dtype=dtype, **options)]


@pytest.fixture
def check(kernels):
    """check_jvp_against_reference(), and that it was this kernel."""

    def run(*inputs, **options):
        check_jvp_against_reference(*inputs, **options)
        assert b"sm80::jvp_kernel" in kernels.c.last_kernel()

    return run


@head_dims
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (127, 31), (128, 32), (129, 33), (130, 63), (17, 64), (17, 65), (17, 200)]
)
@pytest.mark.parametrize("causal", ["upper_left", "lower_right"])
def test_tile_edges(check, head_dim, seqlen_q, seqlen_k, causal):
    check(make(1, 1, seqlen_q, seqlen_k, head_dim), causal=causal)


@halves
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 8), (64, 64), (72, 16), (40, 128), (128, 128)])
def test_head_dims(check, dtype, head_dim, head_dim_v):
    check(make(1, 4, 70, 150, head_dim, head_dim_v, heads_kv=2, dtype=dtype))


@pytest.mark.parametrize("window", [(0, 0), (-1, 3), (3, -1), (100, 30)])
def test_window(check, window):
    check(make(1, 1, 300, 280, 16), window=window)


@head_dims
@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout(check, head_dim, p):
    check(make(2, 2, 100, 150, head_dim), dropout_p=p)


@head_dims
def test_softcap(check, head_dim):
    check(make(1, 1, 70, 150, head_dim), softcap=0.7, scale=0.5)


@halves
@pytest.mark.parametrize("head_dim", [24, 72])
def test_all_options_together(check, dtype, head_dim):
    inputs = make(2, 4, 140, 131, head_dim, 40, heads_kv=2, dtype=dtype)
    mask = torch.randn(1, 4, 140, 131).masked_fill(torch.rand(1, 4, 140, 131) < 0.2, -torch.inf)
    mask[0, 1, 130] = -torch.inf  # a row with only the sink's column
    inputs += [t.to(dtype) for t in (mask, torch.rand(2, 4), torch.randn(4))]
    check(inputs, causal="lower_right", window=(80, 100), softcap=5.0, dropout_p=0.2)


@pytest.mark.parametrize("name", ADDED)
def test_each_added_term_alone(check, name):
    """With a tangent, although nothing else needs more than the products."""
    shape = {"attn_mask": (70, 150), "alibi_slopes": (2,), "sink": (2, 2)}[name]
    check([*make(2, 2, 70, 150, 16), torch.rand(shape).bfloat16()], added=(name,))


def test_rows_that_see_nothing_do_not_move(check):
    q, k, v = make(1, 2, 140, 70, 64)
    mask = torch.rand(140, 70) > 0.3
    mask[100:] = False
    check([q, k, v], attn_mask=mask)
    check(make(1, 2, 20, 0, 64))


def test_a_large_mean_of_the_tangents(check):
    """The subtraction of mu cancels: mu reaches 1000, and t_out is of order 1."""
    q, k, v = make(1, 1, 40, 200, 16, dtype=torch.float16)
    mask = torch.zeros(40, 200)
    tangents = [torch.zeros_like(q), torch.zeros_like(k), torch.randn_like(v), 1000 + torch.randn_like(mask)]
    check([q, k, v, mask], tangents)


@head_dims
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["k", "v", "t_k", "t_v"])
def test_hidden_values_reach_no_result(head_dim, where, poison):
    """Of a causal call, key 40 is seen from row 40 on."""
    primals = make(1, 2, 150, 150, head_dim)
    tangents = make(1, 2, 150, 150, head_dim)

    def run(primals, tangents):
        attend = lambda *x: flash_attn(*x, is_causal=True, return_lse=True)  # noqa: E731
        (out, lse), (t_out, t_lse) = torch.func.jvp(attend, tuple(primals), tuple(tangents))
        return out, lse[..., None], t_out, t_lse[..., None]

    clean = run(primals, tangents)
    side = tangents if where.startswith("t_") else primals
    poisoned = dict(zip(("q", "k", "v"), side, strict=True))[where[-1]]
    poisoned[:, :, 40] = poison
    got = run(primals, tangents)
    for a, b in zip(got, clean, strict=True):
        assert torch.equal(a[:, :, :40], b[:, :, :40])
    assert not torch.isfinite(got[2][:, :, 40:]).any()
    if where.startswith("t_"):
        assert torch.equal(got[0], clean[0])


def test_inputs_without_a_tangent(kernels):
    """Each input alone has a tangent, or no input. The results equal the results with tangents of zeros."""
    inputs = make(1, 2, 20, 70, 64)
    zeros, tangents = ([f(t) for t in inputs] for f in (torch.zeros_like, torch.randn_like))
    for with_tangent in (0, 1, 2, None):
        given = [tangents[n] if n == with_tangent else None for n in range(3)]
        full = [tangents[n] if n == with_tangent else zeros[n] for n in range(3)]
        results, expected = (
            torch.ops.flash_attn_ext.attention_jvp(*t, None, None, None, *inputs, softcap=2.0) for t in (given, full)
        )
        assert b"sm80::jvp_kernel" in kernels.c.last_kernel()
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@head_dims
def test_strided_inputs_and_tangents(head_dim):
    primals, tangents = (tuple(make(2, 2, 20, 70, head_dim)) for _ in range(2))
    expected = torch.func.jvp(flash_attn, primals, tangents)
    strided = [
        tuple(dict(test_contract.strided_versions(t))["B S H D"].detach() for t in side) for side in (primals, tangents)
    ]
    for a, b in zip(torch.func.jvp(flash_attn, *strided), expected, strict=True):
        assert torch.equal(a, b)


@head_dims
def test_results_do_not_depend_on_the_order_of_threads_and_blocks(kernels, head_dim):
    primals, tangents = (tuple(make(1, 2, 150, 100, head_dim)) for _ in range(2))
    attend = lambda *x: flash_attn(*x, is_causal=True, return_lse=True)  # noqa: E731
    results = []
    for seed in range(3):
        kernels.seed_order(seed)
        (out, lse), (t_out, t_lse) = torch.func.jvp(attend, primals, tangents)
        results.append((out, lse, t_out, t_lse))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def params_of(**changed):
    """A call that this tier can run, unless it is changed."""
    head_dim = changed.pop("head_dim", 64)
    rows = library.Tensor4(4096, 2 * 64 * head_dim, 64 * head_dim, head_dim)
    params = library.JvpParams(
        dtype=library.DTYPES[torch.bfloat16], sizes=library.Sizes(1, 2, 2, 64, 64, *[head_dim] * 2)
    )
    for name in ("q", "k", "v", "out", "t_out"):
        setattr(params, name, rows)
    for name, tensor in changed.items():
        setattr(params if name == "t_out" else params.tangents, name, tensor)
    return params


def test_which_calls_it_takes(kernels):
    reason = "sm80: a tensor's rows are not aligned to 16 bytes"
    odd = library.Tensor4(4098, 128, 64, 64)
    not_sm90 = "sm90: this GPU has compute capability 8.0; wgmma and TMA need 9.0"
    assert kernels.choice(params_of()) == ("sm80", [not_sm90])
    for changed in ({"q": odd}, {"k": odd}, {"v": odd}, {"t_out": odd}):
        assert kernels.choice(params_of(**changed))[1][1:] == [reason]
    tier, why_not = kernels.choice(params_of(head_dim=136))
    assert (tier, why_not[1]) == ("simt", "sm80: its forward mode takes only head dimensions up to 128")
    with kernels.on_gpu(9, 0):
        assert kernels.choice(params_of()) == ("sm80", ["sm90: no forward-mode AD"])


def test_larger_ones_go_to_simt(kernels):
    inputs = tuple(make(1, 1, 20, 30, 136))
    torch.func.jvp(flash_attn, inputs, inputs)
    assert b"simt::jvp_kernel" in kernels.c.last_kernel()
