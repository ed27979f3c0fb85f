"""Each keyword that transformers passes to an attention function is honoured, known to be harmless, or refused."""

import inspect
import re

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

from transformers.generation.continuous_batching.input_outputs import PagedAttentionArgs  # noqa: E402
from transformers.modeling_flash_attention_utils import FlashAttentionKwargs  # noqa: E402
from transformers.utils.generic import TransformersKwargs  # noqa: E402
from transformers_keywords import ROOT, keywords_of_models  # noqa: E402

from flash_attn_ext.integrations import transformers as integration  # noqa: E402
from flash_attn_ext.integrations.transformers import FLOAT_MASKS, HONOURED, REFUSED, WITHOUT_EFFECT  # noqa: E402

PARAMETERS = set(inspect.signature(integration.attention).parameters) - {"module", "options"}


def attend(**keywords):
    q = torch.randn(1, 2, 3, 8)
    return integration.attention(torch.nn.Module(), q, q, q, None, **keywords)[0]


def listed(name):
    return sum(name in names for names in (PARAMETERS, HONOURED, WITHOUT_EFFECT, REFUSED)) == 1


def test_each_keyword_of_the_models_is_in_one_list():
    passed, read_by_eager = keywords_of_models()
    # The search finds keywords written in the call, and keywords that a decoder passes down through two modules.
    assert "deepseek_v32" in passed["indices"]
    assert "gpt_oss" in passed["s_aux"]
    assert "llama" in passed["use_cache"]
    assert {name: sorted(models) for name, models in passed.items() if not listed(name)} == {}
    # A keyword that some model's own eager attention reads may change the result.
    assert "softcap" in read_by_eager
    assert not read_by_eager & WITHOUT_EFFECT


def test_models_that_add_columns_of_numbers_get_a_mask_of_numbers():
    extends = re.compile(r"cat\(\[(\w*mask), \w+\.to\(\1\.dtype\)")
    files = (ROOT / "models").glob("*/modeling_*.py")
    assert {file.parent.name for file in files if extends.search(file.read_text())} == FLOAT_MASKS


@pytest.mark.parametrize("kind", [TransformersKwargs, FlashAttentionKwargs, PagedAttentionArgs])
def test_each_documented_keyword_is_in_one_list(kind):
    assert [name for name in kind.__annotations__ if not listed(name)] == []


def dense_with_sinks(q, k, v, sinks, visible):
    scores = (q @ k.transpose(-1, -2) * 0.3).masked_fill(~visible, -torch.inf)
    return (torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)


@pytest.mark.parametrize("form", ["causal", "mask", "packed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sink_for_each_query(dtype, form):
    q, k, v = (torch.randn(2, heads, 9, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.randn(2, 4, 9, 1, dtype=dtype, requires_grad=True)
    visible, mask, options = torch.ones(9, 9, dtype=torch.bool).tril(), None, {}
    if form == "mask":
        visible = mask = visible & (torch.rand(2, 1, 9, 9) > 0.3)
        visible[:, :, 4] = False  # no key: out is 0
    if form == "packed":  # 5, 4, 6 and 3 rows
        offsets = torch.tensor([0, 5, 9, 15, 18], dtype=torch.int32)
        numbers = torch.bucketize(torch.arange(18), offsets[1:], right=True).view(2, 1, 9)
        visible = visible & (numbers[..., :, None] == numbers[..., None, :])
        options = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    module = torch.nn.Module()
    module.is_causal = True
    out, _ = integration.attention(module, q, k, v, mask, scaling=0.3, sinks=sinks, **options)
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v, sinks)]
    repeated = [t.repeat_interleave(2, 1) for t in leaves[1:3]]
    expected = dense_with_sinks(leaves[0], *repeated, leaves[3], visible)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 2e-2}
    torch.testing.assert_close(out.double(), expected, **tolerance)
    upstream = torch.randn_like(expected)
    grads = torch.autograd.grad(out, (q, k, v, sinks), upstream.to(dtype))
    for got, exact in zip(grads, torch.autograd.grad(expected, leaves, upstream), strict=True):
        torch.testing.assert_close(got.double(), exact, **tolerance)


def test_sinks_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"^sinks: got shape \(2,\); allowed: \(B, H, S_q, 1\), \(1, 2, 3, 1\)"):
        attend(sinks=torch.zeros(2))


def chosen_mask(indices, keys, block_size=1):
    """bool (B, heads, S_q, S_k) from numbers of keys or blocks, element by element."""
    mask = torch.zeros(*indices.shape[:3], keys, dtype=torch.bool)
    for b, h, i, n in torch.cartesian_prod(*(torch.arange(size) for size in indices.shape)).tolist():
        number = int(indices[b, h, i, n])
        if number >= 0:
            mask[b, h, i, number * block_size : (number + 1) * block_size] = True
    return mask


@pytest.mark.parametrize("form", ["causal", "decode", "static cache", "mask", "packed"])
@pytest.mark.parametrize("name", ["indices", "block_indices"])
def test_chosen_keys(name, form):
    seqlen_q = 1 if form == "decode" else 9
    q = torch.randn(2, 4, seqlen_q, 8, requires_grad=True)
    k, v = (torch.randn(2, 2, 9, 8, requires_grad=True) for _ in range(2))
    module, mask, options = torch.nn.Module(), None, {}
    module.is_causal = True
    visible = torch.ones(9, 9, dtype=torch.bool).tril()[-seqlen_q:]
    if name == "indices":
        numbers = torch.rand(2, seqlen_q, 9).topk(5)[1].to(torch.int32)
        chosen = chosen_mask(numbers[:, None], 9)
    else:
        module.indexer = torch.nn.Module()
        module.indexer.block_size = 2
        numbers = torch.rand(2, 2, seqlen_q, 5).topk(3)[1]
        numbers[:, :, :, 2] = -1
        chosen = chosen_mask(numbers, 9, 2).repeat_interleave(2, 1)
    if form == "mask":
        visible = mask = visible & (torch.rand(2, 1, 9, 9) > 0.3)
    if form == "packed":
        offsets = torch.tensor([0, 5, 9, 15, 18], dtype=torch.int32)
        sequence = torch.bucketize(torch.arange(18), offsets[1:], right=True).view(2, 1, 9)
        visible = visible & (sequence[..., :, None] == sequence[..., None, :])
        options = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    keys = (k, v)
    if form == "static cache":  # its unused end may be chosen, too
        keys = [torch.cat([t, torch.full((2, 2, 4, 8), torch.nan)], 2) for t in keys]
        numbers = torch.cat([numbers, torch.full_like(numbers[..., :1], 12 if name == "indices" else 6)], -1)
    out, _ = integration.attention(module, q, *keys, mask, scaling=0.3, **{name: numbers}, **options)
    hidden = ~(visible & chosen)
    scores = (q @ k.repeat_interleave(2, 1).transpose(-1, -2) * 0.3).masked_fill(hidden, -torch.inf)
    weights = scores.masked_fill(hidden.all(-1, keepdim=True), 0.0).softmax(-1).masked_fill(hidden, 0.0)
    expected = (weights @ v.repeat_interleave(2, 1)).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(expected)
    for got, exact in zip(*(torch.autograd.grad(t, (q, k, v), upstream) for t in (out, expected)), strict=True):
        torch.testing.assert_close(got, exact)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"indices": torch.zeros(1)}, r"^indices: got shape \(1,\); allowed: \(B, S_q, number of keys\)"),
        ({"block_indices": torch.zeros(1)}, r"^block_indices: got shape \(1,\); allowed: \(B, heads, S_q"),
        (
            {"indices": torch.zeros(1, 3, 1), "block_indices": torch.zeros(1)},
            "^block_indices: got a tensor with indices",
        ),
        ({"indices": torch.zeros(1, 3, 1, dtype=int), "cache": object()}, "^indices: got a tensor with continuous"),
        ({"indices": torch.zeros(1, 3, 1, dtype=int), "read_index": []}, "^indices: got a tensor with continuous"),
    ],
    ids=["indices", "block_indices", "both", "continuous batching", "continuous batching, 5.24"],
)
def test_chosen_keys_that_are_not_allowed(keywords, message):
    with pytest.raises(ValueError, match=message):
        attend(**keywords)


@pytest.mark.parametrize("name", REFUSED)
def test_a_keyword_that_is_not_supported_raises_its_name(name):
    with pytest.raises(ValueError, match=f"^{name}: got Tensor; allowed: None"):
        attend(**{name: torch.zeros(1)})
    attend(**{name: None})


def test_an_unknown_keyword_raises_its_name():
    with pytest.raises(TypeError, match=r"^tilt: flash_attn_ext does not know this keyword"):
        attend(tilt=2)
    attend(tilt=None)
    WITHOUT_EFFECT.add("tilt")
    try:
        attend(tilt=2)
    finally:
        WITHOUT_EFFECT.remove("tilt")
