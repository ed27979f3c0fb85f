"""Packed sequences (VarlenParams of csrc/core/params.h) in the CUDA kernels' host build, against the dense oracle of
each sequence."""

from itertools import accumulate

import pytest
import reference
import torch
from cuda_host import library
from test_derivatives import second_order

from flash_attn_ext import _ops, dropout_mask, new_rng_state

LENGTHS = [(70, 130), (1, 64), (0, 5), (129, 3), (65, 0), (64, 65)]  # queries and keys of each sequence
FEW = [(3, 700), (1, 64), (2, 0), (0, 9), (16, 130)]  # the keys are split
HEADS, HEADS_KV, HEAD_DIM = 4, 2, 24


def packed(lengths, heads, dtype, head_dim=HEAD_DIM):
    return torch.randn(sum(lengths), heads, head_dim, dtype=torch.float64).to(dtype)


def run(kernels, q, k, v, dout, lengths, *, dtype_of_offsets=torch.int32, cu_seqlens=None, seqused=(None, None),
        deterministic=False, attn_mask=None, mask_by_row=False, slopes=None, sink=None, rng_state=None,
        **options):  # fmt: skip
    """out, lse, dq, dk, dv, dslopes, dsink, dmask by the kernels, of packed tensors."""
    offsets = [cu_seqlens or [0, *accumulate(side)] for side in zip(*lengths, strict=True)]
    cu_seqlens_q, cu_seqlens_k = (torch.tensor(side, dtype=dtype_of_offsets) for side in offsets)
    longest = [max(side) for side in zip(*lengths, strict=True)]
    options |= {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
    tensors = {
        "query": q, "key": k, "value": v, "attn_mask": attn_mask[0] if mask_by_row else attn_mask,
        "alibi_slopes": slopes, "sink": sink, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k,
        "seqused_q": seqused[0], "seqused_k": seqused[1], "rng_state": rng_state,
    }  # fmt: skip
    out, lse = _ops.attention_varlen(**tensors, **options)
    added = attn_mask is not None and attn_mask.is_floating_point(), slopes is not None, sink is not None
    dq, dk, dv, dmask, dslopes, dsink = _ops.attention_varlen_backward(
        grad_out=dout, grad_lse=None, **tensors, out=out, lse=lse, deterministic=deterministic, **options,
        grad_mask=[True, True, True, *added],
    )  # fmt: skip
    if dmask is not None and mask_by_row:
        dmask = dmask[None]
    return [out, lse, dq, dk, dv, dslopes, dsink, dmask]


def check(kernels, lengths, dtype=torch.float64, head_dim=HEAD_DIM, **options):
    q, k, v = (packed(side, heads, dtype, head_dim) for side, heads in zip(
        (*zip(*lengths, strict=True), [n for _, n in lengths]), (HEADS, HEADS_KV, HEADS_KV), strict=True))  # fmt: skip
    dout = torch.randn_like(q)
    slopes, sink, mask, rng_state = (options.get(name) for name in ("slopes", "sink", "attn_mask", "rng_state"))
    out, lse, dq, dk, dv, dslopes, dsink, dmask = run(kernels, q, k, v, dout, lengths, **options)
    exact_mask = None if mask is None else mask.double().requires_grad_()
    exact_dmask = 0
    at_q = at_k = 0
    for b, (seqlen_q, seqlen_k) in enumerate(lengths):
        own_q, own_k = slice(at_q, at_q + seqlen_q), slice(at_k, at_k + seqlen_k)
        at_q, at_k = own_q.stop, own_k.stop
        inputs = [t.transpose(0, 1)[None].double().requires_grad_() for t in (q[own_q], k[own_k], v[own_k])]
        own_slopes, own_sink = (None if t is None else t[b : b + 1].clone().requires_grad_() for t in (slopes, sink))
        kept = None
        if rng_state is not None:  # its words are counted by batch: use the words of sequence b
            kept = dropout_mask(rng_state, len(lengths), HEADS, seqlen_q, seqlen_k, options["dropout_p"])[b : b + 1]
        own_mask = exact_mask
        if mask is not None:
            own_mask = exact_mask[:, :, own_q if options.get("mask_by_row") else slice(seqlen_q), :seqlen_k]
            own_mask = own_mask[b : b + 1] if len(mask) > 1 else own_mask
        causal = ("lower_right" if options.get("lower_right") else "upper_left") if options.get("causal") else None
        expected, expected_lse = reference.attention(
            *inputs, own_mask, causal=causal, kept=kept,
            alibi_slopes=own_slopes, sink=own_sink, dropout_p=options.get("dropout_p", 0.0),
            softcap=options.get("softcap", 0.0),
        )  # fmt: skip
        wanted = [t for t in (*inputs, own_slopes, own_sink, exact_mask) if t is not None]
        grads = list(torch.autograd.grad(expected, wanted, dout[own_q].transpose(0, 1)[None].double()))
        if mask is not None:
            exact_dmask = exact_dmask + grads.pop()
        tolerance = dict(rtol=1e-9, atol=1e-9) if dtype == torch.float64 else dict(rtol=0.03, atol=0.05)
        close = lambda ours, exact: torch.testing.assert_close(ours.double(), exact.double(), **tolerance)  # noqa: E731, B023
        close(out[own_q].transpose(0, 1)[None], expected)
        close(lse[None, :, own_q], expected_lse)
        for ours, own, exact in zip((dq, dk, dv), (own_q, own_k, own_k), grads, strict=False):
            close(ours[own].transpose(0, 1)[None], exact)
        if slopes is not None:
            close(dslopes[b : b + 1], grads[3])
        if sink is not None:
            close(dsink[b : b + 1], grads[-1])
    if mask is not None:
        close(dmask, exact_dmask)


@pytest.mark.parametrize("lower_right", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [LENGTHS, FEW], ids=["tiles", "splits"])
def test_each_sequence_is_its_own(kernels, lengths, causal, lower_right):
    check(kernels, lengths, causal=causal, lower_right=lower_right)


def test_64_bit_offsets(kernels):
    check(kernels, LENGTHS, dtype_of_offsets=torch.int64)


@pytest.mark.parametrize("cu_seqlens", [(0, 70, 20, 20), (-9, 10, 500, 90), (90, 60, 30, 0), (0, 0, 0, 1 << 30)])
def test_hostile_offsets_read_nothing_outside(kernels, cu_seqlens):
    """The host run checks every access. The results are not compared."""
    q = packed([90], HEADS, torch.float64)
    k, v = packed([90], HEADS_KV, torch.float64), packed([90], HEADS_KV, torch.float64)
    run(kernels, q, k, v, torch.randn_like(q), [(40, 40)] * 3, cu_seqlens=cu_seqlens, causal=True, lower_right=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(kernels, dtype):
    check(kernels, LENGTHS, dtype, causal=True, lower_right=True)


def test_options_count_from_the_start_of_a_sequence(kernels):
    longest_q, longest_k = (max(side) for side in zip(*LENGTHS, strict=True))
    mask = torch.randn(1, HEADS, longest_q, longest_k, dtype=torch.float64)
    slopes = torch.rand(len(LENGTHS), HEADS, dtype=torch.float64)
    sink = torch.randn(len(LENGTHS), HEADS, dtype=torch.float64)
    check(kernels, LENGTHS, attn_mask=mask, slopes=slopes, sink=sink, softcap=2.0, causal=True)
    check(kernels, LENGTHS, rng_state=new_rng_state(torch.device("cpu")), dropout_p=0.3)


@pytest.mark.parametrize("shape", [(1, 4, 129, 130), (6, 1, 129, 130), (6, 4, 1, 130), (1, 1, 129, 1), (1, 1, 1, 1)])
def test_masks_of_every_shape(kernels, shape):
    check(kernels, LENGTHS, attn_mask=torch.randn(shape, dtype=torch.float64), causal=True)


@pytest.mark.parametrize("shape", [(4, 130), (1, 130), (1, 1)])
def test_masks_by_the_rows_of_a_packed_q(kernels, shape):
    heads, columns = shape
    mask = torch.randn(1, heads, sum(n for n, _ in LENGTHS), columns, dtype=torch.float64)
    check(kernels, LENGTHS, attn_mask=mask, mask_by_row=True)


def test_forward_mode_and_double_backward(kernels):
    """Each sequence has the same results in a separate call."""
    lengths = [(70, 40), (1, 64), (0, 5), (33, 3)]
    totals = [sum(side) for side in zip(*lengths, strict=True)]
    rows = {"q": HEADS, "k": HEADS_KV, "v": HEADS_KV, "dout": HEADS}
    rows = {name: torch.randn(totals[name in "kv"], heads, HEAD_DIM).double() for name, heads in rows.items()}
    rows |= {"t_" + name: torch.randn_like(rows[name]) for name in ("q", "k", "v")}
    dlse = torch.randn(HEADS, totals[0]).double()
    cu_seqlens = [torch.tensor([0, *accumulate(side)]) for side in zip(*lengths, strict=True)]
    tangents = {f"tangent_{name}": rows[f"t_{name[0]}"] for name in ("query", "key", "value")}
    tangents |= {f"tangent_{name}": None for name in ("attn_mask", "alibi_slopes", "sink")}
    tensors = {name: rows[name[0]] for name in ("query", "key", "value")}
    tensors |= {name: None for name in ("attn_mask", "alibi_slopes", "sink", "seqused_q", "seqused_k", "rng_state")}
    tensors |= {"cu_seqlens_q": cu_seqlens[0], "cu_seqlens_k": cu_seqlens[1]}
    options = {"causal": True, "softcap": 3.0}
    out, lse, t_out, t_lse = _ops.attention_varlen_jvp(**tangents, **tensors, **options)
    dq, dk, dv, *_ = _ops.attention_varlen_double_backward(
        grad_out=rows["dout"], grad_lse=dlse, **tangents, **tensors, out=out, lse=lse, tangent_out=t_out,
        tangent_lse=t_lse, **options, grad_mask=[True, True, True, False, False, False],
    )  # fmt: skip
    rows |= {"out": out, "t_out": t_out, "dq": dq, "dk": dk, "dv": dv}
    statistics = {"lse": lse, "t_lse": t_lse, "dlse": dlse}

    for b, (seqlen_q, seqlen_k) in enumerate(lengths):
        own_q = slice(int(cu_seqlens[0][b]), int(cu_seqlens[0][b]) + seqlen_q)
        own_k = slice(int(cu_seqlens[1][b]), int(cu_seqlens[1][b]) + seqlen_k)
        own = {name: t[own_k if name in ("k", "v", "t_k", "t_v", "dk", "dv") else own_q].transpose(0, 1)[None]
               for name, t in rows.items()}  # fmt: skip
        lse, t_lse, dlse = (t[None, :, own_q] for t in statistics.values())
        inputs = [own[name].clone().requires_grad_() for name in ("q", "k", "v")]
        tangents = tuple(own["t_" + name] for name in ("q", "k", "v"))
        exact = second_order(
            lambda *x: reference.attention(*x, causal="upper_left", softcap=3.0), inputs, tangents, [own["dout"], dlse]
        )
        ours = [own["out"], lse, own["t_out"], t_lse, own["dq"], own["dk"], own["dv"]]
        for a, e in zip(ours, exact, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-9)


def test_which_tier_runs(kernels):
    cu_seqlens = torch.tensor([0, 128, 256], dtype=torch.int32)
    rows = library.Tensor4(4096, 0, 64, 128)
    tensors = dict.fromkeys(("q", "k", "v", "out"), rows)
    varlen = library.VarlenParams(*[library.offsets(cu_seqlens)] * 2, total_q=256, total_k=256)
    for kind in (library.AttentionParams, library.BackwardParams):
        params = kind(dtype=library.DTYPES[torch.bfloat16], sizes=library.Sizes(2, 2, 2, 128, 128, 64, 64), scale=0.125,
                      varlen=varlen, **tensors)  # fmt: skip
        if kind is library.BackwardParams:
            params.dout = rows
        with kernels.on_gpu(9, 0):
            assert kernels.choice(params) == ("sm90", [])
        with kernels.on_gpu(8, 0):
            assert kernels.choice(params)[0] == "sm80"
            params.dtype = library.DTYPES[torch.float32]
            assert kernels.choice(params)[0] == "simt"
