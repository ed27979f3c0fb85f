"""The random numbers of dropout: the state that a call draws, and the mask that follows from it."""

import torch
from torch import Tensor

from . import _ops


def new_rng_state(device: torch.device | str | None = None) -> Tensor:
    """A fresh dropout state, int64 (seed, offset) on ``device``, drawn from torch's generator of that device.

    ``device``: torch's default device if None.
    """
    return torch.randint(torch.iinfo(torch.int64).max, (2,), dtype=torch.int64, device=device)


def dropout_mask(
    rng_state: Tensor, batch: int, heads: int, seqlen_q: int, seqlen_k: int, dropout_p: float, first_row: int = 0
) -> Tensor:
    """The weights that :func:`flash_attn` keeps with ``rng_state``: bool (batch, heads, seqlen_q, seqlen_k).

    False is dropped. For tests and dense references. With ``seqlen_q`` of all queries the mask is as large as the score
    matrix. It can be computed in parts: ``seqlen_q`` queries from query ``first_row`` on. Kept weights are scaled by
    ``1 / (1 - dropout_p)``. Philox4x32-10 (Salmon et al. 2011) of seed, offset, batch, head, row and column.
    """
    return _ops.dropout_mask(rng_state, batch, heads, seqlen_q, seqlen_k, dropout_p, first_row)
