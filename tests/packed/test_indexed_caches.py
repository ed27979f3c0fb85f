"""By index: 8-bit caches, and separate caches with qv. Their chosen rows are copied before the attention."""

import pytest
import torch

from flash_attn_ext import flash_attn_with_kvcache
from flash_attn_ext._chosen_rows import number_chosen

BATCH, SIZE, HEADS, HEADS_KV, D, D_V = 3, 16, 8, 2, 32, 24
LENGTHS = torch.tensor([40, 7, 25])


def make(kind, dtype, coded_as=None):
    """(q, caches, arguments): caches of 12 pages of 16 rows, or 4 caches of 48 rows."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(BATCH, 4, HEADS, D, generator=g).to(dtype)
    caches = [torch.randn(12, SIZE, HEADS_KV, d, generator=g) for d in (D, D_V)]
    caches = [c.to(dtype) if coded_as is None else (20 * c).clamp(-100, 100).to(coded_as) for c in caches]
    given = {"cache_seqlens": LENGTHS, "causal": True, "return_softmax_lse": True}
    if kind == "pages":
        given["block_table"] = torch.randperm(12, generator=g)[:9].view(3, 3).int()
    else:
        caches = [c.view(4, 3 * SIZE, *c.shape[2:]) for c in caches]
    if kind == "batch_idx and leftpad":
        given |= {"cache_batch_idx": torch.tensor([2, 0, 3]), "cache_leftpad": torch.tensor([11, 2, 0])}
    return q, caches, given


def make_numbers(heads, block=0, n=12):
    g = torch.Generator().manual_seed(1)
    own = [torch.randint(-1, -(-int(s) // max(block, 1)), (heads, 4, n), generator=g) for s in LENGTHS]
    name = "key_block_indices" if block else "key_indices"
    return {name: torch.stack(own)} | ({"key_block_size": block} if block else {})


@pytest.mark.parametrize("coded_as", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("kind", ["pages", "caches", "batch_idx and leftpad"])
@pytest.mark.parametrize(("form", "heads", "block"), [("none", 1, 0), ("head", 2, 0), ("cache", 1, 4), ("token", 2, 0)])
def test_8_bit_caches_equal_widened_ones(isa, kind, coded_as, form, heads, block):
    q, coded, given = make(kind, torch.bfloat16, coded_as)
    shapes = {"head": (HEADS_KV,), "cache": (len(coded[0]), HEADS_KV), "token": coded[0].shape[:3]}
    scales = [None if form == "none" else torch.rand(shapes[form]) / 20 + 0.01 for _ in coded]
    given |= make_numbers(heads, block)
    out, lse = flash_attn_with_kvcache(q, *coded, **given, k_descale=scales[0], v_descale=scales[1])
    full = [1.0 if s is None else (s[:, None] if s.dim() == 2 else s)[..., None] for s in scales]
    exact = [c.float() * s for c, s in zip(coded, full, strict=True)]
    same = flash_attn_with_kvcache(q, *(c.to(q.dtype) for c in exact), **given)
    torch.testing.assert_close((out, lse), same)
    wide = flash_attn_with_kvcache(q.double(), *(c.double() for c in exact), **given)
    if form != "none":  # scores of hundreds are one-hot: the rounding of a row then chooses another key
        torch.testing.assert_close(out.double(), wide[0], atol=0.02 * wide[0].abs().max().item(), rtol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_8_bit_caches_of_other_dtypes(dtype):
    q, coded, given = make("pages", dtype, torch.int8)
    given |= make_numbers(1)
    scale = torch.full((HEADS_KV,), 0.05)
    out = flash_attn_with_kvcache(q, *coded, **given, k_descale=scale, v_descale=scale)
    expected = flash_attn_with_kvcache(q, *(c.to(dtype) * scale[0].to(dtype) for c in coded), **given)
    torch.testing.assert_close(out, expected)


def test_an_8_bit_cache_appends_first():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 1, h, 16, generator=g) for h in (4, 2, 2))
    caches = [torch.zeros(2, 20, 2, 16, dtype=torch.int8) for _ in range(2)]
    scale = torch.full((2,), 0.05)
    given = dict(cache_seqlens=9, k_descale=scale, v_descale=scale, causal=True)
    out = flash_attn_with_kvcache(q, *caches, k, v, key_indices=torch.tensor([9]).expand(2, 1, 1, 1), **given)
    assert caches[1][:, 9].any()
    expected = (caches[1][:, 9:10].float() * 0.05).repeat_interleave(2, 2)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", ["pages", "caches", "batch_idx and leftpad"])
@pytest.mark.parametrize(("heads", "block"), [(1, 0), (2, 0), (1, 4)])
def test_qv_with_separate_caches_equals_one_tensor(isa, dtype, kind, heads, block):
    q, caches, given = make(kind, dtype)
    given |= make_numbers(heads, block) | {"qv": torch.randn(*q.shape[:3], D_V).to(dtype)}
    new = [torch.randn(BATCH, 2, HEADS_KV, d).to(dtype) for d in (D, D_V)]
    given["cache_seqlens"] = LENGTHS - 2
    together = torch.cat(caches, -1).split([D, D_V], -1)
    out = flash_attn_with_kvcache(q, *caches, *new, **given)
    expected = flash_attn_with_kvcache(q, *together, *new, **given)
    torch.testing.assert_close(out, expected)
    assert all(torch.equal(a, b) for a, b in zip(caches, together, strict=True))


def test_only_chosen_rows_are_copied():
    indices = torch.tensor([[[7, -1, 3], [3, 9, 7]]])
    chosen, own = number_chosen(indices, 10)
    assert chosen.tolist() == [3, 7, 9]
    assert own.tolist() == [[[1, -1, 0], [0, 2, 1]]]
    chosen, own = number_chosen(torch.full((1, 2, 3), -1), 0)
    assert chosen.numel() == 0
    assert (own == -1).all()


def test_in_a_graph_the_number_of_rows_does_not_depend_on_the_numbers():
    q, coded, given = make("pages", torch.float32, torch.int8)
    given |= make_numbers(1) | {"k_descale": torch.full((HEADS_KV,), 0.05)}
    expected = flash_attn_with_kvcache(q, *coded, **given)
    compiled = torch.compile(flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, *coded, **given), expected)
