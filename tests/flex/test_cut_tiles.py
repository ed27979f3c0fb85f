"""Tiles that a mask function shows in part: the products have the seen keys, and in the backward the seen queries.

The backward cuts a tile in two halves of queries if this saves work.
"""

import pytest
import torch
from flex_reference import dense_flex

from flash_attn_ext import flash_attn, new_rng_state

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LENGTH = 150  # three tiles; the last one is not full
EDGES = [1, 15, 16, 17, 31, 33, 47, 48, 49, 63, 64, 65, 79, 81, 95, 97, 112, 127, 128, 129, 145, 149]


def documents(edge):
    """Two documents."""
    rows = torch.arange(LENGTH)
    return torch.where(rows < edge, 0, edge), torch.where(rows < edge, edge, LENGTH)


def window(width):
    rows = torch.arange(LENGTH)
    return (rows - width).clamp(0), rows + 1


def late_queries(edge):
    """The queries before `edge` see no key."""
    rows = torch.arange(LENGTH)
    return torch.where(rows < edge, LENGTH, edge // 2), torch.full((LENGTH,), LENGTH)


MASKS = [documents, window, late_queries]


def mask_of(first, end):
    keys = torch.arange(LENGTH)
    visible = (keys >= first[:, None]) & (keys < end[:, None])
    return visible, lambda b, h, i, j: (j >= first[i]) & (j < end[i])


def make(*shape, dtype, count=3):
    return [torch.randn(shape).to(dtype).requires_grad_() for _ in range(count)]


def gradients(out, wrt, dout):
    return torch.autograd.grad(out, wrt, dout)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranges", MASKS)
def test_bits_are_those_of_a_bool_mask(ranges, dtype, isa):
    """Tiles of a bool mask are not cut. Two halves of a tile are two sums of dk and dv."""
    q, k, v = make(1, 2, LENGTH, 16, dtype=dtype)
    dout = torch.randn(q.shape).to(dtype)
    for edge in EDGES:
        visible, mask_mod = mask_of(*ranges(edge))
        out, lse = flash_attn(q, k, v, mask_mod=mask_mod, return_lse=True)
        wanted, wanted_lse = flash_attn(q, k, v, attn_mask=visible, return_lse=True)
        assert torch.equal(out, wanted), edge
        assert torch.equal(lse, wanted_lse), edge
        grads, exact = (gradients(o, (q, k, v), dout) for o in (out, wanted))
        assert torch.equal(grads[0], exact[0]), edge
        torch.testing.assert_close(grads, exact)


@pytest.mark.parametrize("ranges", MASKS)
def test_gradients_at_every_edge(ranges):
    q, k, v = make(1, 2, LENGTH, 8, dtype=torch.float64)
    dout = torch.randn_like(q)
    for edge in EDGES:
        _, mask_mod = mask_of(*ranges(edge))
        out = flash_attn(q, k, v, mask_mod=mask_mod)
        wanted, _ = dense_flex(q, k, v, None, mask_mod)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(gradients(out, (q, k, v), dout), gradients(wanted, (q, k, v), dout))


@pytest.mark.parametrize("ranges", MASKS)
def test_with_other_options(ranges, isa):
    """Dropout, softcap, ALiBi and a score function with a captured tensor read positions of the cut tile."""
    q, k, v, slopes, table = (t.requires_grad_() for t in (
        *(torch.randn(2, 4, LENGTH, 16) for _ in range(3)), torch.rand(4), torch.randn(4, LENGTH)))  # fmt: skip
    dout, wrt = torch.randn(q.shape), (q, k, v, slopes, table)
    options = {
        "softcap": 5.0,
        "alibi_slopes": slopes,
        "dropout_p": 0.3,
        "rng_state": new_rng_state(),
        "score_mod": lambda s, b, h, i, j: s + table[h, j],
    }
    for edge in EDGES:
        visible, mask_mod = mask_of(*ranges(edge))
        out = flash_attn(q, k, v, mask_mod=mask_mod, **options)
        wanted = flash_attn(q, k, v, attn_mask=visible, **options)
        assert torch.equal(out, wanted), edge
        torch.testing.assert_close(gradients(out, wrt, dout), gradients(wanted, wrt, dout))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_stays_in_its_document(dtype, isa):
    q, k, v = make(1, 2, LENGTH, 16, dtype=dtype)
    for edge in EDGES:
        first = [t.detach()[:, :, :edge].clone().requires_grad_() for t in (q, k, v)]
        dout = torch.randn(1, 2, LENGTH, 16).to(dtype)
        # With a function, because calls without one may have larger tiles, and so other last bits.
        every_key = flash_attn(*first, mask_mod=lambda b, h, i, j: i >= 0)
        wanted = gradients(every_key, first, dout[:, :, :edge])
        broken = [t.detach().clone() for t in (q, k, v, dout)]
        for t in broken:
            t[:, :, edge:] = torch.nan
        out = flash_attn(*(t.requires_grad_() for t in broken[:3]), mask_mod=mask_of(*documents(edge))[1])
        for grad, exact in zip(gradients(out, broken[:3], broken[3]), wanted, strict=True):
            torch.testing.assert_close(grad[:, :, :edge], exact)


@pytest.mark.parametrize("which", ["positions", "head", "batch"])
def test_heads_have_their_own_masks(which):
    """The backward keeps the tiles of a mask that depends on positions alone. All of its 9 x 9 tiles are partial."""
    length = 9 * 64
    visible = torch.rand(2, 3, length, length) < 0.5
    if which != "head":
        visible = visible[:, :1]
    if which != "batch":
        visible = visible[:1]
    captured = visible.int()
    functions = {
        "positions": lambda b, h, i, j: captured[0, 0, i, j] > 0,
        "head": lambda b, h, i, j: captured[0, h, i, j] > 0,
        "batch": lambda b, h, i, j: captured[b, 0, i, j] > 0,
    }
    q, k, v = make(2, 3, length, 8, dtype=torch.float32)
    dout = torch.randn(q.shape)
    grads = gradients(flash_attn(q, k, v, mask_mod=functions[which]), (q, k, v), dout)
    wanted = gradients(flash_attn(q, k, v, attn_mask=visible), (q, k, v), dout)
    for grad, exact in zip(grads, wanted, strict=True):
        assert torch.equal(grad, exact)


def test_bits_do_not_depend_on_the_threads(threads):
    """One thread has tasks of whole heads. Several threads have tasks of one key block."""
    q, k, v = make(1, 1, LENGTH, 16, dtype=torch.float32)
    dout, results = torch.randn(q.shape), []
    for count in (1, 2, 3):
        threads(count)
        outs = [flash_attn(q, k, v, mask_mod=mask_of(*documents(edge))[1]) for edge in EDGES]
        results.append([gradients(out, (q, k, v), dout) for out in outs])
    for other in results[1:]:
        for some, same in zip(results[0], other, strict=True):
            assert all(map(torch.equal, some, same))
