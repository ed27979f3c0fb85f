"""Tiny random models of transformers, with its eager attention and with ours."""

import copy

import torch
import transformers

from flash_attn_ext.integrations import transformers as integration

NAME = integration.register()
SMALL = dict(
    vocab_size=48, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=None,
)  # fmt: skip
GROUPED = dict(SMALL, num_key_value_heads=2, head_dim=8)


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
    "llama4_chunks": decoder(
        transformers.Llama4TextConfig, **GROUPED, attention_chunk_size=6, num_local_experts=2, intermediate_size_mlp=32,
        layer_types=["chunked_attention", "full_attention"],
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
                parameter.mul_(4)  # so that the attention weights differ
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
