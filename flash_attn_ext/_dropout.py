"""The random numbers of dropout: the state, and the mask of a state."""

import torch
from torch import Tensor

from . import _ops


def new_rng_state(device: torch.device | str | None = None) -> Tensor:
    """Draws a dropout state, int64 (seed, offset), from torch's generator of ``device``.

    ``device``: None is torch's default device.
    """
    return torch.randint(torch.iinfo(torch.int64).max, (2,), dtype=torch.int64, device=device)


def dropout_mask(
    rng_state: Tensor, batch: int, heads: int, seqlen_q: int, seqlen_k: int, dropout_p: float, first_row: int = 0
) -> Tensor:
    """The elements that dropout keeps with ``rng_state``: bool (batch, heads, seqlen_q, seqlen_k).

    False: dropped. For tests and dense references. For all queries, the mask is as large as the score matrix. A call
    can compute a part: ``seqlen_q`` queries from query ``first_row`` on. :func:`flash_attn` multiplies kept
    probabilities by ``1 / (1 - dropout_p)``. The mask is Philox4x32-10 (Salmon et al. 2011) of seed, offset, batch,
    head, row and column.
    """
    return _ops.dropout_mask(rng_state, batch, heads, seqlen_q, seqlen_k, dropout_p, first_row)
