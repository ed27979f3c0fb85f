"""context_parallel_attn over real processes, against one process with the whole sequence."""

import pytest
import torch
import torch.distributed as dist
from process_group import group_of, shared
from torch.distributed.device_mesh import init_device_mesh

from flash_attn_ext import flash_attn, flash_attn_varlen
from flash_attn_ext.distributed import context_parallel_attn, shard_sequence, unshard_sequence

METHODS = ("ring", "all_gather", "ulysses")


@pytest.fixture
def processes():
    return shared(4)


def run_case(
    size, method, *, shape=(2, 4, 2, 24, 24, 16, 16), dtype=torch.float64, balanced=True, uneven=False, **given
):
    """Compares out, lse and all gradients of this process's rows with a single process. Returns the results."""
    group = group_of(size)
    batch, heads, heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v = shape
    torch.manual_seed(0)
    q = torch.randn(batch, heads, seqlen_q, head_dim, dtype=dtype)
    k = torch.randn(batch, heads_kv, seqlen_k, head_dim, dtype=dtype)
    v = torch.randn(batch, heads_kv, seqlen_k, head_dim_v, dtype=dtype)
    upstream = torch.randn(batch, heads, seqlen_q, head_dim_v, dtype=dtype)
    upstream_lse = torch.randn(batch, heads, seqlen_q, dtype=dtype if dtype == torch.float64 else torch.float32)
    accumulator = upstream_lse.dtype
    options = dict(enable_gqa=True, return_lse=True) | given
    extras = {}
    for name in ("alibi_slopes", "sink"):
        if name in options:
            per_head = torch.randn(options.pop(name), dtype=accumulator).abs()
            extras[name] = (per_head * 0.2 if name == "alibi_slopes" else per_head).requires_grad_()
    mask_shape = options.pop("mask_shape", None)
    if mask_shape is not None:
        extras["attn_mask"] = torch.randn(mask_shape, dtype=accumulator).requires_grad_()
    if options.pop("padding", False):
        padding = torch.ones(batch, 1, 1, seqlen_k, dtype=torch.bool)
        padding[0, ..., seqlen_k - seqlen_k // 3 :] = False
        padding[-1, ..., : seqlen_k // 4] = False
        extras["attn_mask"] = padding
    if options.pop("key_mask", False):
        extras["key_mask"] = torch.rand(batch, seqlen_k) > 0.3
    if options.get("dropout_p"):
        options["rng_state"] = torch.tensor([5, 7])

    whole = [t.clone().requires_grad_() for t in (q, k, v)]
    whole_extras = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in extras.items()}
    one = dict(options) | whole_extras
    cu_seqlens = one.pop("cu_seqlens", None)
    if cu_seqlens is None:
        out, lse = flash_attn(*whole, **one)
    else:
        options["cu_seqlens"] = cu_seqlens = torch.tensor(cu_seqlens)
        out, lse = flash_attn_varlen(*(t[0].transpose(0, 1) for t in whole), cu_seqlens, cu_seqlens, **one)
        out, lse = out.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)
    upstream_lse = upstream_lse.masked_fill(lse == -torch.inf, 0.0)
    names = [name for name, t in whole_extras.items() if t.requires_grad]
    wanted = whole + [whole_extras[name] for name in names]
    expected = torch.autograd.grad((out, lse), wanted, (upstream, upstream_lse))

    def shard(t, dim=2):
        return shard_sequence(t, dim, group=group, balanced=balanced, uneven=uneven)

    own = [shard(t).requires_grad_() for t in (q, k, v)]
    own_extras = dict(extras)
    if mask_shape is not None and mask_shape[-2] != 1:
        own_extras["attn_mask"] = shard(extras["attn_mask"].detach(), -2).requires_grad_()
    where = dict(group=group, balanced=balanced, method=method)
    if uneven:
        where["seqlen"] = (seqlen_q, seqlen_k)
    own_out, own_lse = context_parallel_attn(*own, **where, **options, **own_extras)
    own_wanted = own + [own_extras[name] for name in names]
    grads = torch.autograd.grad((own_out, own_lse), own_wanted, (shard(upstream), shard(upstream_lse)))

    compared = [("out", own_out, shard(out)), ("lse", own_lse, shard(lse))]
    compared += [(f"d{name}", grad, shard(e)) for name, grad, e in zip("qkv", grads, expected, strict=False)]
    for name, grad, e in zip(names, grads[3:], expected[3:], strict=True):
        if name == "attn_mask" and mask_shape[-2] != 1:
            e = shard(e, -2)
        else:  # each process has a part of the sum
            grad = grad.clone()
            dist.all_reduce(grad, group=group)
        compared.append((f"d{name}", grad, e))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for name, got, want in compared:
        assert got.shape == want.shape, name
        assert got.dtype == want.dtype, name
        scale = want.masked_fill(want.isinf(), 0.0).abs().max().clamp(min=1) if want.numel() else 1.0
        torch.testing.assert_close(got, want, rtol=0, atol=float(tolerance * scale), msg=lambda m, n=name: f"{n}: {m}")
    return [t.detach().clone() for t in (own_out, own_lse, *grads)]


OPTIONS = {
    "plain": {},
    "causal": dict(is_causal=True),
    "causal, long": dict(is_causal=True, shape=(1, 4, 4, 320, 320, 8, 8)),
    "not balanced": dict(is_causal=True, balanced=False),
    "lower right": dict(causal="lower_right", shape=(1, 4, 4, 16, 40, 8, 8)),
    "upper left, fewer keys": dict(causal="upper_left", shape=(1, 4, 4, 40, 16, 8, 8)),
    "lower right, rows without keys": dict(causal="lower_right", shape=(1, 4, 4, 40, 16, 8, 8)),
    "window": dict(window=(5, 0)),
    "window, not balanced": dict(window=(2, 1), balanced=False),
    "window on both sides": dict(window=(9, 4), shape=(1, 4, 4, 48, 48, 8, 8)),
    "window without the diagonal": dict(window=(-2, 7)),
    "chunks": dict(is_causal=True, attention_chunk=7),
    "chunks, not balanced, both sides": dict(attention_chunk=9, window=(5, 3), balanced=False),
    "causal window": dict(is_causal=True, window=(4, None)),
    "one key head": dict(is_causal=True, shape=(1, 4, 1, 16, 16, 8, 8)),
    "softcap": dict(is_causal=True, softcap=1.5),
    "scale": dict(scale=0.3),
    "ALiBi": dict(alibi_slopes=(4,)),
    "ALiBi, causal, each batch": dict(is_causal=True, alibi_slopes=(2, 4)),
    "sink": dict(is_causal=True, sink=(4,)),
    "sink, each batch, window": dict(window=(2, 0), sink=(2, 4)),
    "padding": dict(padding=True),
    "padding, causal": dict(padding=True, is_causal=True),
    "key mask": dict(key_mask=True),
    "key mask, bias, window": dict(key_mask=True, mask_shape=(24, 24), window=(7, 2)),
    "bias of keys": dict(mask_shape=(2, 4, 1, 24)),
    "bias": dict(mask_shape=(1, 4, 24, 24), is_causal=True),
    "bias of rows": dict(mask_shape=(24, 1)),
    "dropout": dict(dropout_p=0.4),
    "dropout, causal": dict(dropout_p=0.4, is_causal=True, shape=(2, 4, 2, 104, 104, 8, 8)),
    "dropout, long": dict(dropout_p=0.4, shape=(1, 4, 4, 160, 320, 8, 8)),
    "documents": dict(cu_seqlens=[0, 5, 6, 6, 21, 30, 40], shape=(1, 4, 2, 40, 40, 8, 8)),
    "documents, causal": dict(cu_seqlens=[0, 3, 4, 8, 33, 36, 38, 40], is_causal=True, shape=(1, 4, 2, 40, 40, 8, 8)),
    "one document": dict(cu_seqlens=[0, 40], is_causal=True, shape=(1, 4, 2, 40, 40, 8, 8)),
    "documents, everything": dict(
        cu_seqlens=[0, 2, 5, 6, 9, 31, 40], window=(6, 0), attention_chunk=4, alibi_slopes=(4,), sink=(4,), softcap=2.0,
        dropout_p=0.3, shape=(1, 4, 2, 40, 40, 8, 12),
    ),
    "uneven": dict(is_causal=True, uneven=True, shape=(2, 4, 2, 23, 23, 8, 8)),
    "uneven, all different": dict(uneven=True, causal="lower_right", dropout_p=0.2, shape=(1, 4, 4, 21, 35, 8, 8)),
    "uneven, fewer rows than chunks": dict(uneven=True, is_causal=True, shape=(1, 4, 4, 3, 3, 8, 8)),
    "uneven documents": dict(uneven=True, cu_seqlens=[0, 9, 10, 29], is_causal=True, shape=(1, 4, 4, 29, 29, 8, 8)),
    "uneven, not balanced": dict(uneven=True, is_causal=True, balanced=False, shape=(1, 4, 4, 23, 23, 8, 8)),
    "value's head dimension": dict(is_causal=True, shape=(1, 4, 4, 16, 16, 8, 24)),
    "float32": dict(is_causal=True, dtype=torch.float32, shape=(1, 4, 4, 64, 64, 16, 16)),
    "bfloat16": dict(is_causal=True, dtype=torch.bfloat16, shape=(1, 4, 4, 64, 64, 16, 16)),
    "everything": dict(
        is_causal=True, window=(11, None), softcap=3.0, alibi_slopes=(4,), sink=(4,), dropout_p=0.25, padding=True,
        shape=(2, 4, 2, 56, 56, 8, 8),
    ),
}  # fmt: skip


def possible(size, method, options):
    heads_kv = options.get("shape", (2, 4, 2))[2]
    rows_in_mask = "mask_shape" in options and options["mask_shape"][-2] != 1
    return method != "ulysses" or (heads_kv % size == 0 and not rows_in_mask)


# A test with four processes covers two processes. These options also run with two.
ALSO_WITH_TWO = ("plain", "causal", "documents, everything", "uneven, all different", "everything")


def sizes(method, name):
    """The numbers of processes to test an option with."""
    can = [size for size in (2, 4) if possible(size, method, OPTIONS[name])]
    return can if name in ALSO_WITH_TWO else can[-1:]


CASES = [
    pytest.param(size, method, options, id=f"{size}-{method}-{name}")
    for method in METHODS
    for name, options in OPTIONS.items()
    for size in sizes(method, name)
]


@pytest.mark.parametrize(("size", "method", "options"), CASES)
def test_equals_one_process(processes, size, method, options):
    processes.run(run_case, size, method, **options)


@pytest.mark.parametrize("method", METHODS)
def test_every_run_gives_the_same_bits(processes, method):
    options = dict(is_causal=True, dropout_p=0.2, dtype=torch.float32, shape=(1, 4, 4, 64, 64, 16, 16))
    first, second = (processes.run(run_case, 4, method, **options) for _ in range(2))
    for results in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class _Replicated(torch.autograd.Function):
    """A tensor that every process holds. Its gradient is the mean over the processes."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad / dist.get_world_size(ctx.group), None


def gradcheck(method):
    group = group_of(2)
    inputs = [torch.randn(1, 2, 8, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    inputs.append(torch.rand(2, dtype=torch.float64, requires_grad=True))

    def of_whole(*tensors):
        *qkv, slopes = (_Replicated.apply(t, group) for t in tensors)
        shards = [shard_sequence(t, 2, group=group) for t in qkv]
        out, lse = context_parallel_attn(
            *shards, method=method, group=group, is_causal=True, alibi_slopes=slopes, return_lse=True
        )
        return [unshard_sequence(t, 2, group=group) for t in (out, lse)]

    # unshard_sequence adds the gradients of all processes. Here they are all equal.
    assert torch.autograd.gradcheck(of_whole, inputs, fast_mode=True)


@pytest.mark.parametrize("method", METHODS)
def test_gradcheck_through_the_collectives(processes, method):
    processes.run(gradcheck, method)


def in_a_mesh():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    q = torch.randn(2, 2, 16, 8)
    own = shard_sequence(q[dist.get_rank() // 2], 1, mesh=mesh["cp"]).unsqueeze(0)
    out = context_parallel_attn(own, own, own, is_causal=True, mesh=mesh["cp"])
    whole = unshard_sequence(out, 2, mesh=mesh["cp"])[0]
    torch.testing.assert_close(whole, flash_attn(*[q[dist.get_rank() // 2]] * 3, is_causal=True))
    q = torch.randn(1, 2, 16, 8)  # the default group has all four processes
    out = context_parallel_attn(*[shard_sequence(q, 2)] * 3, is_causal=True)
    torch.testing.assert_close(unshard_sequence(out, 2), flash_attn(q, q, q, is_causal=True))
    with pytest.raises(ValueError, match=r"mesh: got 2 dimensions, \('dp', 'cp'\)"):
        context_parallel_attn(q, q, q, mesh=mesh)


def test_a_mesh_and_the_default_group(processes):
    processes.run(in_a_mesh)


def drawn_dropout():
    """Without rng_state all processes use the state of the group's first process."""
    group = group_of(2)
    torch.manual_seed(100 + dist.get_rank() % 2)
    q = torch.ones(1, 1, 16, 8)
    v = torch.eye(16).view(1, 1, 16, 16)
    results = []
    for _ in range(2):
        own = shard_sequence(q, 2, group=group)
        out = context_parallel_attn(own, own, shard_sequence(v, 2, group=group), dropout_p=0.5, group=group)
        results.append(unshard_sequence(out, 2, group=group))
    torch.manual_seed(100)
    for result in results:
        expected = flash_attn(q, q, v, dropout_p=0.5)
        assert torch.equal(result != 0, expected != 0)
        torch.testing.assert_close(result, expected)


def test_dropout_draws_one_state_for_all(processes):
    processes.run(drawn_dropout)


def autocast():
    group = group_of(2)
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    own = [shard_sequence(t, 2, group=group).requires_grad_() for t in (q, k, v)]
    for method in METHODS:
        with torch.autocast("cpu", torch.bfloat16):
            out = context_parallel_attn(*own, is_causal=True, method=method, group=group)
        assert out.dtype == torch.bfloat16
        out.float().sum().backward()
        assert own[0].grad.dtype == torch.float32


def test_autocast(processes):
    processes.run(autocast)


def frozen():
    """Gradients of some inputs only, and of no input."""
    group = group_of(2)
    q, k, v = (torch.randn(1, 2, 16, 8, dtype=torch.float64) for _ in range(3))
    for method in METHODS:
        for wanted in ([0], [1], [2], [0, 2]):
            whole = [t.clone().requires_grad_(n in wanted) for n, t in enumerate((q, k, v))]
            own = [shard_sequence(t, 2, group=group).requires_grad_(n in wanted) for n, t in enumerate((q, k, v))]
            flash_attn(*whole, is_causal=True).square().sum().backward()
            context_parallel_attn(*own, is_causal=True, method=method, group=group).square().sum().backward()
            for a, b in zip(own, whole, strict=True):
                assert (a.grad is None) == (b.grad is None)
                if b.grad is not None:
                    torch.testing.assert_close(a.grad, shard_sequence(b.grad, 2, group=group))
        own = [shard_sequence(t, 2, group=group) for t in (q, k, v)]
        assert not context_parallel_attn(*own, method=method, group=group).requires_grad


def test_gradients_of_some_inputs(processes):
    processes.run(frozen)


def second_derivative():
    group = group_of(2)
    x = torch.randn(1, 2, 8, 4, dtype=torch.float64)
    own = shard_sequence(x, 2, group=group).requires_grad_()
    out = context_parallel_attn(own, own, own, method="ulysses", group=group)
    (grad,) = torch.autograd.grad(out.square().sum(), own, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), own)
    x.requires_grad_()
    (grad,) = torch.autograd.grad(flash_attn(x, x, x).square().sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad(grad.square().sum(), x)
    torch.testing.assert_close(second, shard_sequence(expected, 2, group=group))
    q = torch.randn(1, 2, 8, 4, requires_grad=True)
    for method in ("ring", "all_gather"):
        out = context_parallel_attn(q, q, q, method=method, group=group_of(2))
        with pytest.raises(NotImplementedError, match="a second derivative; allowed: method='ulysses'"):
            torch.autograd.grad(out.sum(), q, create_graph=True)


def test_a_second_derivative(processes):
    processes.run(second_derivative)


def same_under_another_default_device(method):
    group = group_of(2)
    own = [shard_sequence(torch.randn(1, 2, 16, 8), 2, group=group).requires_grad_() for _ in range(3)]
    slopes, state = torch.rand(2), torch.tensor([5, 7])
    options = {"is_causal": True, "dropout_p": 0.3, "rng_state": state, "alibi_slopes": slopes}
    results = []
    for device in ("meta", "cpu"):  # first on meta: a later call would find what the first call stored
        with torch.device(device):
            out = context_parallel_attn(*own, method=method, group=group, **options)
            results.append((out, *torch.autograd.grad(out.square().sum(), own)))
    for on_meta, on_cpu in zip(*results, strict=True):
        assert torch.equal(on_meta, on_cpu)


@pytest.mark.parametrize("method", METHODS)
def test_the_default_device_has_no_effect(processes, method):
    processes.run(same_under_another_default_device, method)
