"""transformers' models on flash_attn_ext: tiny random ones give what their eager attention gives."""

import copy
import importlib

import pytest
import torch
from paths import ROOT

import flash_attn_ext

transformers = pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

from transformers import masking_utils  # noqa: E402

from flash_attn_ext.integrations import transformers as integration  # noqa: E402
from flash_attn_ext.integrations.mask_pattern import PatternMask, read_pattern  # noqa: E402

NAME = integration.register()
SMALL = dict(
    vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
GROUPED = dict(SMALL, num_key_value_heads=2, head_dim=8)

pytestmark = pytest.mark.usefixtures("one_thread")


def tokens(batch=2, length=20):
    return torch.randint(2, 48, (batch, length))


def decoder(config, **options):
    return lambda: transformers.AutoModelForCausalLM.from_config(config(**options))


DECODERS = {
    "llama": decoder(transformers.LlamaConfig, **GROUPED),
    "mistral_window": decoder(transformers.MistralConfig, **GROUPED, sliding_window=6),
    "gemma2_softcap_window": decoder(
        transformers.Gemma2Config, **GROUPED, sliding_window=6, attn_logit_softcapping=2.0, query_pre_attn_scalar=2
    ),
    "gemma3_window": decoder(
        transformers.Gemma3TextConfig, **GROUPED, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt_oss_sinks": decoder(
        transformers.GptOssConfig, **GROUPED, sliding_window=6, num_local_experts=2, num_experts_per_tok=1,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt2": decoder(
        transformers.GPT2Config, vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0,
        embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=1, eos_token_id=None,
    ),
}  # fmt: skip


def make_pair(build):
    """The same model with eager attention and with ours."""
    eager = build().eval()
    with torch.no_grad():
        for name, parameter in eager.named_parameters():
            if "sinks" in name or "relative_attention_bias" in name:
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.mul_(4)  # so that attention looks somewhere
    eager.set_attn_implementation("eager")
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation(NAME)
    return eager, ours


def assert_same(eager, ours, run, real=None):
    """Outputs where `real` is True, and the gradient of every parameter. `run` gives one tensor of (B, S, ...)."""
    results = []
    for model in (eager, ours):
        model.zero_grad()
        out = run(model)
        real = torch.ones(out.shape[:2], dtype=torch.bool) if real is None else real
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape) * real.view(*real.shape, *[1] * (out.dim() - 2))
        (out * weights).sum().backward()
        results.append((out.detach()[real], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (expected, expected_grads), (got, got_grads) = results
    torch.testing.assert_close(got, expected, atol=2e-5 * expected.abs().max().item(), rtol=1e-4)
    assert got_grads.keys() == expected_grads.keys()
    largest = max(grad.abs().max().item() for grad in expected_grads.values())
    for name, grad in expected_grads.items():
        # The gradient of a key's bias is 0 in exact arithmetic: all of it is rounding of larger numbers.
        scale = max(grad.abs().max().item(), 1e-2 * largest)
        torch.testing.assert_close(
            got_grads[name], grad, atol=2e-4 * scale, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture
def masks(monkeypatch):
    """What flash_attn and flash_attn_varlen were given as a mask and as options, call by call."""
    given = []

    def record(name):
        kernel = getattr(integration, name)

        def recorded(q, k, v, *args, **options):
            given.append((name, None if name == "flash_attn_varlen" else args[0], options))
            return kernel(q, k, v, *args, **options)

        monkeypatch.setattr(integration, name, recorded)

    record("flash_attn")
    record("flash_attn_varlen")
    return given


@pytest.fixture
def no_dense_masks(monkeypatch):
    """transformers' functions that make masks of S_q x S_k raise."""

    def refuse(*args, **options):
        raise AssertionError("a mask of S_q x S_k was made")

    monkeypatch.setattr(integration, "sdpa_mask", refuse)


@pytest.mark.parametrize("padded", [None, "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name, padded, masks, no_dense_masks):
    eager, ours = make_pair(DECODERS[name])
    ids, real = tokens(), torch.ones(2, 20, dtype=torch.bool)
    if padded:
        real[1, slice(0, 7) if padded == "left" else slice(13, 20)] = False
    inputs = {"input_ids": ids, "attention_mask": real.long() if padded else None}
    assert_same(eager, ours, lambda model: model(**inputs).logits, real)
    assert masks
    for _, mask, options in masks:  # nothing of S_q x S_k: at most the padding
        assert mask is None
        assert padded or options["key_mask"] is None
        assert ("sink" in options) == ("sinks" in name)
    if "window" in name:
        assert any(options.get("window") == (5, -1) for *_, options in masks)


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
    assert expected[0].unique().numel() > 3  # it says something


def bert_pair():
    config = transformers.BertConfig(**SMALL, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return make_pair(lambda: transformers.BertModel(config, add_pooling_layer=False))


@pytest.mark.parametrize("padded", [False, True])
def test_bert(padded, masks, no_dense_masks):
    eager, ours = bert_pair()
    ids, real = tokens(), torch.ones(2, 20, dtype=torch.bool)
    if padded:
        real[1, 13:] = False
    assert_same(eager, ours, lambda model: model(ids, attention_mask=real.long()).last_hidden_state, real)
    assert all(mask is None for _, mask, _ in masks)


@pytest.mark.parametrize("padded", [False, True])
def test_t5_with_position_bias(padded, masks, no_dense_masks):
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
    # The bias as it is, for all of the batch; the padding beside it.
    assert all(mask is None or len(mask) == 1 for _, mask, _ in masks)
    options = dict(attention_mask=real, max_new_tokens=8, do_sample=False)
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))


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


POSITIONS = torch.cat([torch.arange(12), torch.arange(8)])[None]
OFFSETS = torch.tensor([0, 12, 20], dtype=torch.int32)
# As transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True) gives them.
LENGTHS = dict(cu_seq_lens_q=OFFSETS, cu_seq_lens_k=OFFSETS, max_length_q=12, max_length_k=12)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *[(name, given) for name in ("llama", "mistral_window", "gemma2_softcap_window") for given in ({}, LENGTHS)],
        # Its mask does not hear of position_ids (transformers 5.23): only lengths tell.
        ("gpt_oss_sinks", LENGTHS),
    ],
)
def test_packed_sequences(name, given, masks, no_dense_masks):
    """By position_ids that begin again, through flash_attn_varlen; as each sequence alone."""
    eager, ours = make_pair(DECODERS[name])
    ids, options = tokens(1, 20), {ours: given, eager: {}}
    if "oss" in name:
        full = torch.block_diag(torch.ones(12, 12), torch.ones(8, 8)).tril()
        dense = {"full_attention": full, "sliding_attention": full.triu(-5)}
        options[eager]["attention_mask"] = {
            kind: torch.where(seen.bool(), 0.0, -torch.inf)[None, None] for kind, seen in dense.items()
        }

    def run(model):
        return model(ids, position_ids=POSITIONS, use_cache=False, **options[model]).logits

    assert_same(eager, ours, run)
    assert {function for function, *_ in masks} == {"flash_attn_varlen"}
    if "window" in name:
        assert any(options.get("window") == (5, -1) for *_, options in masks)
    for part in (slice(0, 12), slice(12, 20)):
        alone = eager(ids[:, part], use_cache=False).logits
        torch.testing.assert_close(run(ours)[:, part], alone, atol=1e-4, rtol=1e-4)


def test_packed_sequences_in_a_batch(masks, no_dense_masks):
    """No sequence goes on in the next row."""
    eager, ours = make_pair(DECODERS["mistral_window"])
    ids, positions = tokens(2, 20), torch.cat([POSITIONS, torch.cat([POSITIONS[:, 12:], POSITIONS[:, :12]], 1)])
    assert_same(eager, ours, lambda model: model(ids, position_ids=positions, use_cache=False).logits)
    assert {function for function, *_ in masks} == {"flash_attn_varlen"}


def test_sequences_that_lengths_alone_describe(masks):
    """transformers' models pass them on to the attention function."""
    layer = transformers.LlamaModel(transformers.LlamaConfig(**GROUPED)).layers[0].self_attn
    q, k = torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8)
    same = torch.block_diag(torch.ones(12, 12), torch.ones(8, 8)).bool()
    bias = torch.randn(1, 4, 20, 20)
    user = torch.rand(1, 1, 20, 20).add(torch.eye(20)) > 0.3
    window = integration.attention_mask(1, 20, 20, mask_function=masking_utils.sliding_window_causal_mask_function(4))
    other = integration.attention_mask(
        1, 20, 20, mask_function=masking_utils.packed_sequence_compatibility_function(
            masking_utils.causal_mask_function, torch.arange(20)[None] % 5, torch.arange(20)[None] // 5
        )
    )  # fmt: skip
    for mask, position_bias, dense in (
        (None, None, same.tril()),
        (window, None, same.tril().triu(-3)),
        (user, None, same & user),
        (None, bias, same.tril()),
        (torch.where(user, 0.0, -torch.inf), None, same & user),
        (other, None, same.tril() & torch.block_diag(*[torch.ones(5, 5)] * 4).bool()),
    ):
        out, _ = integration.attention(layer, q, k, k, mask, position_bias=position_bias, **LENGTHS)
        dense = dense if position_bias is None else torch.where(dense, position_bias, -torch.inf)
        expected = torch.nn.functional.scaled_dot_product_attention(q, k, k, dense, enable_gqa=True)
        torch.testing.assert_close(out, expected.transpose(1, 2))
    assert [function for function, *_ in masks[:2]] == ["flash_attn_varlen"] * 2


@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma2_softcap_window", "gpt_oss_sinks"])
def test_continuous_batching(name, masks):
    """The same tokens as each prompt alone, and nothing but packed sequences."""
    eager, ours = make_pair(DECODERS[name])
    prompts = [tokens(1, length)[0].tolist() for length in (3, 9, 14)]
    options = transformers.GenerationConfig(max_new_tokens=7, do_sample=False, eos_token_id=-1, pad_token_id=0)
    before = ours.config._attn_implementation
    with integration.continuous_batching(ours):
        results = ours.generate_batch(prompts, generation_config=options, progress_bar=False)
    assert ours.config._attn_implementation == before
    assert {function for function, *_ in masks} == {"flash_attn_varlen"}
    got = sorted(results.values(), key=lambda result: len(result.prompt_ids))
    for prompt, result in zip(prompts, got, strict=True):
        assert result.prompt_ids == prompt
        alone = eager.generate(torch.tensor([prompt]), max_new_tokens=7, do_sample=False)[0, len(prompt) :].tolist()
        assert result.generated_tokens == alone


def test_a_mask_of_four_dimensions_by_the_user():
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
    assert losses[0] != losses[1]  # other elements are dropped
    losses[0].backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.filterwarnings("ignore:.*use_return_dict.*")
def test_compiled():
    eager, ours = make_pair(DECODERS["gpt_oss_sinks"])
    ids, real = tokens(), torch.ones(2, 20, dtype=torch.long)
    real[1, 13:] = 0
    compiled = torch.compile(ours.model, backend="aot_eager")
    with torch.no_grad():
        got = compiled(ids, attention_mask=real, use_cache=False).last_hidden_state
        expected = eager.model(ids, attention_mask=real, use_cache=False).last_hidden_state
    torch.testing.assert_close(got[real.bool()], expected[real.bool()], atol=1e-4, rtol=1e-4)


def test_what_is_refused():
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
    importlib.import_module("train_transformers").main(["--seconds", "0", "--context", "32", "--batch-size", "1"])
    line = capsys.readouterr().out.splitlines()[-1]
    assert float(line.split()[-1]) < 1e-3, line  # by how much the losses differ


def test_flash_attn_ext_does_not_need_transformers():
    assert not any("transformers" in str(vars(module)) for module in (flash_attn_ext.functional, flash_attn_ext.patch))
    assert "flash" not in NAME  # transformers would look for flash-attention
    assert NAME in transformers.AttentionInterface().valid_keys()


# Masks.


def causal_and(*functions):
    return masking_utils.and_masks(masking_utils.causal_mask_function, *functions)


MASK_FUNCTIONS = {
    "causal": (masking_utils.causal_mask_function, (-1, 0)),
    "everything": (masking_utils.bidirectional_mask_function, (-1, -1)),
    "window": (masking_utils.sliding_window_causal_mask_function(4), (3, 0)),
    "window_of_both_sides": (masking_utils.sliding_window_bidirectional_mask_function(3), (3, 3)),
    "chunks": (masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=int)), None),
    "of_the_user": (causal_and(lambda b, h, q, k: k != 2), None),
    "or": (
        masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.sliding_window_overlay(2)),
        None,
    ),
}


@pytest.mark.parametrize("name", MASK_FUNCTIONS)
@pytest.mark.parametrize(
    ("q_length", "kv_length", "q_offset", "kv_offset", "seen"),
    [
        (6, 6, 0, 0, 6),  # training
        (1, 9, 8, 0, 9),  # decoding
        (3, 9, 6, 0, 9),  # several tokens at once
        (6, 12, 0, 0, 6),  # the first tokens into a static cache
        (1, 12, 6, 0, 7),  # decoding from it
        (2, 5, 7, 4, 9),  # a window's cache, which forgot 4 keys
        (5, 3, 0, 0, 3),  # more queries than keys
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_masks_are_those_of_transformers(name, q_length, kv_length, q_offset, kv_offset, seen, padded):
    """flash_attn with the pattern sees the keys that transformers' dense mask shows."""
    mask_function, band = MASK_FUNCTIONS[name]
    assert read_pattern(mask_function) == band
    padding = torch.ones(2, seen, dtype=torch.bool)
    if padded:
        padding[1, :2] = False
    arguments = dict(
        batch_size=2, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=padding,
    )  # fmt: skip
    expected = masking_utils.sdpa_mask(**arguments, allow_is_causal_skip=False)
    # As transformers asks: a function of the user's, and what is laid over the diagonal, is never skipped.
    mask = integration.attention_mask(
        **arguments, allow_is_causal_skip=band is not None, allow_is_bidirectional_skip=band == (-1, -1)
    )
    # out is one-hot in the keys, so that it shows the weights.
    q, k = torch.randn(2, 1, q_length, 8), torch.randn(2, 1, kv_length, 8)
    v = torch.eye(kv_length).expand(2, 1, kv_length, kv_length)
    module = torch.nn.Module()
    module.is_causal = band != (-1, -1)
    out, _ = integration.attention(module, q, k, v, mask)
    assert torch.equal(out.transpose(1, 2) > 0, expected.expand(2, 1, q_length, kv_length))
    if isinstance(mask, PatternMask):
        assert mask.shape == expected.shape
        assert mask.dtype == torch.bool


def test_a_pattern_is_dense_as_soon_as_its_values_are_needed():
    mask = integration.attention_mask(2, 8, 8, mask_function=masking_utils.sliding_window_causal_mask_function(3))
    assert isinstance(mask, PatternMask)
    expected = torch.ones(8, 8, dtype=torch.bool).tril().triu(-2).expand(2, 1, 8, 8)
    for operation in (lambda m: m[:, :, 2:, :6], lambda m: m & m, lambda m: m.float(), lambda m: torch.cat([m, m], -1)):
        got = operation(mask)
        assert type(got) is torch.Tensor
        assert torch.equal(got, operation(expected))
