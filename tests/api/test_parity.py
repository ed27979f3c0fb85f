"""flash_attn against the fp64 dense oracle at every tile edge, for every instruction set and dtype."""

import pytest
import reference
import torch
from cases import HEAD_DIMS, LENGTHS
from helpers import check_against_reference, gradients, leaves, make_qkv
from tolerances import assert_as_exact_as_torch
from torch.nn.functional import scaled_dot_product_attention

from flash_attn_ext import flash_attn

pytestmark = pytest.mark.any_device

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))


@dtypes
@pytest.mark.parametrize("causal", [None, "upper_left", "lower_right"])
def test_tile_edges_of_the_sequences(isa, dtype, causal):
    for seqlen_q, seqlen_k in LENGTHS:
        check_against_reference(*make_qkv(1, 2, seqlen_q, seqlen_k, 16, dtype=dtype), causal=causal)


@dtypes
@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIMS)
def test_head_dims(isa, dtype, head_dim, head_dim_v):
    check_against_reference(*make_qkv(2, 2, 70, 67, head_dim, head_dim_v, dtype=dtype), causal="lower_right")


@dtypes
@pytest.mark.parametrize(("heads", "heads_kv"), [(4, 1), (6, 2), (8, 8), (16, 2)])
def test_grouped_query_heads(isa, dtype, heads, heads_kv):
    check_against_reference(*make_qkv(2, heads, 50, 130, 24, heads_kv=heads_kv, dtype=dtype), causal="lower_right")


@dtypes
def test_large_scores_do_not_overflow(isa, dtype):
    """Scores of several hundred: exp would overflow, and an ulp of the lse is 3e-5 in float32.

    So the peer here is torch's own flash kernel, which recomputes P from the lse as ours does.
    """
    inputs = make_qkv(1, 2, 40, 80, 32, dtype=dtype)
    with torch.no_grad():
        inputs[0] *= 30
    grad = torch.randn(1, 2, 40, 32)

    def run(attention, dtype):
        tensors = leaves(inputs, dtype)
        out = attention(*tensors)
        return [out, *gradients([out], tensors, [grad])]

    exact = run(lambda *qkv: reference.attention(*qkv)[0], torch.float64)
    results = zip(run(flash_attn, dtype), run(scaled_dot_product_attention, dtype), exact, strict=True)
    for name, (ours, theirs, expected) in zip(("out", "dq", "dk", "dv"), results, strict=True):
        assert_as_exact_as_torch(name, ours, theirs, expected, factor=3)


def test_long_sequences():
    check_against_reference(*make_qkv(1, 1, 1500, 2100, 64), causal="lower_right")


def test_one_key_block_row_beyond_the_task_split(isa):
    """B * H = 1 splits the backward over key blocks: every count of blocks from 1 to more than the tasks."""
    for blocks in range(1, 11):
        check_against_reference(*make_qkv(1, 1, 33, 64 * blocks + 1, 8))
