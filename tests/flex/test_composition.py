"""Functions of the user together with the other options of flash_attn."""

import pytest
import torch
from flex_reference import dense_flex
from torch.nn.attention.flex_attention import create_block_mask

from flash_attn_ext import explain, flash_attn


def inputs(*shape, count=3):
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(count)]


def window(b, h, q, k):
    return (q - k).abs() <= 30


def test_the_order_is_softcap_alibi_function_masks():
    q, k, v = inputs(2, 3, 70, 8)
    slopes, scale = (torch.rand(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    (bias,) = inputs(2, 1, 70, 70, count=1)

    def score_mod(score, b, h, q_idx, kv_idx):
        return torch.tanh(score) * scale[h]

    def all_of_it(score, b, h, q_idx, kv_idx):
        with_alibi = score - slopes[h] * (q_idx - kv_idx).abs()
        masked = torch.where((q_idx >= kv_idx) & window(b, h, q_idx, kv_idx), 0.0, -torch.inf)
        return score_mod(with_alibi, b, h, q_idx, kv_idx) + bias[b, 0, q_idx, kv_idx] + masked

    wanted, wanted_lse = dense_flex(q, k, v, all_of_it, softcap=2.0)
    mask = create_block_mask(window, None, None, 70, 70, "cpu", BLOCK_SIZE=32)
    for masks in ({"mask_mod": window}, {"block_mask": mask}):
        options = {"is_causal": True, "softcap": 2.0, "alibi_slopes": slopes, "return_lse": True} | masks
        out, lse = flash_attn(q, k, v, bias, score_mod=score_mod, **options)
        torch.testing.assert_close((out, lse), (wanted, wanted_lse))
        wrt = (q, k, v, bias, slopes, scale)
        grads, exact = (torch.autograd.grad(o.square().sum() + s.sum(), wrt, retain_graph=True)
                        for o, s in ((out, lse), (wanted, wanted_lse)))  # fmt: skip
        torch.testing.assert_close(grads, exact)


def test_dropout_is_that_of_flash_attn():
    q, k, v = inputs(1, 2, 40, 8)
    state = torch.tensor([1, 2])
    wanted = flash_attn(q, k, v, dropout_p=0.3, rng_state=state, softcap=3.0)
    out = flash_attn(q, k, v, dropout_p=0.3, rng_state=state, score_mod=lambda s, *_: 3.0 * torch.tanh(s / 3.0))
    torch.testing.assert_close(out, wanted)
    grads, exact = (torch.autograd.grad(o.square().sum(), (q, k, v)) for o in (out, wanted))
    torch.testing.assert_close(grads, exact)


def test_other_numbers_of_dimensions():
    q, k, v = inputs(2, 20, 8)
    out = flash_attn(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    torch.testing.assert_close(out, flash_attn(q, k, v, is_causal=True))


def test_refused_arguments_are_named():
    q, k, v = inputs(1, 2, 20, 8)
    mask = create_block_mask(window, None, None, 20, 20, "cpu")
    with pytest.raises(ValueError, match="mask_mod: got one with block_mask"):
        flash_attn(q, k, v, mask_mod=window, block_mask=mask)


def test_explain_shows_programs_and_blocks():
    q, k, v = inputs(1, 2, 64, 8)
    mask = create_block_mask(window, None, None, 64, 64, "cpu", BLOCK_SIZE=16)
    bias = torch.randn(64, requires_grad=True)
    report = explain(q, k, v, block_mask=mask, score_mod=lambda s, b, h, i, j: torch.tanh(s) + bias[j])
    text = str(report)
    assert "program of the score: 5 instructions (3 per column of keys, 2 per score)" in text
    assert "scatter_add" in text
    assert "blocks: 14 of 16 visited, 4 full, 10 partial" in text
    assert report.gradients == ("query", "key", "value", "captured")
    assert report.backward.allocates["dcaptured"] == 64 * q.element_size()


def test_splits_of_the_keys():
    q, k, v = (torch.randn(1, 2, n, 8) for n in (3, 700, 700))
    wanted = flash_attn(q, k, v, causal="lower_right")
    options = {"score_mod": lambda s, *_: s, "mask_mod": lambda b, h, i, j: i + 697 >= j}
    for splits in ({"num_splits": 1}, {"num_splits": 5}, {"unified_max": 0.0}):
        torch.testing.assert_close(flash_attn(q, k, v, **options, **splits), wanted)
