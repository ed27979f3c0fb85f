"""Few query rows in the Hopper tier on the host (tests/cuda_host): heads that share a tile, and keys split over blocks,
against the dense oracle.

A tile has 128 rows: of 1 to 64 heads, a power of two, as many queries as fit; 128 keys, 80 at head dimension 256.
"""

import ctypes
from typing import NamedTuple

import pytest
import reference
import test_contract
import torch
from cuda_host import library
from helpers import check_against_reference, check_forward_against_reference, make_qkv
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cuda_sm90_options import padding
from test_cuda_varlen import check as check_packed

from flash_attn_ext import flash_attn

head_dims = pytest.mark.parametrize("head_dim", [64, 128, 256])


class Cut(NamedTuple):
    """How the forward is cut: its kernel, the heads that share a tile, the splits of the keys."""

    kernel: str
    heads: int
    splits: int


def cut_of(kernels, params):
    numbers = (ctypes.c_int * 3)()
    kernels.c.sm90_forward_cut(ctypes.byref(params), numbers)
    return Cut(("plain", "with options", "few rows")[numbers[0]], *numbers[1:])


@pytest.fixture(autouse=True)
def kernels(built):
    with library.on_hopper(built, deterministic=True) as loaded:
        yield loaded


@pytest.fixture
def cuts(kernels, monkeypatch):
    """A list. Each forward of this tier appends how it is cut."""
    found, workspace = [], kernels.c.forward_workspace

    def asked(params):
        if kernels.c.why_not_sm90_forward(params) is None:
            found.append(cut_of(kernels, params._obj))
        return workspace(params)

    monkeypatch.setattr(kernels.c, "forward_workspace", asked)
    return found


def make(*shape, dtype=torch.bfloat16, **options):
    return [t.detach() for t in make_qkv(*shape, dtype=dtype, **options)]


def check(kernels, cuts, cut, *inputs, **options):
    """out and lse by the kernel under test, cut as it should be."""
    kernels.num_splits = cut[1]
    results = check_forward_against_reference(*inputs, **options)
    assert cuts[-1] == ("few rows", *cut)
    assert (b"cuda::combine_kernel" if cut[1] > 1 else b"sm90::forward_kernel") in kernels.c.last_kernel()
    return results


# ---- heads that share a tile


@head_dims
@pytest.mark.parametrize(
    ("heads", "heads_kv", "shared", "seqlen_q"),
    [(2, 1, 2, 129), (6, 2, 4, 17), (8, 1, 8, 33), (16, 2, 8, 16), (5, 1, 8, 7), (64, 1, 64, 3), (71, 1, 64, 1)],
)
def test_heads_share_tiles(kernels, cuts, head_dim, heads, heads_kv, shared, seqlen_q):
    q, k, v = make(1 if heads > 8 else 2, heads, seqlen_q, 150, head_dim, heads_kv=heads_kv)
    check(kernels, cuts, (shared, 1), q, k, v)
    check(kernels, cuts, (shared, 2), q, k, v, causal="lower_right")


@pytest.mark.parametrize("layout", ["B S H D", "S B H D"])
def test_strided_inputs(kernels, cuts, layout):
    inputs = make(2, 8, 20, 200, 64, heads_kv=2)
    strided = [dict(test_contract.strided_versions(t))[layout] for t in inputs]
    expected = check(kernels, cuts, (4, 2), *inputs, causal="lower_right")
    ours = check(kernels, cuts, (4, 2), *strided, causal="lower_right")
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "splits"),
    [(8, 8, 1), (40, 128, 2), (96, 96, 2), (192, 128, 2), (136, 8, 2), (64, 200, 1)],
)
def test_head_dims(kernels, cuts, head_dim, head_dim_v, splits):
    inputs = make(1, 4, 20, 200, head_dim, heads_kv=1, head_dim_v=head_dim_v, dtype=torch.float16)
    check(kernels, cuts, (4, splits), *inputs, window=(170, 0))


# ---- splits


@head_dims
@pytest.mark.parametrize("seqlen_q", [17, 64, 129])
def test_splits(kernels, cuts, head_dim, seqlen_q):
    keys = 80 if head_dim == 256 else 128
    for seqlen_k, splits in [(keys + 1, 2), (5 * keys - 1, 3)]:
        check(kernels, cuts, (1, splits), *make(1, 2, seqlen_q, seqlen_k, head_dim))


@pytest.mark.parametrize(
    ("head_dim", "causal", "window"),
    [(64, "upper_left", None), (128, "lower_right", None), (256, "lower_right", (330, 3)), (64, None, (-1, 130)),
     (128, "upper_left", (300, -1)), (256, None, (150, 60))],
)  # fmt: skip
def test_bands(kernels, cuts, head_dim, causal, window):
    """If a block of queries sees fewer tiles than there are splits, some splits are empty."""
    kernels.num_splits = 4
    for seqlen_q, seqlen_k, heads in ((150, 600, 1), (600, 300, 1), (170, 500, 4)):
        inputs = make(1, heads, seqlen_q, seqlen_k, head_dim, heads_kv=1)
        check_forward_against_reference(*inputs, causal=causal, window=window)
    assert min(cut.splits for cut in cuts) > 1
    assert cuts[-1].heads == 4


@pytest.mark.parametrize("splits", [1, 3])
def test_rows_that_see_nothing(kernels, cuts, splits):
    q, k, v = make(1, 4, 200, 140, 64, heads_kv=1)
    out, lse = check(kernels, cuts, (4, min(splits, 2)), q, k, v, causal="lower_right")  # the first 60 rows
    assert (out[:, :, :60] == 0).all()
    assert (lse[:, :, :60] == -torch.inf).all()
    check(kernels, cuts, (4, min(splits, 2)), q, k, v, causal="lower_right", sink=torch.randn(4))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", ["nothing or one", "holes", "left"])
def test_key_masks_and_softcap(kernels, cuts, case, splits):
    q, k, v = make(2, 4, 40, 300, 128, heads_kv=2, dtype=torch.float16)
    check(kernels, cuts, (2, splits), q, k, v, padding(2, 300, case), softcap=5.0, sink=torch.randn(2, 4))


def test_all_options_with_one_gradient(kernels, cuts):
    """The backward reads merged out and lse."""
    kernels.num_splits = 3
    q, k, v = make_qkv(1, 4, 40, 300, 64, heads_kv=2, dtype=torch.bfloat16)
    check_against_reference(q, k, v, padding(1, 300, "right"), softcap=5.0, causal="lower_right")
    assert ("few rows", 2, 3) in cuts


@st.composite
def calls(draw):
    heads_kv, eights = draw(st.integers(1, 2)), st.integers(1, 32).map(lambda n: 8 * n)
    return {
        "shape": {
            "batch": draw(st.integers(1, 2)),
            "heads": heads_kv * draw(st.integers(1, 9)),
            "heads_kv": heads_kv,
            "seqlen_q": draw(st.integers(17, 90)),
            "seqlen_k": draw(st.integers(1, 500)),
            "head_dim": draw(eights),
            "head_dim_v": draw(eights),
            "dtype": draw(st.sampled_from([torch.bfloat16, torch.float16])),
        },
        "masked": draw(st.booleans()),
        "num_splits": draw(st.integers(0, 5)),
        "options": {
            "causal": draw(st.sampled_from([None, "upper_left", "lower_right"])),
            "window": draw(st.one_of(st.none(), st.tuples(st.integers(-1, 150), st.integers(-1, 150)))),
            "softcap": draw(st.sampled_from([0.0, 3.0])),
        },
        "seed": draw(st.integers(0, 2**32)),
    }


@settings(max_examples=20)
@given(call=calls())
def test_any_call(kernels, call):
    torch.manual_seed(call["seed"])
    kernels.seed_order(call["seed"])
    kernels.num_splits = call["num_splits"]
    q, k, v = make(**call["shape"])
    mask = torch.rand(len(q), 1, 1, k.shape[2]) > 0.5 if call["masked"] else None
    check_forward_against_reference(q, k, v, mask, **call["options"])
    assert b"sm90::forward_kernel" in kernels.c.last_kernel() or b"combine_kernel" in kernels.c.last_kernel()


# ---- packed sequences


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("head_dim", "lower_right"), [(64, True), (128, False), (256, True)])
def test_packed_sequences(kernels, cuts, head_dim, lower_right, splits):
    kernels.num_splits = splits
    lengths = [(30, 380), (0, 40), (1, 300), (33, 0), (40, 129), (17, 1)]
    check_packed(kernels, lengths, torch.bfloat16, head_dim=head_dim, causal=True, lower_right=lower_right, softcap=3.0)
    assert cuts == [("few rows", 2, splits)]


# ---- hidden values


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize(("head_dim", "splits"), [(64, 1), (64, 2), (128, 4), (256, 2)])
def test_masked_values_cannot_poison(kernels, cuts, head_dim, splits, where, poison):
    """0 x NaN is NaN, so the kernel repairs the rows that do not see the poisoned key, each in its split."""
    kernels.num_splits = splits
    q, k, v = make(1, 4, 60, 420, head_dim, heads_kv=1)
    (k if where == "key" else v)[:, 0, 400, 5] = poison
    with torch.no_grad():
        out = flash_attn(q, k, v, causal="lower_right", enable_gqa=True)
    assert cuts == [("few rows", 4, splits)]
    clean = reference.attention(q[:, :, :40], k[:, :, :400], v[:, :, :400], causal="lower_right")
    torch.testing.assert_close(out[:, :, :40], clean[0], rtol=0, atol=0.02)
    if where == "value" or poison is torch.nan:  # a score of -inf is a weight of 0
        assert not torch.isfinite(out[:, :, 40:]).all(-1).any()  # these rows see it


@pytest.mark.parametrize("splits", [1, 3])
def test_masked_values_reach_no_result(kernels, cuts, splits):
    kernels.num_splits = splits
    q, k, v = make(2, 4, 40, 300, 64, heads_kv=1)
    mask = padding(2, 300, "holes")
    clean = flash_attn(q, k, v, mask, enable_gqa=True)
    v.masked_fill_(~mask[:, :, 0, :, None], torch.nan)
    torch.testing.assert_close(flash_attn(q, k, v, mask, enable_gqa=True), clean, rtol=0, atol=0.02)
    assert cuts == 2 * [("few rows", 4, splits)]


# ---- cost


def test_warpgroups_without_rows_do_nothing(kernels, cuts):
    """The test counts exponentials: 64 rows for each warpgroup, even if few rows are in use."""
    work = []
    for seqlen_q in (17, 64, 65):
        before = kernels.c.exponentials()
        check(kernels, cuts, (1, 2), *make(1, 1, seqlen_q, 512, 64))
        work.append(kernels.c.exponentials() - before)
    assert work[0] == work[1] == work[2] / 2


class TestPlan:
    """The choices by shape. H 32 and D 128, unless a case says otherwise."""

    def params(self, seqlen_q, seqlen_k=8192, heads_kv=32, *, batch=1, heads=32, head_dim=128, num_splits=0, band=None):
        sizes = library.Sizes(batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim)
        rows = library.Tensor4(4096, 1 << 24, 1 << 20, head_dim)
        tensors = dict.fromkeys(("q", "k", "v", "out"), rows)
        return library.AttentionParams(
            dtype=2, sizes=sizes, scale=0.1, band=library.Band(*(band or (0, library.UNBOUNDED, library.UNBOUNDED))),
            decode=library.DecodeParams(num_splits), **tensors,
        )  # fmt: skip

    def cut(self, kernels, *args, **options):
        return cut_of(kernels, self.params(*args, **options))

    def test_splits_fill_the_gpu(self, kernels):
        for heads, head_dim in ((1, 128), (4, 64), (8, 128), (32, 256)):
            kernel, shared, splits = self.cut(kernels, 64, 1 << 17, heads, heads=heads, head_dim=head_dim)
            assert (kernel, shared) == ("few rows", 1)
            blocks = heads * splits
            assert blocks > 0.9 * 132 * -(-blocks // 132)

    def test_heads_share_where_that_saves_tiles(self, kernels):
        assert self.cut(kernels, 32, heads_kv=8, batch=32) == ("few rows", 4, 1)
        assert self.cut(kernels, 20, heads_kv=4, batch=64) == ("few rows", 8, 1)
        assert self.cut(kernels, 128, heads_kv=8, batch=32).kernel == "plain"
        assert self.cut(kernels, 20, batch=64).kernel == "plain"

    def test_the_cost_of_padding_counts(self, kernels):
        """Three heads that share tiles have five in place of six, but at head dimension 96 wider ones."""
        for head_dim, kernel in ((128, "few rows"), (96, "plain")):
            assert self.cut(kernels, 150, heads_kv=44, heads=132, batch=30, head_dim=head_dim).kernel == kernel

    def test_training_shapes_are_not_split(self, kernels):
        for seqlen, batch in ((512, 32), (1024, 16), (4096, 4), (16384, 1)):
            assert self.cut(kernels, seqlen, seqlen, batch=batch) == ("plain", 1, 1)
            assert self.cut(kernels, seqlen, seqlen, 8, batch=batch) == ("plain", 1, 1)

    def test_only_keys_that_a_query_sees_count(self, kernels):
        window = (0, 100, 0)
        assert self.cut(kernels, 64, 1 << 20, band=((1 << 20) - 64, 100, 0)).kernel == "plain"
        assert self.cut(kernels, 64, 1 << 12, band=window).kernel == "plain"

    def test_the_caller_decides(self, kernels):
        assert self.cut(kernels, 64, num_splits=1).kernel == "plain"
        assert self.cut(kernels, 64, num_splits=5) == ("few rows", 1, 5)
        assert self.cut(kernels, 4096, num_splits=3, batch=8) == ("few rows", 1, 3)
        assert self.cut(kernels, 64, 100, num_splits=5).kernel == "plain", "one tile"

    def test_memory_of_splits_is_linear(self, kernels):
        assert self.cut(kernels, 8192, num_splits=1000).splits == 4
        params = self.params(64, num_splits=5)
        assert kernels.c.forward_workspace(ctypes.byref(params)) == 5 * 32 * 64 * (128 + 2) * 4

    @pytest.mark.parametrize(
        ("seqlen_q", "heads_kv", "tier"),
        [(1, 1, "sm80"), (2, 1, "sm90"), (16, 32, "sm80"), (16, 16, "sm80"), (16, 8, "sm90"), (17, 32, "sm90")],
    )
    def test_the_tier_that_decodes(self, kernels, seqlen_q, heads_kv, tier):
        """sm80, where its blocks have all rows of a group of heads."""
        chosen, why_not = kernels.choice(self.params(seqlen_q, heads_kv=heads_kv))
        assert chosen == tier
        if tier == "sm80":
            assert why_not == [
                "sm90: few queries, with at most 32 rows of the heads that share a key head: sm80 decodes them"
            ]
