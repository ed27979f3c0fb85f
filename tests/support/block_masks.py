"""Block masks for the tests of block-sparse FlashAttention: name -> function of the shape (T_r, T_c)."""

import torch


def every_block(shape):
    return torch.ones(shape, dtype=torch.bool)


BLOCK_MASKS = {
    "all": every_block,
    "causal": lambda shape: every_block(shape).tril(),
    "window": lambda shape: every_block(shape).tril(1).triu(-1),
    "diagonal": lambda shape: every_block(shape).tril().triu(),
    "random": lambda shape: torch.rand(shape) < 0.3,
    "a hidden row and column": lambda shape: (torch.arange(shape[0]) != 1)[:, None] & (torch.arange(shape[1]) != 2),
    "empty": lambda shape: ~every_block(shape),
}
