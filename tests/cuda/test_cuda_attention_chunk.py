"""attention_chunk on the CUDA kernels' host build (tests/cuda_host).

The tier simt runs these calls.
"""

import pytest
import test_attention_chunk
import torch
from cache_helpers import check as check_cache
from cache_helpers import make as make_cache
from helpers import check_against_reference, check_jvp_against_reference, make_qkv
from varlen_helpers import check_pack

from flash_attn_ext import flash_attn_with_kvcache

pytestmark = pytest.mark.usefixtures("kernels")

test_a_part_of_a_larger_matrix = test_attention_chunk.test_a_part_of_a_larger_matrix
test_hidden_values_may_be_nan = test_attention_chunk.test_hidden_values_may_be_nan
test_second_derivatives = test_attention_chunk.test_second_derivatives_over_tiles


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "chunk"), [(70, 130, 48), (3, 300, 64), (100, 70, 1)])
@pytest.mark.parametrize("causal", [None, "lower_right"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward(dtype, causal, seqlen_q, seqlen_k, chunk):
    q, k, v = make_qkv(2, 4, seqlen_q, seqlen_k, 16, heads_kv=2, dtype=dtype)
    check_against_reference(q, k, v, causal=causal, attention_chunk=chunk)


def test_forward_mode():
    check_jvp_against_reference(make_qkv(1, 2, 70, 130, 16), attention_chunk=48, causal="lower_right")


def test_weights():
    test_attention_chunk.test_weights("simt", "lower_right")


def test_packed_sequences():
    check_pack([(70, 130), (0, 5), (8, 200)], attention_chunk=48, causal="lower_right")


@pytest.mark.parametrize("page_size", [None, 16])
def test_caches(page_size):
    lengths = [70, 0, 200, 5, 129]
    q, k, v, table = make_cache(torch.float32, 3, page_size)
    out, lse = flash_attn_with_kvcache(
        q, k, v, cache_seqlens=torch.tensor(lengths), block_table=table, causal=True, attention_chunk=64,
        return_softmax_lse=True,
    )  # fmt: skip
    check_cache(out, lse, q, k, v, lengths, table, causal=True, attention_chunk=64)
