"""Models equal transformers' eager attention: latent caches, chosen keys, a sink for each query, chunks."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

from transformers_helpers import GROUPED, SMALL, assert_same, make_pair, tokens  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

MOE = dict(
    SMALL, num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=2, num_experts_per_tok=1, n_group=1,
    topk_group=1, n_shared_experts=1,
)  # fmt: skip
LATENT = dict(kv_lora_rank=8, q_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)
INDEXER = dict(index_n_heads=2, index_head_dim=8, index_topk=4)  # 4 keys of 20
DENSE_FIRST = dict(first_k_dense_replace=1)
MODELS = {
    "deepseek_v2": ("DeepseekV2Config", MOE | LATENT | DENSE_FIRST | dict(topk_method="greedy")),
    "deepseek_v3": ("DeepseekV3Config", MOE | LATENT | DENSE_FIRST),
    "deepseek_v32": ("DeepseekV32Config", MOE | LATENT | DENSE_FIRST | INDEXER),
    "glm_moe_dsa": ("GlmMoeDsaConfig", MOE | LATENT | DENSE_FIRST | INDEXER),
    "mistral_large4": ("MistralLarge4TextConfig", MOE | LATENT | DENSE_FIRST | INDEXER),
    "axk2": ("AXK2Config", MOE | LATENT | INDEXER),
    "hy_v4": ("HYV4Config", MOE | LATENT | INDEXER | dict(head_dim=8)),
    "dots3_note": ("Dots3NoteTextConfig", MOE | LATENT | INDEXER),
    "deepseek_v4": (
        "DeepseekV4Config",
        SMALL | dict(
            head_dim=8, partial_rotary_factor=0.5, q_lora_rank=16, num_hidden_layers=3, sliding_window=6, o_groups=2,
            o_lora_rank=8, hc_mult=2, hc_sinkhorn_iters=2, n_routed_experts=2, num_experts_per_tok=1,
            moe_intermediate_size=16, mlp_layer_types=["moe"] * 3, index_n_heads=2, index_head_dim=8, index_topk=2,
            layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
            compress_rates={"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        ),
    ),
    "youtu": ("YoutuConfig", SMALL | LATENT | dict(num_key_value_heads=4)),
    "minicpm3": ("MiniCPM3Config", SMALL | LATENT | dict(num_key_value_heads=4, dim_model_base=32)),
    "mistral4": ("Mistral4Config", MOE | LATENT | DENSE_FIRST),
    "axk1": ("AXK1Config", MOE | LATENT | dict(mlp_layer_types=["dense", "sparse"])),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", MOE | LATENT | dict(mlp_layer_types=["dense", "sparse"])),
    "sarvam_mla": ("SarvamMLAConfig", MOE | LATENT | DENSE_FIRST | dict(q_lora_rank=None)),
    "hy_v4_vl": (
        "HYV4VLTextConfig",
        MOE | LATENT | INDEXER | dict(
            head_dim=8, rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[1, 1, 0]),
        ),
    ),
    "longcat_flash": (
        "LongcatFlashConfig",
        LATENT | {name: SMALL[name] for name in SMALL if name not in ("intermediate_size", "num_hidden_layers")} | dict(
            num_layers=1, head_dim=4, ffn_hidden_size=48, expert_ffn_hidden_size=16, moe_topk=2, n_routed_experts=2,
            zero_expert_num=1,
        ),
    ),
    "bailing_hybrid": (
        "BailingHybridConfig",
        MOE | LATENT | DENSE_FIRST | dict(
            q_lora_rank=None, head_dim=8, num_local_experts=2, layer_types=["full_attention", "linear_attention"],
            num_mtp_layers=0,
        ),
    ),
    "minimax_m3": (
        "MiniMaxM3VLTextConfig",
        SMALL | dict(
            num_key_value_heads=2, head_dim=8, dense_intermediate_size=32, num_experts_per_tok=1, num_local_experts=2,
            index_n_heads=2, index_head_dim=8, index_block_size=4, index_topk_blocks=2,
            layer_types=["full_attention", "minimax_m3_sparse"],
        ),
    ),
    "inkling2": (
        "Inkling2TextConfig",
        SMALL | dict(
            num_key_value_heads=2, head_dim=8, swa_num_attention_heads=4, swa_num_key_value_heads=2, swa_head_dim=8,
            sliding_window_size=6, rel_extent=8, d_rel=4, layer_types=["hybrid_sliding", "hybrid"],
            n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=16, n_shared_experts=1,
            unpadded_vocab_size=48,
        ),
    ),
    "glm5_next": (
        "Glm5NextTextConfig",
        MOE | LATENT | INDEXER | dict(
            qk_rope_head_dim=0, index_kpool=2, layer_types=["indexed_attention", "linear_attention"],
            mlp_layer_types=["dense", "sparse"], linear_head_dim=8, linear_num_heads=4, hc_mult=2, hc_sinkhorn_iters=2,
        ),
    ),
    "qwen4_exp": (
        "Qwen4ExpTextConfig",
        SMALL | dict(
            num_key_value_heads=2, head_dim=8, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
            linear_num_value_heads=4, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=2,
            num_experts_per_tok=1, layer_types=["linear_attention", "indexed_attention"], hc_count=2, hc_lowrank=8,
            indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=4, indexer_compress_ratio=2,
        ),
    ),
    "llama4": (
        "Llama4TextConfig",
        GROUPED | dict(
            attention_chunk_size=6, num_local_experts=2, intermediate_size_mlp=32,
            layer_types=["chunked_attention", "full_attention"],
        ),
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        SMALL | LATENT | dict(
            num_key_value_heads=4, q_lora_rank=None, moe_intermediate_size=16, num_experts=2, num_experts_per_token=1,
            layer_types=["full_attention", "linear_attention"], linear_head_dim=8, linear_num_heads=4,
        ),
    ),
}  # fmt: skip
STATEFUL = {
    "kimi_linear",
    "bailing_hybrid",
    "deepseek_v4",
    "glm5_next",
    "qwen4_exp",
}  # transformers refuses assisted generation
CHOSEN = {
    **dict.fromkeys(("deepseek_v32", "glm_moe_dsa", "mistral_large4", "axk2", "hy_v4", "hy_v4_vl"), "key_indices"),
    "dots3_note": "key_indices",
    "minimax_m3": "key_block_indices",
}  # fmt: skip


def build(name):
    config_class, options = MODELS[name]
    if name == "glm5_next":
        vision = dict(hidden_size=16, intermediate_size=16, depth=1, num_heads=2, out_hidden_size=32)
        config = transformers.Glm5NextConfig(text_config=options, vision_config=vision)
        return transformers.Glm5NextForConditionalGeneration(config)
    config = getattr(transformers, config_class)(**options)
    if name == "mistral4":  # Mistral4Config is the text part of a larger model: AutoModelForCausalLM does not know it.
        from transformers.models.mistral4.modeling_mistral4 import Mistral4ForCausalLM

        return Mistral4ForCausalLM._from_config(config)
    if name == "hy_v4_vl":
        vision = dict(
            hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, out_hidden_size=32
        )
        return transformers.HYV4VLForConditionalGeneration(
            transformers.HYV4VLConfig(text_config=config, vision_config=vision)
        )
    if name != "mistral_large4":
        return transformers.AutoModelForCausalLM.from_config(config)
    vision = transformers.PixtralVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = transformers.MistralLarge4Config(text_config=config, vision_config=vision)
    return transformers.AutoModelForImageTextToText.from_config(config)


@pytest.mark.filterwarnings("ignore:.*RoPE.*")
@pytest.mark.parametrize("padded", [None, "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients(name, padded, given_masks):
    eager, ours = make_pair(lambda: build(name))
    ids, real = tokens(), torch.ones(2, 20, dtype=torch.bool)
    if padded:
        real[1, slice(0, 7) if padded == "left" else slice(13, 20)] = False
    if name == "minimax_m3" and padded == "left":
        # Its indexer scores padding, too, and eager's rows of padding are averages of all values. sdpa's are 0 as ours.
        eager.set_attn_implementation("sdpa")
    inputs = {"input_ids": ids, "attention_mask": real.long() if padded else None}
    assert_same(eager, ours, lambda model: model(**inputs).logits, real)
    assert given_masks
    assert any(CHOSEN[name] in options for *_, options in given_masks) if name in CHOSEN else True


@pytest.mark.parametrize("name", MODELS)
def test_generation_gives_the_same_tokens(name):
    eager, ours = make_pair(lambda: build(name))
    ids, real = tokens(2, 9), torch.ones(2, 9, dtype=torch.long)
    real[1, :4] = 0
    options = dict(attention_mask=real, max_new_tokens=10, do_sample=False, disable_compile=True)
    expected = eager.generate(ids, **options)
    assert torch.equal(ours.generate(ids, **options), expected)
    assert expected[0].unique().numel() > 3  # different tokens, so the comparison is not trivial


@pytest.mark.parametrize("name", sorted(MODELS.keys() - STATEFUL))
def test_assisted_generation_gives_the_same_tokens(name):
    """Guesses from the prompt: several tokens are checked at once, and the cache forgets the wrong ones."""
    eager, ours = make_pair(lambda: build(name))
    ids = tokens(1, 4).repeat(1, 3)
    # Not compared with plain generation: transformers 5.23 gives other tokens for glm_moe_dsa and dots3_note.
    options = dict(max_new_tokens=10, do_sample=False, disable_compile=True, prompt_lookup_num_tokens=3)
    assert torch.equal(ours.generate(ids, **options), eager.generate(ids, **options))


@pytest.mark.parametrize("name", ["deepseek_v32", "minimax_m3"])
def test_chosen_keys_with_dropout(name, given_masks):
    """Dropout in training, and none in eval()."""
    model = make_pair(lambda: build(name))[1]
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    ids = tokens()
    expected = model(ids).logits
    given_masks.clear()
    model.train()
    draws = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        draws.append(model(ids).logits)
    used = [options for *_, options in given_masks if CHOSEN[name] in options]
    assert used
    assert all(options["dropout_p"] == 0.5 for options in used)
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(model.eval()(ids).logits, expected)
