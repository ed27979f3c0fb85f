"""Operators on a part of a larger call: its position counts for the band, ALiBi and dropout. And the merge of parts."""

import pytest
import torch

from flash_attn_ext import _ops, dropout_mask, flash_attn, new_rng_state

OPTIONS = dict(
    scale=None, causal=False, lower_right=False, diagonal=0, window_left=None, window_right=None, attention_chunk=0,
    first_key=0, softcap=0.0,
    dropout_p=0.0, num_splits=0, unified_max=None, deterministic=True,
)  # fmt: skip
HEADS, SIZE = 4, 150
# Rows, columns and heads of the part. Some begin inside a block of 16 x 2 elements, which share random numbers.
PARTS = [
    ((0, 70), (0, 80), (0, 4)),
    ((32, 150), (64, 150), (2, 4)),
    ((37, 120), (51, 149), (1, 3)),
    ((3, 8), (1, 90), (0, 2)),
]


def place(state, rows, columns, heads):
    return torch.cat([state, torch.tensor([rows[0], columns[0], heads[0], HEADS])])


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_part_drops_the_elements_that_the_whole_drops(part):
    state, (rows, columns, heads) = new_rng_state(), part
    whole = dropout_mask(state, 2, HEADS, SIZE, SIZE, 0.4)
    sizes = (heads[1] - heads[0], rows[1] - rows[0], columns[1] - columns[0])
    own = dropout_mask(place(state, *part), 2, *sizes, 0.4)
    assert torch.equal(own, whole[:, slice(*heads), slice(*rows), slice(*columns)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_a_part_of_the_keys(isa, part, dtype):
    """With all other keys masked, the whole call gives the result of the part."""
    rows, columns, heads = part
    q, k, v = (torch.randn(2, HEADS, SIZE, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    slopes = torch.rand(HEADS, dtype=dtype, requires_grad=True)
    state, p = new_rng_state(), 0.3
    hidden = torch.zeros(SIZE, SIZE, dtype=torch.bool)
    hidden[slice(*rows), slice(*columns)] = True
    whole = flash_attn(
        q,
        k,
        v,
        hidden,
        dropout_p=p,
        rng_state=state,
        window=(40, 30),
        alibi_slopes=slopes,
        causal=None,
        return_lse=True,
    )
    inside = (slice(None), slice(*heads), slice(*rows))
    cut = [q[inside], *(t[:, slice(*heads), slice(*columns)] for t in (k, v))]
    options = OPTIONS | dict(diagonal=rows[0] - columns[0], window_left=40, window_right=30, dropout_p=p)
    own = _ops.attention(*cut, None, slopes[slice(*heads)], None, place(state, *part), **options)
    upstream = [torch.randn_like(t) for t in own]
    upstream[1] = upstream[1].masked_fill(own[1] == -torch.inf, 0)
    results = [[*own], [t[inside] for t in whole]]
    for result in results:
        result += torch.autograd.grad(result, (q, k, v, slopes), upstream)
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_merging_parts(dtype):
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = (torch.randn(2, 3, 60, 20, dtype=dtype) for _ in range(3))
    expected, expected_lse = flash_attn(q, k, v, window=(50, 0), return_lse=True)
    out = torch.zeros(2, 3, 60, 20, dtype=accumulator)
    lse = torch.full((2, 3, 60), -torch.inf, dtype=accumulator)
    for begin, end in ((0, 7), (7, 40), (40, 60)):
        part = _ops.attention(
            q, k[:, :, begin:end], v[:, :, begin:end], None, None, None, None,
            **OPTIONS | dict(diagonal=-begin, window_left=50, window_right=0),
        )  # fmt: skip
        _ops.attention_merge_(out, lse, *part)
    atol = {torch.bfloat16: 2e-2, torch.float16: 3e-3}.get(dtype, 1e-5)
    torch.testing.assert_close(out.to(dtype), expected, rtol=0, atol=atol)
    torch.testing.assert_close(lse, expected_lse)


def test_merging_on_other_devices_is_the_same():
    """The formula in torch's operators, which run on devices without a kernel for it."""
    out, part = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4, dtype=torch.bfloat16)
    lse, part_lse = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    lse[0, 0], part_lse[0, :, 1] = -torch.inf, -torch.inf
    out[0, 0], part[0, :, 1] = 0, 0
    expected = out.clone(), lse.clone()
    _ops.attention_merge_(*expected, part, part_lse)
    composite = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    torch.ops.flash_attn_ext.attention_merge_.default.redispatch(composite, out, lse, part, part_lse)
    torch.testing.assert_close((out, lse), expected)


def test_merge_errors():
    out, lse = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3)
    for arguments, kind, text in [
        ((out.half(), lse, out, lse), TypeError, "out: got dtype Half"),
        ((out, lse, out.int(), lse), TypeError, "part_out: got dtype Int"),
        ((out, lse.double(), out, lse), TypeError, "lse: got dtype Double"),
        ((out, lse, out[:, :, :2], lse), ValueError, "part_out: got shape"),
        ((out, lse, out, lse[:, :1]), ValueError, "part_lse: got shape"),
        ((out.transpose(2, 3), lse[:, :, :1].expand(1, 2, 4), out.transpose(2, 3), lse[:, :, :1].expand(1, 2, 4)),
         ValueError, "out: got a tensor whose last dimension is not contiguous"),
    ]:  # fmt: skip
        with pytest.raises(kind, match=text):
            _ops.attention_merge_(*arguments)
