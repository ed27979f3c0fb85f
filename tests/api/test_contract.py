"""The promises of docs/contract.md: masked rows, NaN, empty and strided tensors, determinism, memory."""

import os
import subprocess
import sys

import pytest
import reference
import torch
from helpers import check_against_reference, gradients, leaves, make_qkv
from tolerances import EPS, ULPS_16BIT
from torch.nn.functional import scaled_dot_product_attention as sdpa

from flash_attn_ext import dropout_mask, flash_attn, new_rng_state

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@pytest.mark.any_device
@dtypes
@pytest.mark.parametrize("kind", ["bool", "float", "causal"])
def test_a_fully_masked_row_is_zero(isa, dtype, kind):
    q, k, v = make_qkv(2, 2, 100, 70, 16, dtype=dtype)
    mask, causal = None, None
    if kind == "causal":  # lower right, S_q > S_k: the first 30 rows have no visible key
        causal, dead = "lower_right", torch.arange(100) < 30
    else:
        dead = torch.rand(100) < 0.3
        mask = ~dead[:, None].expand(100, 70)
        if kind == "float":
            mask = torch.zeros(100, 70, dtype=dtype).masked_fill(~mask, -torch.inf).requires_grad_()
    out, lse = flash_attn(q, k, v, mask, causal=causal, return_lse=True)
    assert (out[:, :, dead] == 0).all()
    assert (lse[:, :, dead] == -torch.inf).all()
    assert torch.isfinite(lse[:, :, ~dead]).all()
    inputs = [q, k, v, mask]
    grads = gradients([out, lse], inputs, [torch.randn_like(out), torch.randn_like(lse)])
    assert all(torch.isfinite(g).all() for g in grads)
    assert (grads[0][:, :, dead] == 0).all()
    if kind == "float":
        assert (grads[3][dead] == 0).all()
    check_against_reference(q, k, v, mask, causal=causal)


@pytest.mark.any_device
@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -1e30, -1e9, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_finite_mask_values_are_not_minus_infinity(isa, dtype, value):
    """Masks of finfo.min or -1e9 (as Hugging Face's): a row with only these values is uniform, as in torch, not zero.

    Next to 1e9, lse cannot hold log(S_k). The gradients must still equal the gradients of a uniform row.
    """
    q, k, v = make_qkv(2, 2, 100, 130, 16, dtype=dtype)
    mask = torch.zeros(100, 130).masked_fill(torch.rand(100, 130) < 0.5, value)
    mask[[0, 40, 99]] = value
    grad = torch.randn(2, 2, 100, 16)
    results = []
    for attention in (lambda *a: flash_attn(*a, return_lse=True), reference.attention):
        inputs = leaves([q, k, v], torch.float32 if attention is reference.attention else None)
        inputs.append(mask.clone().requires_grad_())
        outputs = attention(*inputs)
        results.append([outputs[0], *gradients(outputs[:1], inputs, [grad])])
    assert torch.isfinite(outputs[1]).all()
    half = 0.03 if dtype == torch.bfloat16 else 0
    for ours, theirs in zip(*results, strict=True):
        tolerance = half + (5e-3 if value == -1e4 else 2e-5)  # at 1e4 an ulp of a score is 1e-3
        torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=tolerance * max(1, theirs.abs().max().item()))


def test_torch_gives_nan_where_we_give_zero():
    """The reason for the contract: if torch changes its mind, the README must change too."""
    q, k, v = (torch.randn(1, 1, 4, 8, requires_grad=True) for _ in range(3))
    mask = torch.zeros(4, 4).masked_fill(torch.tensor([True, False, False, False])[:, None], -torch.inf)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        theirs = torch.softmax(q @ k.transpose(-1, -2) + mask, -1) @ v
    assert theirs[0, 0, 0].isnan().all()
    assert (flash_attn(q, k, v, mask)[0, 0, 0] == 0).all()


@pytest.mark.any_device
@dtypes
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["key", "value", "both"])
@pytest.mark.parametrize("kind", ["causal", "window", "bool", "float", "padding"])
def test_masked_values_cannot_poison(isa, dtype, poison, where, kind):
    """Infinite or NaN inputs in masked positions change neither out, nor lse, nor any gradient."""
    q, k, v = make_qkv(2, 2, 70, 150, 24, dtype=dtype)
    mask, options = None, {}
    bad = torch.zeros(150, dtype=torch.bool)
    bad[[5, 63, 64, 100, 149]] = True
    if kind == "causal":  # upper left: no query sees keys from 70 on, and only the last row sees key 69
        bad[:] = torch.arange(150) >= 70
        options = {"causal": "upper_left"}
    elif kind == "window":  # query i sees keys i + 75 to i + 80
        bad[:] = (torch.arange(150) < 75) | (torch.arange(150) > 149)
        options = {"window": (5, 0)}
    elif kind == "bool":
        mask = (torch.rand(70, 150) > 0.2) & ~bad
    elif kind == "float":
        mask = torch.randn(70, 150, dtype=dtype).masked_fill(bad, -torch.inf)
    else:
        mask = ~bad[None, None, None, :]
    clean = flash_attn(q, k, v, mask, return_lse=True, **options)
    poisoned = [t.detach().clone().requires_grad_() for t in (q, k, v)]
    with torch.no_grad():
        for name, t in (("key", poisoned[1]), ("value", poisoned[2])):
            if where in (name, "both"):
                t[:, :, bad] = poison
    dirty = flash_attn(*poisoned, mask, return_lse=True, **options)
    grads = [torch.randn_like(clean[0]), torch.randn_like(clean[1])]

    def close(a):
        """Kernels on tensor cores compute rows again that a NaN would reach, with other roundings of P and dS."""
        is_16_bit = dtype in (torch.bfloat16, torch.float16)
        return {"rtol": 0, "atol": ULPS_16BIT * EPS[dtype] * a.abs().max().item()} if is_16_bit else {}

    for a, b in zip(clean, dirty, strict=True):
        if a.is_cuda:
            torch.testing.assert_close(a, b, **close(a))
        else:
            assert torch.equal(a, b)
    for a, b in zip(gradients(clean, [q, k, v], grads), gradients(dirty, poisoned, grads), strict=True):
        assert torch.isfinite(b).all()
        torch.testing.assert_close(a, b, **close(a))


@pytest.mark.any_device
@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_a_partly_visible_nan_reaches_exactly_the_rows_that_see_it(isa, poison, softcap):
    """Causal: key and value 40 hold the poison. It must reach rows from 40 on, and no row before 40."""
    q, k, v = make_qkv(1, 1, 100, 100, 16)
    with torch.no_grad():
        v[:, :, 40] = poison
    out = flash_attn(q, k, v, is_causal=True, softcap=softcap)
    assert torch.isfinite(out[:, :, :40]).all()
    assert not torch.isfinite(out[:, :, 40:]).any()
    with torch.no_grad():
        k[:, :, 40] = torch.nan
    out, lse = flash_attn(q, k, v, is_causal=True, softcap=softcap, return_lse=True)
    assert torch.isfinite(out[:, :, :40]).all()
    assert lse[:, :, 40:].isnan().all()


@pytest.mark.any_device
def test_a_nan_query_or_gradient_reaches_only_keys_that_it_attends_to(isa):
    q, k, v = make_qkv(1, 1, 100, 100, 16)
    with torch.no_grad():
        q[:, :, 30] = torch.nan
    out = flash_attn(q, k, v, is_causal=True)
    assert out[:, :, 30].isnan().all()
    assert torch.isfinite(out[:, :, torch.arange(100) != 30]).all()
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert torch.isfinite(dq[:, :, torch.arange(100) != 30]).all()
    for grad in (dk, dv):
        assert torch.isfinite(grad[:, :, 31:]).all()
        assert grad[:, :, :31].isnan().all()


@pytest.mark.any_device
@pytest.mark.parametrize(
    ("batch", "heads", "seqlen_q", "seqlen_k"),
    [(0, 2, 5, 7), (2, 0, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0), (2, 2, 0, 0), (0, 0, 0, 0)],
)
def test_empty(batch, heads, seqlen_q, seqlen_k):
    q, k, v = make_qkv(batch, heads, seqlen_q, seqlen_k, 8, 4)
    mask = torch.zeros(seqlen_q, seqlen_k, requires_grad=True)
    for options in ({}, {"causal": "lower_right"}, {"dropout_p": 0.5}):
        out, lse = flash_attn(q, k, v, mask, return_lse=True, **options)
        assert out.shape == (batch, heads, seqlen_q, 4)
        assert lse.shape == (batch, heads, seqlen_q)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
        for t, g in zip((q, k, v, mask), torch.autograd.grad(out.sum(), (q, k, v, mask)), strict=True):
            assert g.shape == t.shape
            assert (g == 0).all()


def strided_versions(t):
    batch, heads, seqlen, dim = t.shape
    yield "B S H D", t.transpose(1, 2).contiguous().transpose(1, 2)
    yield "S B H D", t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    wide = torch.randn(batch, heads, seqlen, dim + 3)
    wide[..., 1 : dim + 1] = t
    yield "slice of a wider row", wide[..., 1 : dim + 1]
    yield "last dimension strided", t.transpose(2, 3).contiguous().transpose(2, 3)
    flat = torch.empty(t.numel() + 1)
    flat[1:] = t.reshape(-1)
    yield "misaligned", flat[1:].view(t.shape)


@pytest.mark.any_device
@pytest.mark.parametrize("which", [0, 1, 2])
def test_strided_and_misaligned_inputs(isa, which):
    inputs = [t.detach() for t in make_qkv(2, 3, 70, 70, 24)]
    expected = flash_attn(*inputs, is_causal=True)
    grad = torch.randn_like(expected)
    expected_grads = run_backward(inputs, grad)
    for name, strided in strided_versions(inputs[which]):
        assert torch.equal(strided, inputs[which])
        arguments = [*inputs[:which], strided, *inputs[which + 1 :]]
        assert torch.equal(flash_attn(*arguments, is_causal=True), expected), name
        for a, b in zip(run_backward(arguments, grad), expected_grads, strict=True):
            assert torch.equal(a, b), name


def run_backward(inputs, grad):
    inputs = [t.detach().requires_grad_() for t in inputs]
    return torch.autograd.grad(flash_attn(*inputs, is_causal=True), inputs, grad)


@pytest.mark.any_device
def test_broadcast_inputs_are_read_in_place():
    q, k, v = (torch.randn(1, 1, 33, 16).expand(3, 4, 33, 16) for _ in range(3))
    assert torch.equal(flash_attn(q, k, v), flash_attn(q.contiguous(), k.contiguous(), v.contiguous()))


def test_out_follows_the_memory_order_of_query():
    q, k, v = (torch.randn(2, 10, 4, 8).transpose(1, 2) for _ in range(3))
    out = flash_attn(q, k, v)
    assert out.transpose(1, 2).is_contiguous()
    assert flash_attn(*(t.contiguous() for t in (q, k, v))).is_contiguous()


@pytest.mark.any_device
@pytest.mark.parametrize("stride_0", [True, False])
def test_odd_gradients_of_out(stride_0):
    q, k, v = make_qkv(2, 2, 20, 30, 8)
    out = flash_attn(q, k, v)
    grad = torch.ones(()).expand(out.shape) if stride_0 else torch.randn(2, 2, 8, 20).transpose(2, 3)
    expected = torch.autograd.grad(sdpa(q, k, v), (q, k, v), grad)
    for a, b in zip(torch.autograd.grad(out, (q, k, v), grad), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("batch", "heads", "heads_kv"), [(1, 1, 1), (1, 4, 1), (2, 6, 2), (3, 4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bitwise_equal_for_any_thread_count(isa, threads, batch, heads, heads_kv, dtype):
    q, k, v = make_qkv(batch, heads, 150, 333, 24, heads_kv=heads_kv, dtype=dtype)
    mask = torch.randn(1, heads, 150, 333, dtype=dtype).requires_grad_()
    slopes = torch.rand(heads, dtype=dtype).requires_grad_()
    rng_state = new_rng_state()
    results = []
    for count in (1, 2, 4):
        threads(count)
        inputs = leaves([q, k, v, mask, slopes])
        outputs = flash_attn(
            *inputs[:4], dropout_p=0.2, causal="lower_right", alibi_slopes=inputs[4], enable_gqa=True,
            return_lse=True, rng_state=rng_state,
        )  # fmt: skip
        torch.manual_seed(1)
        results.append([*outputs, *gradients(outputs, inputs, [torch.randn_like(o) for o in outputs])])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": "upper_left"}, {"window": (70, 5)}, {"nan": True}], ids=str)
def test_blocks_that_share_tiles_give_the_same_bits(isa, threads, dtype, options):
    """With one thread, two blocks of 48 queries share the tiles of K and V. With eight they do not."""
    q, k, v = torch.randn(3, 2, 4, 200, 40).to(dtype)
    if options.get("nan"):  # the mask hides a NaN from the first block only
        v[:, :, 130] = torch.nan
        mask = torch.ones(200, 200, dtype=torch.bool)
        mask[:48, 130] = False
        options = {"attn_mask": mask}
    results = []
    for count in (1, 8):
        threads(count)
        results.append(flash_attn(q, k, v, **options, return_lse=True))
    for one, eight in zip(*results, strict=True):
        assert torch.equal(one.nan_to_num(7.0), eight.nan_to_num(7.0))
    if "attn_mask" in options:
        assert results[0][0][:, :, :48].isfinite().all()
        assert results[0][0][:, :, 48:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_lse_of_16_bit_inputs_is_nearly_float32s(isa, dtype):
    """The exponential of 16-bit probabilities has a relative error below 2.7e-6. It does not grow with the keys."""
    q, k, v = torch.randn(1, 2, 50, 64).to(dtype), *torch.randn(2, 1, 2, 3000, 64).to(dtype)
    _, lse = flash_attn(q, k, v, return_lse=True)
    exact = torch.logsumexp(q.double() @ k.double().mT / 8, -1)
    assert (lse - exact).abs().max() < 6e-6


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (90, 20)])
def test_gradients_of_many_blocks_for_any_thread_count(isa, threads, window):
    """Blocks of keys take turns at dQ; at a window's end a block waits for no other block."""
    q, k, v = make_qkv(1, 2, 650, 700, 8, dtype=torch.float64)
    distance = torch.arange(700) - torch.arange(650)[:, None] - (700 - 650)
    left, right = (700 if n < 0 else n for n in window)
    grad = torch.randn_like(q)
    seen = (-left <= distance) & (distance <= right)
    expected = torch.autograd.grad(sdpa(q, k, v, seen), (q, k, v), grad)
    results = []
    for count in (1, 9):
        threads(count)
        results.append(torch.autograd.grad(flash_attn(q, k, v, window=window), (q, k, v), grad))
    for a, b, c in zip(*results, expected, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c)


@pytest.mark.parametrize("shape", [(1, 1, 1, 150), (4, 1, 130, 1), (1, 2, 1, 1), (1, 1, 130, 150)])
def test_gradient_of_a_mask_of_few_elements(isa, threads, shape):
    """Many tiles of scores share each tile of the mask: tasks sum up parts of them."""
    q, k, v = make_qkv(4, 2, 130, 150, 16, dtype=torch.float64)
    mask = torch.randn(shape, dtype=torch.float64).requires_grad_()
    grad = torch.randn_like(q)
    (expected,) = torch.autograd.grad(sdpa(q, k, v, mask.expand(4, 2, 130, 150)), mask, grad)
    results = []
    for count in (1, 3):
        threads(count)
        results.append(torch.autograd.grad(flash_attn(q, k, v, mask), mask, grad)[0])
    assert torch.equal(*results)
    torch.testing.assert_close(results[0], expected)


def test_repeated_runs_are_bitwise_equal():
    q, k, v = make_qkv(2, 3, 300, 300, 32)
    grad = torch.randn(2, 3, 300, 32)
    first = torch.autograd.grad(flash_attn(q, k, v, is_causal=True), (q, k, v), grad)
    for _ in range(5):
        again = torch.autograd.grad(flash_attn(q, k, v, is_causal=True), (q, k, v), grad)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.any_device
class TestDropout:
    def test_manual_seed_governs_it(self):
        q, k, v = make_qkv(1, 2, 40, 40, 8)
        torch.manual_seed(7)
        first, second = flash_attn(q, k, v, dropout_p=0.5), flash_attn(q, k, v, dropout_p=0.5)
        torch.manual_seed(7)
        assert torch.equal(flash_attn(q, k, v, dropout_p=0.5), first)
        assert not torch.equal(first, second)

    def test_no_dropout_draws_no_numbers(self):
        q, k, v = make_qkv(1, 2, 40, 40, 8)
        state = torch.get_rng_state()
        flash_attn(q, k, v)
        assert torch.equal(torch.get_rng_state(), state)

    @pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
    def test_rate(self, p):
        kept = dropout_mask(new_rng_state(), 2, 3, 200, 300, p)
        assert kept.float().mean().item() == pytest.approx(1 - p, abs=5 * (p * (1 - p) / kept.numel()) ** 0.5)

    def test_elements_are_independent(self):
        """No two rows, columns, heads or batches have the same pattern."""
        kept = dropout_mask(new_rng_state(), 2, 2, 64, 64, 0.5).double() - 0.5
        flat = kept.flatten()
        for shift in (1, 2, 8, 16, 63, 64, 65, 64 * 8, 64 * 64, 2 * 64 * 64):
            assert abs((flat * flat.roll(shift)).mean().item()) < 5 * 0.25 / flat.numel() ** 0.5

    def test_seed_and_offset_both_matter(self):
        masks = [
            dropout_mask(torch.tensor(s), 1, 1, 32, 32, 0.5)
            for s in ([1, 0], [2, 0], [1, 1], [1, 1 << 40], [1 | 1 << 40, 0])
        ]
        for n, a in enumerate(masks):
            assert not any(torch.equal(a, b) for b in masks[n + 1 :])

    def test_the_mask_does_not_depend_on_the_shape(self):
        state = new_rng_state()
        large, small = dropout_mask(state, 1, 2, 100, 90, 0.3), dropout_mask(state, 1, 2, 37, 21, 0.3)
        assert torch.equal(large[:, :, :37, :21], small)


MEMORY_PROGRAM = """
import resource, torch
from flash_attn_ext import flash_attn
n = {n}
q, k, v = (torch.randn(1, 1, n, 16, requires_grad=True) for _ in range(3))
mask = torch.zeros(1, n, requires_grad=True)  # broadcast over rows: its gradient is (1, n)
flash_attn(q[:, :, :64], k[:, :, :64], v[:, :, :64]).sum().backward()  # libraries, thread pools
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
options = {options}
flash_attn(q, k, v, mask, **options).sum().backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True, "dropout_p": 0.1, "softcap": 5.0}], ids=["plain", "options"]
)
def test_peak_memory_grows_linearly(options):
    """Forward and backward at N = 16384; the N x N matrix in fp32 would be 1024 MiB."""
    n = 16384
    program = MEMORY_PROGRAM.format(n=n, options=options)
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True)
    peak = int(run.stdout)
    assert peak < n * n * 4 / 16, peak  # nowhere near a matrix, not even of bytes
    assert peak < n * 16 * 4 * 40, peak  # a few dozen (N, D) tensors
