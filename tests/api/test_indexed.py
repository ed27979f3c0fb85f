"""Attention by index against the dense reference with the equivalent mask, in float64."""

import math

import pytest
import reference
import torch
from helpers import allocated_by
from torch.utils.flop_counter import FlopCounterMode

from flash_attn_ext import flash_attn

torch.manual_seed(0)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
BOUND = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def make(b=2, h=6, h_kv=2, s_q=40, s_k=150, d=24, d_v=40, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
        for shape in ((b, h, s_q, d), (b, h_kv, s_k, d), (b, h_kv, s_k, d_v))
    ]


def make_indices(b, h_kv, s_q, limit, n, seed=1, none=0.2):
    """Random numbers with duplicates, in any order; some -1; the first row is empty."""
    g = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, limit, (b, h_kv, s_q, n), generator=g)
    numbers[torch.rand(numbers.shape, generator=g) < none] = -1
    numbers[:, :, 0] = -1
    return numbers


def mask_of(indices, shape, block_size=1):
    """The bool mask (B, H, S_q, S_k) that says the same. ``shape``: B, H, S_q, S_k."""
    b, h, s_q, s_k = shape
    blocks = -(-s_k // block_size)
    seen = torch.zeros(*indices.shape[:3], blocks + 1, dtype=torch.bool)
    seen.scatter_(3, indices.long() % (blocks + 1), True)  # -1 is the last column
    seen = seen[..., :blocks].repeat_interleave(block_size, 3)[..., :s_k]
    return seen.repeat_interleave(h // seen.shape[1], 1).expand(b, h, s_q, s_k)


def dense(q, k, v, mask, **options):
    q, k, v = (t.double() for t in (q, k, v))
    options = {n: o.double() if isinstance(o, torch.Tensor) else o for n, o in options.items()}
    return reference.attention(q, k, v, mask, **options)


def run_both(tensors, indices, mask, extra=(), grads=True, **options):
    """(ours, reference): out, lse and the gradients of a random function of both, with respect to all tensors."""
    results = []
    for name in ("ours", "reference"):
        leaves = [t.detach().clone() if name == "ours" else t.detach().double() for t in tensors]
        more = {n: t.detach().clone() if name == "ours" else t.detach().double() for n, t in dict(extra).items()}
        for t in (*leaves, *more.values()):
            t.requires_grad_(grads)
        if name == "ours":
            out, lse = flash_attn(*leaves, enable_gqa=True, return_lse=True, **indices, **more, **options)
        else:
            reference_options = {
                n: o for n, o in options.items() if n not in ("attn_mask", "key_mask", "attention_chunk")
            }
            out, lse = dense(*leaves, mask, **reference_options, **more)
        got = [out, lse]
        if grads:
            g = torch.Generator().manual_seed(5)
            w_out, w_lse = (torch.randn(t.shape, generator=g, dtype=torch.float64) for t in (out, lse))
            loss = (out.double() * w_out).sum() + torch.where(lse > -math.inf, lse.double() * w_lse, 0.0).sum()
            got += torch.autograd.grad(loss, [*leaves, *more.values()])
        results.append(got)
    return results


def check(ours, expected, bound):
    for n, (a, e) in enumerate(zip(ours, expected, strict=True)):
        assert a.shape == e.shape
        assert torch.equal(a == -math.inf, e == -math.inf), n
        a, e = a.double().masked_fill(a == -math.inf, 0), e.masked_fill(e == -math.inf, 0)
        assert torch.isfinite(a).all(), n
        scale = max(e.abs().max().item(), 1.0)
        assert (a - e).abs().max().item() <= bound * scale, (n, (a - e).abs().max().item(), scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("of_batch", "of_heads"), [(1, 1), (2, 2), (2, 1)])
def test_matches_a_mask(dtype, of_batch, of_heads):
    tensors = make(dtype=dtype)
    indices = make_indices(of_batch, of_heads, 40, 150, 90)
    shape = (2, 6, 40, 150)
    check(*run_both(tensors, {"key_indices": indices.int()}, mask_of(indices, shape)), BOUND[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "h_kv", "d", "d_v"),
    [(1, 1, 16, 16), (16, 1, 64, 64), (100, 2, 8, 17), (3, 3, 5, 70), (8, 1, 65, 3), (8, 4, 7, 33)],
)
def test_heads_and_head_dimensions(dtype, heads, h_kv, d, d_v):
    tensors = make(b=1, h=heads, h_kv=h_kv, s_q=9, s_k=700, d=d, d_v=d_v, dtype=dtype)
    indices = make_indices(1, h_kv, 9, 700, 400)
    check(*run_both(tensors, {"key_indices": indices}, mask_of(indices, (1, heads, 9, 700))), BOUND[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 7, 64, 1000])
def test_blocks(dtype, block_size):
    tensors = make(dtype=dtype)
    indices = make_indices(2, 2, 40, -(-150 // block_size), 5)
    given = {"key_block_indices": indices, "key_block_size": block_size}
    mask = mask_of(indices, (2, 6, 40, 150), block_size)
    check(*run_both(tensors, given, mask, causal="lower_right"), BOUND[dtype])


def options_of():
    g = torch.Generator().manual_seed(3)
    bias = torch.randn(2, 6, 40, 150, generator=g)
    bias[torch.rand(bias.shape, generator=g) < 0.3] = -math.inf
    keys = torch.rand(2, 150, generator=g) > 0.3
    return {
        "causal": {"causal": "lower_right"},
        "upper_left": {"causal": "upper_left"},
        "window": {"causal": "lower_right", "window": (30, 0)},
        "both sides": {"window": (20, 9)},
        "chunks": {"causal": "lower_right", "attention_chunk": 32},
        "softcap": {"softcap": 1.5, "scale": 0.7},
        "bool mask": {"attn_mask": bias > 0},
        "one mask": {"attn_mask": (bias > 0)[:1, :1]},
        "bias": {"attn_mask": bias},
        "key mask": {"key_mask": keys},
        "both masks": {"attn_mask": bias[:, :1], "key_mask": keys, "softcap": 2.0, "causal": "lower_right"},
    }


@pytest.mark.parametrize("name", options_of())
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_options(name, dtype):
    options = options_of()[name]
    tensors, indices = make(dtype=dtype), make_indices(2, 2, 40, 150, 90)
    mask = torch.zeros(2, 6, 40, 150, dtype=torch.float64).masked_fill(~mask_of(indices, (2, 6, 40, 150)), -math.inf)
    given = options.get("attn_mask")
    if given is not None:
        if given.dtype != torch.bool and dtype == torch.bfloat16:
            options = options | {"attn_mask": given.to(dtype)}
            given = options["attn_mask"]
        mask = mask + (given.double() if given.dtype != torch.bool else torch.where(given, 0.0, -math.inf).double())
    if "key_mask" in options:
        mask = mask.masked_fill(~options["key_mask"][:, None, None], -math.inf)
    if "attention_chunk" in options:
        size = options["attention_chunk"]
        chunk = (torch.arange(40) + 110)[:, None] // size
        mask = mask.masked_fill(torch.arange(150) // size != chunk, -math.inf)
    check(*run_both(tensors, {"key_indices": indices}, mask, **options), BOUND[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slopes_and_sinks_have_gradients(dtype):
    tensors, indices = make(dtype=dtype), make_indices(2, 1, 40, 150, 90)
    extra = {"alibi_slopes": torch.rand(2, 6), "sink": torch.randn(6)}
    mask = mask_of(indices, (2, 6, 40, 150))
    ours, expected = run_both(tensors, {"key_indices": indices}, mask, extra, causal="lower_right")
    check(ours, expected, 3 * BOUND[dtype])


def test_large_masks_keep_the_sum():
    """With -1e9 added to each score lse loses log l. The backward computes log l again."""
    tensors, indices = make(), make_indices(2, 2, 40, 150, 90, none=0.0)
    bias = torch.full((1, 1, 1, 150), -1e9)
    mask = mask_of(indices, (2, 6, 40, 150))
    ours, _ = run_both(tensors, {"key_indices": indices}, mask, attn_mask=bias)
    plain, _ = run_both(tensors, {"key_indices": indices}, mask)
    # float32 rounds scores near -1e9 to multiples of 64: the weights are uniform.
    assert torch.isfinite(torch.cat([t.flatten() for t in ours[2:]])).all()
    uniform = mask.double() / mask.sum(-1, keepdim=True).clamp(min=1)
    expected = uniform @ tensors[2].double().repeat_interleave(3, 1)
    assert torch.allclose(ours[0].double(), expected, atol=1e-5)
    g = torch.Generator().manual_seed(5)
    w_out = torch.randn(ours[0].shape, generator=g, dtype=torch.float64)
    dv = (uniform.transpose(-1, -2) @ w_out).view(2, 2, 3, 150, 40).sum(2)
    assert torch.allclose(ours[4].double(), dv, atol=1e-4)
    assert plain[0].shape == ours[0].shape


def test_order_and_duplicates_change_no_bit():
    tensors, indices = make(dtype=torch.bfloat16), make_indices(2, 2, 40, 150, 60)
    shuffled = torch.cat([indices.flip(-1), indices[..., :30], torch.full((2, 2, 40, 7), -1)], -1)
    results = [run_both(tensors, {"key_indices": n}, None)[0] for n in (indices, shuffled)]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_same_bits_for_any_threads_and_alone():
    tensors = make(b=2, h=4, h_kv=2, s_q=64, s_k=1500, d=32, d_v=32, dtype=torch.bfloat16)
    indices = make_indices(2, 2, 64, 1500, 900)

    def run(tensors, indices):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        out, lse = flash_attn(*leaves, enable_gqa=True, causal="lower_right", key_indices=indices, return_lse=True)
        return [out, lse, *torch.autograd.grad(out.float().square().sum(), leaves)]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = run(tensors, indices)
        torch.set_num_threads(3)
        three = run(tensors, indices)
    finally:
        torch.set_num_threads(threads)
    alone = run([t[1:] for t in tensors], indices[1:])
    assert all(torch.equal(a, b) for a, b in zip(one, three, strict=True))
    assert all(torch.equal(a[1:], b) for a, b in zip(one, alone, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_outside_of_the_keys_stays_there(dtype):
    """NaN in keys that no query names, and in keys that a mask hides."""
    q, k, v = make(dtype=dtype)
    indices = make_indices(2, 2, 40, 75, 60)
    key_mask = torch.ones(2, 150, dtype=torch.bool)
    key_mask[:, 20:25] = False
    k[:, :, 75:], v[:, :, 75:], k[:, :, 20:25], v[:, :, 20:25] = (math.nan,) * 4
    clean = [torch.nan_to_num(t) for t in (q, k, v)]
    got, expected = (run_both(t, {"key_indices": indices}, None, key_mask=key_mask)[0] for t in ((q, k, v), clean))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_nan_of_one_head_stays_in_it():
    q, k, v = make(dtype=torch.bfloat16)
    q[:, 0], indices = math.nan, make_indices(2, 2, 40, 150, 60)
    mask = torch.ones(1, 6, 1, 1, dtype=torch.bool)
    mask[:, 0] = False
    (out, lse, dq, dk, dv), _ = run_both((q, k, v), {"key_indices": indices}, None, attn_mask=mask)
    for t in (out, dq, dk, dv):
        assert torch.isfinite(t).all()
    assert (out[:, 0] == 0).all()
    assert (lse[:, 0] == -math.inf).all()


def test_value_in_the_key():
    """Latent attention: one key head. Its first columns are the value."""
    q = torch.randn(1, 32, 20, 48, dtype=torch.float64)
    latent = torch.randn(1, 1, 300, 48, dtype=torch.float64)
    indices = make_indices(1, 1, 20, 300, 100)
    mask = mask_of(indices, (1, 32, 20, 300))
    results = []
    for run in (lambda *t: flash_attn(*t, key_indices=indices), lambda *t: dense(*t, mask)[0]):
        leaves = [t.clone().requires_grad_() for t in (q, latent)]
        out = run(leaves[0], leaves[1], leaves[1][..., :32])
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    check(*results, 1e-12)


def test_other_numbers_of_dimensions():
    q, k, v = make()
    indices = make_indices(2, 2, 40, 150, 30)
    whole = flash_attn(q, k, v, enable_gqa=True, key_indices=indices)
    one = flash_attn(q[1], k[1], v[1], enable_gqa=True, key_indices=indices[1])
    assert torch.equal(one, whole[1])
    alone = flash_attn(q[1, 3], k[1, 1], v[1, 1], key_indices=indices[1, 1])
    assert torch.equal(alone, whole[1, 3]) or torch.allclose(alone, whole[1, 3], atol=1e-6)
    many = flash_attn(q[:, None], k[:, None], v[:, None], enable_gqa=True, key_indices=indices[:, None])
    assert torch.equal(many[:, 0], whole)


def test_empty():
    q, k, v = make()
    no_numbers = torch.empty(1, 1, 40, 0, dtype=torch.int32)
    out, lse = flash_attn(q, k, v, enable_gqa=True, key_indices=no_numbers, return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    sink = torch.randn(6, requires_grad=True)
    q = q.requires_grad_()
    out, lse = flash_attn(q, k, v, enable_gqa=True, key_indices=no_numbers, sink=sink, return_lse=True)
    assert torch.equal(lse, sink[None, :, None].expand(2, 6, 40))
    dq, dsink = torch.autograd.grad(lse.sum() + out.sum(), [q, sink])
    assert (dq == 0).all()
    assert torch.allclose(dsink, torch.full((6,), 80.0))
    k, v = k[:, :, :0], v[:, :, :0]
    none = torch.full((1, 1, 40, 3), -1)
    out = flash_attn(q, k, v, enable_gqa=True, key_indices=none)
    assert (out == 0).all()


BAD = [
    ({"key_indices": torch.zeros(1, 1, 40, 3)}, TypeError, "key_indices: got dtype"),
    ({"key_indices": torch.zeros(1, 1, 39, 3, dtype=torch.int32)}, ValueError, "key_indices: got shape"),
    ({"key_indices": torch.zeros(1, 3, 40, 3, dtype=torch.int32)}, ValueError, "key_indices: got shape"),
    ({"key_indices": torch.zeros(40, 3, dtype=torch.int32)}, ValueError, "key_indices: got shape"),
    ({"key_indices": torch.full((1, 1, 40, 3), 150)}, ValueError, "key_indices: got 150; allowed: -1"),
    ({"key_indices": torch.full((1, 1, 40, 3), -2)}, ValueError, "key_indices: got -2; allowed: -1"),
    ({"key_indices": torch.full((1, 1, 40, 3), 2**63 - 1)}, ValueError, "key_indices: got 9223372036854775807"),
    ({"key_indices": [1, 2]}, TypeError, "key_indices: got list"),
    ({"key_block_indices": torch.full((1, 1, 40, 3), 2)}, ValueError, "key_block_indices: got 2; allowed: -1"),
]  # fmt: skip
GOOD = torch.zeros(1, 1, 40, 3, dtype=torch.int64)
BAD += [
    ({"key_block_indices": GOOD, "key_block_size": 0}, ValueError, "key_block_size: got 0"),
    ({"key_block_indices": GOOD, "key_block_size": 1.5}, TypeError, "key_block_size: got 1.5"),
    ({"key_indices": GOOD, "key_block_indices": GOOD}, ValueError, "key_block_indices: got a tensor with key_indices"),
    ({"key_indices": GOOD, "dropout_p": 1.5}, ValueError, "dropout_p: got 1.5"),
    ({"key_indices": GOOD, "num_splits": 4}, ValueError, "num_splits, unified_max"),
    ({"key_indices": GOOD, "score_mod": lambda s, *_: s}, NotImplementedError, "key_indices"),
    ({"key_indices": GOOD, "attn_mask": torch.zeros(40, 150, requires_grad=True)}, NotImplementedError, "attn_mask"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), BAD)
def test_errors(arguments, error, message):
    q, k, v = make()
    with pytest.raises(error, match=message):
        flash_attn(q, k, v, enable_gqa=True, **arguments)


def test_missing_derivatives_raise_an_error():
    q, k, v = make(dtype=torch.float64)
    indices = make_indices(2, 2, 40, 150, 30)

    def run(q):
        return flash_attn(q, k, v, enable_gqa=True, key_indices=indices)

    with pytest.raises(NotImplementedError, match="key_indices"):
        torch.func.jvp(run, (q,), (q,))
    with pytest.raises(NotImplementedError, match="key_indices"):
        torch.func.vmap(run, in_dims=0)(q[None])


@pytest.mark.parametrize("block_size", [0, 7])
def test_forward_mode_and_second_derivatives(block_size):
    """Against the derivatives of the dense reference, of queries in several blocks."""
    shape = (2, 4, 9, 40)
    tensors = make(b=2, h=4, h_kv=2, s_q=9, s_k=40, d=6, d_v=5, dtype=torch.float64)
    indices = make_indices(2, 1, 9, 6 if block_size else 40, 20)
    name = "key_block_indices" if block_size else "key_indices"
    given = {name: indices, **({"key_block_size": block_size} if block_size else {})}
    mask = mask_of(indices, shape, block_size or 1)
    chunk = torch.arange(40) // 16 == (torch.arange(9) + 31)[:, None] // 16
    options = {"causal": "lower_right", "softcap": 2.0}
    extra = [torch.rand(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)]  # slopes and sink

    def ours(q, k, v, slopes, sink):
        return flash_attn(q, k, v, enable_gqa=True, return_lse=True, alibi_slopes=slopes, sink=sink,
                          attention_chunk=16, **given, **options)  # fmt: skip

    def expected(q, k, v, slopes, sink):
        return dense(q, k, v, mask & chunk, alibi_slopes=slopes, sink=sink, **options)

    g = torch.Generator().manual_seed(2)
    directions = [torch.randn(t.shape, generator=g, dtype=torch.float64) for t in (*tensors, *extra)]
    results = []
    for function in (ours, expected):
        leaves = [t.clone().requires_grad_() for t in (*tensors, *extra)]
        out, lse = function(*leaves)
        first = torch.autograd.grad(out.sin().sum() + lse.sin().sum(), leaves, create_graph=True)
        total = sum((a * b).sum() for a, b in zip(first, directions, strict=True))
        second = torch.autograd.grad(total, leaves)
        with torch.autograd.forward_ad.dual_level():
            pairs = zip((*tensors, *extra), directions, strict=True)
            dual = function(*(torch.autograd.forward_ad.make_dual(t, d) for t, d in pairs))
            tangents = [torch.autograd.forward_ad.unpack_dual(t).tangent for t in dual]
        results.append([out, lse, *first, *second, *tangents])
    check(*results, 1e-11)


def test_compiles_without_a_graph_break():
    tensors, indices = make(dtype=torch.bfloat16), make_indices(2, 2, 40, 150, 30)
    run = torch.compile(
        lambda *t: flash_attn(*t, enable_gqa=True, key_indices=indices), fullgraph=True, backend="aot_eager"
    )
    results = []
    for function in (run, lambda *t: flash_attn(*t, enable_gqa=True, key_indices=indices)):
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = function(*leaves)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_opcheck():
    q, k, v = (t.requires_grad_() for t in make(dtype=torch.float64))
    indices = make_indices(1, 2, 40, 150, 30)
    torch.library.opcheck(
        torch.ops.flash_attn_ext.attention_indexed.default, (q, k, v), {"key_indices": indices, "causal": True}
    )


def test_autocast():
    tensors, indices = make(), make_indices(1, 1, 40, 150, 30)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash_attn(*tensors, enable_gqa=True, key_indices=indices)
    rounded = flash_attn(*(t.bfloat16() for t in tensors), enable_gqa=True, key_indices=indices)
    assert torch.equal(out, rounded)


def test_memory_is_linear_in_the_numbers():
    """4096 queries and keys, 16 numbers a query: a matrix of bytes would be 16 MiB."""
    q, k, v = (torch.randn(1, h, 4096, 16, requires_grad=True) for h in (2, 1, 1))
    indices = torch.randint(0, 4096, (1, 1, 4096, 16))
    used, out = allocated_by(lambda: flash_attn(q, k, v, enable_gqa=True, causal="lower_right", key_indices=indices))
    backward, _ = allocated_by(lambda: out.sum().backward())
    numbers, rows = 4096 * 16 * 4, 4096 * 2 * 16 * 4
    assert max(used, backward) < 2 * numbers + 6 * rows + (2 << 20)  # 2 MiB: scratch of the threads


def test_flops():
    q, k, v = make()
    leaf = q.requires_grad_()
    with FlopCounterMode(display=False) as counter:
        flash_attn(leaf, k, v, enable_gqa=True, key_indices=make_indices(1, 1, 40, 150, 30)).sum().backward()
    assert counter.get_total_flops() == 2 * 6 * 40 * 30 * (2 * (24 + 40) + 6 * 24 + 4 * 40)


def dropped_pair(tensors, indices, mask, state, dropout_p, **options):
    """(by index, by mask): out, lse and gradients with the same dropout state."""
    results = []
    for keys in ({"key_indices": indices}, {"attn_mask": mask}):
        leaves = [t.clone().requires_grad_() for t in tensors]
        given = {"enable_gqa": True, "dropout_p": dropout_p, "rng_state": state, **keys, **options}
        out, lse = flash_attn(*leaves, return_lse=True, **given)
        g = torch.Generator().manual_seed(5)
        w_out, w_lse = (torch.randn(t.shape, generator=g, dtype=torch.float64) for t in (out, lse))
        loss = (out.double() * w_out).sum() + torch.where(lse > -math.inf, lse.double() * w_lse, 0.0).sum()
        results.append([out, lse, *torch.autograd.grad(loss, leaves)])
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [20, 3])
def test_dropout_of_every_instruction_set(isa, dtype, heads):
    """The elements that the dense call drops with the same state."""
    tensors, indices = make(b=2, h=2 * heads, s_q=10, dtype=dtype), make_indices(2, 1, 10, 150, 90)
    mask = mask_of(indices, (2, 2 * heads, 10, 150))
    ours, expected = dropped_pair(tensors, indices, mask, torch.tensor([3, 9]), 0.4, causal="lower_right")
    check(ours, [t.double() for t in expected], 2 * BOUND[dtype])
    assert not torch.equal(ours[0], dropped_pair(tensors, indices, mask, torch.tensor([3, 10]), 0.4)[0][0])


@pytest.mark.parametrize("dropout_p", [0.3, 1.0])
@pytest.mark.parametrize("state", [(3, 9), (3, 9, 37, 41, 2, 30)], ids=["whole", "part"])
def test_dropout(state, dropout_p):
    tensors, indices = make(dtype=torch.float64), make_indices(2, 2, 40, 150, 90)
    mask = mask_of(indices, (2, 6, 40, 150))
    bias = torch.full((1, 1, 1, 150), -1e18, dtype=torch.float64)  # lse cannot hold the sum
    for given, dense_mask in (({}, mask), ({"attn_mask": bias}, torch.where(mask, bias, -math.inf))):
        ours = dropped_pair(tensors, indices, None, torch.tensor(state), dropout_p, softcap=2.0, **given)[0]
        expected = dropped_pair(tensors, indices, dense_mask, torch.tensor(state), dropout_p, softcap=2.0)[1]
        check(ours, expected, 1e-12)
        assert (ours[0] == 0).all() == (dropout_p == 1.0)


def test_dropout_draws_a_state_and_has_second_derivatives():
    tensors, indices = make(s_q=9, s_k=40, dtype=torch.float64), make_indices(2, 1, 9, 40, 20)
    q, k, v = tensors
    mask = mask_of(indices, (2, 6, 9, 40))
    draws = []
    for _ in range(2):
        torch.manual_seed(1)
        draws.append(flash_attn(q, k, v, enable_gqa=True, key_indices=indices, dropout_p=0.5))
    assert torch.equal(*draws)
    assert not torch.equal(draws[0], flash_attn(q, k, v, enable_gqa=True, key_indices=indices, dropout_p=0.5))
    results = []
    for keys in ({"key_indices": indices}, {"attn_mask": mask}):
        leaf = q.clone().requires_grad_()
        out = flash_attn(leaf, k, v, enable_gqa=True, dropout_p=0.5, rng_state=torch.tensor([1, 2]), **keys)
        (grad,) = torch.autograd.grad(out.sin().sum(), leaf, create_graph=True)
        results.append([out, grad, *torch.autograd.grad(grad.sin().sum(), leaf)])
    check(*results, 1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [20, 1, 3])
def test_every_instruction_set(isa, dtype, heads):
    tensors, indices = make(b=1, h=heads, h_kv=1, s_q=10, s_k=300, dtype=dtype), make_indices(1, 1, 10, 300, 200)
    mask = mask_of(indices, (1, heads, 10, 300))
    check(*run_both(tensors, {"key_indices": indices}, mask, causal="lower_right", softcap=3.0), BOUND[dtype])
