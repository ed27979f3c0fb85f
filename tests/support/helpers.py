"""Running flash_attn, torch and the oracle on the same inputs, and comparing everything they return."""

import reference
import torch
from tolerances import EPS, assert_as_exact_as_torch, slack_of_delta
from torch.autograd import forward_ad

from flash_attn_ext import dropout_mask, flash_attn, new_rng_state


def make_qkv(batch, heads, seqlen_q, seqlen_k, head_dim, head_dim_v=None, *, heads_kv=None, dtype=torch.float32):
    """Leaf tensors that require gradients."""
    heads_kv = heads_kv or heads
    shapes = [
        (batch, heads, seqlen_q, head_dim),
        (batch, heads_kv, seqlen_k, head_dim),
        (batch, heads_kv, seqlen_k, head_dim_v or head_dim),
    ]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def leaves(tensors, dtype=None):
    """Fresh leaves of the same values; floats in `dtype` if given."""
    result = []
    for t in tensors:
        if t is None or not t.is_floating_point():
            result.append(t)
        else:
            result.append(t.detach().to(dtype or t.dtype).requires_grad_(t.requires_grad))
    return result


def gradients(outputs, inputs, grads):
    """Gradients of the float inputs that require one."""
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    return torch.autograd.grad(outputs, wanted, [g.to(o.dtype) for o, g in zip(outputs, grads, strict=True)])


def check_against_reference(
    q, k, v, attn_mask=None, *, alibi_slopes=None, sink=None, dropout_p=0.0, num_splits=0, unified_max=None, **options
):  # fmt: skip
    """flash_attn's out, lse and every gradient, against the dense oracle in fp64 and in the same dtype."""
    inputs = [q, k, v, attn_mask, alibi_slopes, sink]
    rng_state = new_rng_state() if dropout_p else None
    kept = None
    if dropout_p:
        kept = dropout_mask(rng_state, q.shape[0], q.shape[1], q.shape[2], k.shape[2], dropout_p)

    def dense(dtype):
        q_, k_, v_, mask_, slopes_, sink_ = tensors = leaves(inputs, dtype)
        results = reference.attention(
            q_, k_, v_, mask_, alibi_slopes=slopes_, sink=sink_, kept=kept, dropout_p=dropout_p, **options
        )
        return results, tensors

    ours_in = leaves(inputs)
    ours = flash_attn(
        *ours_in[:3], ours_in[3], alibi_slopes=ours_in[4], sink=ours_in[5], dropout_p=dropout_p,
        rng_state=rng_state, enable_gqa=True, return_lse=True, num_splits=num_splits, unified_max=unified_max,
        **options,
    )  # fmt: skip
    exact, exact_in = dense(torch.float64)
    theirs, theirs_in = dense(q.dtype)
    for name, factor, a, b, c in zip(("out", "lse"), (2, 2), ours, theirs, exact, strict=True):
        assert_as_exact_as_torch(name, a, b, c, factor)

    # The lse of a fully masked row is -inf: it has no gradient to pass.
    grads = [torch.randn_like(exact[0]), torch.randn_like(exact[1]).masked_fill(exact[1] == -torch.inf, 0.0)]
    wanted = [t for t in exact_in if t is not None and t.requires_grad]
    slacks = slack_of_delta(exact[0], exact[1], wanted, grads[0], q.dtype)
    all_grads = [gradients(o, i, grads) for o, i in ((ours, ours_in), (theirs, theirs_in), (exact, exact_in))]
    names = ("dq", "dk", "dv", "dmask", "dslopes", "dsink")
    names = [n for n, t in zip(names, inputs, strict=True) if t is not None and t.requires_grad]
    for name, slack, a, b, c in zip(names, slacks, *all_grads, strict=True):
        assert a.shape == c.shape
        if name == "dslopes":  # its terms are dS times a distance of up to S_k, and cancel
            slack += 2 * EPS[torch.float64 if q.dtype == torch.float64 else torch.float32] * k.shape[2]
        assert_as_exact_as_torch(name, a, b, c, 3, slack)
    return ours


def check_forward_against_reference(
    q, k, v, attn_mask=None, *, alibi_slopes=None, sink=None, dropout_p=0.0, num_splits=0, unified_max=None, **options
):  # fmt: skip
    """flash_attn's out and lse alone, against the dense oracle in fp64 and in the same dtype."""
    inputs = [t if t is None else t.detach() for t in (q, k, v, attn_mask, alibi_slopes, sink)]
    rng_state = new_rng_state() if dropout_p else None
    kept = dropout_mask(rng_state, *q.shape[:3], k.shape[2], dropout_p) if dropout_p else None
    ours = flash_attn(
        *inputs[:4], alibi_slopes=inputs[4], sink=inputs[5], dropout_p=dropout_p, rng_state=rng_state, enable_gqa=True,
        return_lse=True, num_splits=num_splits, unified_max=unified_max, **options,
    )  # fmt: skip

    def dense(dtype):
        *tensors, slopes, sink_ = leaves(inputs, dtype)
        return reference.attention(*tensors, alibi_slopes=slopes, sink=sink_, kept=kept, dropout_p=dropout_p, **options)

    for name, a, b, c in zip(("out", "lse"), ours, dense(q.dtype), dense(torch.float64), strict=True):
        assert_as_exact_as_torch(name, a, b, c, 2)
    return ours


ADDED = ("attn_mask", "alibi_slopes", "sink")


def check_jvp_against_reference(inputs, tangents=None, *, added=ADDED, dropout_p=0.0, **options):
    """flash_attn's out and lse with their tangents, against the dense oracle in fp64 and in the same dtype.

    `inputs`: q, k, v, then the inputs that `added` names, as far as given. Each input has a tangent.
    """
    q, k = inputs[:2]
    tangents = [torch.randn_like(t) for t in inputs] if tangents is None else tangents
    ours_options, dense_options = dict(options), dict(options)
    if dropout_p > 0:
        ours_options |= {"rng_state": new_rng_state(), "dropout_p": dropout_p}
        kept = dropout_mask(ours_options["rng_state"], *q.shape[:3], k.shape[2], dropout_p)
        dense_options |= {"kept": kept, "dropout_p": dropout_p}

    def attend(q, k, v, **options):
        return flash_attn(q, k, v, enable_gqa=True, return_lse=True, **options)

    def results_of(function, dtype, options):
        run = lambda *x: function(*x[:3], **dict(zip(added, x[3:], strict=False)), **options)  # noqa: E731
        primals, directions = (tuple(t.detach().to(dtype) for t in side) for side in (inputs, tangents))
        (out, lse), (t_out, t_lse) = torch.func.jvp(run, primals, directions)
        return out, lse, t_out, t_lse

    ours = results_of(attend, q.dtype, ours_options)
    exact, theirs = (results_of(reference.attention, t, dense_options) for t in (torch.float64, q.dtype))
    for name, a, b, c in zip(("out", "lse", "t_out", "t_lse"), ours, theirs, exact, strict=True):
        assert_as_exact_as_torch(name, a, b, c, 3 if name.startswith("t_") else 2)


def allocated_by(action):
    """Returns the bytes that the action allocated through torch, and the result of the action."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = action()
    events = profile.profiler.kineto_results.events()
    return sum(e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0), result


def assert_hessian_vector_products_agree(loss, inputs):
    """Forward over reverse, reverse over forward and reverse over reverse are the same vector."""
    direction, everything = tuple(torch.randn_like(t) for t in inputs), tuple(range(len(inputs)))
    forward_over_reverse = torch.func.jvp(torch.func.grad(loss, everything), inputs, direction)[1]
    reverse_over_forward = torch.func.grad(lambda *x: torch.func.jvp(loss, x, direction)[1], everything)(*inputs)
    reverse_over_reverse = torch.autograd.functional.hvp(loss, inputs, direction)[1]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(t.detach().requires_grad_(), d) for t, d in zip(inputs, direction, strict=True)]
        dual_level = [forward_ad.unpack_dual(g).tangent for g in torch.autograd.grad(loss(*duals), duals)]
    for a, *mixed_modes in zip(
        forward_over_reverse, reverse_over_forward, reverse_over_reverse, dual_level, strict=True
    ):
        for b in mixed_modes:
            torch.testing.assert_close(b, a)
