"""The functions on DTensors over two real processes, against one process with the whole tensors."""

import pytest
import torch
from process_group import shared
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from flash_attn_ext import flash_attn, flash_attn_varlen, flash_attn_with_kvcache
from flash_attn_ext.flash_attn_interface import flash_attn_func, flash_attn_qkvpacked_func


@pytest.fixture
def processes():
    return shared(2)


def on_dtensors(placement, heads_kv, options):
    mesh = init_device_mesh("cpu", (2,))
    q = torch.randn(2, 4, 12, 8, dtype=torch.float64)
    k, v = (torch.randn(2, heads_kv, 12, 8, dtype=torch.float64) for _ in range(2))
    slopes, mask = torch.rand(4, dtype=torch.float64), torch.randn(2, 1, 12, 12, dtype=torch.float64)
    key_mask = torch.rand(2, 12) > 0.3
    upstream = torch.randn(2, 4, 12, 8, dtype=torch.float64)
    options = options | dict(enable_gqa=True, rng_state=torch.tensor([3, 4]), return_lse=True, key_mask=key_mask)
    one = torch.ones((), dtype=torch.float64)
    plain = [t.clone().requires_grad_() for t in (q, k, v, slopes, mask)]
    out, lse = flash_attn(*plain[:3], plain[4], alibi_slopes=plain[3], **options)
    expected = torch.autograd.grad((out, lse.sum()), plain, (upstream, one))

    key_placement = Replicate() if placement == Shard(1) and heads_kv == 1 else placement
    places = [[placement], [key_placement], [key_placement], [Replicate()], [Replicate()]]
    own = [distribute_tensor(t, mesh, p).requires_grad_() for t, p in zip((q, k, v, slopes, mask), places, strict=True)]
    own_out, own_lse = flash_attn(*own[:3], own[4], alibi_slopes=own[3], **options)
    assert own_out.placements == own_lse.placements == (placement,)
    assert own_out.shape == out.shape
    grads = torch.autograd.grad(
        (own_out, own_lse.sum()),
        own,
        (distribute_tensor(upstream, mesh, [placement]), distribute_tensor(one, mesh, [Replicate()])),
    )
    torch.testing.assert_close(own_out.full_tensor(), out)
    torch.testing.assert_close(own_lse.full_tensor(), lse)
    one_dtensor = flash_attn(*own[:3], own[4], alibi_slopes=own[3], **options | dict(return_lse=False))
    assert torch.equal(one_dtensor.to_local(), own_out.to_local())
    for grad, e in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.full_tensor(), e)


@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(2), Replicate()], ids=str)
def test_flash_attn_on_dtensors(processes, placement, heads_kv):
    processes.run(on_dtensors, placement, heads_kv, dict(is_causal=True, dropout_p=0.3))


@pytest.mark.parametrize("placement", [Shard(1), Shard(2)], ids=str)
def test_options_of_flash_attn_on_dtensors(processes, placement):
    options = dict(window=(5, 1), diagonal=-2, softcap=4.0, scale=0.3, num_splits=2, unified_max=1.5)
    processes.run(on_dtensors, placement, 4, options)


def dtensor_errors():
    mesh = init_device_mesh("cpu", (2,))
    for dim in (1, 2):
        q = distribute_tensor(torch.randn(1, 4, 8, 8), mesh, [Shard(dim)])
        with pytest.raises(ValueError, match="num_splits: got -7; allowed: 0"):
            flash_attn(q, q, q, num_splits=-7)
        with pytest.raises(ValueError, match="unified_max: got nan; allowed: a finite number"):
            flash_attn(q, q, q, unified_max=float("nan"))
        with pytest.raises(TypeError, match=r"diagonal: got 0\.5; allowed: an int"):
            flash_attn(q, q, q, diagonal=0.5)
    q, odd = (distribute_tensor(torch.randn(1, 4, s, 8), mesh, [Shard(2)]) for s in (8, 7))
    with pytest.raises(ValueError, match="query: got 7 rows sharded over 2 processes; allowed: a multiple"):
        flash_attn(odd, odd, odd)
    with pytest.raises(TypeError, match="key: got a Tensor together with DTensors"):
        flash_attn(q, torch.randn(1, 4, 8, 8), q)
    q = distribute_tensor(torch.randn(1, 6, 8, 8), mesh, [Shard(1)])
    k = distribute_tensor(torch.randn(1, 3, 8, 8), mesh, [Shard(1)])
    with pytest.raises(ValueError, match="key: got 3 heads sharded over 2 processes; allowed: a multiple, or 1"):
        flash_attn(q, k, k, enable_gqa=True)


def test_errors_of_dtensors(processes):
    processes.run(dtensor_errors)


def packed_on_dtensors(placement, heads_kv):
    mesh = init_device_mesh("cpu", (2,))
    q = torch.randn(20, 4, 8, dtype=torch.float64)
    k, v = (torch.randn(20, heads_kv, 8, dtype=torch.float64) for _ in range(2))
    slopes, mask = torch.rand(4, dtype=torch.float64), torch.randn(4, 20, 9, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 9, 11, 20])
    options = dict(is_causal=True, dropout_p=0.3, rng_state=torch.tensor([3, 4]), enable_gqa=True, return_lse=True,
                   max_seqlen_q=9, max_seqlen_k=9)  # fmt: skip
    plain = [t.clone().requires_grad_() for t in (q, k, v, mask, slopes)]
    out, lse = flash_attn_varlen(
        *plain[:3], cu_seqlens, cu_seqlens, attn_mask=plain[3], alibi_slopes=plain[4], **options
    )
    expected = torch.autograd.grad(out.square().sum() + lse.sum(), plain)

    of_keys = Replicate() if heads_kv == 1 else placement
    places = (placement, of_keys, of_keys, Replicate(), Replicate())
    own = [distribute_tensor(t.detach(), mesh, [p]).requires_grad_() for t, p in zip(plain, places, strict=True)]
    own_out, own_lse = flash_attn_varlen(
        *own[:3], cu_seqlens, cu_seqlens, attn_mask=own[3], alibi_slopes=own[4], **options
    )
    assert own_out.placements == (placement,)
    torch.testing.assert_close(own_out.full_tensor(), out)
    torch.testing.assert_close(own_lse.full_tensor(), lse)
    grads = torch.autograd.grad(own_out.square().sum() + own_lse.sum(), own)
    for grad, e in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad.full_tensor(), e)


@pytest.mark.parametrize("heads_kv", [4, 2, 1])
@pytest.mark.parametrize("placement", [Shard(1), Replicate()], ids=str)
def test_flash_attn_varlen_on_dtensors(processes, placement, heads_kv):
    processes.run(packed_on_dtensors, placement, heads_kv)


def cache_on_dtensors(heads_kv):
    """Each process holds the caches of its own key heads, and writes to them."""
    mesh = init_device_mesh("cpu", (2,))
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 3, heads_kv, 8), torch.randn(2, 3, heads_kv, 8)
    caches = [torch.randn(2, 16, heads_kv, 8) for _ in range(2)]
    angles = torch.arange(16)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    options = dict(rotary_cos=angles.cos(), rotary_sin=angles.sin(), cache_seqlens=torch.tensor([5, 9]), causal=True,
                   alibi_slopes=torch.rand(4), sink=torch.rand(4), return_softmax_lse=True)  # fmt: skip
    heads = Shard(2)
    of_keys = Replicate() if heads_kv == 1 else heads
    own_caches = [distribute_tensor(t, mesh, [of_keys]) for t in caches]
    own = [distribute_tensor(t, mesh, [p]) for t, p in ((q, heads), (k, of_keys), (v, of_keys))]
    out, lse = flash_attn_with_kvcache(q, *caches, k, v, **options)
    own_out, own_lse = flash_attn_with_kvcache(own[0], *own_caches, *own[1:], **options)
    assert own_out.placements == (heads,)
    results = (own_out, own_lse, *own_caches)
    torch.testing.assert_close([t.full_tensor() for t in results], [out, lse, *caches])


@pytest.mark.parametrize("heads_kv", [4, 2, 1])
def test_flash_attn_with_kvcache_on_dtensors(processes, heads_kv):
    processes.run(cache_on_dtensors, heads_kv)


def float8_cache_on_dtensors():
    """Each process has the factors of its own key heads. Dense DTensors in float8 are refused."""
    mesh = init_device_mesh("cpu", (2,))
    rank = mesh.get_local_rank()
    q, k, v = ((4 * torch.randn(2, 3, heads, 8)).to(torch.float8_e4m3fn) for heads in (4, 2, 2))
    factors = {name: torch.rand(2, 2) / 2 for name in ("q_descale", "k_descale", "v_descale")}
    out = flash_attn_with_kvcache(q, k, v, **factors)
    own = [DTensor.from_local(t.chunk(2, 2)[rank].contiguous(), mesh, [Shard(2)]) for t in (q, k, v)]
    torch.testing.assert_close(flash_attn_with_kvcache(*own, **factors).full_tensor(), out, rtol=0, atol=0)
    with pytest.raises(NotImplementedError, match=r"query: got a DTensor of torch.float8_e4m3fn; allowed"):
        flash_attn(*own)


def test_float8_caches_on_dtensors(processes):
    processes.run(float8_cache_on_dtensors)


def errors_of_packed():
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.randn(8, 4, 8), mesh, [Shard(0)])
    offsets = torch.tensor([0, 8])
    with pytest.raises(ValueError, match=r"query: got placements \(Shard\(dim=0\),\); allowed: Replicate"):
        flash_attn_varlen(rows, rows, rows, offsets, offsets)
    heads = distribute_tensor(torch.randn(8, 4, 8), mesh, [Shard(1)])
    with pytest.raises(TypeError, match="value: got a Tensor together with DTensors"):
        flash_attn_varlen(heads, heads, torch.randn(8, 4, 8), offsets, offsets)
    q = distribute_tensor(torch.randn(2, 1, 4, 8), mesh, [Shard(2)])
    cache = distribute_tensor(torch.randn(2, 8, 4, 8), mesh, [Replicate()])
    with pytest.raises(ValueError, match=r"k_cache: got placements \(Replicate\(\),\), with k to be written"):
        flash_attn_with_kvcache(q, cache, cache, q, q, cache_seqlens=3)


def test_errors_of_packed_sequences_and_caches(processes):
    processes.run(errors_of_packed)


def flash_attention_names():
    mesh = init_device_mesh("cpu", (2,))
    qkv = torch.randn(2, 6, 3, 4, 8)
    own = distribute_tensor(qkv, mesh, [Shard(3)])
    expected = flash_attn_qkvpacked_func(qkv, causal=True)
    torch.testing.assert_close(flash_attn_qkvpacked_func(own, causal=True).full_tensor(), expected)
    torch.testing.assert_close(flash_attn_func(*own.unbind(2), causal=True).full_tensor(), expected)


def test_flash_attentions_names_on_dtensors(processes):
    processes.run(flash_attention_names)


def raw_operator(placement, heads_kv, batch):
    """torch.ops.flash_attn_ext.attention and its backward, with all their tensors."""
    mesh = init_device_mesh("cpu", (2,))
    q = torch.randn(batch, 4, 6, 8, dtype=torch.float64)
    k, v = (torch.randn(batch, heads_kv, 9, 8, dtype=torch.float64) for _ in range(2))
    extras = (torch.randn(1, 4, 6, 9), torch.rand(4), torch.rand(batch, 4))  # mask, slopes, sink
    plain = [t.double().requires_grad_() for t in (q, k, v, *extras)]
    state_and_key_mask = torch.tensor([3, 4]), torch.rand(batch, 9) > 0.3  # the same state on every process
    options = dict(causal=True, dropout_p=0.3)
    out, lse = torch.ops.flash_attn_ext.attention(*plain, *state_and_key_mask, **options)
    expected = torch.autograd.grad(out.square().sum() + lse.sum(), plain)
    own = [
        distribute_tensor(t.detach(), mesh, [placement if n == 0 else Replicate()]).requires_grad_()
        for n, t in enumerate(plain)
    ]
    own_out, own_lse = torch.ops.flash_attn_ext.attention(*own, *state_and_key_mask, **options)
    assert own_out.placements == own_lse.placements == (placement,)
    torch.testing.assert_close([own_out.full_tensor(), own_lse.full_tensor()], [out, lse])
    grads = torch.autograd.grad(own_out.square().sum() + own_lse.sum(), own)
    torch.testing.assert_close([grad.full_tensor() for grad in grads], list(expected))
    some = torch.autograd.grad(
        torch.ops.flash_attn_ext.attention(*own[:2], own[2].detach(), causal=True)[0].sum(), own[:2]
    )
    few = torch.autograd.grad(torch.ops.flash_attn_ext.attention(*plain[:3], causal=True)[0].sum(), plain[:2])
    torch.testing.assert_close([grad.full_tensor() for grad in some], list(few))


@pytest.mark.parametrize(("heads_kv", "batch"), [(4, 2), (2, 3), (1, 1)])
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_the_raw_operator(processes, placement, heads_kv, batch):
    processes.run(raw_operator, placement, heads_kv, batch)


def raw_packed_operator():
    mesh = init_device_mesh("cpu", (2,))
    q, k, v = (torch.randn(12, 4, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    offsets = torch.tensor([0, 5, 12])
    arguments = (None, torch.rand(4), None, offsets, offsets)
    out, lse = torch.ops.flash_attn_ext.attention_varlen(q, k, v, *arguments)
    expected = torch.autograd.grad(out.square().sum() + lse.sum(), (q, k, v))
    own = [distribute_tensor(t.detach(), mesh, [Shard(1)]).requires_grad_() for t in (q, k, v)]
    own_out, own_lse = torch.ops.flash_attn_ext.attention_varlen(*own, *arguments)
    assert own_out.placements == (Shard(1),)
    torch.testing.assert_close([own_out.full_tensor(), own_lse.full_tensor()], [out, lse])
    grads = torch.autograd.grad(own_out.square().sum() + own_lse.sum(), own)
    torch.testing.assert_close([grad.full_tensor() for grad in grads], list(expected))


def test_the_raw_packed_operator(processes):
    processes.run(raw_packed_operator)


def errors_of_raw_operators():
    mesh = init_device_mesh("cpu", (2,))
    rows = distribute_tensor(torch.randn(1, 4, 8, 8), mesh, [Shard(2)])
    with pytest.raises(ValueError, match=r"query: got placements \(Shard\(dim=2\),\); allowed: Replicate"):
        torch.ops.flash_attn_ext.attention(rows, rows, rows)
    with pytest.raises(TypeError, match="key: got a Tensor together with DTensors"):
        torch.ops.flash_attn_ext.attention(rows, torch.randn(1, 4, 8, 8), rows)
    heads = distribute_tensor(torch.randn(1, 6, 8, 8), mesh, [Shard(1)])
    keys = distribute_tensor(torch.randn(1, 3, 8, 8), mesh, [Replicate()])
    with pytest.raises(ValueError, match="key: got 3 heads sharded over 2 processes"):
        torch.ops.flash_attn_ext.attention(heads, keys, keys)
    offsets = torch.tensor([0, 8])
    with pytest.raises(NotImplementedError, match="flash_attn_ext::attention_cache: got DTensors; allowed: ordinary"):
        torch.ops.flash_attn_ext.attention_cache(heads[0], rows, rows, None, None, offsets, offsets)
    heads.requires_grad_()
    out, _ = torch.ops.flash_attn_ext.attention(heads, heads, heads)
    (grad,) = torch.autograd.grad(out.sum(), heads, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"flash_attn_ext::attention_[a-z_]*: got DTensors"):
        grad.sum().backward()


def test_errors_of_raw_operators(processes):
    processes.run(errors_of_raw_operators)
