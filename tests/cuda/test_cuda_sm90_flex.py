"""Mask functions and block masks in the Hopper tier's forward, on the kernels' host build, against dense references in
float64."""

import pytest
import test_flex_attention as cpu
import torch
from cuda_host import library
from flex_gallery import mask_mods
from flex_reference import dense_flex
from torch.nn.attention.flex_attention import create_block_mask

from flash_attn_ext import flash_attn, flash_attn_varlen, flex_attention


@pytest.fixture(autouse=True)
def kernels(built):
    with library.on_hopper(built) as loaded:
        yield loaded


def on_sm90(kernels):
    assert kernels.tier == "sm90"
    assert b"sm90::forward_kernel" in kernels.c.last_kernel()


@pytest.mark.parametrize(("mask", "block_size", "head_dim"), cpu.BLOCK_MASKS)
def test_block_masks(kernels, mask, block_size, head_dim):
    """Two query heads share a key head; the blocks of by_table differ between heads."""
    dtype = torch.float16 if head_dim == 40 else torch.bfloat16
    mask_mod, mask_heads = mask_mods(2, 150, 330)[mask], 2 if mask == "by_table" else None
    cpu.check_forward((2, 2, 1, 150, 330, head_dim), dtype, None, mask_mod, block_size, mask_heads)
    on_sm90(kernels)


def test_rows_that_see_nothing(kernels):
    """Rows 128 and later have an empty list of tiles; rows 5 to 9 see none of the keys in partial blocks."""
    mask_mod = lambda b, h, i, j: (i < 128) & ((i < 5) | (i > 9))  # noqa: E731
    cpu.check_forward((1, 1, 1, 140, 200, 64), torch.bfloat16, None, mask_mod, 64)
    on_sm90(kernels)
    q = torch.randn(1, 1, 140, 64).half()
    out, lse = flex_attention(
        q, q, q, block_mask=create_block_mask(mask_mod, None, None, 140, 140, "cpu", BLOCK_SIZE=64), return_lse=True
    )
    on_sm90(kernels)
    assert not out[:, :, 128:].any()
    assert (lse[:, :, 128:] == -torch.inf).all()


@pytest.mark.parametrize("block_size", [128, (48, 100)], ids=str)
def test_tiles_that_a_mask_hides_are_not_computed(kernels, block_size):
    """The products of a tile that is read would have NaN."""
    q, k, v = (torch.randn(1, 1, n, 64).half() for n in (192, 600, 600))
    mask = create_block_mask(lambda b, h, i, j: j < 200, None, None, 192, 600, "cpu", BLOCK_SIZE=block_size)
    k[:, :, 256:] = v[:, :, 256:] = torch.nan
    before = kernels.c.exponentials()
    out = flex_attention(q, k, v, block_mask=mask)
    on_sm90(kernels)
    # 2 query tiles of 128 rows; 2 key tiles of 128 keys; a factor for each row and tile in each of four lanes.
    assert kernels.c.exponentials() - before == 2 * 2 * (128 * 128 + 128 * 4)
    exact = dense_flex(*(t.double() for t in (q, k[:, :, :200], v[:, :, :200])))[0]
    cpu.assert_near("out", out, exact, cpu.TOLERANCES[torch.float16])


def test_many_hidden_tiles(kernels):
    """A warp looks up 32 tiles at once: visible ones are the first, the last, and far apart."""
    length = 128 * 70
    q, k, v = (torch.randn(1, 1, n, 8).bfloat16() for n in (20, length, length))
    shown = torch.zeros(70, dtype=torch.bool)
    shown[[0, 31, 32, 69]] = True
    mask_mod = lambda b, h, i, j: shown[j // 128]  # noqa: E731
    mask = create_block_mask(mask_mod, None, None, 20, length, "cpu", BLOCK_SIZE=128)
    out = flex_attention(q, k, v, block_mask=mask)
    on_sm90(kernels)
    exact = dense_flex(*(t.double() for t in (q, k, v)), None, mask_mod)[0]
    cpu.assert_near("out", out, exact, cpu.TOLERANCES[torch.bfloat16])


def test_hidden_rows_that_are_not_finite(kernels):
    """The mask function hides a key from some rows only: the other rows are NaN."""
    q, k, v = (torch.randn(1, 1, 140, 64).half() for _ in range(3))
    mask_mod = lambda b, h, i, j: (j != 90) | (i == 7)  # noqa: E731
    mask = create_block_mask(mask_mod, None, None, 140, 140, "cpu", BLOCK_SIZE=(64, 40))
    clean = flex_attention(q, k, v, block_mask=mask)
    k[:, :, 90], v[:, :, 90] = torch.nan, torch.inf
    got = flex_attention(q, k, v, block_mask=mask)
    on_sm90(kernels)
    assert got[:, :, 7].isnan().all()
    others = torch.arange(140) != 7
    cpu.assert_near("out", got[:, :, others], clean[:, :, others].double(), 3e-3)


def test_other_options(kernels):
    q, k, v = (torch.randn(2, 4, n, 64).half() for n in (140, 300, 300))
    k, v, sink = k[:, :2], v[:, :2], torch.rand(4)
    padding = torch.arange(300) < torch.tensor([[290], [150]])
    mask_mod = mask_mods(2, 140, 300)["document"]
    mask = create_block_mask(mask_mod, 2, None, 140, 300, "cpu", BLOCK_SIZE=64)
    options = dict(softcap=3.0, sink=sink, window=(100, 70), enable_gqa=True, block_mask=mask)
    out = flash_attn(q, k, v, padding[:, None, None], **options)
    on_sm90(kernels)
    kernels.force_tier("simt")
    cpu.assert_near("out", out, flash_attn(q, k, v, padding[:, None, None], **options).double(), 3e-3)
    kernels.force_tier("")


def test_packed_sequences(kernels):
    """The neighbours of a sequence are in its tiles, and not finite."""
    lengths = (150, 0, 5, 133)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = (torch.randn(288, 2, 24).half() for _ in range(3))
    mask_mod = lambda b, h, i, j: (i + h >= j) & ((i - j) % 3 != b)  # noqa: E731
    v[150] = torch.inf
    out = flash_attn_varlen(q, k, v, cu, cu, mask_mod=mask_mod)
    on_sm90(kernels)
    for b, length in enumerate(lengths):
        rows = slice(cu[b], cu[b] + length)
        own = [t[rows].transpose(0, 1)[None].double() for t in (q, k, v)]
        if length and b != 2:
            exact = dense_flex(*own, None, lambda _, h, i, j, b=b: mask_mod(b, h, i, j))[0]
            cpu.assert_near("packed", out[rows], exact[0].transpose(0, 1), 4e-3)


def test_what_it_refuses(kernels):
    q, k, v = (torch.randn(1, 2, 9, 8).half() for _ in range(3))
    flex_attention(q, k, v, lambda s, b, h, i, j: s + h)
    assert (kernels.tier, kernels.why_not) == ("sm80", ["sm90: no score_mod"])
    inputs = [t.requires_grad_() for t in (q, k, v)]
    flash_attn(*inputs, mask_mod=lambda b, h, i, j: i >= j).sum().backward()
    assert (kernels.tier, kernels.why_not) == ("sm80", ["sm90: no backward with functions of the user"])
