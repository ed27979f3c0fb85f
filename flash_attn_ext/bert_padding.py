"""Converts padded batches to packed rows and back: the functions of flash_attn.bert_padding."""

import torch
from torch import Tensor


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Returns rows ``indices`` of ``input`` (N, ...). Differentiable."""
    return input[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Returns (first_axis_dim, ...) with ``values`` in rows ``indices`` and zeros elsewhere. Differentiable."""
    output = values.new_zeros(first_axis_dim, *values.shape[1:])
    return output.index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the rows of a padded batch that a mask selects.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: (B, S), bool or int: 1 is a token.
        unused_mask: (B, S): more rows, which are packed but not in use. None: no more rows.

    Returns:
        rows (T, ...); their indices (T) in the flattened batch; cu_seqlens (B + 1), int32; the length of the longest
        sequence; seqused (B), int32. seqused is the number of rows in use of each sequence.
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
    """Packs a batch that has several short sequences in each element.

    Args:
        hidden_states: (B, S, ...).
        attention_mask_in_length: (B, S), int. Its positive numbers are the lengths of an element's sequences, which
            follow each other from the element's start. ``[2, 3, 0, 0, 0, 0]``: rows 0 to 1 are a sequence, rows 2 to 4
            are another sequence, and row 5 is padding.

    Returns:
        rows (T, ...); their indices (T) in the flattened batch; cu_seqlens of all short sequences, int32; the length
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
    """Undoes :func:`unpad_input`: returns (T, ...) as (batch, seqlen, ...), with zeros in the padding."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
