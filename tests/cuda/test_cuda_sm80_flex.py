"""Functions of the user and block masks on the tensor cores of the sm80 tier, on the kernels' host build, against dense
references in float64."""

import pytest
import test_flex_attention as cpu
import test_flex_packed as packed
import torch
from cuda_host import library
from flex_gallery import mask_mods, score_mods
from flex_reference import dense_flex
from torch.nn.attention.flex_attention import create_block_mask

from flash_attn_ext import flash_attn, flash_attn_varlen, flash_attn_with_kvcache, flex_attention

pytestmark = pytest.mark.usefixtures("kernels")


def on_sm80(kernels):
    assert kernels.tier == "sm80"
    assert kernels.why_not == ["sm90: this GPU has compute capability 8.0; wgmma and TMA need 9.0"]


@pytest.mark.parametrize(("mask", "block_size", "head_dim"), cpu.BLOCK_MASKS)
def test_block_masks(kernels, mask, block_size, head_dim):
    dtype = torch.float16 if head_dim == 40 else torch.bfloat16
    mask_mod = mask_mods(2, 150, 330)[mask]
    cpu.check_forward((2, 2, 1, 150, 330, head_dim), dtype, None, mask_mod, block_size, mask_heads=2)
    on_sm80(kernels)


@pytest.mark.parametrize(
    ("score", "mask", "head_dim"),
    [("everything", "document", 72), ("causal_score", None, 64), ("integers", "dilated", 136)],
)
def test_score_functions(kernels, score, mask, head_dim):
    score_mod, _ = score_mods(2, 140, 200, torch.float64)[score]
    mask_mod = mask_mods(1, 140, 200)[mask] if mask else None
    cpu.check_forward((1, 2, 1, 140, 200, head_dim), torch.float16, score_mod, mask_mod, (64, 48), mask_heads=2)
    on_sm80(kernels)


@pytest.mark.parametrize("deterministic", [True, False], ids=["in turns", "in any order"])
@pytest.mark.parametrize(
    ("mask", "block_size", "head_dim"),
    [("document", 64, 64), ("by_table", (48, 100), 72), ("window", (16, 24), 136), ("prefix_lm", 128, 200)],
)
def test_gradients(kernels, mask, block_size, head_dim, deterministic):
    """Blocks of keys take turns at each tile of dq. The turns must count only the blocks that visit the tile."""
    kernels.deterministic = deterministic
    shape = (1, 2, 1, 130, 300, head_dim)
    cpu.check(shape, torch.bfloat16, None, mask_mods(1, 130, 300)[mask], block_size=block_size)
    on_sm80(kernels)


@pytest.mark.parametrize("deterministic", [True, False], ids=["in turns", "in any order"])
@pytest.mark.parametrize(
    ("score", "mask", "head_dim"),
    [("everything", "document", 64), ("causal_score", None, 136), ("relative_table", "window", 184)],
)
def test_gradients_of_score_functions(kernels, score, mask, head_dim, deterministic):
    kernels.deterministic = deterministic
    score_mod, captured = score_mods(2, 130, 150, torch.float64)[score]
    mask_mod = mask_mods(1, 130, 150)[mask] if mask else None
    cpu.check((1, 2, 1, 130, 150, head_dim), torch.float16, score_mod, mask_mod, captured, (48, 100))
    on_sm80(kernels)


def test_gradients_of_score_functions_with_other_options(kernels):
    """The derivative of the softcap follows from the old scores, also with slopes."""
    q, k, v = (torch.randn(1, 4, n, 40).bfloat16().requires_grad_() for n in (70, 150, 150))
    table, slopes = torch.randn(4, 8).requires_grad_(), torch.rand(4).requires_grad_()
    score_mod = lambda s, b, h, i, j: torch.where(j % 5 == i % 3, -torch.inf, s * s * table[h, j % 8])  # noqa: E731
    options = dict(score_mod=score_mod, softcap=2.0, alibi_slopes=slopes, is_causal=True, sink=torch.rand(4))
    out = flash_attn(q, k, v, **options)
    dout, wanted = torch.randn_like(out), (q, k, v, table, slopes)
    got = torch.autograd.grad(out, wanted, dout, retain_graph=True)
    on_sm80(kernels)
    again = torch.autograd.grad(out, wanted, dout, retain_graph=True)
    assert torch.equal(got[3], again[3])  # integers, so in any order
    kernels.force_tier("simt")
    for name, ours, exact in zip(
        ("q", "k", "v", "table", "slopes"), got, torch.autograd.grad(out, wanted, dout), strict=True
    ):
        cpu.assert_near(name, ours, exact.double(), 8e-3)
    kernels.force_tier("")


@pytest.mark.parametrize("wanted", [(0,), (3,), (1, 3)], ids=["query", "captured", "key and captured"])
def test_some_gradients_of_score_functions(kernels, wanted):
    inputs = [torch.randn(1, 2, 70, 24).half() for _ in range(3)] + [torch.randn(2)]
    for n in wanted:
        inputs[n].requires_grad_()
    q, k, v, slopes = inputs
    out = flex_attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s) + slopes[h] * (i - j))
    dout, leaves = torch.randn_like(out), [inputs[n] for n in wanted]
    got = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    on_sm80(kernels)
    kernels.force_tier("simt")
    for ours, exact in zip(got, torch.autograd.grad(out, leaves, dout), strict=True):
        cpu.assert_near("gradient", ours, exact.double(), 4e-3)
    kernels.force_tier("")


def test_hidden_rows_that_are_not_finite(kernels):
    """A mask function hides these rows, so they reach no gradient."""
    q, k, v = (torch.randn(1, 1, 140, 64).half().requires_grad_() for _ in range(3))
    dout = torch.randn(1, 1, 140, 64).half()
    masks = [lambda b, h, i, j: (j != 90) & (i != 60), lambda b, h, i, j: (j != 90) & (i != 60) & (j < 120)]
    for mask_mod in masks:
        mask = create_block_mask(mask_mod, None, None, 140, 140, "cpu", BLOCK_SIZE=(64, 40))
        clean = torch.autograd.grad(flex_attention(q, k, v, block_mask=mask), (q, k, v), dout)
        on_sm80(kernels)
        dirty = [t.detach().clone() for t in (q, k, v)]
        dirty[0][:, :, 60], dirty[1][:, :, 90], dirty[2][:, :, 90] = torch.nan, torch.nan, torch.inf
        dirty = [t.requires_grad_() for t in dirty]
        got = torch.autograd.grad(flex_attention(*dirty, block_mask=mask), dirty, dout)
        for name, ours, wanted in zip("qkv", got, clean, strict=True):
            cpu.assert_near(name, ours, wanted.double(), 3e-3)


def test_rows_that_a_score_function_hides_and_are_not_finite(kernels):
    q, k, v = (torch.randn(1, 1, 140, 64).half().requires_grad_() for _ in range(3))
    slope = torch.rand(()).requires_grad_()
    dout = torch.randn(1, 1, 140, 64).half()

    def score_mod(s, b, h, i, j):
        return torch.where((j == 90) | (i == 60), -torch.inf, torch.tanh(s) + slope * (i - j))

    clean = torch.autograd.grad(flex_attention(q, k, v, score_mod), (q, k, v, slope), dout)
    on_sm80(kernels)
    dirty = [t.detach().clone() for t in (q, k, v)]
    dirty[0][:, :, 60], dirty[1][:, :, 90], dirty[2][:, :, 90] = torch.nan, torch.nan, torch.inf
    dirty = [t.requires_grad_() for t in dirty]
    got = torch.autograd.grad(flex_attention(*dirty, score_mod), (*dirty, slope), dout)
    on_sm80(kernels)
    for name, ours, wanted in zip(("q", "k", "v", "slope"), got, clean, strict=True):
        cpu.assert_near(name, ours, wanted.double(), 3e-3)


@pytest.mark.parametrize("block_size", [64, (48, 100)], ids=str)
def test_blocks_that_a_mask_hides_are_not_read(kernels, block_size):
    """The products of a tile that is read have NaN, and the mask function runs in partial blocks only."""
    q, k, v = (torch.randn(1, 1, n, 64).half() for n in (192, 400, 400))
    mask = create_block_mask(lambda b, h, i, j: j < 200, None, None, 192, 400, "cpu", BLOCK_SIZE=block_size)
    expected = flex_attention(q, k[:, :, :200], v[:, :, :200])
    before = kernels.c.exponentials()
    k[:, :, 200:] = v[:, :, 200:] = torch.nan
    assert torch.equal(flex_attention(q, k, v, block_mask=mask), expected)
    on_sm80(kernels)
    # 2 query tiles of 128 rows; 4 key tiles of 64 keys; a factor for each row and tile in each of four lanes.
    assert kernels.c.exponentials() - before == 2 * 4 * (128 * 64 + 128 * 4)


def test_many_hidden_tiles():
    """A warp looks up 32 tiles at once: visible ones are the first, the last, and far apart."""
    length = 64 * 80
    q, k, v = (torch.randn(1, 1, n, 8).bfloat16() for n in (20, length, length))
    shown = torch.zeros(80, dtype=torch.bool)
    shown[[0, 31, 32, 79]] = True
    mask_mod = lambda b, h, i, j: shown[j // 64]  # noqa: E731
    mask = create_block_mask(mask_mod, None, None, 20, length, "cpu", BLOCK_SIZE=64)
    exact = dense_flex(*(t.double() for t in (q, k, v)), None, mask_mod)[0]
    cpu.assert_near("out", flex_attention(q, k, v, block_mask=mask), exact, cpu.TOLERANCES[torch.bfloat16])


def test_other_options(kernels):
    q, k, v = (torch.randn(2, 4, n, 64).half() for n in (140, 200, 200))
    slopes, bias = torch.rand(4), torch.rand(140, 200).masked_fill(torch.rand(140, 200) < 0.3, -torch.inf)
    distance = (torch.arange(140)[:, None] - torch.arange(200)).abs()
    mask_mod = mask_mods(2, 140, 200)["document"]
    mask = create_block_mask(mask_mod, 2, None, 140, 200, "cpu", BLOCK_SIZE=64)
    sink = torch.rand(4)
    biased = lambda s, b, h, i, j: s - slopes[h] * distance[i, j] + bias[i, j]  # noqa: E731
    options = dict(softcap=3.0, alibi_slopes=slopes, is_causal=True)
    out = flash_attn(q, k, v, bias.half(), block_mask=mask, **options)
    visible = torch.ones(140, 200, dtype=torch.bool).tril()
    exact = dense_flex(*(t.double() for t in (q, k, v)), biased, mask_mod, softcap=3.0, visible=visible)[0]
    cpu.assert_near("out", out, exact, 5e-3)
    on_sm80(kernels)
    state = torch.tensor([1, 2])
    rest = dict(dropout_p=0.2, rng_state=state, sink=sink, mask_mod=lambda b, h, i, j: i + h >= j)
    on_tensor_cores = flash_attn(q, k, v, **rest)
    on_sm80(kernels)
    kernels.force_tier("simt")
    cpu.assert_near("dropout", on_tensor_cores, flash_attn(q, k, v, **rest).double(), 5e-3)
    kernels.force_tier("")


def test_packed_sequences_and_caches(kernels):
    lengths = (150, 0, 5, 133)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = (torch.randn(288, 2, 24).half() for _ in range(3))
    score_mod = lambda s, b, h, i, j: torch.tanh(s) * (b + 1) + 0.125 * (i - j)  # noqa: E731
    mask_mod = lambda b, h, i, j: i + h >= j  # noqa: E731
    out = flash_attn_varlen(q, k, v, cu, cu, score_mod=score_mod, mask_mod=mask_mod)
    on_sm80(kernels)
    for b, length in enumerate(lengths):
        rows = slice(cu[b], cu[b] + length)
        own = [t[rows].transpose(0, 1)[None].double() for t in (q, k, v)]
        if length:
            exact = dense_flex(*own, lambda s, _, h, i, j, b=b: score_mod(s, b, h, i, j), mask_mod)[0]
            cpu.assert_near("packed", out[rows], exact[0].transpose(0, 1), 4e-3)

    new, caches = torch.randn(2, 3, 2, 24).half(), [torch.randn(2, 96, 2, 24).half() for _ in range(2)]
    used = torch.tensor([90, 37])
    out = flash_attn_with_kvcache(new, *caches, cache_seqlens=used, mask_mod=lambda b, h, i, j: (i - j) % 3 == 0)
    on_sm80(kernels)
    for b, length in enumerate(used.tolist()):
        own = [t[b : b + 1, :length].transpose(1, 2).double() for t in caches]
        shift = length - 3
        exact = dense_flex(
            new[b : b + 1].transpose(1, 2).double(), *own, None, lambda _, h, i, j, s=shift: (i + s - j) % 3 == 0
        )[0]
        cpu.assert_near("cache", out[b : b + 1], exact.transpose(1, 2), 4e-3)


@pytest.mark.parametrize("tier", ["sm80", "simt"])
@pytest.mark.parametrize(("seqlen_q", "has_function"), [(8, True), (70, True), (70, False)])
def test_a_block_mask_hides_no_key_from_queries_before_the_first_key(kernels, tier, seqlen_q, has_function):
    kernels.force_tier("" if tier == "sm80" else tier)
    packed.check_queries_before_the_first_key(seqlen_q, has_function, torch.float16)
    assert kernels.tier == tier
    kernels.force_tier("")


def test_packed_gradients(kernels):
    cu = torch.tensor([0, 70, 70, 203])
    inputs = [torch.randn(203, 2, 24).half().requires_grad_() for _ in range(3)]
    slopes = torch.rand(3).requires_grad_()
    mask_mod = lambda b, h, i, j: (i + h >= j) & ((i - j) % 3 != b)  # noqa: E731
    score_mod = lambda s, b, h, i, j: s * slopes[b]  # noqa: E731
    for functions, wanted in (({}, inputs), ({"score_mod": score_mod}, [*inputs, slopes])):
        out = flash_attn_varlen(*inputs, cu, cu, mask_mod=mask_mod, **functions)
        dout = torch.randn_like(out)
        on_tensor_cores = torch.autograd.grad(out, wanted, dout, retain_graph=True)
        on_sm80(kernels)
        kernels.force_tier("simt")
        for ours, exact in zip(on_tensor_cores, torch.autograd.grad(out, wanted, dout), strict=True):
            cpu.assert_near("packed gradient", ours, exact.double(), 4e-3)
        kernels.force_tier("")


def test_what_it_refuses(kernels):
    q, k, v = (torch.randn(1, 2, 9, 8).half() for _ in range(3))
    bias = torch.rand(9, 9).half()
    flash_attn(q, k, v, bias, score_mod=lambda s, b, h, i, j: s + h)
    assert kernels.tier == "simt"
    assert kernels.why_not[-1] == "sm80: no attn_mask together with a score_mod"

    wide = [torch.randn(1, 1, 9, 200).half().requires_grad_() for _ in range(3)]
    flex_attention(*wide, lambda s, b, h, i, j: s + h).sum().backward()
    assert kernels.why_not[-1] == "sm80: the backward of a score_mod only with head dimensions up to 192"
    inputs = [t.requires_grad_() for t in (q, k, v)]
    flash_attn(*inputs, mask_mod=lambda b, h, i, j: i >= j, dropout_p=0.5).sum().backward()
    assert kernels.why_not[-1] == "sm80: no dropout in the backward with functions of the user"

    def long(s, b, h, i, j):
        for n in range(200):
            s = torch.tanh(s * (n + 1.5))
        return s

    with torch.no_grad(), pytest.raises(library.KernelError, match="more than 384 instructions or 64 values"):
        flex_attention(q, k, v, long)
    assert kernels.why_not[1] == "sm80: no functions of the user beyond the limits of simt"
