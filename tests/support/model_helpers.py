"""Small models of torch.nn's classes, and their inputs."""

from functools import partial

import module_helpers
import torch
from torch import nn

B, S, T, E, H = 3, 7, 5, 12, 2

assert_same = partial(module_helpers.assert_same, rtol=1e-10)  # of whole models


def randomize(model):
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double()


def encoder_layer(**kwargs):
    return nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, **{"batch_first": True, **kwargs})


def causal_mask(size):
    return nn.Transformer.generate_square_subsequent_mask(size, dtype=torch.float64)


# Padding at the end of each sequence. In eval without grad nn.TransformerEncoder converts the batch to nested tensors.
PADDING = torch.arange(S) >= torch.tensor([S, 4, 1]).unsqueeze(1)
SRC = torch.randn(B, S, E, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
TGT = torch.randn(B, T, E, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
