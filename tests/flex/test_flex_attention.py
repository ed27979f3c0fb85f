"""flex_attention against dense references: every function of the gallery, forward and backward."""

import itertools
from functools import partial

import pytest
import torch
from flex_gallery import MASKS, SCORES, mask_mods, score_mods
from flex_reference import dense_flex
from helpers import allocated_by, leaves
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, noop_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention

import flash_attn_ext
from flash_attn_ext import flash_attn, flash_attn_varlen, flex_attention
from flash_attn_ext.flex import create

TOLERANCES = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SHAPES = [(2, 4, 2, 67, 90, 16), (1, 2, 2, 130, 33, 8), (1, 1, 1, 5, 300, 24)]  # B, H, H_kv, S_q, S_k, D
# For the tests of CUDA tiers: mask of flex_gallery, block size, head dimension.
BLOCK_MASKS = [
    ("document", 128, 64),  # blocks as large as tiles
    ("by_table", (48, 100), 40),  # tiles that meet several blocks
    ("prefix_lm", 32, 128),
    ("window", (16, 24), 200),
    ("nothing_for_some", 64, 16),
]


def make(shape, dtype):
    """q, k, v and the gradient of out, as float64 tensors that ``dtype`` holds exactly."""
    batch, heads, heads_kv, q_len, k_len, head_dim = shape
    sizes = [(heads, q_len), (heads_kv, k_len), (heads_kv, k_len), (heads, q_len)]
    return [torch.randn(batch, h, s, head_dim).to(dtype).double().requires_grad_() for h, s in sizes]


def assert_near(name, ours, exact, tolerance):
    finite = exact.isfinite()
    assert torch.equal(ours.isfinite(), finite), name
    assert torch.equal(ours[~finite].double(), exact[~finite]), name
    if finite.any():
        error = (ours[finite].double() - exact[finite]).abs().max() / exact[finite].abs().max().clamp(min=1e-30)
        assert error < tolerance, f"{name}: {error}"


def check_forward(shape, dtype, score_mod, mask_mod, block_size, mask_heads=None):
    """Compares out and lse with the dense reference in float64. ``mask_heads``: the heads of the block mask."""
    q, k, v = (t.detach() for t in make(shape, dtype)[:3])
    batch, _, _, q_len, k_len, _ = shape
    mask = mask_mod and create_block_mask(mask_mod, batch, mask_heads, q_len, k_len, "cpu", BLOCK_SIZE=block_size)
    inputs = [t.to(dtype) for t in (q, k, v)]
    results = flex_attention(*inputs, score_mod, mask, enable_gqa=True, return_lse=True)
    with torch.no_grad():
        exact = dense_flex(q, k, v, score_mod, mask_mod)
    for name, ours, wanted in zip(("out", "lse"), results, exact, strict=True):
        assert_near(name, ours, wanted, TOLERANCES[dtype])


def check(shape, dtype, score_mod=None, mask_mod=None, captured=(), block_size=128, through_lse=True):
    """Compares results and gradients with the dense reference in float64."""
    q, k, v, dout = make(shape, dtype)
    dout = dout.detach()
    dlse = torch.randn(dout.shape[:3]).double() if through_lse else torch.zeros(dout.shape[:3]).double()
    exact_inputs, inputs = leaves((q, k, v)), leaves((q, k, v), dtype)
    mask = None
    if mask_mod is not None:
        mask = create_block_mask(mask_mod, shape[0], shape[1], shape[3], shape[4], "cpu", BLOCK_SIZE=block_size)
    exact, exact_lse = dense_flex(*exact_inputs, score_mod, mask_mod)
    out, lse = flex_attention(*inputs, score_mod, mask, enable_gqa=True, return_lse=True)
    assert out.dtype == dtype
    tolerance = TOLERANCES[dtype]
    assert_near("out", out, exact, tolerance)
    assert_near("lse", lse, exact_lse, tolerance)

    def gradients(out, lse, inputs):
        visible = lse.isfinite()
        loss = (out * dout.to(out.dtype)).sum() + (lse[visible] * dlse[visible].to(lse.dtype)).sum()
        return torch.autograd.grad(loss, [*inputs, *captured])

    wanted, got = gradients(exact, exact_lse, exact_inputs), gradients(out, lse, inputs)
    names = ("query", "key", "value", *("captured" for _ in captured))
    for name, ours, theirs in zip(names, got, wanted, strict=True):
        # The gradient of a captured tensor is a sum over the whole score matrix.
        assert_near(name, ours, theirs, tolerance * (10 if name == "captured" else 1))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_score_functions(name, shape):
    for dtype in (torch.float64, torch.float32):
        score_mod, captured = score_mods(shape[1], shape[3], shape[4], torch.float64)[name]
        check(shape, dtype, score_mod, captured=captured)


@pytest.mark.parametrize("name", ["relative_table", "softcap", "everything"])
def test_every_instruction_set(name, isa):
    score_mod, captured = score_mods(4, 67, 90, torch.float64)[name]
    for dtype in TOLERANCES:
        check(SHAPES[0], dtype, score_mod, mask_mods(2, 67, 90)["document"], captured, block_size=32)


@pytest.mark.parametrize("block_size", [128, (32, 48), (7, 100)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_block_masks(name, block_size):
    for shape in ((2, 4, 2, 200, 270, 16), SHAPES[1]):
        check(shape, torch.float32, None, mask_mods(shape[0], shape[3], shape[4])[name], block_size=block_size)


def test_scores_and_masks_together():
    score_mod, captured = score_mods(4, 67, 90, torch.float64)["learned_slope"]
    check(SHAPES[0], torch.float64, score_mod, mask_mods(2, 67, 90)["prefix_lm"], captured)


def test_agrees_with_torch():
    q, k, v, _ = (t.detach().float() for t in make((2, 2, 2, 64, 64, 16), torch.float32))
    score_mod = score_mods(2, 64, 64)["t5_buckets"][0]
    mask = create_block_mask(mask_mods(2, 64, 64)["document"], 2, 2, 64, 64, "cpu")
    with torch.no_grad():
        wanted = torch_flex_attention(q, k, v, score_mod, mask)
        torch.testing.assert_close(flex_attention(q, k, v, score_mod, mask), wanted, rtol=1e-5, atol=1e-5)
        out, aux = flex_attention(q, k, v, score_mod, mask, return_aux=AuxRequest(lse=True))
        torch.testing.assert_close(aux.lse, flex_attention(q, k, v, score_mod, mask, return_lse=True)[1])
        torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("block_size", [128, 80, 32, 100, 256], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_row_tiles_end_at_the_edges_of_blocks(block_size, dtype):
    """Enough heads that a task has two row tiles. Rows of blocks end in short tiles, or not at a multiple of 16."""
    shape = (1, 24, 2, 200, 270, 16)
    mask_mod = mask_mods(1, 200, 270)["document"]
    q, k, v = (t.detach() for t in make(shape, dtype)[:3])
    mask = create_block_mask(mask_mod, None, None, 200, 270, "cpu", BLOCK_SIZE=block_size)
    exact, exact_lse = dense_flex(q, k, v, None, mask_mod)
    out, lse = flex_attention(*(t.to(dtype) for t in (q, k, v)), None, mask, enable_gqa=True, return_lse=True)
    assert_near("out", out, exact, TOLERANCES[dtype])
    assert_near("lse", lse, exact_lse, TOLERANCES[dtype])


KEPT = {
    "positions": lambda b, h, i, j: (i * 7 + j * 5) % 11 < 6,
    "batch": lambda b, h, i, j: (i * 7 + j * 5 + b * 3) % 11 < 6,
    "head": lambda b, h, i, j: (i * 7 + j * 5 + h * 3) % 11 < 6,
    "both": lambda b, h, i, j: (i * 7 + j * 5 + h * 3 + b) % 11 < 6,
}


@pytest.mark.parametrize("name", KEPT)
def test_tiles_of_a_mask_that_are_kept_for_other_heads(name):
    """A thread keeps the mask that the function computes. Heads alone have the same bits.

    700 keys: more tiles than slots.
    """
    q, k, v = (torch.randn(2, 3, length, 8) for length in (100, 700, 700))
    ends = [0, 100, 150]  # packed, with a short sequence
    together = flash_attn(q, k, v, mask_mod=KEPT[name])
    packed = flash_attn_varlen(
        *(torch.cat([t[0].transpose(0, 1)[:100], t[1].transpose(0, 1)[:50]]) for t in (q, k, v)),
        torch.tensor(ends), torch.tensor(ends), mask_mod=KEPT[name],
    )  # fmt: skip
    for b in range(2):
        for h in range(3):
            mask_mod = lambda _, __, i, j, b=b, h=h: KEPT[name](b, h, i, j)  # noqa: E731
            one = [t[b : b + 1, h : h + 1] for t in (q, k, v)]
            assert torch.equal(flash_attn(*one, mask_mod=mask_mod)[0, 0], together[b, h])
            short = [t[:, :, : ends[b + 1] - ends[b]] for t in one]
            assert torch.equal(flash_attn(*short, mask_mod=mask_mod)[0, 0], packed[ends[b] : ends[b + 1], h])


@pytest.mark.parametrize("order", itertools.permutations(range(4)), ids=str)
def test_memory_order_of_torch(order):
    """out and the gradients have the order of strides of query, key and value, as torch's flex_attention has."""
    shape = (2, 3, 5, 8)
    places = [order.index(dim) for dim in range(4)]
    q, k, v = (torch.randn([shape[dim] for dim in order]).permute(places) for _ in range(3))
    assert q.shape == shape
    with torch.no_grad():
        wanted = torch_flex_attention(q, k, v)
        assert flex_attention(q, k, v, lambda s, b, h, i, j: s * 2).stride() == wanted.stride()
    inputs = [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in (q, k, v)]
    out = flex_attention(*inputs, lambda s, b, h, i, j: s * 2)
    torch.testing.assert_close(out, flex_attention(*(t.contiguous() for t in inputs), lambda s, b, h, i, j: s * 2))
    assert all(g.stride() == wanted.stride() for g in torch.autograd.grad(out.sum(), inputs))


def test_memory_order_with_a_dimension_of_one():
    q = torch.randn(2, 1, 12, 8).permute(2, 0, 1, 3)  # dimensions 1 and 2 have the same stride
    with torch.no_grad():
        assert flex_attention(q, q, q).stride() == torch_flex_attention(q, q, q).stride()


def test_gradcheck_with_captured_tensors():
    q, k, v = (torch.randn(1, 2, 7, 5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    table, temperature = (torch.rand(2, n, dtype=torch.float64, requires_grad=True) for n in (13, 1))

    def attend(q, k, v, table, temperature):
        def score_mod(score, b, h, q_idx, kv_idx):
            return torch.tanh(score * torch.exp(temperature[h, 0])) + table[h, q_idx - kv_idx + 6]

        return flex_attention(q, k, v, score_mod, return_lse=True)

    assert torch.autograd.gradcheck(attend, (q, k, v, table, temperature))


INDICES = {
    "rising and falling": lambda i, j, _: i - j + 300,
    "falling and rising": lambda i, j, _: j - i + 150,
    "constant beyond a distance": lambda i, j, _: (i - j).clamp(-6, 9) + 6,
    "two apart": lambda i, j, _: (2 * i + 2 * j) % 400,
    "random": lambda i, j, order: order[i] + order[j],
}


@pytest.mark.parametrize("shape", [(1, 2, 2, 67, 90, 16), (1, 2, 1, 3, 300, 16)], ids=["rows", "decode"])
@pytest.mark.parametrize("index", INDICES)
def test_neighbouring_elements_of_a_table(index, shape, isa):
    """The kernels load elements n, n + 1, ... or n, n - 1, ... as a vector."""
    order, exact_table = torch.randperm(shape[4]) % 200, torch.randn(shape[1], 450).double()
    tables = [exact_table.clone().requires_grad_(), exact_table.clone().requires_grad_()]
    q, k, v, dout = (t.detach() for t in make(shape, torch.float64))
    ours, exact = (
        call(q, k, v, lambda s, b, h, i, j, table=table: s + table[h, INDICES[index](i, j, order)])
        for call, table in zip(
            (partial(flex_attention, enable_gqa=True), lambda *a: dense_flex(*a)[0]), tables, strict=True
        )
    )
    assert_near("out", ours, exact, 1e-12)
    grads = [torch.autograd.grad(out, table, dout)[0] for out, table in zip((ours, exact), tables, strict=True)]
    assert_near("gradient of the table", *grads, 1e-12)


def test_no_function_is_plain_attention():
    q, k, v, _ = (t.detach().float() for t in make(SHAPES[1], torch.float32))
    wanted = flash_attn_ext.flash_attn(q, k, v)
    assert torch.equal(flex_attention(q, k, v), wanted)
    mask = create_block_mask(noop_mask, None, None, 130, 33, "cpu")
    assert torch.equal(flex_attention(q, k, v, block_mask=mask), wanted)


def test_masked_nan_does_not_reach_other_rows():
    q, k, v = (torch.randn(1, 2, 100, 16, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        k[:, :, 50:] = v[:, :, 50:] = torch.nan

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.where(kv_idx < 50, score, -torch.inf)

    out = flex_attention(q, k, v, score_mod)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in grads)
    assert (grads[2][:, :, 50:] == 0).all()


def test_same_bits_for_any_number_of_threads():
    score_mod, captured = score_mods(2, 200, 200)["relative_table"]

    def run():
        torch.manual_seed(0)
        q, k, v = (torch.randn(2, 2, 200, 32, requires_grad=True) for _ in range(3))
        out = flex_attention(q, k, v, score_mod)
        return out, *torch.autograd.grad(out.square().sum(), (q, k, v, *captured))

    one = run()
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert all(torch.equal(a, b) for a, b in zip(one, run(), strict=True))
    finally:
        torch.set_num_threads(threads)


def test_16_bit_tensors_may_be_captured():
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    bias = torch.randn(2, 40, dtype=torch.bfloat16, requires_grad=True)
    out = flex_attention(q, k, v, lambda score, b, h, q_idx, kv_idx: score + bias[h, kv_idx])
    (gradient,) = torch.autograd.grad(out.square().sum(), bias)
    assert gradient.dtype == torch.bfloat16
    assert gradient.abs().sum() > 0


def test_block_mask_of_inference_mode():
    """Its tensors have no version, so their states are not kept."""
    q = torch.randn(1, 1, 20, 8)
    with torch.inference_mode():
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 20, 20, "cpu", BLOCK_SIZE=8)
        inside = flex_attention(q, q, q, block_mask=mask)
    wanted = flash_attn(q, q, q, is_causal=True)
    torch.testing.assert_close(inside, wanted)
    torch.testing.assert_close(flex_attention(q, q, q, block_mask=mask), wanted)


def test_empty_inputs():
    for shape in ((0, 2, 2, 5, 5, 8), (1, 2, 2, 0, 5, 8), (1, 2, 2, 5, 0, 8)):
        q, k, v, _ = (t.detach().float().requires_grad_() for t in make(shape, torch.float32))
        out = flex_attention(q, k, v, lambda score, *_: score * 2)
        assert (out == 0).all()
        out.sum().backward()


def test_no_score_matrix_is_stored():
    length = 2048
    score_mod, _ = score_mods(1, length, length)["relative_table"]
    mask = create_block_mask(mask_mods(1, length, length)["causal"], 1, 1, length, length, "cpu")
    q, k, v = (torch.randn(1, 1, length, 16, requires_grad=True) for _ in range(3))
    flex_attention(q, k, v, score_mod, mask)  # traces
    allocated, _ = allocated_by(lambda: flex_attention(q, k, v, score_mod, mask).sum().backward())
    assert allocated < length * length  # bytes: a quarter of one score matrix


@pytest.mark.parametrize("block_size", [128, (32, 48)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_create_block_mask_is_that_of_torch(name, block_size):
    mask_mod = mask_mods(2, 200, 270)[name]
    arguments = (mask_mod, 2, 3, 200, 270, "cpu", block_size)
    assert_same_lists(create.create_block_mask(*arguments), create_block_mask(*arguments))


@pytest.mark.parametrize("name", ["causal", "prefix_lm"])
def test_create_block_mask_has_torchs_other_arguments(name):
    mask_mod = mask_mods(2, 200, 270)[name]
    arguments = (mask_mod, 2, 3, 200, 270, "cpu", 32)
    whole, partial = (create.create_block_mask(*arguments, True, separate) for separate in (True, False))
    wanted = create_block_mask(*arguments, separate_full_blocks=False)
    assert partial.full_kv_num_blocks is None
    assert partial.full_q_num_blocks is None
    for lists in ("kv", "q"):
        assert torch.equal(getattr(partial, f"{lists}_num_blocks"), getattr(wanted, f"{lists}_num_blocks"))
    q, k, v = (torch.randn(2, 3, n, 8) for n in (200, 270, 270))
    torch.testing.assert_close(flex_attention(q, k, v, None, partial), flex_attention(q, k, v, None, whole))
    for order in (True, False):
        options = {"compute_dq_write_order": True, "dq_kv_order": order}
        ours, exact = (make(*arguments, **options) for make in (create.create_block_mask, create_block_mask))
        assert ours.dq_kv_order_spt == exact.dq_kv_order_spt
        for attribute in ("dq_write_order", "dq_write_order_full"):
            torch.testing.assert_close(getattr(ours, attribute), getattr(exact, attribute))


def assert_same_lists(ours, wanted):
    for lists in ("kv", "full_kv", "q", "full_q"):
        counts = getattr(ours, f"{lists}_num_blocks")
        assert torch.equal(counts, getattr(wanted, f"{lists}_num_blocks"))
        got, expected = getattr(ours, f"{lists}_indices"), getattr(wanted, f"{lists}_indices")
        listed = torch.arange(got.shape[-1]) < counts.unsqueeze(-1)
        assert torch.equal(got[listed], expected[listed])
    assert ours.seq_lengths == wanted.seq_lengths
    assert ours.BLOCK_SIZE == wanted.BLOCK_SIZE


OFFSETS = torch.tensor([0, 40, 40, 170, 260], dtype=torch.int32)
DOCUMENT = torch.bucketize(torch.arange(260), OFFSETS[1:], right=True)
VISIBLE = (torch.arange(2 * 3 * 100).view(2, 3, 100, 1) * 7 + torch.arange(170) * 5) % 64 < torch.arange(170)
FORMS = {
    "documents": (
        lambda size: create.documents_block_mask(OFFSETS, BLOCK_SIZE=size),
        lambda b, h, i, j: DOCUMENT[i] == DOCUMENT[j], (260, 260),
    ),
    "causal documents": (
        lambda size: create.documents_block_mask(OFFSETS, causal=True, BLOCK_SIZE=size),
        lambda b, h, i, j: (DOCUMENT[i] == DOCUMENT[j]) & (i >= j), (260, 260),
    ),
    "window": (
        lambda size: create.window_block_mask(100, 170, 40, 9, diagonal=70, BLOCK_SIZE=size),
        lambda b, h, i, j: (j >= i + 70 - 40) & (j <= i + 70 + 9), (100, 170),
    ),
    "causal": (
        lambda size: create.window_block_mask(100, 170, right=0, BLOCK_SIZE=size),
        lambda b, h, i, j: i >= j, (100, 170),
    ),
    "dense": (lambda size: create.dense_block_mask(VISIBLE, size), lambda b, h, i, j: VISIBLE[b, h, i, j], (100, 170)),
    "dense of a head": (
        lambda size: create.dense_block_mask(VISIBLE[:1], size), lambda b, h, i, j: VISIBLE[0, h, i, j], (100, 170),
    ),
    "dense of a sequence": (
        lambda size: create.dense_block_mask(VISIBLE[:, 1:2], size), lambda b, h, i, j: VISIBLE[b, 1, i, j], (100, 170),
    ),
    "one dense mask": (
        lambda size: create.dense_block_mask(VISIBLE[0, 0], size), lambda b, h, i, j: VISIBLE[0, 0, i, j], (100, 170),
    ),
}  # fmt: skip


@pytest.mark.parametrize("block_size", [32, (32, 48), (64, 16)], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_block_masks_of_other_forms(name, block_size):
    """The lists and the elements equal torch's."""
    make_mask, mask_mod, lengths = FORMS[name]
    ours = make_mask(block_size)
    batch, heads = ours.kv_num_blocks.shape[:2]
    assert_same_lists(ours, create.create_block_mask(mask_mod, batch, heads, *lengths, BLOCK_SIZE=block_size))
    q, k = (torch.randn(2, 3, length, 8) for length in lengths)
    out = flex_attention(q, k, k, block_mask=ours)
    assert_near("out", out, dense_flex(q, k, k, None, mask_mod)[0], TOLERANCES[torch.float32])


@pytest.mark.parametrize("mask_mod", [None, lambda b, h, i, j: (i + j) % 3 > 0], ids=["whole", "function"])
def test_block_mask_of_lists(mask_mod):
    """flash-attention 4's lists: indices beyond the count are anything."""
    counts, indices = torch.tensor([[[1, 2, 0]]]), torch.tensor([[[[1, -7], [0, 2], [99, 1]]]])
    full_counts, full_indices = torch.tensor([[[1, 0, 1]]]), torch.tensor([[[[0], [5], [2]]]])
    lengths = {"Q_LEN": 40, "KV_LEN": 45, "BLOCK_SIZE": 16}
    mask = create.listed_block_mask(counts, indices, full_counts, full_indices, mask_mod=mask_mod, **lengths)
    partial, full = torch.zeros(2, 3, 3, dtype=torch.bool)
    partial[0, 1] = partial[1, 0] = partial[1, 2] = full[0, 0] = full[2, 2] = True

    def visible(b, h, i, j):
        by_function = True if mask_mod is None else mask_mod(b, h, i, j)
        return full[i // 16, j // 16] | (partial[i // 16, j // 16] & by_function)

    q, k = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 45, 8)
    out = flex_attention(q, k, k, block_mask=mask)
    assert_near("out", out, dense_flex(q, k, k, None, visible)[0], TOLERANCES[torch.float32])
    with pytest.raises(ValueError, match="mask_block_idx: allowed: 0 to 1"):
        create.listed_block_mask(counts, indices, **{**lengths, "KV_LEN": 20})
    with pytest.raises(ValueError, match=r"mask_block_cnt, mask_block_idx: got \(1, 1, 3\)"):
        create.listed_block_mask(counts, indices, **{**lengths, "Q_LEN": 20})


@pytest.mark.parametrize(
    ("make_mask", "message"),
    [
        (lambda: create.documents_block_mask(torch.tensor([0, 5, 3])), "cu_seqlens: got"),
        (lambda: create.documents_block_mask(torch.tensor([0])), "cu_seqlens: allowed"),
        (lambda: create.window_block_mask(5, 5, -1), "left: got -1"),
        (lambda: create.dense_block_mask(torch.ones(3, 3)), "mask: got torch.float32"),
        (lambda: create.window_block_mask(5, 5, BLOCK_SIZE=0), "BLOCK_SIZE: got 0"),
        (lambda: create.create_block_mask(lambda b, h, i, j: i * j, 1, 1, 5, 5), "mask_mod: got a result of torch.int"),
        (lambda: create.create_block_mask(lambda b, h, i, j: i > j, 1, 1, 5, 5, dq_kv_order=2), "dq_kv_order: got 2"),
    ],
)
def test_block_masks_that_cannot_be_made(make_mask, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make_mask()


def peak_of(action):
    """The largest number of bytes that torch held for the action at once."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        action()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def test_memory_is_linear():
    """Forward and backward with a function, a table and a block mask. At S 16384, D 64 the peak is 21 MiB."""
    table = torch.zeros(1, 513, requires_grad=True)

    def peak(length):
        q, k, v = (torch.randn(1, 1, length, 32, requires_grad=True) for _ in range(3))
        mask_mod = mask_mods(1, length, length)["window"]
        mask = create.create_block_mask(mask_mod, None, None, length, length)

        def train():
            out = flex_attention(q, k, v, lambda s, b, h, i, j: s + table[h, (i - j).clamp(0, 512)], mask)
            out.sum().backward()

        train()
        return peak_of(train)

    assert peak(4096) < 2.2 * peak(2048)


def test_create_block_mask_stores_no_mask():
    length = 4096
    arguments = (mask_mods(1, length, length)["causal"], None, None, length, length, "cpu")
    assert peak_of(lambda: create.create_block_mask(*arguments)) < length * length / 3  # bytes
    assert peak_of(lambda: create_block_mask(*arguments)) > length * length
