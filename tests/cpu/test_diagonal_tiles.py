"""Tiles on the diagonal of a causal mask: products leave out keys that no query of a step sees."""

import pytest
import torch
from reference import attention as reference

from flash_attn_ext import flash_attn

pytestmark = pytest.mark.usefixtures("one_thread")  # the thread's scratch memory is the same in all calls
OPTIONS = [
    {"causal": "upper_left"},
    {"causal": "lower_right", "softcap": 10.0},
    {"window": (30, 5)},
    {"causal": "upper_left", "window": (20, 0)},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(48, 48), (100, 100), (33, 150), (70, 40)])
def test_scratch_memory_with_nan_changes_nothing(isa, seqlen_q, seqlen_k, options, dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, seqlen, 64).to(dtype) for seqlen in (seqlen_q, seqlen_k, seqlen_k))
    first = flash_attn(q, k, v, num_splits=1, **options)
    nan = [torch.full_like(t, float("nan")) for t in (q, k, v)]
    for fill in ({}, options):
        assert flash_attn(*nan, num_splits=1, **fill).isnan().any()
    assert torch.equal(flash_attn(q, k, v, num_splits=1, **options), first)
    exact, _ = reference(*(t.double() for t in (q, k, v)), **options)
    torch.testing.assert_close(first.double(), exact, atol=3e-2 if dtype.itemsize == 2 else 1e-5, rtol=0)
