"""transformers' packed inputs and continuous batching on flash_attn_ext."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

from transformers import masking_utils  # noqa: E402
from transformers_helpers import DECODERS, GROUPED, assert_same, make_pair, tokens  # noqa: E402

from flash_attn_ext.integrations import transformers as integration  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

POSITIONS = torch.cat([torch.arange(12), torch.arange(8)])[None]
OFFSETS = torch.tensor([0, 12, 20], dtype=torch.int32)
# The keywords that transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True) makes.
LENGTHS = dict(cu_seq_lens_q=OFFSETS, cu_seq_lens_k=OFFSETS, max_length_q=12, max_length_k=12)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        *[(name, given) for name in ("llama", "mistral_window", "gemma2_softcap_window") for given in ({}, LENGTHS)],
        # Its mask function does not get position_ids (transformers 5.23), so only the lengths describe sequences.
        ("gpt_oss_sinks", LENGTHS),
    ],
)
def test_packed_sequences(name, given, given_masks, no_dense_masks):
    """position_ids that restart run through flash_attn_varlen. The result equals the result of each sequence alone."""
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
    assert {function for function, *_ in given_masks} == {"flash_attn_varlen"}
    if "window" in name:
        assert any(options.get("window") == (5, -1) for *_, options in given_masks)
    for part in (slice(0, 12), slice(12, 20)):
        alone = eager(ids[:, part], use_cache=False).logits
        torch.testing.assert_close(run(ours)[:, part], alone, atol=1e-4, rtol=1e-4)


def test_packed_sequences_in_a_batch(given_masks, no_dense_masks):
    """No sequence continues in the next row of the batch."""
    eager, ours = make_pair(DECODERS["mistral_window"])
    ids, positions = tokens(2, 20), torch.cat([POSITIONS, torch.cat([POSITIONS[:, 12:], POSITIONS[:, :12]], 1)])
    assert_same(eager, ours, lambda model: model(ids, position_ids=positions, use_cache=False).logits)
    assert {function for function, *_ in given_masks} == {"flash_attn_varlen"}


def test_sequences_described_only_by_lengths(given_masks):
    """transformers' models pass them on to the attention function."""
    layer = transformers.LlamaModel(transformers.LlamaConfig(**GROUPED)).layers[0].self_attn
    q, k = torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8)
    same = torch.block_diag(torch.ones(12, 12), torch.ones(8, 8)).bool()
    bias = torch.randn(1, 4, 20, 20)
    user = torch.rand(1, 1, 20, 20).add(torch.eye(20)) > 0.3
    window = integration.attention_mask(1, 20, 20, mask_function=masking_utils.sliding_window_causal_mask_function(4))
    other = integration.attention_mask(
        1, 20, 20, mask_function=masking_utils.and_masks(
            masking_utils.remap_positions_for_packed_sequence(
                masking_utils.causal_mask_function, torch.arange(20)[None] % 5
            ),
            masking_utils.packed_sequence_mask_function(torch.arange(20)[None] // 5),
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
    assert [function for function, *_ in given_masks[:2]] == ["flash_attn_varlen"] * 2


@pytest.mark.parametrize("more", ["packed", "remapped"])
def test_a_mask_with_a_third_part_loses_none(more):
    numbers, other_numbers = torch.arange(20)[None] // 10, torch.arange(20)[None] // 5
    parts = [
        masking_utils.remap_positions_for_packed_sequence(
            masking_utils.causal_mask_function, torch.arange(20)[None] % 10
        ),
        masking_utils.packed_sequence_mask_function(numbers),
    ]
    if more == "packed":
        parts.insert(1, masking_utils.packed_sequence_mask_function(other_numbers))
    else:
        window = masking_utils.sliding_window_causal_mask_function(3)
        parts.insert(0, masking_utils.remap_positions_for_packed_sequence(window, torch.arange(20)[None] % 10))
    both = masking_utils.and_masks(*parts)
    mask = integration.attention_mask(1, 20, 20, mask_function=both, allow_is_causal_skip=False)
    i, j = torch.arange(20)[:, None], torch.arange(20)[None]
    extra = i // 5 == j // 5 if more == "packed" else i - j < 3
    q = torch.randn(1, 4, 20, 8)
    layer = transformers.LlamaModel(transformers.LlamaConfig(**GROUPED)).layers[0].self_attn
    out, _ = integration.attention(layer, q, q, q, mask)
    dense = (i >= j) & (i // 10 == j // 10) & extra
    expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, dense)
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize("name", ["gemma2_softcap_window", "gpt_oss_sinks"])
def test_continuous_batching(name, given_masks):
    """The same tokens as for each prompt alone, and only calls of packed sequences."""
    eager, ours = make_pair(DECODERS[name])
    prompts = [tokens(1, length)[0].tolist() for length in (3, 9, 14)]
    options = transformers.GenerationConfig(max_new_tokens=7, do_sample=False, eos_token_id=-1, pad_token_id=0)
    before = ours.config._attn_implementation
    small = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)  # not most of the memory
    with integration.continuous_batching(ours):
        results = ours.generate_batch(
            prompts, generation_config=options, continuous_batching_config=small, progress_bar=False
        )
    assert ours.config._attn_implementation == before
    assert {function for function, *_ in given_masks} == {"flash_attn_varlen"}
    got = sorted(results.values(), key=lambda result: len(result.prompt_ids))
    for prompt, result in zip(prompts, got, strict=True):
        assert result.prompt_ids == prompt
        alone = eager.generate(torch.tensor([prompt]), max_new_tokens=7, do_sample=False)[0, len(prompt) :].tolist()
        assert result.generated_tokens == alone
