"""flash_attn_varlen: packed sequences against the dense reference, against padding, and each one alone."""

import re

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch.nn.attention.varlen import varlen_attn
from varlen_helpers import LENGTHS, check_pack, longest, make_pack, offsets

import flash_attn_ext
from flash_attn_ext import _ops, flash_attn, flash_attn_varlen, new_rng_state

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
H = 4


@pytest.mark.parametrize("causal", [None, "upper_left", "lower_right"])
def test_each_sequence_attends_to_itself(isa, causal):
    check_pack(LENGTHS, causal=causal)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(isa, dtype):
    check_pack(LENGTHS, dtype, causal="lower_right", offsets_dtype=torch.int64)


@pytest.mark.parametrize(
    "options",
    [
        {"window": (20, 3)},
        {"window": (20, 3), "causal": "lower_right"},
        {"softcap": 1.5},
        {"scale": 0.3},
        {"dropout_p": 0.3},
        {"num_splits": 3, "causal": "lower_right"},
    ],
    ids=lambda options: "-".join(options),
)
def test_options(options):
    check_pack(LENGTHS, **options)


@pytest.mark.parametrize("batched", [False, True])
def test_alibi_slopes(batched):
    slopes = torch.rand((len(LENGTHS), H) if batched else (H,)).requires_grad_()
    check_pack(LENGTHS, alibi_slopes=slopes)
    check_pack(LENGTHS, alibi_slopes=slopes, causal="upper_left", softcap=2.0)


def masks():
    total_q, batch = sum(q for q, _ in LENGTHS), len(LENGTHS)
    max_q, max_k = longest(LENGTHS)
    return {
        "key padding": (batch, 1, 1, max_k), "table": (1, H, max_q, max_k), "all": (batch, H, max_q, max_k),
        "rows": (batch, 1, max_q, 1), "by row": (total_q, max_k), "by row and head": (H, total_q, max_k),
        "by row, one column": (1, total_q, 1),
    }  # fmt: skip


@pytest.mark.parametrize("form", masks())
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks(form, dtype):
    mask = torch.randn(masks()[form])
    mask = mask > -0.5 if dtype == torch.bool else mask.masked_fill(mask > 1.5, -torch.inf).requires_grad_()
    check_pack(LENGTHS, attn_mask=mask)


def test_all_options_together(isa):
    mask = torch.randn(masks()["by row and head"]).requires_grad_()
    slopes = torch.rand(len(LENGTHS), H).requires_grad_()
    check_pack(LENGTHS, attn_mask=mask, alibi_slopes=slopes, dropout_p=0.2, softcap=3.0, causal="lower_right",
               window=(60, 0))  # fmt: skip


def padded(t, cu_seqlens, seqlen):
    """Returns (T, H, D) as (B, H, seqlen, D)."""
    lengths = cu_seqlens.diff().tolist()
    rows = [torch.nn.functional.pad(part, (0, 0, 0, 0, 0, seqlen - len(part))) for part in t.split(lengths)]
    return torch.stack(rows).transpose(1, 2)


def test_same_as_padding_and_a_mask(isa):
    """Dropout drops the same elements, too: it counts by sequence, row and column."""
    lengths = [(70, 70), (5, 5), (100, 100)]
    q, k, v = make_pack(lengths)
    cu_seqlens, (longest_q, longest_k) = offsets(lengths), longest(lengths)
    rng_state = new_rng_state()
    options = dict(dropout_p=0.3, rng_state=rng_state, enable_gqa=True, is_causal=True)
    ours = flash_attn_varlen(q, k, v, *cu_seqlens, longest_q, longest_k, **options)
    inside = torch.arange(longest_k) < cu_seqlens[1].diff()[:, None]
    dense = flash_attn(
        *(padded(t, cu, n) for t, cu, n in zip((q, k, v), (cu_seqlens[0], *cu_seqlens[1:] * 2),
                                               (longest_q, longest_k, longest_k), strict=True)),
        attn_mask=inside[:, None, None], **options,
    )  # fmt: skip
    for b, (seqlen_q, _) in enumerate(lengths):
        own = ours[cu_seqlens[0][b] : cu_seqlens[0][b + 1]]
        torch.testing.assert_close(own, dense[b, :, :seqlen_q].transpose(0, 1), rtol=1e-5, atol=1e-5)


def run(q, k, v, lengths, **options):
    """Returns out, lse, dq, dk, dv."""
    tensors = [t.detach().requires_grad_() for t in (q, k, v)]
    out, lse = flash_attn_varlen(
        *tensors,
        *offsets(lengths),
        *longest(lengths),
        enable_gqa=True,
        causal="lower_right",
        return_lse=True,
        **options,
    )
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(1, *out.shape[1:], generator=generator, dtype=out.dtype).expand_as(out)
    return [out, lse.T, *torch.autograd.grad(out, tensors, dout)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_neighbours(isa, dtype):
    q, k, v = make_pack(LENGTHS, dtype=dtype)
    together = run(q, k, v, LENGTHS)
    cu_seqlens = offsets(LENGTHS)
    for b, lengths in enumerate(LENGTHS):
        own_q, own_k = (slice(*cu[b : b + 2].tolist()) for cu in cu_seqlens)
        alone = run(q[own_q], k[own_k], v[own_k], [lengths])
        for name, a, whole, own in zip(
            ("out", "lse", "dq", "dk", "dv"), alone, together, (own_q, own_q, own_q, own_k, own_k), strict=True
        ):
            assert torch.equal(a, whole[own]), (name, b)


def test_bits_do_not_depend_on_threads(threads):
    q, k, v = make_pack(LENGTHS)
    results = []
    for count in (1, 2, 3):
        threads(count)
        results.append(run(q, k, v, LENGTHS))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_a_sequence_does_not_see_its_neighbours():
    """NaN in one sequence reaches no other sequence."""
    lengths = [(50, 50), (30, 60), (1, 70)]
    q, k, v = make_pack(lengths)
    with torch.no_grad():
        for t in (q, k, v):
            t[50 : 80 if t is q else 110] = torch.nan
    out, lse, dq, dk, dv = run(q, k, v, lengths)
    for t in (out, lse, dq):
        assert t[:50].isfinite().all()
        assert t[80:].isfinite().all()
        assert t[50:80].isnan().all()
    for t in (dk, dv):
        assert t[:50].isfinite().all()
        assert t[110:].isfinite().all()


def test_rows_out_of_use():
    lengths, used = [(70, 90), (10, 20), (3, 5)], [(60, 80), (0, 20), (3, 0)]
    q, k, v = make_pack(lengths)
    cu_seqlens = offsets(lengths)
    keep = [
        torch.cat([torch.arange(rows[side]) < in_use[side] for rows, in_use in zip(lengths, used, strict=True)])
        for side in (0, 1)
    ]
    with torch.no_grad():
        q[~keep[0]], k[~keep[1]], v[~keep[1]] = torch.nan, torch.nan, torch.nan
    seqused = [torch.tensor(side, dtype=torch.int32) for side in zip(*used, strict=True)]
    out, lse = flash_attn_varlen(q, k, v, *cu_seqlens, *longest(lengths), enable_gqa=True, return_lse=True,
                                 seqused_q=seqused[0], seqused_k=seqused[1])  # fmt: skip
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    expected = run_used = flash_attn_varlen(
        q[keep[0]], k[keep[1]], v[keep[1]], *offsets(used), *longest(used), enable_gqa=True, return_lse=True
    )
    assert torch.equal(out[keep[0]], expected[0])
    assert torch.equal(lse[:, keep[0]], expected[1])
    assert (out[~keep[0]] == 0).all()
    assert (lse[:, ~keep[0]] == -torch.inf).all()
    used_grads = torch.autograd.grad(run_used[0], (q, k, v), torch.ones_like(run_used[0]))
    for grad, used_grad, kept in zip(grads, used_grads, (keep[0], keep[1], keep[1]), strict=True):
        assert torch.equal(grad[kept], used_grad[kept])
        assert (grad[~kept] == 0).all()


def test_no_rows_at_all():
    for lengths in ([], [(0, 0)], [(0, 3)], [(3, 0), (2, 0)]):
        total_q, total_k = (sum(side) for side in (zip(*lengths, strict=True) if lengths else ((), ())))
        cu_seqlens = offsets(lengths) if lengths else [torch.zeros(1, dtype=torch.int32)] * 2
        q, k, v = (torch.randn(n, 2, 8, requires_grad=True) for n in (total_q, total_k, total_k))
        out, lse = flash_attn_varlen(q, k, v, *cu_seqlens, return_lse=True)
        assert out.shape == (total_q, 2, 8)
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
        assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), (q, k, v)))


def test_strided_rows_are_read_in_place():
    """q, k and v are views of one tensor (T, 3, H, D), and are not copied."""
    lengths = [(70, 70), (9, 9)]
    qkv = torch.randn(79, 3, 2, 16)
    cu_seqlens, _ = offsets(lengths)
    out = flash_attn_varlen(*qkv.unbind(1), cu_seqlens, cu_seqlens, causal="lower_right")
    copies = [t.contiguous() for t in qkv.unbind(1)]
    assert torch.equal(out, flash_attn_varlen(*copies, cu_seqlens, cu_seqlens, causal="lower_right"))


def test_gradcheck():
    lengths = [(3, 4), (1, 2), (0, 1), (5, 2)]
    q, k, v = make_pack(lengths, 2, 1, 3, 2, torch.float64)
    mask = torch.randn(9, 4, dtype=torch.float64, requires_grad=True)
    slopes = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    cu_seqlens = offsets(lengths)

    def attend(q, k, v, mask, slopes):
        return flash_attn_varlen(q, k, v, *cu_seqlens, 5, 4, mask, enable_gqa=True, softcap=2.0, alibi_slopes=slopes,
                                 return_lse=True)  # fmt: skip

    assert torch.autograd.gradcheck(attend, (q, k, v, mask, slopes))


@hypothesis.settings(max_examples=20)
@hypothesis.given(
    st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), min_size=1, max_size=6),
    st.sampled_from([None, "upper_left", "lower_right"]),
    st.sampled_from([None, (3, 5), (0, 0)]),
)
def test_random_packs(lengths, causal, window):
    check_pack(lengths, causal=causal, window=window)


BAD = {
    "descending": (dict(cu_seqlens_q=[0, 5, 3, 10]), "cu_seqlens_q: got 3 after 5 at 2; allowed: ascending"),
    "not from 0": (dict(cu_seqlens_q=[1, 2, 5, 10]), "cu_seqlens_q: got offsets from 1 to 10; allowed: from 0 to 10"),
    "past the end": (dict(cu_seqlens_k=[0, 2, 5, 11]), "cu_seqlens_k: got offsets from 0 to 11; allowed: from 0 to 10"),
    "inside past the end": (dict(cu_seqlens_k=[0, 2, 99, 10]), "cu_seqlens_k: got 99 after 2 at 2; allowed: ascending"),
    "negative": (dict(cu_seqlens_k=[0, -3, 5, 10]), "cu_seqlens_k: got -3 after 0 at 1; allowed: ascending"),
    "longer than max": (dict(max_seqlen_q=3), "max_seqlen_q: got 3; allowed: at least the longest sequence's 5"),
    "negative max": (dict(max_seqlen_k=-1), "max_seqlen_k: got -1; allowed: 0 or more"),
    "used too much": (dict(seqused_k=[2, 3, 6]), "seqused_k: got 6 at 2; allowed: 0 to the sequence's 5 rows"),
    "used negative": (dict(seqused_q=[2, -3, 5]), "seqused_q: got -3 at 1"),
    "other number": (dict(cu_seqlens_k=[0, 10]), "cu_seqlens_k: got shape [2]"),
    "used other number": (dict(seqused_k=[1]), "seqused_k: got shape [1]; allowed: [3], one number a sequence"),
    "mask rows": (dict(attn_mask=torch.ones(9, 5)), "attn_mask: got shape [1, 9, 5], with size 9 in dimension 1"),
    "mask columns": (dict(attn_mask=torch.ones(3, 1, 1, 4)), "attn_mask: got shape [3, 1, 1, 4], with size 4"),
    "mask dims": (dict(attn_mask=torch.ones(5)), "attn_mask: got a tensor of shape [5]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_argument(case):
    changed, message = BAD[case]
    q = torch.randn(10, 2, 8)
    arguments = dict(cu_seqlens_q=[0, 2, 5, 10], cu_seqlens_k=[0, 2, 5, 10], max_seqlen_q=5, max_seqlen_k=5) | changed
    arguments = {
        name: torch.tensor(v, dtype=torch.int32) if isinstance(v, list) else v for name, v in arguments.items()
    }
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_attn_varlen(q, q, q, **arguments)


def test_wrong_types():
    q, cu_seqlens = torch.randn(10, 2, 8), torch.tensor([0, 10])
    with pytest.raises(TypeError, match="cu_seqlens_k: got dtype float32; allowed: int32, int64"):
        flash_attn_varlen(q, q, q, cu_seqlens, cu_seqlens.float())
    with pytest.raises(TypeError, match=r"cu_seqlens_q: got list; allowed: a torch.Tensor"):
        flash_attn_varlen(q, q, q, [0, 10], cu_seqlens)
    with pytest.raises(TypeError, match=r"max_seqlen_q: got 2.5; allowed: None, an int"):
        flash_attn_varlen(q, q, q, cu_seqlens, cu_seqlens, 2.5)
    with pytest.raises(ValueError, match=r"query: got a tensor of shape .*; allowed: 3-D, .total_q, heads, head_dim"):
        flash_attn_varlen(q[None], q, q, cu_seqlens, cu_seqlens)
    with pytest.raises(ValueError, match=r"key: got 1 heads for 2 query heads; .*enable_gqa=True"):
        flash_attn_varlen(q, q[:, :1], q[:, :1], cu_seqlens, cu_seqlens)


def operator_arguments(lengths=((5, 7), (0, 2), (9, 4))):
    q, k, v = make_pack(lengths, 2, 1, 8, 8)
    mask = torch.randn(1, sum(n for n, _ in lengths), 7, requires_grad=True)
    return (q, k, v, mask, *(torch.rand(2, requires_grad=True) for _ in range(2)), *offsets(lengths))


def test_opcheck():
    q, k, v, attn_mask, slopes, sink, *cu_seqlens = operator_arguments()
    torch.library.opcheck(
        _ops.attention_varlen,
        (q, k, v, attn_mask, slopes, sink, *cu_seqlens),
        {"causal": True, "max_seqlen_q": 9, "max_seqlen_k": 7},
    )


def test_compile_with_dynamic_lengths():
    def attend(q, k, v, cu_seqlens_q, cu_seqlens_k):
        return flash_attn_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, enable_gqa=True, causal="lower_right") * 2

    frames = []

    def count(graph, inputs):
        frames.append(graph)
        return graph.forward

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=count)
    for lengths in ([(5, 8), (6, 2)], [(9, 9), (3, 4), (0, 6)], [(20, 30), (2, 2)]):
        tensors = make_pack(lengths)
        cu_seqlens = offsets(lengths)
        ours = compiled(*tensors, *cu_seqlens)
        expected = attend(*tensors, *cu_seqlens)
        assert torch.equal(ours, expected)
        dout = torch.randn_like(expected)
        for a, b in zip(
            torch.autograd.grad(ours, tensors, dout), torch.autograd.grad(expected, tensors, dout), strict=True
        ):
            assert torch.equal(a, b)
    assert len(frames) == 1


def test_export():
    class Attend(torch.nn.Module):
        def forward(self, q, k, v, cu_seqlens):
            return flash_attn_varlen(q, k, v, cu_seqlens, cu_seqlens, causal="lower_right")

    q, k, v = (torch.randn(12, 2, 8) for _ in range(3))
    cu_seqlens = torch.tensor([0, 5, 12])
    rows, sequences = torch.export.Dim("rows", min=2), torch.export.Dim("offsets", min=2)
    program = torch.export.export(Attend(), (q, k, v, cu_seqlens), dynamic_shapes=({0: rows},) * 3 + ({0: sequences},))
    q, k, v = (torch.randn(30, 2, 8) for _ in range(3))
    cu_seqlens = torch.tensor([0, 5, 12, 30])
    assert torch.equal(program.module()(q, k, v, cu_seqlens), Attend()(q, k, v, cu_seqlens))


def test_autocast():
    q, k, v = make_pack([(5, 7), (6, 2)])
    cu_seqlens = offsets([(5, 7), (6, 2)])
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = flash_attn_varlen(q, k, v, *cu_seqlens, enable_gqa=True, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    out.sum().backward()
    assert q.grad.dtype == torch.float32


def test_functional_transforms():
    lengths = [(5, 7), (6, 2)]
    q, k, v = make_pack(lengths)
    cu_seqlens = offsets(lengths)

    def loss(q, k, v):
        return flash_attn_varlen(q, k, v, *cu_seqlens, enable_gqa=True).square().sum()

    expected = torch.autograd.grad(loss(q, k, v), (q, k, v))
    for a, b in zip(torch.func.grad(loss, (0, 1, 2))(q, k, v), expected, strict=True):
        assert torch.equal(a, b)
    stacked = torch.stack([q, 2 * q])
    grads = torch.vmap(torch.func.grad(loss), (0, None, None))(stacked, k, v)
    torch.testing.assert_close(grads[0], expected[0])
    torch.testing.assert_close(grads[1], torch.autograd.grad(loss(2 * q, k, v), q)[0] / 2)


def test_jagged_tensors():
    """torch's nested tensors (B, H, j, D), as in scaled_dot_product_attention."""
    lengths = [(30, 30), (1, 1), (70, 70)]
    q, k, v = make_pack(lengths, heads_kv=4, head_dim_v=17)
    offsets_q = offsets(lengths, torch.int64)[0]
    # Views of one nested tensor share their ragged size.
    nested = [torch.nested.nested_tensor_from_jagged(t, offsets_q).transpose(1, 2) for t in (q, k, v)]
    options = {"is_causal": True, "softcap": 2.0, "sink": torch.randn(4), "return_lse": True}
    out, lse = flash_attn(*nested, **options)
    expected, expected_lse = flash_attn_varlen(q, k, v, offsets_q, offsets_q, **options)
    assert torch.equal(out.transpose(1, 2).values(), expected)
    assert torch.equal(lse.transpose(1, 2).values().T, expected_lse)
    grads = torch.autograd.grad(out.transpose(1, 2).values().square().sum(), (q, k, v))
    for ours, theirs in zip(grads, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match=r"key: got a tensor of shape .* allowed with nested tensors"):
        flash_attn(nested[0], torch.randn(3, 4, 5, 17), nested[2])


def test_jagged_values_have_the_lengths_of_their_keys():
    rows = torch.randn(101, 4, 16)
    key, value = (
        torch.nested.nested_tensor_from_jagged(rows, torch.tensor(cut)).transpose(1, 2)
        for cut in ([0, 30, 31, 101], [0, 70, 100, 101])
    )
    with pytest.raises(ValueError, match=r"value: got sequence lengths \[70, 30, 1\]; allowed: key's, \[30, 1, 70\]"):
        flash_attn(key, key, value)
    same = torch.nested.nested_tensor_from_jagged(rows, torch.tensor([0, 30, 31, 101])).transpose(1, 2)
    assert torch.equal(flash_attn(key, key, same).values(), flash_attn(key, key, key).values())


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (20, 0), (5, 3)])
def test_torchs_varlen_attn_runs_while_active(window):
    lengths = [(30, 50), (1, 7), (70, 70)]
    q, k, v = make_pack(lengths, heads_kv=4, head_dim_v=17)
    cu_seqlens = offsets(lengths)

    def attend():
        return varlen_attn(q, k, v, *cu_seqlens, *longest(lengths), window_size=window)

    with flash_attn_ext.activated():
        out = attend()
        grads = torch.autograd.grad(out.square().sum(), (q, k, v))
    expected = flash_attn_varlen(q, k, v, *cu_seqlens, window=None if window == (-1, -1) else window)
    assert torch.equal(out, expected)
    for ours, theirs in zip(grads, torch.autograd.grad(expected.square().sum(), (q, k, v)), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(NotImplementedError):
        attend()


def test_torchs_varlen_attn_reads_pages_while_active():
    q, (k, v) = torch.randn(5, 4, 16), torch.randn(2, 8, 16, 2, 16)
    cu_seqlens, seqused_k = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([20, 60], dtype=torch.int32)
    block_table = torch.randperm(8, dtype=torch.int32).view(2, 4)
    cu_seqlens_k = torch.tensor([0, 64, 128], dtype=torch.int32)
    with flash_attn_ext.activated(), torch.no_grad():
        out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens_k, 3, 64, enable_gqa=True, seqused_k=seqused_k,
                          block_table=block_table)  # fmt: skip
    rows = [t[block_table.long()].flatten(1, 2) for t in (k, v)]
    expected = flash_attn_varlen(q, *(t.flatten(0, 1) for t in rows), cu_seqlens, cu_seqlens_k, seqused_k=seqused_k,
                                 enable_gqa=True)  # fmt: skip
    torch.testing.assert_close(out, expected)
