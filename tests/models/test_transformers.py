"""transformers' models on flash_attn_ext: tiny random models return the results of their eager attention."""

import importlib

import pytest
import torch
from paths import ROOT

import flash_attn_ext

transformers = pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

from transformers_helpers import DECODERS, GROUPED, NAME, SMALL, assert_same, make_pair, tokens  # noqa: E402

from flash_attn_ext.integrations import transformers as integration  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("padded", [None, "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name, padded, given_masks, no_dense_masks):
    eager, ours = make_pair(DECODERS[name])
    ids, real = tokens(), torch.ones(2, 20, dtype=torch.bool)
    if padded:
        real[1, slice(0, 7) if padded == "left" else slice(13, 20)] = False
    inputs = {"input_ids": ids, "attention_mask": real.long() if padded else None}
    assert_same(eager, ours, lambda model: model(**inputs).logits, real)
    assert given_masks
    for _, mask, options in given_masks:  # no S_q x S_k mask, at most the padding
        assert mask is None
        assert padded or options["key_mask"] is None
        assert ("sink" in options) == ("sinks" in name)
    if "window" in name:
        assert any(options.get("window") == (5, -1) for *_, options in given_masks)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generation_gives_the_same_tokens(name, cache):
    eager, ours = make_pair(DECODERS[name])
    ids, real = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    real[1, :4] = 0
    options = dict(attention_mask=real, max_new_tokens=12, do_sample=False, disable_compile=True)
    if cache == "static":
        options["cache_implementation"] = "static"
    expected = eager.generate(ids, **options)
    assert torch.equal(ours.generate(ids, **options), expected)
    assert expected[0].unique().numel() > 3  # different tokens, so the comparison is not trivial


def bert_pair():
    config = transformers.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return make_pair(lambda: transformers.BertModel(config, add_pooling_layer=False))


@pytest.mark.parametrize("padded", [False, True])
def test_bert(padded, given_masks, no_dense_masks):
    eager, ours = bert_pair()
    ids, real = tokens(), torch.ones(2, 20, dtype=torch.bool)
    if padded:
        real[1, 13:] = False
    assert_same(eager, ours, lambda model: model(ids, attention_mask=real.long()).last_hidden_state, real)
    assert all(mask is None for _, mask, _ in given_masks)


@pytest.mark.parametrize("padded", [False, True])
def test_t5_with_position_bias(padded, given_masks, no_dense_masks):
    config = transformers.T5Config(
        vocab_size=48, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=None,
        relative_attention_num_buckets=8, relative_attention_max_distance=16,
    )  # fmt: skip
    eager, ours = make_pair(lambda: transformers.T5ForConditionalGeneration(config))
    ids, targets, real = tokens(), tokens(2, 11), torch.ones(2, 20, dtype=torch.long)
    if padded:
        real[1, 12:] = 0
    assert_same(eager, ours, lambda model: model(input_ids=ids, attention_mask=real, decoder_input_ids=targets).logits)
    # One bias for the whole batch; the padding is not merged into it.
    assert all(mask is None or len(mask) == 1 for _, mask, _ in given_masks)
    options = dict(attention_mask=real, max_new_tokens=8, do_sample=False)
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))


def test_a_causal_decoder_that_does_not_say_so():
    """NLLB-MoE's decoder modules have is_causal False, so without a mask they would see later tokens."""
    config = transformers.NllbMoeConfig(
        vocab_size=48, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, num_experts=2,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=40, dropout=0.0,
        encoder_sparse_step=0, decoder_sparse_step=0, attention_dropout=0.0, activation_dropout=0.0,
    )  # fmt: skip
    eager, ours = make_pair(lambda: transformers.NllbMoeModel(config))
    assert not ours.decoder.layers[0].self_attn.is_causal
    ids, targets = tokens(2, 9), tokens(2, 11)
    assert_same(eager, ours, lambda model: model(input_ids=ids, decoder_input_ids=targets)[0])

    traced = torch.compile(integration.attention_mask, backend="eager", fullgraph=True)
    assert torch.equal(traced(1, 5, 5, config=config), torch.ones(1, 1, 5, 5, dtype=torch.bool).tril())
    assert not integration._has_causal_modules(type(config))
    assert integration._has_causal_modules(transformers.LlamaModel.config_class)


def test_whisper():
    config = transformers.WhisperConfig(
        vocab_size=48, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=30,
        max_target_positions=40, dropout=0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    eager, ours = make_pair(lambda: transformers.WhisperForConditionalGeneration(config))
    audio, targets = torch.randn(2, 8, 60), tokens(2, 11)
    assert_same(eager, ours, lambda model: model(input_features=audio, decoder_input_ids=targets).logits)


def test_vit():
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    eager, ours = make_pair(lambda: transformers.ViTModel(config, add_pooling_layer=False))
    image = torch.randn(2, 3, 16, 16)
    assert_same(eager, ours, lambda model: model(image).last_hidden_state)


def test_clip():
    text = dict(SMALL, max_position_embeddings=20, eos_token_id=2)
    vision = dict(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4
    )
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    eager, ours = make_pair(lambda: transformers.CLIPModel(config))
    image, ids, real = torch.randn(2, 3, 16, 16), tokens(), torch.ones(2, 20, dtype=torch.long)
    real[1, 13:] = 0

    def run(model):
        result = model(pixel_values=image, input_ids=ids, attention_mask=real)
        return torch.stack([result.text_embeds, result.image_embeds], 1)

    assert_same(eager, ours, run)


def test_a_users_mask_of_four_dimensions():
    eager, ours = make_pair(DECODERS["llama"])
    mask = torch.ones(2, 1, 20, 20).tril().masked_fill(torch.rand(2, 1, 20, 20) < 0.3, 0)
    mask.diagonal(dim1=-2, dim2=-1).fill_(1)
    mask = torch.where(mask.bool(), 0.0, torch.finfo(torch.float32).min)
    ids = tokens()
    assert_same(eager, ours, lambda model: model(ids, attention_mask=mask).logits)


def test_bfloat16_and_dropout_train():
    config = transformers.LlamaConfig(**GROUPED, attention_dropout=0.2)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).train()
    model.set_attn_implementation(NAME)
    ids = tokens()
    losses = [model(ids, labels=ids).loss for _ in range(2)]
    assert losses[0] != losses[1]  # different elements are dropped
    losses[0].backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.filterwarnings("ignore:.*use_return_dict.*")
def test_compiled():
    one_layer = dict(GROUPED, num_hidden_layers=1, layer_types=["sliding_attention"], sliding_window=6)
    config = transformers.GptOssConfig(**one_layer, num_local_experts=2, num_experts_per_tok=1)
    eager, ours = make_pair(lambda: transformers.AutoModelForCausalLM.from_config(config))
    ids, real = tokens(), torch.ones(2, 20, dtype=torch.long)
    real[1, 13:] = 0
    compiled = torch.compile(ours.model, backend="aot_eager")
    with torch.no_grad():
        got = compiled(ids, attention_mask=real, use_cache=False).last_hidden_state
        expected = eager.model(ids, attention_mask=real, use_cache=False).last_hidden_state
    torch.testing.assert_close(got[real.bool()], expected[real.bool()], atol=1e-4, rtol=1e-4)


def test_errors():
    model = transformers.LlamaModel(transformers.LlamaConfig(**GROUPED))
    model.set_attn_implementation(NAME)
    layer = model.layers[0].self_attn
    q = torch.randn(1, 4, 6, 8)
    with pytest.raises(ValueError, match=r"output_attentions: got True .*; allowed: False"):
        integration.attention(layer, q, q, q, None, output_attentions=True)
    with pytest.raises(ValueError, match=r"cu_seq_lens_q, cu_seq_lens_k: got one of them; allowed: both or none"):
        integration.attention(layer, q, q, q, None, cu_seq_lens_q=torch.tensor([0, 2, 6]))
    with pytest.raises(ValueError, match=r"attention_mask: got shape \(1, 6\); allowed: 4 dimensions"):
        integration.attention(layer, q, q, q, torch.ones(1, 6))


def test_the_example_trains_both_models_alike(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    text = importlib.import_module("stdlib_text")
    files = text.source_files()[:20]
    monkeypatch.setattr(text, "source_files", lambda: files)
    importlib.import_module("train_transformers").main(["--seconds", "0", "--context", "32", "--batch-size", "1"])
    line = capsys.readouterr().out.splitlines()[-1]
    assert float(line.split()[-1]) < 1e-3, line  # the difference of the losses


def test_flash_attn_ext_does_not_need_transformers():
    assert not any(
        "transformers" in str(vars(module)) for module in (flash_attn_ext.functional, flash_attn_ext.nn.replacement)
    )
    assert "flash" not in NAME  # transformers would look for flash-attention
    assert NAME in transformers.AttentionInterface().valid_keys()
