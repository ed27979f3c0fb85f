"""int4 caches: the format, attention to them, appending, and the checks."""

import re
from functools import partial

import pytest
import torch
from cache_helpers import check, rotary_tables

from flash_attn_ext import (
    _append,
    _ops,
    dequantize_int4,
    explain_kvcache,
    flash_attn_with_kvcache,
    quantize_int4,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")
H, HK, D, DV, ROWS = 8, 2, 128, 96, 160
LENGTHS = [70, 0, 133]


def caches_of(page_size=None, group=32, zeros=True, dtype=torch.float16, heads_kv=HK, columns=(D, DV)):
    """Coded caches, decoded caches and block_table. Values are not centred, and rows differ in size."""
    table, shape = None, (len(LENGTHS), ROWS)
    if page_size:
        pages = -(-ROWS // page_size)
        table = torch.randperm(len(LENGTHS) * pages, dtype=torch.int32).view(len(LENGTHS), pages)
        shape = (table.numel(), page_size)
    coded, decoded = {}, []
    for name, d in zip("kv", columns, strict=True):
        x = (torch.randn(*shape, heads_kv, d) + 0.7) * 2.0 ** torch.randint(-2, 2, (*shape, 1, 1))
        values, scales, zero = quantize_int4(x, group, with_zeros=zeros, dtype=dtype)
        coded |= {f"{name}_cache": values, f"{name}_scales": scales, f"{name}_zeros": zero}
        decoded.append(dequantize_int4(values, scales, zero))
    return coded, decoded, table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("page_size", "group", "zeros", "numbers"),
    [
        (None, 32, True, torch.float16),
        (16, 32, False, torch.float16),
        (24, 32, True, torch.float32),
        (None, None, True, torch.float32),
        (16, None, False, torch.float16),
    ],
)
def test_read(isa, dtype, page_size, group, zeros, numbers):
    """As exact as torch's attention to the decoded numbers, with 1, 4 and 3 x 7 rows for each key head."""
    coded, decoded, table = caches_of(page_size, group, zeros, numbers)
    for heads, seqlen_q in ((2, 1), (8, 1), (6, 7)):
        q = torch.randn(len(LENGTHS), seqlen_q, heads, D).to(dtype)
        out, lse = flash_attn_with_kvcache(
            q, **coded, cache_seqlens=torch.tensor(LENGTHS), causal=True, block_table=table, return_softmax_lse=True
        )
        check(out, lse, q, *decoded, LENGTHS, table, causal=True)


@pytest.mark.parametrize("columns", [(64, 192), (40, 2), (2, 40), (256, 64)])
def test_head_dimensions(isa, columns):
    """Parts of a step of columns, and more groups than a step has."""
    group = 64 if min(columns) >= 64 else None
    coded, decoded, _ = caches_of(None, group, True, columns=columns)
    for dtype in (torch.bfloat16, torch.float32):
        q = torch.randn(len(LENGTHS), 1, H, columns[0]).to(dtype)
        out, lse = flash_attn_with_kvcache(q, **coded, cache_seqlens=torch.tensor(LENGTHS), return_softmax_lse=True)
        check(out, lse, q, *decoded, LENGTHS)


def test_many_queries(isa):
    coded, decoded, table = caches_of(16)
    for dtype in (torch.bfloat16, torch.float32):
        q = torch.randn(len(LENGTHS), 40, H, D).to(dtype)
        out, lse = flash_attn_with_kvcache(
            q, **coded, cache_seqlens=torch.tensor(LENGTHS), block_table=table, return_softmax_lse=True
        )
        check(out, lse, q, *decoded, LENGTHS, table)


OPTIONS = {
    "window": ({"window_size": (30, 0)}, {"window": (30, 0)}),
    "softcap": ({"softcap": 2.0}, {"softcap": 2.0}),
    "slopes": ({"alibi_slopes": torch.rand(H)},) * 2,
    "sink": ({"sink": torch.rand(H)},) * 2,
    "splits": ({"num_splits": 3}, {}),
    "left padding": ({"cache_leftpad": torch.tensor([3, 0, 70])}, {"leftpad": [3, 0, 70]}),
    "numbers of caches": ({"cache_batch_idx": torch.tensor([2, 0, 1])}, {"caches": [2, 0, 1]}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    given, of_reference = OPTIONS[name]
    if "alibi_slopes" in given:
        of_reference = {"slopes": given["alibi_slopes"]}
    coded, decoded, _ = caches_of()
    lengths = [70, 90, 133]
    q = torch.randn(len(lengths), 2, H, D).to(torch.float32 if name == "slopes" else torch.bfloat16)
    out, lse = flash_attn_with_kvcache(
        q, **coded, **given, cache_seqlens=torch.tensor(lengths), causal=True, return_softmax_lse=True
    )
    check(out, lse, q, *decoded, lengths, causal=True, **of_reference)


def test_functions_and_trees():
    coded, decoded, _ = caches_of()
    lengths, q = torch.tensor([70, 90, 133]), torch.randn(3, 2, H, D)
    given = dict(cache_seqlens=lengths)
    for options in (
        {"score_mod": lambda score, b, h, i, j: score + 0.1 * (j % 3)},
        {"tree_mask": torch.eye(2, dtype=torch.bool)},
    ):
        expected = flash_attn_with_kvcache(q, *decoded, **given, **options)
        torch.testing.assert_close(flash_attn_with_kvcache(q, **coded, **given, **options), expected)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("page_size", [None, 16])
def test_append(isa, zeros, page_size):
    """A call writes quantize_int4 of the rotated rows, and nothing else."""
    coded, _, table = caches_of(page_size, 32, zeros)
    before = {name: t.clone() for name, t in coded.items() if t is not None}
    lengths, new = torch.tensor(LENGTHS), 3
    for dtype in (torch.bfloat16, torch.float64):
        q = torch.randn(3, new, H, D).to(dtype)
        k, v = (torch.randn(3, new, HK, d).to(dtype) for d in (D, DV))
        tables = rotary_tables(ROWS, 32)
        offsets = torch.arange(4) * new
        rows = (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
        theirs = {name: t.clone() for name, t in before.items()}
        numbers = [theirs.get(name) for name in ("k_scales", "v_scales", "k_zeros", "v_zeros")]
        _append.append_to_cache(
            *rows, theirs["k_cache"], theirs["v_cache"], offsets, offsets, lengths, *tables, None, None, None, table,
            None, None, *numbers, interleaved=False,
        )  # fmt: skip
        out = flash_attn_with_kvcache(
            q, **coded, k=k, v=v, rotary_cos=tables[0], rotary_sin=tables[1], cache_seqlens=lengths, causal=True,
            block_table=table, rotary_interleaved=False,
        )  # fmt: skip
        assert out.isfinite().all()
        for name, expected in theirs.items():
            if name.startswith("v") or dtype == torch.bfloat16:  # a rotation in float64 may round otherwise
                assert (coded[name] != expected).float().mean() < (1e-4 if name.startswith("k") else 1e-9)
        for name, t in before.items():
            coded[name].copy_(t)


@pytest.mark.parametrize("zeros", [False, True])
def test_values_at_the_limits_are_rounded_as_torch_does(isa, zeros):
    """Constant groups, zeros, one peak, ties of both signs, subnormals, float16's limits, NaN and infinities."""
    rows = torch.randn(12, 1, 64)
    rows[0], rows[1], rows[2, :, 5], rows[3] = 0.0, 5.0, 1e4, -3.0
    rows[4, :, 0], rows[4, :, 1] = 7.0, -7.0
    rows[5] *= 1e-8
    rows[6] *= 1e6
    rows[7, :, 3], rows[8, :, 3], rows[9, :, 40] = torch.nan, torch.inf, -torch.inf
    rows[10] += 1000.0
    expected = quantize_int4(rows, 32, with_zeros=zeros)
    caches = [torch.full((1, 12, 1, 32), 255, dtype=torch.uint8) for _ in range(2)]
    numbers = [torch.full((1, 12, 1, 2), 9.0, dtype=torch.float16) if n < 2 or zeros else None for n in range(4)]
    offsets = torch.tensor([0, 12])
    _ops.append_to_cache(
        rows, rows, rows, *caches, offsets, offsets, torch.tensor([0]), *[None] * 8, *numbers, interleaved=True
    )
    for t in caches:
        assert torch.equal(t[0], expected[0])
    for n, t in enumerate(numbers):
        if t is not None:
            assert torch.equal(t[0].view(torch.int16), expected[1 + n // 2].view(torch.int16)) or torch.equal(
                t[0].nan_to_num(1.5), expected[1 + n // 2].nan_to_num(1.5)
            )


def test_the_format():
    """Byte c holds columns 2c and 2c + 1. The largest element is exact, and no error is above half a level."""
    x = torch.randn(5, 3, 64)
    for zeros in (False, True):
        values, scales, zero = quantize_int4(x, 32, with_zeros=zeros, dtype=torch.float32)
        assert values.shape == (5, 3, 32)
        decoded = dequantize_int4(values, scales, zero)
        level = scales.abs().repeat_interleave(32, -1)
        assert ((decoded - x).abs() <= level * (0.501 if zeros else 1.001)).all()
        first = values[1, 2, 7]
        for c, nibble in ((14, first & 15), (15, first >> 4)):
            z = 8 if zero is None else zero[1, 2, c // 32]
            torch.testing.assert_close(decoded[1, 2, c], (nibble.float() - z) * scales[1, 2, c // 32])
    assert quantize_int4(torch.full((64,), 5.0), with_zeros=True)[1].item() > 0
    constant = dequantize_int4(*quantize_int4(torch.full((64,), 5.0), with_zeros=True))
    torch.testing.assert_close(constant, torch.full((64,), 5.0), rtol=1e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_nan_scales_reach_their_head_and_no_hidden_row(isa, dtype):
    coded, _, _ = caches_of(zeros=False)
    q = torch.randn(3, 1, H, D).to(dtype)
    given = dict(cache_seqlens=torch.tensor([133, 133, 133]), window_size=(50, 0))
    expected = flash_attn_with_kvcache(q, **coded, **given)
    for name in ("k_scales", "v_scales"):
        coded[name][:, 64:80] = torch.nan
    hidden = flash_attn_with_kvcache(q, **coded, **given)
    torch.testing.assert_close(hidden, expected, rtol=0.02, atol=0.02)
    coded["v_scales"][:, 132, 1] = torch.nan
    out = flash_attn_with_kvcache(q, **coded, **given)
    assert torch.equal(out[:, :, : H // 2], hidden[:, :, : H // 2])
    assert out[:, :, H // 2 :].isnan().all()


BAD = {
    "no scales": (dict(k_scales=None), ValueError, "k_cache: got dtype uint8 without k_scales"),
    "one cache": (dict(v_cache=torch.zeros(3, ROWS, HK, DV)), ValueError, "v_scales: got one with a cache of dtype"),
    "groups": (dict(k_scales=torch.ones(3, ROWS, HK, 3).half()), ValueError, "k_scales: got 3 groups for 128 columns"),
    "16 columns": (dict(k_scales=torch.ones(3, ROWS, HK, 8)), ValueError, "k_scales: got 8 groups for 128 columns"),
    "shape": (dict(v_scales=torch.ones(3, ROWS, 1, 3).half()), ValueError, "v_scales: got shape [3, 160, 1, 3]; allow"),
    "no groups": (dict(k_scales=torch.ones(3, ROWS, HK, 0)), ValueError, "k_scales: got 0 groups"),
    "dtype": (dict(k_scales=torch.ones(3, ROWS, HK, 4).double()), TypeError, "k_scales: got dtype float64; allowed: f"),
    "zeros": (dict(k_zeros=torch.ones(3, ROWS, HK, 4)), TypeError, "k_zeros: got dtype float32; allowed: the dtype of"),
    "shape of zeros": (dict(k_zeros=torch.ones(3, ROWS, HK, 2).half()), ValueError, "k_zeros: got shape [3, 160, 2, 2"),
    "strides": (dict(k_scales=torch.ones(3, ROWS, HK, 8).half()[..., ::2]), ValueError, "k_scales: got strides"),
    "odd D": (dict(q=torch.zeros(3, 1, H, 127)), ValueError, "k_cache: got shape"),
    "descale": (dict(k_descale=torch.ones(HK)), ValueError, "k_descale: got one with a cache of dtype uint8"),
    "expanded": (dict(k_scales=torch.ones(1, 1, HK, 4).half().expand(3, ROWS, HK, 4)), ValueError,
                 "k_scales: got strides [0, 0, 4, 1]"),
    "shared": (dict(v_scales=torch.ones(3, ROWS, HK, 4).half()), ValueError, "v_scales: got a tensor that shares"),
    "huge": (dict(k_cache=torch.zeros(1, dtype=torch.uint8).expand(2**26, 2**26, HK, D // 2)), ValueError,
             "k_scales: got shape"),
    "qv": (dict(qv=torch.zeros(3, 1, H, DV)), NotImplementedError, "qv: got a tensor with k_scales"),
    "key_indices": (dict(key_indices=torch.zeros(3, 1, 1, 4).long()), NotImplementedError, "key_indices: got a tensor"),
    "k": (dict(k=torch.zeros(3, 1, HK, D // 2)), ValueError, "k: got shape [3, 1, 2, 64]; allowed: (3, seqlen_new, 2"),
}  # fmt: skip


@pytest.mark.parametrize("appends", [False, True])
def test_int4_and_int8_caches_are_not_mixed(appends):
    """The kernels read both caches in the key's format, so they would read int8 rows as rows of half the bytes."""
    coded, _, _ = caches_of(zeros=False, columns=(D, D))
    coded_k = {"k_cache": coded["k_cache"], "k_scales": coded["k_scales"]}
    coded_v = {"v_cache": coded["k_cache"], "v_scales": coded["k_scales"]}
    int8 = torch.zeros(3, ROWS, HK, D, dtype=torch.int8)
    q, new = torch.zeros(3, 1, H, D), torch.ones(3, 1, HK, D) if appends else None
    for caches, message in (
        ({**coded_k, "v_cache": int8}, "v_cache: got dtype int8; allowed: k_cache's, uint8"),
        ({**coded_v, "k_cache": int8}, "v_cache: got dtype uint8; allowed: k_cache's, int8"),
    ):
        with pytest.raises(TypeError, match=re.escape(message)):
            flash_attn_with_kvcache(q, k=new, v=new, cache_seqlens=5, **caches)
    with pytest.raises(TypeError, match=re.escape("v_cache: got dtype float32; allowed: k_cache's, uint8")):
        flash_attn_with_kvcache(q, k=new, v=new, cache_seqlens=5, v_cache=int8.float(), **coded_k)


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument_and_nothing_is_written(case):
    given, error, message = BAD[case]
    coded, _, _ = caches_of()
    if "groups" in case or case == "16 columns":
        coded["k_zeros"] = None
    if case == "shared":
        coded["k_zeros"] = coded["v_zeros"] = None
        coded, _, _ = caches_of(zeros=False, columns=(D, D))
        given = {"v_scales": coded["k_scales"], "v": torch.zeros(3, 1, HK, D)}
    arguments = {"q": torch.zeros(3, 1, H, D), "k": torch.ones(3, 1, HK, D), "v": torch.ones(3, 1, HK, DV)}
    arguments |= coded | {"cache_seqlens": 5} | given
    before = {name: t.clone() for name, t in coded.items() if t is not None}
    with pytest.raises(error, match=re.escape(message)):
        flash_attn_with_kvcache(**arguments)
    for name, t in before.items():
        assert torch.equal(coded[name], t)


def test_errors_of_the_helpers():
    x = torch.zeros(2, 64)
    for call, error, message in (
        (lambda: quantize_int4(x.int()), TypeError, "x: got torch.int32"),
        (lambda: quantize_int4(x[:, :63]), ValueError, "x: got shape [2, 63]"),
        (lambda: quantize_int4(x, 16), ValueError, "group: got groups of 16 columns"),
        (lambda: quantize_int4(x, 32.0), TypeError, "group: got 32.0"),
        (lambda: quantize_int4(x, dtype=torch.bfloat16), TypeError, "dtype: got torch.bfloat16"),
        (lambda: dequantize_int4(x, x), TypeError, "values: got dtype torch.float32"),
        (lambda: dequantize_int4(x.byte(), x[:, :5]), ValueError, "scales: got 5 groups for 128 columns"),
        (lambda: dequantize_int4(x.byte(), x[:1, :1]), ValueError, "scales: got shape [1, 1]"),
        (lambda: dequantize_int4(x.byte(), x[:, :2], x[:, :1]), ValueError, "zeros: got shape [2, 1]"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            call()


def test_opcheck_compile_and_explain():
    coded, _, table = caches_of(16)
    lengths, q = torch.tensor(LENGTHS), torch.randn(3, 1, H, D)
    offsets, rows = torch.arange(4), [torch.randn(3, HK, d) for d in (D, DV)]
    caches = [coded["k_cache"], coded["v_cache"]]
    numbers = [coded[name] for name in ("k_scales", "v_scales", "k_zeros", "v_zeros")]
    torch.library.opcheck(
        _ops.attention_cache,
        (q.flatten(0, 1), *caches, None, None, offsets, lengths, None, None, table, None, None, None, *numbers),
    )
    torch.library.opcheck(
        _ops.append_to_cache,
        (q.flatten(0, 1), *rows, *caches, offsets, offsets, lengths, *[None] * 5, table, None, None, *numbers),
    )

    def step(q, k, v, coded, lengths, table):
        return flash_attn_with_kvcache(q, **coded, k=k, v=v, cache_seqlens=lengths, block_table=table, causal=True)

    given = [q, *(t[:, None] for t in rows)]
    compiled_coded = {name: t.clone() for name, t in coded.items()}
    expected = step(*given, coded, lengths, table)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given, compiled_coded, lengths, table), expected)
    assert all(torch.equal(t, coded[name]) for name, t in compiled_coded.items())
    report = explain_kvcache(q.bfloat16(), **coded, cache_seqlens=lengths, block_table=table)
    assert "int4 caches" in report.call
    assert report.forward.error is None


@pytest.mark.parametrize("zeros", [True, False])
@pytest.mark.parametrize("group", [32, 64, None])
def test_bits_do_not_depend_on_the_size_of_pages(isa, group, zeros):
    """Pages of 5 rows have another conversion to bfloat16. Pages in order are converted at once. 1 to 24 rows of q."""
    coded, _, table = caches_of(16, group, zeros, columns=(D, D), heads_kv=1)
    rows = {name: None if t is None else t[table.long()].flatten(1, 2) for name, t in coded.items()}
    small = {name: None if t is None else t.unflatten(1, (-1, 5)).flatten(0, 1) for name, t in rows.items()}
    in_order = {name: None if t is None else t.unflatten(1, (-1, 16)).flatten(0, 1) for name, t in rows.items()}

    for name, t in in_order.items():  # the numbers of a page do not follow the numbers of the page before
        if t is not None and "cache" not in name:
            in_order[name] = torch.cat([t, torch.full_like(t, torch.nan)], 1)[:, :16]

    def pages(size):
        return torch.arange(len(LENGTHS) * ROWS // size, dtype=torch.int32).view(len(LENGTHS), -1)

    for heads in (1, 3, 4, 8, 24):
        q = torch.randn(3, 1, heads, D).bfloat16()
        call = partial(flash_attn_with_kvcache, q, cache_seqlens=torch.tensor(LENGTHS))
        expected = call(**coded, block_table=table)
        assert torch.equal(call(**rows), expected)
        assert torch.equal(call(**small, block_table=pages(5)), expected)
        assert torch.equal(call(**in_order, block_table=pages(16)), expected)


def test_bits_do_not_depend_on_threads_pages_or_the_batch(threads):
    coded, _, table = caches_of(16)
    q = torch.randn(3, 1, H, D).bfloat16()
    results = []
    for count in (1, 2, 5):
        threads(count)
        results.append(flash_attn_with_kvcache(q, **coded, cache_seqlens=torch.tensor(LENGTHS), block_table=table))
    assert all(torch.equal(results[0], other) for other in results[1:])
    rows = {name: t[table[2:].long()].flatten(1, 2) for name, t in coded.items()}
    assert torch.equal(flash_attn_with_kvcache(q[2:], **rows, cache_seqlens=LENGTHS[2]), results[0][2:])
