"""From padded batches to packed rows and back, as flash_attn.bert_padding has it."""

import torch
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows ``indices`` of ``input`` (N, ...). Differentiable."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...) with ``values`` in rows ``indices`` and zeros elsewhere. Differentiable."""
    output = values.new_zeros(first_axis_dim, *values.shape[1:])
    return output.index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of a padded batch that a mask keeps, packed.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: (B, S), bool or int: 1 is a token.
        unused_mask: (B, S): rows that get a place, but are not in use. None: there are none.

    Returns:
        rows (T, ...); indices (T) of them in the flattened batch; cu_seqlens (B + 1), int32; the longest sequence's
        length; seqused (B), int32: how many rows of each sequence are in use.
    """
    every = attention_mask if unused_mask is None else attention_mask + unused_mask
    seqused = attention_mask.sum(-1, dtype=torch.int32)
    lengths = every.sum(-1, dtype=torch.int32)
    indices = every.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, seqused


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The rows of a batch whose elements are several short sequences each, packed.

    Args:
        hidden_states: (B, S, ...).
        attention_mask_in_length: (B, S), int. The numbers above 0 are the lengths of an element's sequences, which lie
            one after another from its start. ``[2, 3, 0, 0, 0, 0]``: rows 0 to 1, rows 2 to 4, and a row of padding.

    Returns:
        rows (T, ...); indices (T) of them in the flattened batch; cu_seqlens of all short sequences, int32; the length
        of the longest sequence.
    """
    lengths = attention_mask_in_length[attention_mask_in_length > 0]
    filled = attention_mask_in_length.sum(-1, keepdim=True)
    columns = torch.arange(attention_mask_in_length.shape[-1], device=filled.device)
    indices = (columns < filled).flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    longest = int(lengths.max()) if len(lengths) else 0
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Undoes :func:`unpad_input`: (T, ...) as (batch, seqlen, ...), zeros where there was no token."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
