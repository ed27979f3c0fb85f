"""Functions of the user and block masks in the Hopper tier, on the kernels' host build, against dense references in
float64."""

import pytest
import test_flex_attention as cpu
import torch
from cuda_host import library
from flex_gallery import mask_mods, score_mods
from flex_reference import dense_flex
from torch.nn.attention.flex_attention import create_block_mask

from flash_attn_ext import flash_attn, flash_attn_varlen, flex_attention


@pytest.fixture(autouse=True)
def kernels(built):
    with library.on_hopper(built) as loaded:
        yield loaded


def on_sm90(kernels, kernel=b"sm90::forward_kernel"):
    assert kernels.tier == "sm90"
    assert kernel in kernels.c.last_kernel()


def on_backward(kernels, captured=()):
    on_sm90(kernels, b"store_captured_kernel" if captured else b"sm90::dq_kernel")


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
    finite_queries = torch.arange(140) != 7
    cpu.assert_near("out", got[:, :, finite_queries], clean[:, :, finite_queries].double(), 3e-3)


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


@pytest.mark.parametrize("deterministic", [True, False], ids=["in turns", "in any order"])
@pytest.mark.parametrize(
    ("mask", "block_size", "head_dim"),
    [("document", 64, 64), ("by_table", (48, 100), 72), ("prefix_lm", 128, 200)],
)
def test_gradients(kernels, mask, block_size, head_dim, deterministic):
    """Tiles of keys add to dq in turns. The turns must count only the tiles that visit the queries."""
    kernels.deterministic = deterministic
    cpu.check((1, 2, 1, 130, 300, head_dim), torch.bfloat16, None, mask_mods(1, 130, 300)[mask], block_size=block_size)
    on_backward(kernels)


@pytest.mark.parametrize("length", [64 * 3, 64 * 36])
def test_turns_of_hidden_tiles(kernels, length):
    """Two of three tiles of keys are hidden, also in more tiles than a warp looks up at once."""
    kernels.deterministic = True
    inputs = [torch.randn(1, 1, n, 72).bfloat16().requires_grad_() for n in (70, length, length)]
    mask_mod = lambda b, h, i, j: (j // 64 + i // 64) % 3 == 0  # noqa: E731
    mask = create_block_mask(mask_mod, None, None, 70, length, "cpu", BLOCK_SIZE=64)
    out = flex_attention(*inputs, block_mask=mask)
    dout = torch.randn_like(out)
    exact_inputs = [t.detach().double().requires_grad_() for t in inputs]
    exact = torch.autograd.grad(dense_flex(*exact_inputs, None, mask_mod)[0], exact_inputs, dout.double())
    for name, ours, wanted in zip("qkv", torch.autograd.grad(out, inputs, dout), exact, strict=True):
        cpu.assert_near(name, ours, wanted, cpu.TOLERANCES[torch.bfloat16])
    on_backward(kernels)


def test_backward_of_hidden_tiles(kernels):
    """Hidden tiles are neither read nor computed: their products would be NaN."""
    q, k, v = (torch.randn(1, 1, n, 64).half().requires_grad_() for n in (320, 256, 256))
    mask = create_block_mask(lambda b, h, i, j: (i < 64) | (j < 128), None, None, 320, 256, "cpu", BLOCK_SIZE=64)
    out = flex_attention(q, k, v, block_mask=mask)
    dout = torch.randn(1, 1, 320, 64).half()
    before = kernels.c.exponentials()
    torch.autograd.grad(out, (q, k, v), dout)
    on_backward(kernels)
    # Tiles of 128 keys and 64 queries: all 5 of the first keys, 1 of the last keys.
    assert kernels.c.exponentials() - before == 6 * 128 * 64


def test_gradients_of_hidden_rows_that_are_not_finite(kernels):
    """A mask function hides these rows, so they reach no gradient."""
    q, k, v = (torch.randn(1, 1, 140, 64).half().requires_grad_() for _ in range(3))
    dout = torch.randn(1, 1, 140, 64).half()
    mask_mod = lambda b, h, i, j: (j != 90) & (i != 60) & (j < 120)  # noqa: E731
    mask = create_block_mask(mask_mod, None, None, 140, 140, "cpu", BLOCK_SIZE=(64, 40))
    clean = torch.autograd.grad(flex_attention(q, k, v, block_mask=mask), (q, k, v), dout)
    dirty = [t.detach().clone() for t in (q, k, v)]
    dirty[0][:, :, 60], dirty[1][:, :, 90], dirty[2][:, :, 90] = torch.nan, torch.nan, torch.inf
    dirty = [t.requires_grad_() for t in dirty]
    got = torch.autograd.grad(flex_attention(*dirty, block_mask=mask), dirty, dout)
    on_backward(kernels)
    for name, ours, wanted in zip("qkv", got, clean, strict=True):
        cpu.assert_near(name, ours, wanted.double(), 3e-3)


def gradients_on(kernels, tier, call, inputs, dout):
    kernels.force_tier(tier)
    found = torch.autograd.grad(call(), inputs, dout)
    kernels.force_tier("")
    return found


def test_gradients_with_other_options(kernels):
    q, k, v = (torch.randn(2, heads, n, 128).half().requires_grad_() for heads, n in ((4, 100), (2, 200), (2, 200)))
    sink = torch.rand(4).requires_grad_()
    padding = torch.arange(200) < torch.tensor([[190], [70]])
    mask = create_block_mask(mask_mods(2, 100, 200)["document"], 2, None, 100, 200, "cpu", BLOCK_SIZE=64)
    options = dict(softcap=3.0, sink=sink, window=(100, 70), enable_gqa=True, block_mask=mask)
    dout = torch.randn(2, 4, 100, 128).half()
    call = lambda: flash_attn(q, k, v, padding[:, None, None], **options)  # noqa: E731
    inputs = q, k, v, sink
    ours = torch.autograd.grad(call(), inputs, dout)
    assert kernels.tier == "sm90"
    for each, wanted in zip(ours, gradients_on(kernels, "simt", call, inputs, dout), strict=True):
        cpu.assert_near("gradient", each, wanted.double(), 5e-3)


def test_packed_gradients(kernels):
    cu = torch.tensor([0, 70, 70, 203])
    inputs = [torch.randn(203, 2, 24).half().requires_grad_() for _ in range(3)]
    mask_mod = lambda b, h, i, j: (i + h >= j) & ((i - j) % 3 != b)  # noqa: E731
    dout, slopes = torch.randn(203, 2, 24).half(), torch.rand(3).requires_grad_()
    score_mod = lambda s, b, h, i, j: s * slopes[b]  # noqa: E731
    for functions, captured in (({}, []), ({"score_mod": score_mod}, [slopes])):
        call = lambda f=functions: flash_attn_varlen(*inputs, cu, cu, mask_mod=mask_mod, **f)  # noqa: E731
        ours = torch.autograd.grad(call(), [*inputs, *captured], dout)
        on_backward(kernels, captured)
        for each, wanted in zip(ours, gradients_on(kernels, "simt", call, [*inputs, *captured], dout), strict=True):
            cpu.assert_near("packed gradient", each, wanted.double(), 4e-3)


def test_captured_tensors_of_masks_have_no_gradient(kernels):
    inputs = [torch.randn(1, 1, 20, 8).half().requires_grad_() for _ in range(3)]
    limit = torch.tensor(5.0, requires_grad=True)
    out = flash_attn(*inputs, mask_mod=lambda b, h, i, j: i - j < limit)
    *_, found = torch.autograd.grad(out.sum(), [*inputs, limit], allow_unused=True)
    assert kernels.tier == "sm90"
    assert found is None or not found.any()


@pytest.mark.parametrize(
    ("score", "mask", "head_dim"),
    [
        ("everything", "document", 72),
        ("causal_score", None, 64),
        ("integers", "dilated", 136),
        ("transformer_xl", "by_table", 128),
        ("dense_bias", "prefix_lm", 256),
    ],
)
def test_score_functions(kernels, score, mask, head_dim):
    """Two query heads share a key head. Three of the functions read captured tensors."""
    score_mod, _ = score_mods(2, 140, 200, torch.float64)[score]
    mask_mod = mask_mods(1, 140, 200)[mask] if mask else None
    dtype = torch.float16 if head_dim == 136 else torch.bfloat16
    cpu.check_forward((1, 2, 1, 140, 200, head_dim), dtype, score_mod, mask_mod, (64, 48), mask_heads=2)
    on_sm90(kernels)


@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_scores_of_any_scale(kernels, scale):
    """The largest product is not the largest score."""
    q, k, v = (torch.randn(1, 1, n, 64).half() for n in (20, 150, 150))
    score_mod = lambda s, b, h, i, j: s + 0.02 * (i - j)  # noqa: E731
    out = flex_attention(q, k, v, score_mod, scale=scale)
    on_sm90(kernels)
    at = torch.arange(20)[:, None] - torch.arange(150)
    probs = ((q.double() @ k.double().mT) * scale + 0.02 * at).softmax(-1)
    cpu.assert_near("out", out, probs @ v.double(), 3e-3)


def test_scores_at_the_limits(kernels):
    """A row of finfo.min is uniform. A row of -inf sees nothing, and lets no gradient or NaN through."""
    q, k, v = (torch.randn(1, 1, n, 64).half() for n in (140, 150, 150))
    least = torch.finfo(torch.float32).min

    def score_mod(score, b, h, i, j):
        score = torch.where(i == 5, least, score)
        return torch.where((i == 6) | ((j == 140) & (i != 7)), -torch.inf, score)

    clean, lse = flex_attention(q, k, v, score_mod, return_lse=True)
    on_sm90(kernels)
    others = torch.arange(150) != 140
    cpu.assert_near("uniform", clean[0, 0, 5], v[0, 0, others].double().mean(0), 3e-3)
    assert not clean[0, 0, 6].any()
    assert lse[0, 0, 6] == -torch.inf
    k[:, :, 140], v[:, :, 140] = torch.nan, torch.inf
    got = flex_attention(q, k, v, score_mod)
    assert got[:, :, 7].isnan().all()
    finite_queries = torch.arange(140) != 7
    cpu.assert_near("out", got[:, :, finite_queries], clean[:, :, finite_queries].double(), 3e-3)


@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_scores_with_other_options(kernels, softcap):
    """The order is softcap, function, masks."""
    q, k, v = (torch.randn(2, 4, n, 64).half() for n in (140, 300, 300))
    k, v, sink = k[:, :2], v[:, :2], torch.rand(4)
    padding = torch.arange(300) < torch.tensor([[290], [150]])
    mask = create_block_mask(mask_mods(2, 140, 300)["document"], 2, None, 140, 300, "cpu", BLOCK_SIZE=64)
    options = dict(softcap=softcap, sink=sink, window=(100, 70), enable_gqa=True, block_mask=mask)
    options |= dict(score_mod=lambda s, b, h, i, j: s * 1.5 - 0.01 * (i - j).abs() * h, return_lse=True)
    ours = flash_attn(q, k, v, padding[:, None, None], **options)
    on_sm90(kernels)
    kernels.force_tier("simt")
    slow = flash_attn(q, k, v, padding[:, None, None], **options)
    kernels.force_tier("")
    for name, each, wanted in zip(("out", "lse"), ours, slow, strict=True):
        cpu.assert_near(name, each, wanted.double(), 3e-3)


def test_scores_of_packed_sequences(kernels):
    """Indices count within a sequence. The neighbours of a sequence are in its tiles, and not finite."""
    lengths = (150, 0, 5, 133)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = (torch.randn(288, 2, 24).half() for _ in range(3))
    score_mod = lambda s, b, h, i, j: s - 0.1 * (i - j).abs() * (h + 1) + 0.3 * b  # noqa: E731
    v[150] = torch.inf
    out = flash_attn_varlen(q, k, v, cu, cu, is_causal=True, score_mod=score_mod)
    on_sm90(kernels)
    for b, length in enumerate(lengths):
        rows = slice(cu[b], cu[b] + length)
        own = [t[rows].transpose(0, 1)[None].double() for t in (q, k, v)]
        if length and b != 2:
            wanted = dense_flex(*own, lambda s, _, *at, b=b: score_mod(s, b, *at), lambda b, h, i, j: i >= j)[0]
            cpu.assert_near("packed", out[rows], wanted[0].transpose(0, 1), 4e-3)


@pytest.mark.parametrize("deterministic", [True, False], ids=["in turns", "in any order"])
@pytest.mark.parametrize(
    ("score", "mask", "head_dim"),
    [("everything", "document", 72), ("relative_table", "window", 200), ("causal_score", None, 64)],
)
def test_gradients_of_score_functions(kernels, score, mask, head_dim, deterministic):
    """The head dimensions 64 and 72 have the same kernel."""
    kernels.deterministic = deterministic
    score_mod, captured = score_mods(2, 130, 150, torch.float64)[score]
    mask_mod = mask_mods(1, 130, 150)[mask] if mask else None
    cpu.check((1, 2, 1, 130, 150, head_dim), torch.float16, score_mod, mask_mod, captured, (48, 100))
    on_backward(kernels, captured)


def test_gradients_of_score_functions_with_other_options(kernels):
    q, k, v = (torch.randn(2, heads, n, 40).bfloat16().requires_grad_() for heads, n in ((4, 70), (2, 150), (2, 150)))
    table, sink = torch.randn(4, 8).requires_grad_(), torch.rand(4).requires_grad_()
    padding = (torch.arange(150) < torch.tensor([[140], [70]]))[:, None, None]
    score_mod = lambda s, b, h, i, j: torch.where(j % 5 == i % 3, -torch.inf, s * s * table[h, j % 8])  # noqa: E731
    options = dict(score_mod=score_mod, softcap=2.0, window=(100, 20), sink=sink, enable_gqa=True)
    call = lambda: flash_attn(q, k, v, padding, **options)  # noqa: E731
    dout, inputs = torch.randn(2, 4, 70, 40).bfloat16(), (q, k, v, table, sink)
    ours = torch.autograd.grad(call(), inputs, dout)
    on_backward(kernels, (table,))
    assert torch.equal(ours[3], torch.autograd.grad(call(), inputs, dout)[3])  # integers, so in any order
    for each, wanted in zip(ours, gradients_on(kernels, "simt", call, inputs, dout), strict=True):
        cpu.assert_near("gradient", each, wanted.double(), 8e-3)


@pytest.mark.parametrize("wanted", [(0,), (3,)], ids=["query", "captured"])
def test_some_gradients_of_score_functions(kernels, wanted):
    inputs = [torch.randn(1, 2, 70, 24).half() for _ in range(3)] + [torch.randn(2)]
    for n in wanted:
        inputs[n].requires_grad_()
    q, k, v, slopes = inputs
    out = flex_attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s) + slopes[h] * (i - j))
    dout, leaves = torch.randn(1, 2, 70, 24).half(), [inputs[n] for n in wanted]
    ours = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    assert kernels.tier == "sm90"
    for each, exact in zip(ours, gradients_on(kernels, "simt", lambda: out, leaves, dout), strict=True):
        cpu.assert_near("gradient", each, exact.double(), 4e-3)


def test_gradients_of_scores_at_the_limits(kernels):
    """A row of finfo.min is uniform. Rows that the function hides reach no gradient, also if they are not finite."""
    q, k, v = (torch.randn(1, 1, n, 64).half().requires_grad_() for n in (140, 150, 150))
    slope, dout = torch.rand(()).requires_grad_(), torch.randn(1, 1, 140, 64).half()
    least = torch.finfo(torch.float32).min

    def score_mod(s, b, h, i, j):
        s = torch.where(i == 5, least, torch.tanh(s) + slope * (i - j))
        return torch.where((i == 60) | (j == 90), -torch.inf, s)

    out = flex_attention(q, k, v, score_mod)
    clean = gradients_on(kernels, "simt", lambda: out, (q, k, v), dout)
    dirty = [t.detach().clone() for t in (q, k, v)]
    dirty[0][:, :, 60], dirty[1][:, :, 90], dirty[2][:, :, 90] = torch.nan, torch.nan, torch.inf
    dirty = [t.requires_grad_() for t in dirty]
    got = torch.autograd.grad(flex_attention(*dirty, score_mod), (*dirty, slope), dout)
    on_backward(kernels, (slope,))
    assert got[3].isfinite()
    for name, ours, wanted in zip("qkv", got[:3], clean, strict=True):
        cpu.assert_near(name, ours, wanted.double(), 3e-3)


def test_what_it_refuses(kernels):
    q, k, v = (torch.randn(1, 2, 9, 8).half() for _ in range(3))
    flash_attn(q, k, v, torch.zeros(9, 9, dtype=torch.half), score_mod=lambda s, b, h, i, j: s + h)
    assert (kernels.tier, kernels.why_not[0]) == (
        "simt",
        "sm90: only bool masks that all heads and queries share, as padding is",
    )
