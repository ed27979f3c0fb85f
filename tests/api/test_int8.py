"""flash_attn with quantize="int8": Q K^T in int8 and P V in int16, for inference.

The references are attention of the same rounded operands in fp64 (a tight bound), and exact attention (the errors that
docs/int8.md publishes).
"""

import math

import int8_reference
import pytest
import reference
import torch
from torch.nn.attention.bias import causal_lower_right

import flash_attn_ext
from flash_attn_ext import _ops, explain, flash_attn, flash_attn_varlen

H, HK = 4, 2
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make(seqlen_q=70, seqlen_k=150, head_dim=40, head_dim_v=24, batch=2, dtype=torch.float32, heads_kv=HK):
    shapes = (H, seqlen_q, head_dim), (heads_kv, seqlen_k, head_dim), (heads_kv, seqlen_k, head_dim_v)
    return [torch.randn(batch, *shape).to(dtype) for shape in shapes]


def quantized(q, k, v, **options):
    return flash_attn(q, k, v, enable_gqa=True, return_lse=True, quantize="int8", **options)


def rounded(isa, q, k, v, **options):
    return int8_reference.attention(q, k, v, fused=isa != "generic", **options)


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def check(result, expected, bound=1e-3):
    out, lse = (t.double() for t in result)
    wanted, wanted_lse = expected
    # a 16-bit out is rounded a second time
    bound += torch.finfo(result[0].dtype).eps / 2
    torch.testing.assert_close(out, wanted, rtol=0, atol=bound * max(wanted.abs().max().item(), 1.0))
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=2e-3)  # the row sums are of rounded P


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 3, 16, 64, 129])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (47, 63), (49, 64), (96, 65), (130, 257)])
def test_rounded_operands(isa, dtype, head_dim, seqlen_q, seqlen_k):
    q, k, v = make(seqlen_q, seqlen_k, head_dim, head_dim + 2, dtype=dtype)
    check(quantized(q, k, v), rounded(isa, q, k, v))


OPTIONS = {
    "causal": dict(causal="upper_left"),
    "lower_right": dict(causal="lower_right"),
    "window": dict(causal="lower_right", window=(30, 0)),
    "both_sides": dict(causal=None, window=(9, 50)),
    "chunks": dict(causal="lower_right", attention_chunk=20),
    "softcap": dict(causal="upper_left", softcap=2.0),
    "scale": dict(scale=0.5),
    "negative_scale": dict(scale=-0.3),
}
TENSORS = {
    "alibi": lambda: dict(causal="lower_right", alibi_slopes=torch.rand(H)),
    "sink": lambda: dict(causal="lower_right", sink=torch.randn(H)),
    "softcap_sink": lambda: dict(softcap=3.0, sink=torch.randn(2, H)),
    "bool_mask": lambda: dict(attn_mask=torch.rand(2, 1, 70, 150) > 0.5),
    "float_mask": lambda: dict(attn_mask=torch.randn(H, 70, 150).masked_fill(torch.rand(70, 150) > 0.7, -math.inf)),
    "mask_by_key": lambda: dict(attn_mask=torch.rand(2, 1, 1, 150) > 0.3),
}


@pytest.mark.parametrize("name", [*OPTIONS, *TENSORS])
def test_options(isa, name):
    q, k, v = make()
    k += 2  # softcap, sink and lse need the mean of the keys
    options = OPTIONS[name] if name in OPTIONS else TENSORS[name]()
    check(quantized(q, k, v, **options), rounded(isa, q, k, v, **options))


def test_key_mask(isa):
    q, k, v = make()
    shown = torch.rand(2, 150) > 0.4
    check(quantized(q, k, v, key_mask=shown), rounded(isa, q, k, v, attn_mask=shown[:, None, None]))


@pytest.mark.parametrize("form", ["key_mask", "attn_mask", "both", "float"])
@pytest.mark.parametrize("padding", [0.0, 1e4, math.nan, math.inf])
def test_padding_does_not_change_the_rounding(isa, form, padding):
    """Uninitialised rows with large numbers would otherwise round all real keys and values to nearly 0."""
    q, k, v = make()
    k += 3
    shown = torch.arange(150) < torch.tensor([[101], [7]])
    for t in (k, v):
        t.masked_fill_(~shown[:, None, :, None], padding)
    masks = {
        "key_mask": dict(key_mask=shown),
        "attn_mask": dict(attn_mask=shown[:, None, None]),
        "both": dict(key_mask=shown | (torch.arange(150) < 90), attn_mask=shown[:, None, None]),
        "float": dict(key_mask=torch.zeros(2, 150).masked_fill(~shown, -math.inf)),
    }[form]  # fmt: skip
    out, lse = quantized(q, k, v, **masks)
    for b, length in enumerate((101, 7)):
        # A float mask scales the scores before the softmax, not in it, so the last bits differ from a call without one.
        same_steps = dict(key_mask=torch.zeros(1, length)) if form == "float" else {}
        wanted = quantized(q[b : b + 1], k[b : b + 1, :, :length], v[b : b + 1, :, :length], **same_steps)
        assert torch.equal(out[b : b + 1], wanted[0])
        assert torch.equal(lse[b : b + 1], wanted[1])


def test_numbers_on_the_grid_are_exact(isa):
    """Operands that are integers already, with a mean of 0: only P is rounded."""
    q, k = (torch.randint(-126, 127, (1, 2, 128, 32)) for _ in range(2))
    k = torch.cat([k, -k], 2)
    v = torch.randint(-4094, 4095, (1, 2, 256, 20))
    q[..., 0], k[..., 0], v[:, :, ::64] = 127, torch.tensor([127, -127]).repeat_interleave(128), 4095
    q, k, v = (t.float() for t in (q, k, v))
    out, lse = quantized(q, k, v, scale=1e-4)
    exact, exact_lse = reference.attention(q.double(), k.double(), v.double(), scale=1e-4)
    assert distance(out, exact) < 1e-3
    torch.testing.assert_close(lse.double(), exact_lse, rtol=0, atol=2e-3)


# The errors of docs/int8.md, relative, in the 2-norm. "outlier": four columns of q and four of k are eight times
# larger.
PUBLISHED = {"normal": 0.012, "mean": 0.012, "outlier": 0.12}


@pytest.mark.parametrize("kind", PUBLISHED)
@pytest.mark.parametrize("causal", [None, "lower_right"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_published_errors(kind, causal, head_dim):
    q, k, v = torch.randn(3, 1, 2, 1024, head_dim).unbind(0)
    if kind == "mean":
        k = k + 3 * torch.randn(2, 1, head_dim)
    if kind == "outlier":
        q[..., :4] *= 8
        k[..., 4:8] *= 8
    out, _ = quantized(q, k, v, causal=causal)
    exact, _ = reference.attention(q.double(), k.double(), v.double(), causal=causal)
    error = distance(out, exact)
    assert error < PUBLISHED[kind]
    assert error > 1e-3  # it is the integer kernel


def test_one_large_score_does_not_hide_the_other_keys(isa):
    """An attention sink: key 0 has half of the mass, and the other 4095 keys share the rest."""
    q, k, v = make(16, 4096, 32, 16, batch=1)
    k[:, :, 0] = 0
    q[..., 0], k[:, :, 0, 0], k[:, :, 1:, 0] = 6, 9, 0
    v[:, :, 1:] += 1
    out, _ = quantized(q, k, v)
    exact, _ = reference.attention(q.double(), k.double(), v.double())
    assert distance(out, exact) < 0.02


def test_masked_rows_and_numbers_that_are_not_finite(isa):
    q, k, v = make(60, 130)
    shown = torch.ones(60, 130, dtype=torch.bool)
    shown[5] = False
    shown[:30, 100] = False
    expected = rounded(isa, q, k, v, attn_mask=shown)
    out, lse = quantized(q, k, v, attn_mask=shown)
    check((out, lse), expected)
    assert (out[:, :, 5] == 0).all()
    assert (lse[:, :, 5] == -math.inf).all()
    for bad in (math.nan, math.inf):
        for t in (k, v):
            changed = t.clone()
            changed[:, :, 100, 3] = bad
            tensors = (q, changed, v) if t is k else (q, k, changed)
            out, lse = quantized(*tensors, attn_mask=shown)
            assert torch.isfinite(out[:, :, :30]).all()
            assert torch.isfinite(lse[:, :, :5]).all()
            assert not torch.isfinite(out[:, :, 30:, 3]).any()
        changed = q.clone()
        changed[:, :, 7, 0] = bad
        out, _ = quantized(changed, k, v, attn_mask=shown)
        assert not torch.isfinite(out[:, :, 7]).any()
        assert torch.isfinite(out[:, :, 8:]).all()


@pytest.mark.parametrize(
    "sizes", [dict(seqlen_q=0), dict(seqlen_k=0), dict(batch=0), dict(head_dim_v=0), dict(head_dim=0)]
)
def test_empty(sizes):
    q, k, v = make(**sizes)
    out, lse = quantized(q, k, v)
    exact, exact_lse = flash_attn(q, k, v, enable_gqa=True, return_lse=True)
    torch.testing.assert_close(lse, exact_lse, atol=0.1, rtol=0)
    assert out.shape == exact.shape


def test_extreme_numbers(isa):
    for size in (1e-42, 1e-30, 1e18):
        q, k, v = make()
        out, _ = quantized(q * size, k / max(size, 1e-30) if size < 1 else k / size, v)
        assert torch.isfinite(out).all()
    out, _ = quantized(q * 0, k * 0, v * 0)
    assert (out == 0).all()


def test_layouts_and_threads_keep_the_bits(isa):
    q, k, v = make(130, 300)
    out, lse = quantized(q, k, v, causal="lower_right")
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(quantized(*strided, causal="lower_right")[0], out)
    assert torch.equal(quantized(q[1:], k[1:], v[1:], causal="lower_right")[0], out[1:])
    assert torch.equal(flash_attn(q[0], k[0], v[0], enable_gqa=True, causal="lower_right", quantize="int8"), out[0])
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        again = quantized(q, k, v, causal="lower_right")
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)


def test_instruction_sets_agree():
    """The products are sums of the same integers. Only the exponentials differ."""
    q, k, v = make(130, 300)
    results = []
    try:
        for isa in flash_attn_ext.available_kernels():
            flash_attn_ext.force_kernel(isa)
            results.append(quantized(q, k, v)[0])
    finally:
        flash_attn_ext.force_kernel(None)
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=2e-4)


def test_refused():
    q, k, v = make()
    for wrong in ("int4", 8, True):
        with pytest.raises(ValueError, match=r"quantize: got .*; allowed: None, 'int8'"):
            flash_attn(q, k, v, enable_gqa=True, quantize=wrong)
    with pytest.raises(NotImplementedError, match=r"key: got a tensor that requires a gradient; allowed in flash_attn"):
        quantized(q, k.clone().requires_grad_(), v)
    with torch.no_grad():
        quantized(q, k.clone().requires_grad_(), v)
    with pytest.raises(NotImplementedError, match=r"dropout_p: got 0.1 with quantize='int8'; allowed: 0.0"):
        quantized(q, k, v, dropout_p=0.1)
    with pytest.raises(NotImplementedError, match=r"num_splits: got 2 with quantize='int8'; allowed: 0"):
        quantized(q, k, v, num_splits=2)
    for name, value in {"unified_max": 1.0, "mask_mod": lambda b, h, i, j: i > j}.items():
        with pytest.raises(NotImplementedError, match=rf"{name}: got one with quantize='int8'; allowed: None"):
            quantized(q, k, v, **{name: value})
    with pytest.raises(TypeError, match=r"query: got dtype torch.float64 with quantize='int8'; allowed: float32"):
        quantized(q.double(), k.double(), v.double())
    with pytest.raises(ValueError, match="key: got shape"):
        quantized(q, k[..., :8], v)
    with pytest.raises(NotImplementedError, match=r"quantize: got 'int8' under torch.func; allowed: None"):
        torch.func.vmap(lambda t: quantized(t, k, v)[0])(q[None])
    packed = *(t[0].transpose(0, 1) for t in (q, k, v)), torch.tensor([0, 70]), torch.tensor([0, 150])
    with pytest.raises(TypeError, match="quantize"):
        flash_attn_varlen(*packed, quantize="int8")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match="query: got a tensor with a tangent"):
            quantized(dual, k, v)


def test_operator_has_no_derivative():
    q, k, v = make()
    out, _ = _ops.attention_int8(q.requires_grad_(), k, v)
    with pytest.raises(RuntimeError, match=r"derivative for flash_attn_ext::attention_int8 is not implemented"):
        out.sum().backward()


def test_other_devices():
    q, k, v = (t.to("meta") for t in make())
    out, lse = quantized(q, k, v)
    assert out.shape == (2, H, 70, 24)
    assert lse.dtype == torch.float32
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        on_gpu = [torch.empty(t.shape, device="cuda") for t in (q, k, v)]
        with pytest.raises(
            NotImplementedError, match=r"quantize: got 'int8' with tensors on cuda:0; allowed: tensors on CPU"
        ):
            quantized(*on_gpu)


def test_schema():
    q, k, v = make(20, 30)
    torch.library.opcheck(_ops.attention_int8, (q, k, v), dict(causal=True, softcap=1.0))


def test_compile():
    q, k, v = make(dtype=torch.bfloat16)
    compiled = torch.compile(lambda *t: quantized(*t, causal="lower_right"), fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(q, k, v), quantized(q, k, v, causal="lower_right"), strict=True):
        assert torch.equal(a, b)


def test_autocast():
    q, k, v = make()
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = quantized(q, k, v)
    assert torch.equal(out, quantized(*(t.bfloat16() for t in (q, k, v)))[0])


def test_causal_bias():
    q, k, v = make()
    bias = causal_lower_right(70, 150)
    assert torch.equal(quantized(q, k, v, attn_mask=bias)[0], quantized(q, k, v, causal="lower_right")[0])


def test_explain(isa):
    q, k, v = make(seqlen_k=1500)
    report = explain(q, k, v, enable_gqa=True, quantize="int8").forward
    is_fastest = report.kernel == "avx512_vnni"
    assert is_fastest or report.kernel == isa
    assert [reason.partition(":")[0] for reason in report.why_not] == [] if is_fastest else ["avx512_vnni"]
    assert report.error is None
    assert report.allocates["workspace"] > k.numel()
    assert "int8" in explain(q, k, v, enable_gqa=True, quantize="int8").call


def test_hidden_nan_keys_do_not_change_the_mean():
    """The mean is over the finite keys. With a mean that is too small, the error was 3 to 5 times as large."""
    q, noise, v = torch.randn(3, 1, 2, 512, 64)
    k = noise + 8 * torch.randn(1, 2, 1, 64)
    visible = torch.arange(512)[None] >= 400
    exact = flash_attn(q, k, v, key_mask=visible)
    errors = []
    for hidden in (k, k.masked_fill(~visible[:, None, :, None], torch.nan)):
        out = flash_attn(q, hidden, v, key_mask=visible, quantize="int8")
        errors.append((out - exact).norm() / exact.norm())
    assert errors[1] < 1.2 * errors[0]
