"""How users call the public names, for mypy and pyright: `make lint` checks it, nothing runs it."""

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import flash_attn_ext
from flash_attn_ext import (
    ActivationReport,
    Explanation,
    MultiheadAttention,
    ReplacedAttention,
    activate,
    activated,
    activation_report,
    deactivate,
    dropout_mask,
    explain,
    flash_attn,
    is_active,
    new_rng_state,
    replace_attention,
)


def function(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    state = new_rng_state("cpu")
    kept = dropout_mask(state, 1, 2, 16, 16, 0.1)
    assert_type(kept, Tensor)
    out = flash_attn(q, k, v, mask, 0.1, True, rng_state=state, window=(8, 0), softcap=5.0)
    assert isinstance(out, Tensor)  # the type does not tell one result from two
    both = flash_attn(q, k, v, return_lse=True, causal="lower_right")
    assert isinstance(both, tuple)
    result, lse = both
    assert_type(lse, Tensor)
    return out + result


def module(x: Tensor) -> Tensor:
    attention = MultiheadAttention(64, 4, batch_first=True)
    as_torchs: nn.MultiheadAttention = attention
    y, weights = as_torchs(x, x, x, need_weights=False)
    assert weights is None
    return y


def model(net: nn.Module) -> dict[str, str]:
    report = replace_attention(net, sample_input=torch.randn(2, 50, 64))
    assert_type(report, ReplacedAttention)
    report.undo()
    return report.skipped


def torchs_own(net: nn.Module, x: Tensor) -> int:
    activate()
    deactivate()
    with activated():
        net(x)
    report = activation_report(reset=True)
    assert_type(report, ActivationReport)
    return sum(report.taken.values()) + int(is_active())


def inspection(q: Tensor) -> str:
    found = explain(q, q, q, is_causal=True)
    assert_type(found, Explanation)
    assert_type(found.forward.kernel, str | None)
    flash_attn_ext.force_kernel(None)
    flash_attn_ext.force_cuda_tier(None)
    assert_type(flash_attn_ext.available_kernels(), list[str])
    assert_type(flash_attn_ext.__version__, str)
    return flash_attn_ext.active_kernel()
