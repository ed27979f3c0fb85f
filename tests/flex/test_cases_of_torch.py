"""The cases of torch's own tests of FlexAttention (test_flex_attention.py, test_flex_decoding.py), as far as they run
on a CPU: its score functions, captured tensors, block masks, layouts, pages, decoding and torch.compile."""

import pytest
import torch
from flex_reference import dense_flex
from test_flex_attention import assert_near, check
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, noop_mask

from flash_attn_ext import flex_attention

Q_LEN, K_LEN = 40, 70
SHAPE = (2, 4, 2, Q_LEN, K_LEN, 8)  # B, H, H_kv, S_q, S_k, D


def tensor(*shape, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)


def parameter(*shape, seed=0):
    return tensor(*shape, seed=seed).requires_grad_()


FLAGS = torch.arange(K_LEN) >= K_LEN // 2
BIDIRECTIONAL, LENGTHS = torch.tensor([3, 20], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32)
OFFSETS = torch.tensor([0, 30, 55, K_LEN], dtype=torch.int32)
SEQUENCE = torch.bucketize(torch.arange(K_LEN), OFFSETS[1:], right=True).int()
VISIBLE = torch.arange(2 * Q_LEN * K_LEN).view(2, 1, Q_LEN, K_LEN) % 3 == 0
ONE, WHICH = torch.ones((), dtype=torch.int32), torch.tensor(0)
LISTS, PLANES = tensor(2, K_LEN), tensor(4, 2, 4, K_LEN)
OF_TOKEN, OF_BATCH, OF_HEAD = tensor(K_LEN), tensor(2), tensor(4)


def distance(q, k):
    return (q / 7 - k / 7).abs()


SCORES = {
    "times two": lambda s, b, h, q, k: s * 2,
    "squared": lambda s, b, h, q, k: s * s,
    "inverse causal": lambda s, b, h, q, k: torch.where(q <= k, s, float("-inf")),
    "distance as a bias": lambda s, b, h, q, k: torch.where(q >= k - 30, s + (q - k), float("-inf")),
    "slopes from the head": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / 4)),
    "trigonometric": lambda s, b, h, q, k: torch.sin(torch.cos(s)) + torch.tan(b),
    "two branches": lambda s, b, h, q, k: torch.cos(s) * torch.sin(s) + torch.tan(b),
    "index twice": lambda s, b, h, q, k: s + LISTS[b][q],
    "index after a slice": lambda s, b, h, q, k: s + PLANES[0][b, h][q],
    "index by a captured number": lambda s, b, h, q, k: s + PLANES[:, :, :, 0].permute(1, 2, 0)[b][h][WHICH],
    "odd keys are hidden": lambda s, b, h, q, k: torch.where(k % 2 == 0, s, float("-inf")),
    "every index": lambda s, b, h, q, k: s + OF_TOKEN[q] + OF_BATCH[b] + OF_HEAD[h],
    "flags": lambda s, b, h, q, k: torch.where(FLAGS[q] == FLAGS[k], s, float("-inf")),
    "causal or bidirectional": lambda s, b, h, q, k: torch.where(
        ((q <= BIDIRECTIONAL[b]) & (k <= BIDIRECTIONAL[b])) | (q >= k), s, -float("inf")
    ),
    "fractions of indices": lambda s, b, h, q, k: torch.where(
        (distance(q, k) <= 3) | (distance(q % 7, k % 7) <= 3), s, float("-inf")
    ),
    "divided by an index": lambda s, b, h, q, k: s - q // (1 + k),
    "silu": lambda s, b, h, q, k: torch.nn.functional.silu(s),
    "mask by the score": lambda s, b, h, q, k: torch.where(s <= LENGTHS[b], s, -float("inf")),
    "captured number": lambda s, b, h, q, k: s + ONE,
    "bool added": lambda s, b, h, q, k: s + VISIBLE[b, h.new_zeros(h.shape), q, k],
    "packed in one row": lambda s, b, h, q, k: s + (q - OFFSETS[SEQUENCE[q]]) * 0.1 - (k - OFFSETS[SEQUENCE[k]]) * 0.2,
}  # fmt: skip


@pytest.mark.parametrize("name", SCORES)
def test_score_functions(name):
    check(SHAPE, torch.float32, SCORES[name])  # torch computes functions of integers in float32


def learned():
    """{name: (score_mod, the tensors that it learns)}."""
    table, plane, head, batch_head = parameter(K_LEN + Q_LEN), parameter(Q_LEN, K_LEN), parameter(4), parameter(2, 4)
    indices = torch.randint(0, Q_LEN, (Q_LEN,), generator=torch.Generator().manual_seed(1))
    one, other = parameter(Q_LEN), parameter(K_LEN, seed=2)
    return {
        "q + k": (lambda s, b, h, q, k: s + table[q + k], (table,)),
        "plane": (lambda s, b, h, q, k: s + plane[q, k], (plane,)),
        "batch and head": (lambda s, b, h, q, k: s + batch_head[b, h], (batch_head,)),
        "factor": (lambda s, b, h, q, k: s * one[q], (one,)),
        "window of the table": (lambda s, b, h, q, k: s + table[(q - k + 8).clamp(0, 16)], (table,)),
        "global tokens": (lambda s, b, h, q, k: s + torch.where(k < 5, other[k], 0.0), (other,)),
        "sine of a sum": (lambda s, b, h, q, k: s + torch.sin(one[q] * 3) * other[k], (one, other)),
        "indirect": (lambda s, b, h, q, k: s + one[indices[q]], (one,)),
        "symmetric": (lambda s, b, h, q, k: s + one[q] + one[k.clamp(max=Q_LEN - 1)], (one,)),
        "flipped": (lambda s, b, h, q, k: s + one[Q_LEN - 1 - q], (one,)),
        "gate of the head": (lambda s, b, h, q, k: s * torch.sigmoid(head[h].to(s.dtype)), (head,)),
        "two tensors": (lambda s, b, h, q, k: s + torch.exp(one[q]) + table[q - k], (one, table)),
    }


@pytest.mark.parametrize("name", learned())
def test_learned_tensors(name):
    score_mod, captured = learned()[name]
    check(SHAPE, torch.float64, score_mod, captured=captured)


@pytest.mark.parametrize("q_len", [1, 2, 5])
@pytest.mark.parametrize("name", ["squared", "every index", "mask by the score", "slopes from the head"])
def test_decoding(name, q_len):
    shape = (2, 4, 1, q_len, K_LEN, 16)
    check(shape, torch.float32, SCORES[name])
    position = torch.tensor(30)
    check(shape, torch.float32, lambda s, b, h, q, k: torch.where(q + position >= k, s, -float("inf")))


def test_head_dim_of_value_differs():
    q, k, v = tensor(2, 4, 33, 12), tensor(2, 4, 50, 12, seed=1), tensor(2, 4, 50, 20, seed=2)
    out = flex_attention(q, k, v, SCORES["squared"])
    torch.testing.assert_close(out, dense_flex(q, k, v, SCORES["squared"])[0])


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (1, 0, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
def test_strided_inputs(order):
    inputs = [tensor(6, 5, 7, 8, seed=n).permute(order).requires_grad_() for n in range(3)]
    dout = tensor(*inputs[0].transpose(1, 2).shape, seed=4).transpose(1, 2)
    out = flex_attention(*inputs, SCORES["times two"])
    wanted = dense_flex(*inputs, SCORES["times two"])[0]
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(torch.autograd.grad(out, inputs, dout), torch.autograd.grad(wanted, inputs, dout))


def test_keys_of_one_batch_for_all():
    q, k = tensor(3, 4, 30, 8).requires_grad_(), tensor(1, 2, 30, 8, seed=1).requires_grad_()
    mask = create_block_mask(lambda b, h, i, j: i >= j, 3, None, 30, 30, "cpu")
    out = flex_attention(q, k, k, block_mask=mask, enable_gqa=True)
    wanted = dense_flex(q, k.expand(3, -1, -1, -1), k.expand(3, -1, -1, -1), None, lambda b, h, i, j: i >= j)[0]
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), (q, k)), torch.autograd.grad(wanted.sum(), (q, k)))


def causal(b, h, q, k):
    return q >= k


def test_block_masks_that_are_made_by_hand():
    """From lists of blocks alone, without lengths, without the lists of query blocks, cropped, and cut to a head."""
    length = 256
    q, k, v = (tensor(2, 3, length, 8, seed=n).requires_grad_() for n in range(3))
    wanted = dense_flex(q, k, v, None, causal)[0]
    gradients = torch.autograd.grad(wanted.square().sum(), (q, k, v))
    counts = torch.arange(1, 9).view(1, 1, 8)
    lists = torch.arange(8).expand(1, 1, 8, 8)
    larger = create_block_mask(causal, 2, 3, 300, 290, "cpu", BLOCK_SIZE=64)
    masks = [
        BlockMask.from_kv_blocks(counts, lists, BLOCK_SIZE=32, mask_mod=causal),
        BlockMask.from_kv_blocks(counts, lists, BLOCK_SIZE=32, mask_mod=causal, compute_q_blocks=False),
        larger._adjust(length, length),
    ]
    for mask in masks:
        out = flex_attention(q, k, v, block_mask=mask)
        torch.testing.assert_close(out, wanted)
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), (q, k, v)), gradients)
    with pytest.raises(RuntimeError, match="sliced BlockMask"):
        flex_attention(q, k, v, block_mask=larger[:, 0])
    with pytest.raises(ValueError, match="block_mask: got a mask for"):
        flex_attention(q, k, v, block_mask=larger)


def test_rows_without_keys():
    q, k, v = (tensor(2, 2, 70, 8, seed=n).requires_grad_() for n in range(3))
    mask = create_block_mask(lambda b, h, i, j: i < 35, 2, 1, 70, 70, "cpu", BLOCK_SIZE=32)
    out, lse = flex_attention(q, k, v, block_mask=mask, return_lse=True)
    (out.sum() + lse[..., :35].sum()).backward()
    assert (out[:, :, 35:] == 0).all()
    assert (lse[:, :, 35:] == -torch.inf).all()
    assert (q.grad[:, :, 35:] == 0).all()
    assert all(t.grad.isfinite().all() for t in (q, k, v))


@pytest.mark.parametrize("q_len", [1, 48])
@pytest.mark.parametrize("name", ["causal", "bias"])
def test_pages(name, q_len):
    """torch's PagedAttention: the functions convert physical positions to logical positions."""
    heads, length, page, batch = 2, 48, 16, 3
    q = tensor(batch, heads, q_len, 8)
    k, v = tensor(batch, heads, length, 8, seed=1), tensor(batch, heads, length, 8, seed=2)
    mask_mod = causal if name == "causal" and q_len > 1 else noop_mask
    score_mod = SCORES["slopes from the head"] if name == "bias" else SCORES["times two"]
    pages = PagedAttention(12, page, batch, device="cpu")
    for reserved in (16, length):
        for b in range(batch):
            pages.reserve(torch.tensor(b), torch.tensor(reserved))
    caches = [torch.zeros(1, heads, 12 * page, 8, dtype=q.dtype) for _ in range(2)]
    pages.assign(torch.arange(batch), torch.arange(length).expand(batch, length), k, v, *caches)
    mask = create_block_mask(mask_mod, batch, 1, q_len, length, "cpu", BLOCK_SIZE=(16, page))
    out = flex_attention(q, *caches, pages.get_score_mod(score_mod), pages.convert_logical_block_mask(mask))
    torch.testing.assert_close(out, dense_flex(q, k, v, score_mod, mask_mod)[0])


def test_refusals():
    q, k = tensor(2, 2, 8, 8), tensor(2, 2, 8, 8)
    rows = tensor(2, 8)
    with pytest.raises(NotImplementedError, match=r"aten\.sum.*rows\[b\]\.sum"):
        flex_attention(q, k, k, lambda s, b, h, i, j: s + rows[b].sum(dim=-1))
    with pytest.raises((TypeError, ValueError), match="float16"):
        flex_attention(q, k.half(), k.half())
    with pytest.raises(ValueError, match="heads"):
        flex_attention(q, k[:, :1], k[:, :1])
    with pytest.raises(ValueError, match="dimensions"):
        flex_attention(q[0], k[0], k[0])


class Masked(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(score, visible):
        return torch.where(visible, score, -float("inf"))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.mark_non_differentiable(inputs[1])

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3, None  # not the derivative of forward


def test_an_autograd_function_in_a_score_function():
    q = tensor(1, 2, 20, 8).requires_grad_()
    keys = tensor(1, 2, 20, 8, seed=1)
    out = flex_attention(q, keys, keys, lambda s, b, h, i, j: Masked.apply(s, i <= j))
    wanted = flex_attention(q, keys, keys, SCORES["inverse causal"])
    torch.testing.assert_close(out, wanted)
    (ours,), (exact,) = (torch.autograd.grad(o.sum(), q) for o in (out, wanted))
    torch.testing.assert_close(ours, 3 * exact)


def test_a_flag_of_the_closure_changes():
    q, adds = tensor(1, 1, 9, 4), True

    def score_mod(score, b, h, i, j):
        return score + ONE if adds else score * 3

    first = flex_attention(q, q, q, score_mod)
    adds = False
    second = flex_attention(q, q, q, score_mod)
    torch.testing.assert_close(first, flex_attention(q, q, q))
    torch.testing.assert_close(second, flex_attention(q * 3, q, q))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_gradcheck(backend):
    torch._dynamo.reset()
    q, k, v = (tensor(1, 2, 7, 4, seed=n).requires_grad_() for n in range(3))
    factor = parameter(2)
    compiled = torch.compile(
        lambda q, k, v, factor: flex_attention(
            q, k, v, lambda s, b, h, i, j: torch.sin(s * factor[h]), create_mask(7), return_lse=True
        ),
        backend=backend, fullgraph=True,
    )  # fmt: skip
    assert torch.autograd.gradcheck(compiled, (q, k, v, factor))


def create_mask(length):
    counts = torch.ones(1, 1, 1, dtype=torch.int32)
    return BlockMask.from_kv_blocks(counts, counts[..., None] * 0, mask_mod=causal, seq_lengths=(length, length))


def test_a_compiled_function_that_reads_a_symbol():
    """The batch is a symbol of the graph: the program reads it as a tensor."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True, dynamic=True)
    def attend(q):
        batch, length = q.shape[0], q.shape[2]
        return flex_attention(q, q, q, lambda s, b, h, i, j: s * (2 * batch) + (i - j) % length)

    for batch in (4, 16, 5):
        length = 20 + batch
        q = tensor(batch, 2, length, 8)
        wanted = dense_flex(q, q, q, lambda s, b, h, i, j, n=length, m=2 * batch: s * m + (i - j) % n)[0]
        assert_near("out", attend(q), wanted, 1e-12)
    assert len(graphs) == 1


def test_several_compiled_calls_in_one_graph():
    torch._dynamo.reset()
    q, k, v = (tensor(1, 2, 32, 8, seed=n).requires_grad_() for n in range(3))

    def attend(q, k, v):
        first = flex_attention(q, k, v, SCORES["distance as a bias"])
        second = flex_attention(first, v, k, SCORES["times two"], create_mask(32))
        return flex_attention(second, k, k, SCORES["distance as a bias"]) + first

    out, wanted = torch.compile(attend, backend="aot_eager", fullgraph=True)(q, k, v), attend(q, k, v)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), (q, k, v)), torch.autograd.grad(wanted.sum(), (q, k, v)))
