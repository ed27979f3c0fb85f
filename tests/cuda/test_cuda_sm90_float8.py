"""Products of float8_e4m3fn in the Hopper tier on the host (tests/cuda_host), against the dense oracle in fp64.
The tolerance: float8_helpers.py.
"""

import functools

import pytest
import torch
from cuda_host import library
from float8_helpers import FLOAT8, NAMES, check_values, decoded, make
from tolerances import largest_error

from flash_attn_ext import flash_attn, flash_attn_varlen, flash_attn_with_kvcache

TILES = {64: (192, 128), 128: (128, 128), 256: (128, 96)}  # query rows and keys, by head dimension
KERNEL = b"sm90::forward_float8_kernel"


@pytest.fixture(autouse=True)
def kernels(built):
    with library.on_hopper(built) as loaded:
        yield loaded


def check(kernels, tensors, factors, out_dtype=None, **options):
    out, lse = flash_attn(*tensors, enable_gqa=True, return_lse=True, out_dtype=out_dtype, **options, **factors)
    assert KERNEL in kernels.c.last_kernel()
    assert out.dtype == (out_dtype or torch.bfloat16)
    check_values(out, lse, decoded(tensors, factors), **options)
    return out, lse


@pytest.mark.parametrize("head_dim", TILES)
@pytest.mark.parametrize("edge", [-1, 1])
def test_tile_edges(kernels, head_dim, edge):
    rows, keys = TILES[head_dim]
    for seqlen_q, seqlen_k in [(rows + edge, 2 * keys + edge), (17, keys + 32 + edge)]:
        check(kernels, *make(1, 1, seqlen_q, seqlen_k, head_dim))


@pytest.mark.parametrize("head_dim", TILES)
def test_out_in_float16(kernels, head_dim):
    """Also with a hidden NaN in V. The largest query, -448, and the smallest, 2^-9, are numbers of float16."""
    (q, k, v), factors = make(1, 2, 70, 150, head_dim, heads_kv=1)
    q[:, :, :8] = torch.tensor([448.0, -448.0, 2**-9, -(2**-9)]).repeat_interleave(2)[:, None].to(FLOAT8)
    run = functools.partial(check, kernels, out_dtype=torch.float16, causal="upper_left")
    clean, _ = run((q, k, v), factors)
    wide, _ = check(kernels, (q, k, v), factors, causal="upper_left")
    torch.testing.assert_close(clean.float(), wide.float(), rtol=2**-8, atol=2**-8)  # rounded from the same numbers
    v.view(torch.uint8)[0, :, 60, 3] = 0x7F
    out = flash_attn(q, k, v, enable_gqa=True, causal="upper_left", out_dtype=torch.float16, **factors)
    assert out[:, :, 60:, 3].isnan().all()
    torch.testing.assert_close(out[:, :, :60], clean[:, :, :60], rtol=2**-4, atol=2**-4)


@pytest.mark.parametrize(("head_dim", "causal"), [(64, "upper_left"), (128, "lower_right"), (256, "lower_right")])
def test_causal_and_groups(kernels, head_dim, causal):
    """With more queries than keys, and in the other order. The first rows of `lower_right` see nothing."""
    for seqlen_q, seqlen_k in [(200, 97), (130, 400)]:
        tensors, factors = make(2, 2, seqlen_q, seqlen_k, head_dim, heads_kv=1)
        out, lse = check(kernels, tensors, factors, causal=causal)
        hidden = max(seqlen_q - seqlen_k, 0) if causal == "lower_right" else 0
        assert out[:, :, :hidden].eq(0).all()
        assert lse[:, :, :hidden].eq(-torch.inf).all()


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(48, 16), (96, 112), (208, 256)])
def test_padded_head_dims_window_sink_and_scale(kernels, head_dim, head_dim_v):
    tensors, factors = make(1, 2, 140, 300, head_dim, head_dim_v=head_dim_v)
    check(kernels, tensors, factors, window=(130, 40), sink=torch.randn(2), scale=0.1)


@pytest.mark.parametrize("value", [-0.05, 0.0])
def test_factors_that_are_not_positive(kernels, value):
    tensors, factors = make(1, 1, 20, 140, 64)
    check(kernels, tensors, factors | {"q_descale": torch.tensor([[value]])}, causal="lower_right")
    check(kernels, tensors, factors | {"v_descale": torch.tensor([[value]])})


def test_factors_that_are_nan(kernels):
    """A row that sees no key is 0, whatever the factors are."""
    tensors, factors = make(1, 1, 150, 140, 64)
    for name in NAMES:
        factor = torch.full((1, 1), torch.nan)
        out, lse = flash_attn(*tensors, causal="lower_right", return_lse=True, **factors | {name: factor})
        assert KERNEL in kernels.c.last_kernel()
        assert out[:, :, :10].eq(0).all()
        assert out[:, :, 10:].isnan().all()
        assert lse[:, :, :10].eq(-torch.inf).all()
        assert lse[:, :, 10:].isnan().all() == (name != "v_descale")


def test_closeness_to_widening(kernels):
    """The paper reports errors as root mean squares. Here: of out, relative to the results by widening on CPU."""
    tensors, factors = make(1, 2, 130, 260, 128)
    run = functools.partial(flash_attn, *tensors, return_lse=True, causal="lower_right", **factors)
    ours = run()
    with kernels.on_gpu(8, 0):
        widened = run()
    error = (ours[0].double() - widened[0].double()).square().mean().sqrt()
    assert 0 < error < 0.03 * widened[0].double().square().mean().sqrt()
    assert largest_error(ours[1], widened[1].double()) < 1e-5 * widened[1].abs().max()


def test_packed(kernels):
    """A tile may hold rows of the next sequence, or NaN after the last row."""
    lengths = [(130, 140), (0, 40), (20, 0), (65, 129)]
    total_q, total_k = map(sum, zip(*lengths, strict=True))
    (q, k, v), _ = make(1, 2, total_q, total_k, 64, heads_kv=1)
    factors = make(len(lengths), 1, 1, 1, 16)[1]
    rows = [t[0].transpose(0, 1) for t in (q, k, v)]
    at = [torch.tensor([0, *torch.tensor(side).cumsum(0).tolist()]) for side in zip(*lengths, strict=True)]
    out, lse = flash_attn_varlen(*rows, *at, 130, 140, enable_gqa=True, return_lse=True, **factors)
    assert KERNEL in kernels.c.last_kernel()
    for b, (length_q, _) in enumerate(lengths):
        own_q, own_k = (slice(int(t[b]), int(t[b + 1])) for t in at)
        values = decoded(
            [q[:, :, own_q], k[:, :, own_k], v[:, :, own_k]], {n: f[b : b + 1] for n, f in factors.items()}
        )
        if length_q:
            check_values(out[own_q].transpose(0, 1)[None], lse[None, :, own_q], values)


@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 64), (48, 128), (128, 128), (64, 256), (256, 64)])
def test_pages(kernels, page_size, head_dim):
    """Pages in any order, some shared. Rows and whole pages after a sequence's last row hold NaN."""
    lengths, queries = [300, 17, 129], 20
    pages = -(-max(lengths) // page_size)
    table = torch.randperm(3 * pages, dtype=torch.int32).reshape(3, pages)
    (q, k, v), _ = make(3, 2, queries, pages * page_size, head_dim, heads_kv=1)
    factors = {name: torch.rand(1) / 12 + 0.04 for name in NAMES}
    caches = []
    for t in (k, v):
        cache = torch.full((3 * pages, page_size, 1, head_dim), torch.nan).to(FLOAT8)
        for b, length in enumerate(lengths):
            rows = torch.arange(length)
            cache.view(torch.uint8)[table[b, rows // page_size].long(), rows % page_size] = (
                t[b, :, :length].transpose(0, 1).contiguous().view(torch.uint8)
            )
        caches.append(cache)
    out, lse = flash_attn_with_kvcache(
        q.transpose(1, 2), *caches, cache_seqlens=torch.tensor(lengths, dtype=torch.int32), block_table=table,
        causal=True, return_softmax_lse=True, q_descale=factors["q_descale"].expand(3, 1),
        k_descale=factors["k_descale"], v_descale=factors["v_descale"],
    )  # fmt: skip
    assert KERNEL in kernels.c.last_kernel()
    for b, length in enumerate(lengths):
        values = decoded(
            [q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length]],
            {n: f.expand(1, 1) for n, f in factors.items()},
        )
        check_values(out[b].transpose(0, 1)[None], lse[b][None], values, causal="lower_right")


def test_left_padding_and_shared_caches(kernels):
    (q, k, v), factors = make(2, 2, 20, 150, 64)
    with_padding = {name: factors[name][:1] for name in NAMES}
    caches = [t[:1].transpose(1, 2).contiguous() for t in (k, v)]
    out, lse = flash_attn_with_kvcache(
        q.transpose(1, 2), *caches, cache_seqlens=torch.tensor([150, 140], dtype=torch.int32), causal=True,
        cache_batch_idx=torch.zeros(2, dtype=torch.int32), cache_leftpad=torch.tensor([0, 13], dtype=torch.int32),
        return_softmax_lse=True, **with_padding,
    )  # fmt: skip
    assert KERNEL in kernels.c.last_kernel()
    for b, rows in enumerate((slice(0, 150), slice(13, 140))):
        values = decoded([q[b : b + 1], k[:1, :, rows], v[:1, :, rows]], with_padding)
        check_values(out[b].transpose(0, 1)[None], lse[b][None], values, causal="lower_right")


@pytest.mark.parametrize("head_dim", TILES)
def test_nan_reaches_the_rows_that_see_it(kernels, head_dim):
    """e4m3 has a NaN, 0x7f. A hidden one reaches no row, whether in K or in V."""
    (q, k, v), factors = make(1, 1, 130, 140, head_dim)
    run = functools.partial(flash_attn, causal="upper_left", **factors)
    clean = run(q, k, v)
    for t in (k, v):
        saved = t.clone()
        t.view(torch.uint8)[0, :, 70, 3] = 0x7F
        out = run(q, k, v)
        assert out[:, :, 70:, 3].isnan().all()
        assert out[:, :, 70:].isnan().all() == (t is k)
        # An element that is computed again has a P that is not rounded.
        again = torch.arange(head_dim).eq(3) if t is v else torch.zeros(head_dim, dtype=torch.bool)
        assert torch.equal(out[:, :, :70, ~again], clean[:, :, :70, ~again])
        torch.testing.assert_close(out[:, :, :70], clean[:, :, :70], rtol=2**-4, atol=2**-4)
        t.copy_(saved)


REFUSED = {
    "few queries": (dict(seqlen_q=16), {}, "more than 16 queries"),
    "head dimension": (dict(head_dim=40), {}, "in sixteens"),
    "softcap": ({}, dict(softcap=3.0), "only with causal, window, scale, sink and lengths"),
    "alibi_slopes": ({}, dict(alibi_slopes=torch.rand(1)), "only with causal"),
    "attention_chunk": ({}, dict(attention_chunk=8), "only with causal"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_calls_are_widened_by_simt(kernels, name):
    sizes, options, reason = REFUSED[name]
    sizes = dict(seqlen_q=20, head_dim=64) | sizes
    (q, k, v), factors = make(1, 1, sizes["seqlen_q"], 20, sizes["head_dim"])
    flash_attn(q, k, v, **options, **factors)
    assert kernels.tier == "simt"
    assert reason in kernels.why_not[0]
