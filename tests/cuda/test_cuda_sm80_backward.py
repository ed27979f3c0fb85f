"""The backward on tensor cores of the sm80 tier, on the host (tests/cuda_host).

A test fails on a wrong value, and on a fault that the host run reports. It also fails if a gradient of finite inputs
holds a NaN, which csrc/cuda/sm80/repair.cuh would hide.
"""

import ctypes

import pytest
import torch
from cuda_host import library
from helpers import check_against_reference, gradients, leaves, make_qkv
from tolerances import assert_as_exact_as_torch

from flash_attn_ext import flash_attn

pytestmark = pytest.mark.usefixtures("kernels")

halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
orders = pytest.mark.parametrize("deterministic", [True, False], ids=["in turns", "in any order"])


def make(*shape, dtype=torch.bfloat16, **options):
    return make_qkv(*shape, dtype=dtype, **options)


# Tiles of 128 keys by 64 queries, 32 beyond a head dimension of 64. Head dimensions beyond 128 are in
# test_cuda_sm80_backward_head_dims.py.
@orders
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"), [(1, 1), (31, 127), (32, 128), (33, 129), (63, 5), (64, 256), (65, 300), (200, 17)]
)
def test_tile_edges(check, kernels, deterministic, head_dim, seqlen_q, seqlen_k):
    kernels.deterministic = deterministic
    check(*make(1, 1, seqlen_q, seqlen_k, head_dim))


@halves
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(8, 8), (64, 64), (72, 16), (40, 128), (128, 128)])
def test_head_dims(check, dtype, head_dim, head_dim_v):
    check(*make(1, 2, 70, 150, head_dim, head_dim_v, dtype=dtype))


@orders
@pytest.mark.parametrize("causal", ["upper_left", "lower_right"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(150, 150), (70, 300), (300, 70), (129, 257)])
def test_causal(check, kernels, deterministic, causal, seqlen_q, seqlen_k):
    kernels.deterministic = deterministic
    check(*make(1, 1, seqlen_q, seqlen_k, 32), causal=causal)


# With the window (0, 0) a key tile meets one query tile. With (-1, 3) and (3, -1) the first and the last queries see
# few keys.
@orders
@pytest.mark.parametrize("window", [(0, 0), (-1, 3), (3, -1), (100, 30), (1000, 1000)])
def test_window(check, kernels, deterministic, window):
    kernels.deterministic = deterministic
    check(*make(1, 1, 300, 280, 16), window=window)
    check(*make(1, 1, 70, 300, 72), window=window, causal="lower_right")


@halves
@pytest.mark.parametrize("causal", ["upper_left", "lower_right"])
def test_all_options_together(check, dtype, causal):
    q, k, v = make(2, 4, 150, 131, 24, 40, heads_kv=2, dtype=dtype)
    mask = torch.randn(1, 4, 150, 131, dtype=dtype).masked_fill(torch.rand(1, 4, 150, 131) < 0.2, -torch.inf)
    slopes = torch.rand(2, 4, dtype=dtype).requires_grad_()
    check(
        q, k, v, mask.requires_grad_(), alibi_slopes=slopes, causal=causal, window=(80, 100), softcap=5.0, dropout_p=0.2
    )


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_dropout(check, head_dim, p):
    check(*make(2, 2, 100, 150, head_dim), dropout_p=p)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_softcap(check, head_dim):
    check(*make(1, 1, 70, 150, head_dim), softcap=0.7)


@pytest.mark.parametrize("heads_kv", [1, 2, 6])
@orders
def test_grouped_queries(check, kernels, deterministic, heads_kv):
    kernels.deterministic = deterministic
    check(*make(2, 6, 70, 150, 32, heads_kv=heads_kv), causal="upper_left")


MASKS = [(70, 131), (1, 131), (70, 1), (1, 1), (2, 1, 1, 131), (2, 2, 1, 131)]


@pytest.mark.parametrize("shape", MASKS, ids=str)
def test_masks(check, shape):
    q, k, v = make(2, 2, 70, 131, 8)
    check(q, k, v, torch.rand(shape) > 0.3)
    check(q, k, v, torch.randn(shape, dtype=torch.bfloat16).requires_grad_())


def test_fully_masked_rows_have_no_gradient(check):
    q, k, v = make(1, 2, 100, 150, 64)
    mask = torch.rand(100, 150) > 0.3
    mask[40:] = False
    check(q, k, v, mask)
    for grad in torch.autograd.grad(flash_attn(q, k, v, torch.zeros_like(mask)).sum(), (q, k, v)):
        assert not grad.any()
    dq, _, _ = torch.autograd.grad(flash_attn(q, k, v, mask).sum(), (q, k, v))
    assert not dq[:, :, 40:].any()


def test_masks_of_large_negative_values(check):
    """An lse of -1e9 is not exact: P comes from the row's maximum and sum instead."""
    q, k, v = make(1, 1, 70, 150, 64)
    check(q, k, v, torch.full((70, 150), -1e9, dtype=torch.bfloat16))


@pytest.mark.parametrize("wanted", [[0], [1], [2], [3], [0, 3], [1, 2]], ids=str)
@orders
def test_each_gradient_alone(kernels, deterministic, wanted):
    kernels.deterministic = deterministic
    q, k, v = make(1, 2, 70, 150, 72)
    slopes = torch.rand(2).requires_grad_()
    inputs = [q, k, v, slopes]
    out = flash_attn(q, k, v, alibi_slopes=slopes)
    grad = torch.randn_like(out)
    every = torch.autograd.grad(out, inputs, grad, retain_graph=True)
    some = torch.autograd.grad(out, [inputs[n] for n in wanted], grad, retain_graph=True)
    for n, g in zip(wanted, some, strict=True):
        if n == 0 and not deterministic:
            torch.testing.assert_close(g, every[n], rtol=0.02, atol=1e-3)
        else:
            assert torch.equal(g, every[n])


def test_strided_tensors(kernels):
    """(B, S, H, D) in memory, and rows that are slices of wider rows."""
    inputs = [t.detach() for t in make(2, 3, 70, 150, 24)]
    grad = torch.randn(2, 3, 70, 24, dtype=torch.bfloat16)

    def run(tensors, grad):
        tensors = [t.detach().requires_grad_() for t in tensors]
        result = torch.autograd.grad(flash_attn(*tensors, is_causal=True), tensors, grad)
        assert kernels.flagged_tiles == 0
        return result

    def transposed(t):
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    def sliced(t):
        return torch.nn.functional.pad(t, (8, 16))[..., 8:-16]

    expected = run(inputs, grad)
    for strided in (transposed, sliced):
        for a, b in zip(expected, run([strided(t) for t in inputs], strided(grad)), strict=True):
            assert torch.equal(a, b)
    ones = torch.ones(1, 1, 1, 24, dtype=torch.bfloat16).expand(2, 3, 70, 24)
    for a, b in zip(run(inputs, ones.contiguous()), run(inputs, ones), strict=True):
        assert torch.equal(a, b)


def run_in_order(kernels, seed, inputs, grads):
    kernels.seed_order(seed)
    inputs = leaves(inputs)
    results = flash_attn(*inputs, enable_gqa=True, return_lse=True, is_causal=True)
    return gradients(results, inputs, grads)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_deterministic(kernels, head_dim):
    """With turns, no bit depends on the order of blocks. Without turns only the bits of dq do."""
    inputs = make(1, 4, 150, 300, head_dim, heads_kv=2)
    grads = [torch.randn(1, 4, 150, head_dim), torch.randn(1, 4, 150)]
    runs = {}
    for kernels.deterministic in (True, False):
        runs[kernels.deterministic] = [run_in_order(kernels, seed, inputs, grads) for seed in range(4)]
    for other in runs[True][1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[True][0], other, strict=True))
    for other in runs[False]:
        assert all(torch.equal(a, b) for a, b in zip(runs[True][0][1:], other[1:], strict=True))


class TestNotFinite:
    """NaN and Inf reach exactly the gradients of the elements that they are multiplied with."""

    @pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
    @pytest.mark.parametrize("poison", [torch.nan, torch.inf])
    def test_keys_that_no_query_sees(self, kernels, head_dim, poison):
        q, k, v = make(1, 2, 100, 200, head_dim)
        grad = torch.randn_like(q)
        expected = torch.autograd.grad(flash_attn(q, k, v, is_causal=True), (q, k, v), grad)
        with torch.no_grad():
            k[:, :, 100:] = poison
            v[:, :, 100:] = poison
        got = torch.autograd.grad(flash_attn(q, k, v, is_causal=True), (q, k, v), grad)
        assert kernels.flagged_tiles > 0
        for name, a, b in zip(("dq", "dk", "dv"), got, expected, strict=True):
            assert torch.isfinite(a).all()
            assert_as_exact_as_torch(name, a, b, b, 1)

    @pytest.mark.parametrize("head_dim", [64, 128])
    @pytest.mark.parametrize("which", ["q", "dout", "k", "v"])
    def test_a_nan_reaches_the_gradients_that_depend_on_it(self, which, head_dim):
        """The NaN is in row or key 40 of a causal call: row 40 is the first row that sees key 40, its last key."""
        q, k, v = make(1, 1, 100, 100, head_dim)
        tensors = {"q": q, "k": k, "v": v, "dout": torch.randn_like(q)}
        with torch.no_grad():
            tensors[which][:, :, 40] = torch.nan
        dq, dk, dv = torch.autograd.grad(flash_attn(q, k, v, is_causal=True), (q, k, v), tensors["dout"])
        rows = torch.arange(100)
        if which in ("q", "dout"):
            has_nan = {"dq": rows == 40, "dk": rows <= 40, "dv": rows <= 40}
        else:  # all rows from 40 on are NaN, and the gradients of all keys that they see
            has_nan = {"dq": rows >= 40, "dk": rows >= 0, "dv": rows >= 0 if which == "k" else rows < 0}
        for name, grad in (("dq", dq), ("dk", dk), ("dv", dv)):
            assert torch.equal(grad.isnan().all(-1)[0, 0], has_nan[name]), name
            assert torch.equal(grad.isnan().any(-1)[0, 0], has_nan[name]), name

    def test_only_tiles_that_are_not_finite_are_computed_again(self, kernels):
        """One of two batch elements holds a NaN. The gradients of the other keep their bits."""
        q, k, v = make(2, 1, 100, 200, 64)
        grad = torch.randn_like(q)
        expected = torch.autograd.grad(flash_attn(q, k, v, is_causal=True), (q, k, v), grad)
        with torch.no_grad():
            k[0, :, 110] = torch.nan  # in the tile that all queries visit, but no query sees it
        got = torch.autograd.grad(flash_attn(q, k, v, is_causal=True), (q, k, v), grad)
        assert kernels.flagged_tiles > 0
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a[1], b[1])

    @pytest.mark.parametrize(
        ("head_dim", "options"),
        [
            (64, {}),
            (64, dict(causal="lower_right")),
            (64, dict(window=(50, 0))),
            (64, dict(attn_mask=True)),
            (64, dict(dropout_p=0.25)),
            (256, dict(causal="lower_right")),
        ],
        ids=str,
    )
    def test_an_overflow_costs_next_to_nothing(self, kernels, head_dim, options):
        """All of dout is NaN, as after an overflow of GradScaler. Rows that must be NaN are not computed again."""
        length, options = 200, dict(options)
        q, k, v = (t.detach() for t in make(1, 1, length, length, head_dim))
        if "attn_mask" in options:
            options["attn_mask"] = torch.rand(length, length) < 0.9
        work = []
        for poison in (1.0, torch.nan):
            dout = torch.full((1, 1, length, head_dim), poison).bfloat16()
            before = kernels.c.exponentials()
            torch.manual_seed(0)
            inputs = [t.requires_grad_() for t in (q, k, v)]
            _, dk, dv = torch.autograd.grad(flash_attn(*inputs, **options), inputs, dout)
            work.append(kernels.c.exponentials() - before)
        assert dk.isnan().all()
        assert dv.isnan().all()
        # A few elements of each row of dq and of dk, by 32 lanes each.
        assert work[1] - work[0] <= 32 * 8 * length

    def test_a_gradient_too_large_for_float16_inside(self, kernels):
        """dS above 65504 is Inf in float16. The gradients are then not finite, so GradScaler takes a smaller factor."""
        q, k, v = (t.detach().requires_grad_() for t in make(1, 1, 32, 4, 64, dtype=torch.float16))
        with torch.no_grad():
            v *= 40
        grad = 2000 * torch.randn(1, 1, 32, 64).half()
        before = kernels.c.exponentials()
        out = flash_attn(q, k, v, scale=1e-3)
        forward = kernels.c.exponentials() - before
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), grad)
        assert not dq.isfinite().all()
        assert not dk.isfinite().all()
        assert dv.isfinite().all()
        assert kernels.c.exponentials() - before <= 4 * forward  # nothing is computed again


class TestSelector:
    def why_not(self, kernels, dtype=torch.bfloat16, head_dim=64, head_dim_v=64, **tensors):
        params = library.BackwardParams(
            dtype=library.DTYPES[dtype],
            sizes=library.Sizes(batch=1, heads=1, heads_kv=1, seqlen_q=70, seqlen_k=70, head_dim=head_dim,
                                head_dim_v=head_dim_v),
        )  # fmt: skip
        for name, tensor in tensors.items():
            setattr(params, name, tensor)
        return kernels.c.why_not_sm80_backward(ctypes.byref(params))

    def test_what_it_takes(self, kernels):
        for head_dim in (8, 64, 72, 128, 136, 256):
            assert self.why_not(kernels, head_dim=head_dim) is None
        assert self.why_not(kernels, dtype=torch.float16, head_dim=8, head_dim_v=256) is None

    def test_what_it_does_not_take(self, kernels):
        assert b"float16 and bfloat16" in self.why_not(kernels, dtype=torch.float32)
        assert b"up to 256" in self.why_not(kernels, head_dim=264)
        assert b"up to 256" in self.why_not(kernels, head_dim_v=264)
        assert b"not aligned" in self.why_not(kernels, head_dim=60)
        for name in ("q", "k", "v", "dout", "dq", "dk", "dv"):
            assert b"not aligned" in self.why_not(kernels, **{name: library.Tensor4(data=8)})
            assert b"not aligned" in self.why_not(kernels, **{name: library.Tensor4(data=16, stride_s=66)})

    def test_the_rest_is_left_to_simt(self, kernels):
        check_against_reference(*make(1, 2, 70, 150, 63))
        assert kernels.flagged_tiles == -1
