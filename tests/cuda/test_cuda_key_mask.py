"""The tests of key_mask, on the CUDA kernels' host build (tests/cuda_host).

float32 and float64 run in the tier simt, 16-bit types in sm80, and few queries in their decode kernels.
"""

import pytest
import test_key_mask
import torch
from helpers import make_qkv
from test_key_mask import check, key_masks

pytestmark = pytest.mark.usefixtures("kernels")


test_dtypes = test_key_mask.test_dtypes
test_with_a_band = test_key_mask.test_with_a_band
test_masked_keys_may_be_nan = test_key_mask.test_masked_keys_may_be_nan


# Each mask with both kinds of key mask and, in turn, the lengths.
SAMPLE = [
    (masks, ("bool", "float")[n % 2], *[(70, 130), (3, 9), (1, 300)][n % 3])
    for n, masks in enumerate([*test_key_mask.MASKS, *reversed(test_key_mask.MASKS)])
]


@pytest.mark.parametrize(("masks", "kind", "seqlen_q", "seqlen_k"), SAMPLE)
def test_both_masks_apply(isa, masks, kind, seqlen_q, seqlen_k):
    test_key_mask.test_both_masks_apply(isa, masks, kind, seqlen_q, seqlen_k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(130, 200), (3, 300)])
@pytest.mark.parametrize("masked", [False, True])
def test_tensor_cores(dtype, seqlen_q, seqlen_k, masked):
    mask = torch.rand(3, 1, seqlen_q, seqlen_k) > 0.3 if masked else None
    check(*make_qkv(3, 4, seqlen_q, seqlen_k, 64, heads_kv=2, dtype=dtype), mask, key_masks(3, seqlen_k))
