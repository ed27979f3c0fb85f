"""torchtitan's Llama 3 under activate(): its two ways of attention train on CPU, which torch alone refuses."""

import pytest
import torch
import torch.nn.functional as F

import flash_attn_ext

pytest.importorskip("torchtitan", reason="needs torchtitan and triton, in an environment of its own")
pytest.importorskip("triton", reason="torchtitan's imports need triton")
attention = pytest.importorskip("torchtitan.models.common.attention")
llama3 = pytest.importorskip("torchtitan.models.llama3")

SEQLEN = 64
TOKENS = torch.arange(SEQLEN).mul(37).remainder(2048)[None]
POSITIONS = torch.cat([torch.arange(24), torch.arange(SEQLEN - 24)])[None]  # two documents


def make_model(backend):
    """torchtitan's debug model: 6 layers, 16 heads of dimension 16."""
    model = llama3._debugmodel(backend).build()
    torch.manual_seed(0)
    model.init_weights()
    return model


def step(model):
    """The logits, and all gradients in one vector."""
    logits = model(TOKENS, positions=POSITIONS, attention_masks=model.get_attention_masks(POSITIONS))
    F.cross_entropy(logits.flatten(0, 1), TOKENS.flatten()).backward()
    return logits.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def dense(q, k, v, *_, scale=None, **_options):
    """varlen_attn of these documents, by a dense mask in float32."""
    document = (POSITIONS[0] == 0).cumsum(0)
    mask = (document[:, None] == document) & torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril()
    q, k, v = (tensor.transpose(0, 1).float() for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale).transpose(0, 1).bfloat16()


@pytest.mark.parametrize(("backend", "operator"), [("varlen", "_flash_attention_backward"), ("flex", "flex_attention")])
def test_a_training_step(backend, operator, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(attention, "varlen_attn", dense)
        expected = step(make_model("varlen"))
    with pytest.raises(NotImplementedError):
        step(make_model(backend))
    flash_attn_ext.activation_report(reset=True)
    with flash_attn_ext.activated():
        found = step(make_model(backend))
    # torchtitan rounds q, k and v to bfloat16, and ours accumulates in float32.
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() < 2e-3 * theirs.abs().max()
    assert operator in str(flash_attn_ext.activation_report())
