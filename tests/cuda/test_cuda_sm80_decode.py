"""Decoding on tensor cores (csrc/cuda/sm80/decode.cuh) on the host, against the dense oracle."""

import ctypes
import re

import pytest
import test_contract
import torch
from cuda_host import library
from helpers import check_forward_against_reference, make_qkv
from hypothesis import given, settings
from hypothesis import strategies as st

from flash_attn_ext import flash_attn

pytestmark = pytest.mark.usefixtures("kernels")

halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
# Three warps share a tile of 48 keys, 16 keys for each warp. A warp's ring has 7 tiles up to D 64, then 5, then 3.
HEAD_DIMS = [64, 128, 256]


def names_of_launched(kernels, monkeypatch):
    """A list with an entry for each forward: the reason why sm80 cannot run it, or None."""
    said = []
    launch = kernels.launch

    def record(kind, params, *tensors):
        said.append(kernels.c.why_not_sm80_forward(ctypes.byref(params)))
        launch(kind, params, *tensors)

    monkeypatch.setattr(kernels, "launch", record)
    return said


def make(*shape, dtype=torch.bfloat16, **options):
    return [t.detach() for t in make_qkv(*shape, dtype=dtype, **options)]


def check_decode(kernels, q, *inputs, **options):
    """out and lse by the kernel under test, against the oracle."""
    results = check_forward_against_reference(q, *inputs, **options)
    assert re.search(rb"sm80::decode_kernel|cuda::combine_kernel", kernels.c.last_kernel())
    return results


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_tile_edges(kernels, head_dim, num_splits):
    kernels.num_splits = num_splits
    for seqlen_k in (0, 1, 15, 16, 17, 47, 48, 49, 97, 48 * 7, 48 * 7 + 17):
        check_decode(kernels, *make(1, 2, 1, seqlen_k, head_dim, heads_kv=1))


@halves
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"), [(8, 8), (72, 16), (40, 128), (136, 64), (64, 200), (192, 256), (256, 8)]
)
def test_head_dims(kernels, dtype, head_dim, head_dim_v):
    for num_splits in (1, 2):
        kernels.num_splits = num_splits
        check_decode(kernels, *make(1, 4, 3, 150, head_dim, head_dim_v, heads_kv=2, dtype=dtype))


# A tile has up to 16 rows. Up to head dimension 128 a block has two tiles.
@pytest.mark.parametrize(("heads", "heads_kv"), [(1, 1), (3, 3), (8, 2), (5, 1), (16, 1), (34, 2)])
@pytest.mark.parametrize("seqlen_q", [1, 2, 3, 16])
def test_rows_of_several_heads_share_a_block(kernels, heads, heads_kv, seqlen_q):
    for num_splits, head_dim in ((1, 32), (2, 32), (2, 128), (1, 136)):
        kernels.num_splits = num_splits
        check_decode(kernels, *make(2, heads, seqlen_q, 110, head_dim, heads_kv=heads_kv), causal="lower_right")


@pytest.mark.parametrize("causal", ["upper_left", "lower_right"])
@pytest.mark.parametrize("window", [None, (0, 0), (40, 3), (-1, 70), (200, -1)])
def test_bands(kernels, causal, window):
    for num_splits in (0, 1, 4):
        kernels.num_splits = num_splits
        for seqlen_q, seqlen_k in ((1, 300), (7, 300), (16, 9), (9, 16)):
            inputs = make(1, 4, seqlen_q, seqlen_k, 16, heads_kv=2)
            check_decode(kernels, *inputs, causal=causal, window=window)
            check_decode(kernels, *inputs, window=window)


@halves
@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("seqlen_q", [1, 11])
def test_all_options_together(kernels, dtype, num_splits, seqlen_q):
    kernels.num_splits = num_splits
    q, k, v = make(2, 6, seqlen_q, 231, 24, 40, heads_kv=2, dtype=dtype)
    mask = torch.randn(2, 6, seqlen_q, 231, dtype=dtype)
    mask = mask.masked_fill(torch.rand_like(mask) < 0.2, -torch.inf)
    mask[1, 2, 0] = -torch.inf  # a row without a visible key
    mask[0, :, :, :100] = -torch.inf  # a split without a visible key
    check_decode(
        kernels, q, k, v, mask, alibi_slopes=torch.rand(2, 6, dtype=dtype), causal="lower_right", window=(200, 100),
        softcap=5.0, dropout_p=0.2, scale=-0.3,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(5, 200), (1, 200), (5, 1), (2, 1, 1, 200), (2, 4, 1, 200), (1, 4, 1, 1)], ids=str)
def test_mask_shapes(kernels, shape):
    kernels.num_splits = 2
    q, k, v = make(2, 4, 5, 200, 16, heads_kv=1)
    check_decode(kernels, q, k, v, torch.rand(shape) > 0.3)
    check_decode(kernels, q, k, v, torch.randn(shape).to(torch.bfloat16))


@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
def test_dropout_alone(kernels, dropout_p):
    for num_splits in (1, 3):
        kernels.num_splits = num_splits
        check_decode(kernels, *make(2, 6, 5, 200, 16, heads_kv=2, dtype=torch.float16), dropout_p=dropout_p)


@pytest.mark.parametrize("seqlen_q", [17, 50])
def test_many_queries_whose_keys_the_caller_splits(kernels, seqlen_q):
    kernels.num_splits = 2
    check_decode(kernels, *make(1, 4, seqlen_q, 130, 64, heads_kv=2), causal="lower_right", dropout_p=0.2)


@st.composite
def calls(draw):
    heads_kv, eights = draw(st.integers(1, 3)), st.integers(1, 10).map(lambda n: 8 * n)
    return {
        "shape": {
            "batch": draw(st.integers(1, 2)),
            "heads": heads_kv * draw(st.integers(1, 5)),
            "heads_kv": heads_kv,
            "seqlen_q": draw(st.integers(1, 16)),
            "seqlen_k": draw(st.integers(1, 260)),
            "head_dim": draw(eights),
            "head_dim_v": draw(eights),
            "dtype": draw(st.sampled_from([torch.bfloat16, torch.float16])),
        },
        "mask": draw(st.sampled_from(["none", "bool", "float"])),
        "alibi": draw(st.booleans()),
        "num_splits": draw(st.integers(0, 7)),
        "options": {
            "causal": draw(st.sampled_from([None, "upper_left", "lower_right"])),
            "window": draw(st.one_of(st.none(), st.tuples(st.integers(-1, 150), st.integers(-1, 150)))),
            "softcap": draw(st.sampled_from([0.0, 3.0])),
            "dropout_p": draw(st.sampled_from([0.0, 0.0, 0.25])),
        },
        "seed": draw(st.integers(0, 2**32)),
    }


@settings(max_examples=40)
@given(calls())
def test_any_call(kernels, call):
    torch.manual_seed(call["seed"])
    kernels.seed_order(call["seed"])
    q, k, v = make(**call["shape"])
    mask, options = None, dict(call["options"])
    if call["mask"] != "none":
        mask = torch.rand(q.shape[0], 1, q.shape[2], k.shape[2]) > 0.4
    if call["mask"] == "float":
        mask = torch.randn(mask.shape, dtype=q.dtype).masked_fill(~mask, -torch.inf)
    if call["alibi"]:
        options["alibi_slopes"] = torch.rand(q.shape[1], dtype=q.dtype)
    kernels.num_splits = call["num_splits"]
    check_decode(kernels, q, k, v, mask, **options)


class TestWhatIsNotFinite:
    """A NaN or Inf reaches exactly the rows that attend to it."""

    @pytest.mark.parametrize("poison", [torch.nan, torch.inf])
    @pytest.mark.parametrize("where", ["key", "value", "both"])
    @pytest.mark.parametrize("num_splits", [1, 4])
    @pytest.mark.parametrize("head_dim", [16, 256])
    def test_rows_that_do_not_see_it(self, kernels, poison, where, num_splits, head_dim):
        kernels.num_splits = num_splits
        q, k, v = make(2, 10, 4, 200, head_dim, heads_kv=2)
        mask = torch.rand(2, 10, 4, 200) > 0.3
        mask[0, 0, 0, 100:] = mask[1, 3, 2, :50] = False
        bad = torch.zeros(200, dtype=torch.bool)
        bad[[3, 17, 60, 128, 199]] = True
        mask &= ~bad | (torch.rand(2, 10, 4, 1) > 0.5)  # half of the rows see no bad key
        dirty = [t.clone() for t in (k, v)]
        for name, t in zip(("key", "value"), dirty, strict=True):
            if where in (name, "both"):
                t[:, :, bad] = poison
        out, lse = flash_attn(q, *dirty, mask, enable_gqa=True, return_lse=True)
        clean_out, clean_lse = flash_attn(q, k, v, mask, enable_gqa=True, return_lse=True)
        sees = (mask & bad).any(-1)
        assert sees.any()
        assert not sees.all()
        assert torch.equal(out[~sees], clean_out[~sees])
        assert torch.equal(lse[~sees], clean_lse[~sees])
        if where != "key":
            assert not torch.isfinite(out[sees]).any()

    def test_keys_that_no_query_sees_are_not_read(self, kernels):
        """Causal: the queries' rows end before the poison, at keys of their own tile and of later tiles."""
        q, k, v = make(1, 2, 3, 200, 64)
        clean = flash_attn(q, k, v, causal="upper_left")
        k[:, :, 3:] = v[:, :, 3:] = torch.nan
        assert torch.equal(flash_attn(q, k, v, causal="upper_left"), clean)

    def test_memory_after_the_end(self, kernels):
        q, k, v = make(1, 1, 1, 128, 64)
        k[:, :, 70:] = v[:, :, 70:] = torch.nan
        assert torch.isfinite(flash_attn(q, k[:, :, :70], v[:, :, :70])).all()

    def test_a_nan_crosses_no_split(self, kernels):
        kernels.num_splits = 4
        q, k, v = make(1, 1, 2, 256, 16)
        k[:, :, 255] = v[:, :, 255] = torch.nan
        out = flash_attn(q, k, v, causal="lower_right")  # the last row sees it
        assert torch.isfinite(out[:, :, 0]).all()
        assert out[:, :, 1].isnan().all()

    def test_a_query_stays_in_its_row(self, kernels):
        q, k, v = make(1, 4, 3, 100, 16, heads_kv=1)
        clean = flash_attn(q, k, v, enable_gqa=True)
        q[0, 2, 1, 5] = torch.nan
        out = flash_attn(q, k, v, enable_gqa=True)
        assert out[0, 2, 1].isnan().all()
        out[0, 2, 1] = clean[0, 2, 1]
        assert torch.equal(out, clean)

    @pytest.mark.parametrize("num_splits", [1, 3])
    def test_rows_that_see_nothing(self, kernels, num_splits):
        kernels.num_splits = num_splits
        q, k, v = make(1, 2, 3, 200, 32)
        mask = torch.ones(3, 200, dtype=torch.bool)
        mask[1] = False
        out, lse = check_decode(kernels, q, k, v, mask)
        assert (out[:, :, 1] == 0).all()
        assert (lse[:, :, 1] == -torch.inf).all()


@pytest.mark.parametrize("layout", ["B S H D", "S B H D"])
def test_strided_inputs(kernels, layout):
    inputs = make(2, 3, 5, 200, 24)
    expected = flash_attn(*inputs, is_causal=True)
    strided = [dict(test_contract.strided_versions(t))[layout].detach() for t in inputs]
    assert torch.equal(check_decode(kernels, *strided, causal="upper_left")[0], expected)


def test_broadcast_keys(kernels):
    """With strides of 0 the kernel touches only the elements that exist."""
    q, k, v = make(2, 4, 2, 100, 16, heads_kv=2)
    k, v = (t[:1, :1].expand(2, 2, 100, 16) for t in (k, v))
    check_decode(kernels, q, k, v)


def test_results_do_not_depend_on_the_order_of_threads_and_blocks(kernels):
    inputs = make(2, 6, 3, 330, 64, heads_kv=2)
    for num_splits in (1, 3):
        kernels.num_splits = num_splits
        results = []
        for seed in range(4):
            kernels.seed_order(seed)
            results.append(flash_attn(*inputs, is_causal=True, enable_gqa=True))
        assert all(torch.equal(results[0], other) for other in results[1:])


class TestSelection:
    @pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
    def test_every_gpu_decodes_so(self, kernels, capability):
        kernels.c.set_compute_capability(*capability)
        flash_attn(*make(1, 1, 1, 30, 64))
        kernels.c.set_compute_capability(8, 0)
        assert b"sm80::decode_kernel" in kernels.c.last_kernel()

    @pytest.mark.parametrize(
        ("shape", "num_splits", "reason"),
        [
            (dict(dtype=torch.float32), 0, "only float16 and bfloat16"),
            (dict(head_dim=264), 0, "only head dimensions up to 256"),
            (dict(head_dim=60), 0, "not aligned to 16 bytes"),
            (dict(seqlen_q=17), 2, None),
            (dict(), 1, None),
            (dict(head_dim=256, head_dim_v=8), 0, None),
        ],
    )
    def test_the_rest_goes_elsewhere_and_says_why(self, kernels, monkeypatch, shape, num_splits, reason):
        said = names_of_launched(kernels, monkeypatch)
        kernels.num_splits = num_splits
        flash_attn(*make(**dict(batch=1, heads=1, seqlen_q=1, seqlen_k=30, head_dim=64) | shape))
        assert (b"sm80::decode_kernel" in kernels.c.last_kernel()) == (reason is None)
        assert said[0] is None if reason is None else re.search(reason, said[0].decode())

    @pytest.mark.parametrize("num_splits", [0, 1])
    def test_more_queries_are_the_ordinary_forwards(self, kernels, num_splits):
        kernels.num_splits = num_splits
        flash_attn(*make(1, 1, 17, 30, 64))
        assert b"sm80::forward_kernel" in kernels.c.last_kernel()

    def test_rows_that_are_not_aligned(self, kernels):
        q, k, v = make(1, 2, 1, 150, 64)
        wide = torch.nn.functional.pad(k, (1, 1))[..., 1:65]
        torch.testing.assert_close(flash_attn(q, wide, v), flash_attn(q, k, v), rtol=0, atol=0.01)
        flash_attn(q, wide, v)
        assert b"simt" in kernels.c.last_kernel()


class TestPlan:
    """The number of splits for the shape, from the bytes of their partial results."""

    def splits(self, kernels, seqlen_k=8192, seqlen_q=1, window=None, **sizes):
        sizes = dict(batch=1, heads=32, heads_kv=32, head_dim=128, head_dim_v=128) | sizes
        params = library.AttentionParams(dtype=2, sizes=library.Sizes(seqlen_q=seqlen_q, seqlen_k=seqlen_k, **sizes))
        unbounded = library.UNBOUNDED
        params.band = library.Band(seqlen_k - seqlen_q, unbounded if window is None else window, 0)
        partial_bytes = kernels.c.forward_workspace(ctypes.byref(params))
        return partial_bytes // (4 * sizes["batch"] * sizes["heads"] * seqlen_q * (sizes["head_dim_v"] + 2)) or 1

    def test_few_tasks_fill_a_large_gpu(self, kernels):
        for heads_kv in (1, 2, 8, 32):
            for head_dim in (128, 256):
                splits = self.splits(kernels, 131072, heads_kv=heads_kv, head_dim=head_dim)
                row_blocks = 2 if head_dim == 256 and heads_kv == 1 else 1  # of 16 rows, up to 128 of 32
                assert 120 <= splits * heads_kv * row_blocks <= 256

    def test_many_tasks_are_not_split(self, kernels):
        assert self.splits(kernels, batch=64) == 1

    def test_only_keys_that_a_query_sees_count(self, kernels):
        assert self.splits(kernels, 1 << 20, window=40) == 1
        assert self.splits(kernels, 1 << 20, window=4095) == self.splits(kernels, 4096)
