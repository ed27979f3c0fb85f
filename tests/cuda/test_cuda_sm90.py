"""The Hopper tier on the host (tests/cuda_host): wgmma, TMA and mbarriers emulated as late as they may act.

Values are compared with the dense oracle; a fault in the synchronisation is an error.
"""

import ctypes
import random
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import reference
import test_contract
import torch
from cuda_host import library
from helpers import make_qkv
from tolerances import assert_as_exact_as_torch

from flash_attn_ext import flash_attn

# Query rows and keys of a tile, by head dimension.
TILES = {64: (192, 128), 128: (128, 128), 256: (128, 80)}


@pytest.fixture(autouse=True)
def kernels(built):
    # test_cuda_sm90_few_rows.py tests splits of the keys.
    with library.on_hopper(built, num_splits=1) as loaded:
        yield loaded


def check_forward(kernels, q, k, v, **options):
    """out and lse by the tier under test, against the oracle in fp64 and in the same dtype."""
    with torch.no_grad():
        ours = flash_attn(q, k, v, enable_gqa=True, return_lse=True, **options)
        assert b"sm90::forward_kernel" in kernels.c.last_kernel()
        exact = reference.attention(q.double(), k.double(), v.double(), **options)
        theirs = reference.attention(q, k, v, **options)
    for name, a, b, c in zip(("out", "lse"), ours, theirs, exact, strict=True):
        assert_as_exact_as_torch(name, a, b, c, 2)
    return ours


def make(*shape, dtype=torch.bfloat16, **options):
    return [t.detach() for t in make_qkv(*shape, dtype=dtype, **options)]


@pytest.mark.parametrize("head_dim", TILES)
@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tile_edges(kernels, head_dim, edge, dtype):
    rows, keys = TILES[head_dim]
    for seqlen_q, seqlen_k in [(rows + edge, keys + edge), (17, 2 * keys + edge), (2 * rows + edge, 1), (64 + edge, 5)]:
        check_forward(kernels, *make(1, 1, seqlen_q, seqlen_k, head_dim, dtype=dtype))


@pytest.mark.parametrize("head_dim", TILES)
@pytest.mark.parametrize("causal", ["upper_left", "lower_right"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(130, 130), (200, 97), (97, 400), (193, 257)])
def test_causal(kernels, head_dim, causal, seqlen_q, seqlen_k):
    check_forward(kernels, *make(1, 1, seqlen_q, seqlen_k, head_dim), causal=causal)


@pytest.mark.parametrize("head_dim", TILES)
def test_sink(kernels, head_dim):
    q, k, v = make(1, 2, 200, 97, head_dim)
    check_forward(kernels, q, k, v, causal="lower_right", sink=torch.randn(2))  # rows with only the sink's column


@pytest.mark.parametrize("head_dim", TILES)
@pytest.mark.parametrize("window", [(0, 0), (3, 100), (130, -1), (-1, 70), (1000, 1000)])
def test_windows(kernels, head_dim, window):
    check_forward(kernels, *make(1, 1, 260, 300, head_dim), window=window)
    check_forward(kernels, *make(1, 1, 260, 300, head_dim), window=window, causal="lower_right")


@pytest.mark.parametrize(("heads", "heads_kv"), [(4, 2), (6, 1), (3, 3)])
def test_heads_and_batches(kernels, heads, heads_kv):
    q, k, v = make(2, heads, 240, 150, 64, heads_kv=heads_kv)
    check_forward(kernels, q, k, v, causal="lower_right", scale=0.3)


def test_rows_that_see_nothing(kernels):
    q, k, v = make(1, 1, 300, 100, 128)
    out, lse = check_forward(kernels, q, k, v, causal="lower_right")  # the first 200 rows
    assert (out[:, :, :200] == 0).all()
    assert (lse[:, :, :200] == -torch.inf).all()


@pytest.mark.parametrize("layout", ["B S H D", "S B H D"])
def test_strided_inputs(kernels, layout):
    inputs = make(2, 3, 70, 200, 64)
    strided = [dict(test_contract.strided_versions(t))[layout] for t in inputs]
    expected, _ = check_forward(kernels, *inputs, causal="upper_left")
    assert torch.equal(check_forward(kernels, *strided, causal="upper_left")[0], expected)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(("first", "taken"), [(8, True), (1, False)])
def test_slices_of_wider_rows(kernels, which, first, taken):
    """TMA needs tensors that start at a multiple of 16 bytes; another tier runs the other calls."""
    inputs = make(2, 3, 70, 200, 64)
    expected, _ = check_forward(kernels, *inputs)
    wide = torch.randn(*inputs[which].shape[:3], 80).to(torch.bfloat16)
    wide[..., first : first + 64] = inputs[which]
    inputs[which] = wide[..., first : first + 64]
    out = flash_attn(*inputs)
    assert (b"sm90::forward_kernel" in kernels.c.last_kernel()) == taken
    torch.testing.assert_close(out, expected, rtol=0, atol=0.0 if taken else 0.02)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("dim", [1, 2])
def test_overlapping_views_go_elsewhere(kernels, which, dim):
    """TMA needs steps of at least a row."""
    inputs = make(2, 3, 70, 200, 64)
    shape = inputs[which].shape
    strides = [shape[2] * 64, shape[2] * 64, 64, 1] if dim == 2 else [64 * 1024, 32, 256, 1]
    strides[2] = 32 if dim == 2 else strides[2]
    inputs[which] = torch.randn(1 << 19).bfloat16().as_strided(shape, strides)
    overlapping = flash_attn(*inputs)
    assert b"sm90" not in kernels.c.last_kernel()
    inputs[which] = inputs[which].contiguous()
    torch.testing.assert_close(overlapping, check_forward(kernels, *inputs)[0], rtol=0, atol=0.02)


@pytest.mark.parametrize("head_dim", TILES)
def test_dimensions_of_one_element(kernels, head_dim):
    """No copy uses their strides, but the driver still checks them."""
    q, k, v = make(1, 1, 20, 1, head_dim)
    expected = check_forward(kernels, q, k, v)[0]
    odd = [t.as_strided(t.shape, (3, 3, 3 if t.shape[2] == 1 else head_dim, 1)) for t in (q, k, v)]
    assert torch.equal(check_forward(kernels, *odd)[0], expected)


def test_the_driver_is_asked_once(kernels):
    inputs = make(1, 1, 20, 30, 64)
    check_forward(kernels, *inputs)
    asked = kernels.c.attributes_set(), kernels.c.driver_lookups()
    check_forward(kernels, *inputs)
    assert (kernels.c.attributes_set(), kernels.c.driver_lookups()) == asked
    assert asked[1] == 1


def test_a_thread_without_a_context(kernels):
    """Such as a thread of torch's autograd engine: the launcher sets a context before it calls the driver."""
    inputs = make(1, 1, 20, 30, 64)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(check_forward, kernels, *inputs).result()


def test_division_by_multiplication(kernels):
    largest = 2**31 - 1
    generator = random.Random(0)
    divisors = [*range(1, 100), *(2**n + d for n in range(7, 31) for d in (-1, 0, 1)), largest]
    for divisor in divisors:
        multiple = largest // divisor * divisor
        numbers = {0, 1, divisor - 1, divisor, multiple - 1, multiple, largest, generator.randrange(2**31)}
        for n in numbers - {-1}:
            assert kernels.c.quotient(n, divisor) == n // divisor


def test_shared_memory_that_is_not_aligned_is_an_error(kernels):
    kernels.c.set_shared_base(1024 + 128)
    with pytest.raises(library.KernelError, match=r"trap: .*sm90::forward_kernel"):
        flash_attn(*make(1, 1, 20, 30, 64))
    kernels.c.set_shared_base(1024)


@pytest.mark.parametrize(
    ("rows", "keys", "causal", "tiles"),
    [(64, 640, None, 5), (130, 640, None, 15), (192, 256, "upper_left", 4), (192, 384, "lower_right", 8)],
)
def test_a_warpgroup_skips_tiles_that_its_rows_do_not_see(kernels, rows, keys, causal, tiles):
    """`tiles`: of 64 rows and 128 keys, in all three warpgroups of head dimension 64. The test counts exponentials."""
    work = []
    for seqlen_q, seqlen_k, option in ((64, 128, None), (rows, keys, causal)):
        q, k, v = (t.detach() for t in make(1, 1, seqlen_q, seqlen_k, 64))
        before = kernels.c.exponentials()
        flash_attn(q, k, v, causal=option)
        work.append(kernels.c.exponentials() - before)
    assert b"sm90::forward_kernel" in kernels.c.last_kernel()
    assert work[1] == tiles * work[0]


# The elements of v that are not finite: keys, columns.
NON_FINITE = {
    "everything": (slice(None), slice(None)),
    "one column": (slice(None), 5),
    "one key": (30, slice(None)),
    "one element": (290, 5),
}


@pytest.mark.parametrize("options", [{}, dict(causal="lower_right"), dict(window=(50, 0))], ids=str)
@pytest.mark.parametrize("case", NON_FINITE)
def test_work_where_much_is_nan(kernels, case, options):
    """Rows that must be NaN are not computed key by key. The test counts exponentials: two for each lane and key."""
    length, two_by_lanes = 400, 64
    q, k, v = make(1, 1, length, length, 64)
    results, work = [], []
    for poison in (0.0, torch.nan):
        v[0, 0][NON_FINITE[case]] = poison
        before = kernels.c.exponentials()
        results.append(flash_attn(q, k, v, **options)[0, 0])
        work.append(kernels.c.exponentials() - before)
    assert b"sm90::forward_kernel" in kernels.c.last_kernel()

    sees = reference.visible(length, length, **options)
    is_nan = (sees.double() @ v[0, 0].isnan().double()) > 0
    assert torch.equal(results[1].isnan(), is_nan)
    torch.testing.assert_close(results[1][~is_nan], results[0][~is_nan], rtol=0, atol=0.02)
    # Rows where only some columns may be NaN run to the end. Other rows have a few keys each.
    hidden = ((~sees).double() @ v[0, 0].isnan().double()) > 0
    keys = sees.sum(1)[(hidden & ~is_nan).any(1)].sum().item()
    assert work[1] - work[0] <= two_by_lanes * (keys + 3 * length)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("head_dim", TILES)
def test_masked_values_cannot_poison(kernels, head_dim, where, poison):
    """0 x NaN is NaN, so the kernel repairs the rows that do not see the poisoned key."""
    q, k, v = make(1, 2, 150, 150, head_dim)
    (k if where == "key" else v)[:, 0, 100, 5] = poison
    with torch.no_grad():
        out = flash_attn(q, k, v, causal="upper_left")
        assert b"sm90::forward_kernel" in kernels.c.last_kernel()
    clean = reference.attention(q[:, :, :100], k[:, :, :100], v[:, :, :100], causal="upper_left")
    torch.testing.assert_close(out[:, :, :100], clean[0], rtol=0, atol=0.02)
    if where == "value" or poison is torch.nan:  # a score of -inf is a weight of 0
        assert not torch.isfinite(out[:, 0, 100:]).all(-1).any()  # these rows see it
    assert torch.isfinite(out[:, 1]).all()


def test_memory_after_the_end_reaches_no_result(kernels):
    """TMA loads zeros from outside a tensor, not the memory after it."""
    q, k, v = (t[:, :, :100] for t in make(1, 1, 128, 128, 128))
    expected = flash_attn(q, k, v)
    for t in (k, v):
        t._base[:, :, 100:] = torch.nan
    assert torch.equal(flash_attn(q, k, v), expected)


def test_gradients_through_it(kernels):
    """The backward of another tier reads this tier's out and lse: here, because a gradient is broadcast."""
    q, k, v = make_qkv(1, 2, 20, 30, 64, heads_kv=1, dtype=torch.bfloat16)
    row = torch.randn(64).bfloat16()
    grads = []
    for grad in (row.expand(1, 2, 20, 64), row.expand(1, 2, 20, 64).contiguous()):
        out = flash_attn(q, k, v, causal="lower_right", enable_gqa=True)
        assert b"sm90::forward_kernel" in kernels.c.last_kernel()
        grads.append(torch.autograd.grad(out, (q, k, v), grad))
        assert (b"sm90" in kernels.c.last_kernel()) == grad.is_contiguous()
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0.05)


def test_results_do_not_depend_on_the_order_of_threads_and_copies(kernels):
    q, k, v = make(1, 2, 200, 400, 64)
    results = []
    for seed in range(4):
        kernels.seed_order(seed)
        results.append(check_forward(kernels, q, k, v, causal="lower_right")[0])
    assert all(torch.equal(results[0], other) for other in results[1:])


# Forward and backward.
NEVER_TAKEN = {
    "dtype": (dict(dtype=torch.float32), {}, "only float16 and bfloat16"),
    "head dimension": (dict(head_dim=100), {}, "only head dimensions in eights, up to 256"),
    "head dimension of value": (dict(head_dim_v=60), {}, "only head dimensions in eights, up to 256"),
    "mask": (
        {},
        dict(attn_mask=torch.ones(20, 30, dtype=torch.bool)),
        "only bool masks that all heads and queries share",
    ),
    "slopes": ({}, dict(alibi_slopes=torch.ones(1)), "no ALiBi or dropout"),
    "dropout": ({}, dict(dropout_p=0.5), "no ALiBi or dropout"),
}
REFUSED = NEVER_TAKEN | {
    "negative scale": ({}, dict(scale=-1.0), "only a positive scale"),
    "few queries": (dict(seqlen_q=16), {}, "few queries"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_rest_goes_elsewhere_and_says_why(kernels, case, monkeypatch):
    shape, options, reason = REFUSED[case]
    shape = dict(batch=1, heads=1, seqlen_q=20, seqlen_k=30, head_dim=64, dtype=torch.bfloat16) | shape
    said = []
    launch = kernels.launch

    def record(kind, params, *tensors):
        said.append(kernels.c.why_not_sm90_forward(ctypes.byref(params)).decode())
        launch(kind, params, *tensors)

    monkeypatch.setattr(kernels, "launch", record)
    with torch.no_grad():
        flash_attn(*make_qkv(**shape), **options)
    assert re.search(reason, said[0])
    assert b"sm90" not in kernels.c.last_kernel()


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_do_not_get_it(kernels, capability):
    kernels.c.set_compute_capability(*capability)
    with torch.no_grad():
        flash_attn(*make(1, 1, 20, 30, 64))
    assert b"sm90" not in kernels.c.last_kernel()
