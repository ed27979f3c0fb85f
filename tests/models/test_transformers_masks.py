"""transformers' mask functions, read as patterns, hide the same keys as transformers' dense masks."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.0", reason="transformers 5 is not installed")

from transformers import masking_utils  # noqa: E402

from flash_attn_ext.integrations import transformers as integration  # noqa: E402
from flash_attn_ext.integrations.mask_pattern import Band, Chunks, PatternMask, read_pattern  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")


def causal_and(*functions):
    return masking_utils.and_masks(masking_utils.causal_mask_function, *functions)


NO_PADDING, LEFT_PADDING = torch.zeros(2, dtype=int), torch.tensor([0, 2])
MASK_FUNCTIONS = {
    "causal": (masking_utils.causal_mask_function, Band(-1, 0)),
    "everything": (masking_utils.bidirectional_mask_function, Band(-1, -1)),
    "window": (masking_utils.sliding_window_causal_mask_function(4), Band(3, 0)),
    "window_of_both_sides": (masking_utils.sliding_window_bidirectional_mask_function(3), Band(3, 3)),
    "chunks": (masking_utils.chunked_causal_mask_function(4, NO_PADDING), Band(-1, 0, Chunks(4, NO_PADDING))),
    "chunks_after_padding": (
        masking_utils.chunked_causal_mask_function(4, LEFT_PADDING),
        Band(-1, 0, Chunks(4, LEFT_PADDING)),
    ),
    "chunks_of_both_sides": (masking_utils.chunked_overlay(4, NO_PADDING), Band(-1, -1, Chunks(4, NO_PADDING))),
    "chunk_larger_than_the_sequence": (
        masking_utils.chunked_causal_mask_function(64, LEFT_PADDING),
        Band(-1, 0, Chunks(64, LEFT_PADDING)),
    ),
    "chunks_twice": (
        causal_and(masking_utils.chunked_overlay(4, NO_PADDING), masking_utils.chunked_overlay(3, NO_PADDING)),
        None,
    ),
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
def test_masks_equal_transformers(name, q_length, kv_length, q_offset, kv_offset, seen, padded):
    """In flash_attn with the pattern, each query attends to the keys that transformers' dense mask shows."""
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
    # As transformers calls it: masks of a user's function and chunked masks are never skipped.
    mask = integration.attention_mask(
        **arguments, allow_is_causal_skip=band is not None, allow_is_bidirectional_skip=band == Band(-1, -1)
    )
    # The values are unit vectors, so out is the weights.
    q, k = torch.randn(2, 1, q_length, 8), torch.randn(2, 1, kv_length, 8)
    v = torch.eye(kv_length).expand(2, 1, kv_length, kv_length)
    module = torch.nn.Module()
    module.is_causal = band != Band(-1, -1)
    out, _ = integration.attention(module, q, k, v, mask)
    shown, expected = out.transpose(1, 2) > 0, expected.expand(2, 1, q_length, kv_length)
    if isinstance(mask, PatternMask):
        assert mask.shape == expected.shape
        assert mask.dtype == torch.bool
    if isinstance(mask, PatternMask) and mask.pattern.sequences is not None:  # padding attends to padding
        real = padding[:, None, q_offset : q_offset + q_length]
        shown, expected = shown[real], expected[real]
    assert torch.equal(shown, expected)


def test_an_operation_on_a_pattern_uses_the_dense_mask():
    mask = integration.attention_mask(2, 8, 8, mask_function=masking_utils.sliding_window_causal_mask_function(3))
    assert isinstance(mask, PatternMask)
    expected = torch.ones(8, 8, dtype=torch.bool).tril().triu(-2).expand(2, 1, 8, 8)
    for operation in (lambda m: m[:, :, 2:, :6], lambda m: m & m, lambda m: m.float(), lambda m: torch.cat([m, m], -1)):
        got = operation(mask)
        assert type(got) is torch.Tensor
        assert torch.equal(got, operation(expected))
