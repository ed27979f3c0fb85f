"""The attention weights on the CUDA kernels' host build (tests/cuda_host): the tests of the CPU kernels.

The tier simt is the only one for them.
"""

import math

import pytest
import test_attention_weights
import torch
from cuda_host import library
from helpers import make_qkv
from test_attention_weights import OPTIONS, check

pytestmark = pytest.mark.usefixtures("kernels")


test_rows_without_keys_and_hidden_nan = test_attention_weights.test_rows_without_keys_and_hidden_nan
test_large_scores = test_attention_weights.test_large_scores
test_strided_inputs = test_attention_weights.test_strided_inputs
test_nothing_to_compute = test_attention_weights.test_nothing_to_compute


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_against_the_dense_reference(dtype):
    q, k, _ = make_qkv(2, 4, 65, 130, 17, heads_kv=2, dtype=dtype)
    check(q, k, causal="lower_right")


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option(name):
    q, k, _ = make_qkv(2, 2, 66, 70, 8, heads_kv=1, dtype=torch.float64)
    mask = torch.randn(2, 1, 66, 70).masked_fill(torch.rand(2, 1, 66, 70) < 0.2, -math.inf)
    added = [t.to(q.dtype).requires_grad_() for t in (mask, torch.rand(2), torch.randn(2, 2))]
    check(q, k, *added, **OPTIONS[name])


def test_the_selector_says_why_no_faster_tier_runs(kernels):
    params = library.BackwardParams()
    params.dweights.data = 1
    with kernels.on_gpu(9, 0):
        assert kernels.choice(library.WeightsParams()) == ("simt", ["sm90: no weights", "sm80: no weights"])
        reasons = [f"{tier}: no gradients of the weights" for tier in ("sm90", "sm80")]
        assert kernels.choice(params) == ("simt", reasons)
