"""Tiles of keys whose last keys a mask function hides from all queries: the products skip these keys."""

import pytest
import torch

from flash_attn_ext import flash_attn, new_rng_state

TILE = 48  # queries of the forward on CPU
KEYS = 70  # more than a tile of 64
QUERIES = KEYS * TILE

# Query tile n sees the keys before n + 1, and the odd queries see one key less.
ENDS = torch.arange(1, KEYS + 1).repeat_interleave(TILE) - torch.arange(QUERIES) % 2
VISIBLE = torch.arange(KEYS) < ENDS[:, None]


def mask_mod(b, h, i, j):
    return j < ENDS[i]


def make(heads, dtype):
    return (torch.randn(1, heads, length, 16).to(dtype) for length in (QUERIES, KEYS, KEYS))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [1, 4])  # 4: a task may have two query tiles, which share tiles of keys
def test_bits_are_those_of_a_bool_mask(dtype, heads, isa):
    q, k, v = make(heads, dtype)
    for options in ({}, {"softcap": 5.0, "alibi_slopes": torch.rand(heads).to(dtype), "dropout_p": 0.3}):
        if "dropout_p" in options:
            options["rng_state"] = new_rng_state()
        out, lse = flash_attn(q, k, v, mask_mod=mask_mod, return_lse=True, **options)
        wanted, wanted_lse = flash_attn(q, k, v, attn_mask=VISIBLE, return_lse=True, **options)
        assert torch.equal(out, wanted)
        assert torch.equal(lse, wanted_lse)


def test_masked_nan_does_not_reach_a_query(isa):
    """The first query tiles see no key from 17 on."""
    q, k, v = make(2, torch.float32)
    k[:, :, 17:] = v[:, :, 17:] = torch.nan
    out = flash_attn(q, k, v, mask_mod=mask_mod)
    rows = slice(17 * TILE)
    wanted = flash_attn(q[:, :, rows], k[:, :, :17], v[:, :, :17], attn_mask=VISIBLE[rows, :17])
    torch.testing.assert_close(out[:, :, rows], wanted)
