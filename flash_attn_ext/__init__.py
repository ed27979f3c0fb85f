"""flash_attn_ext: exact attention for PyTorch, computed tile by tile, without storing the N x N matrix."""

from ._unbuilt import is_unbuilt
from ._version import __version__

if is_unbuilt():
    # Only iomodel and reference work. Every name of __all__ raises an error that explains how to build.
    from ._unbuilt import refuse as __getattr__  # noqa: F401
else:
    from . import _flops, _vmap  # noqa: F401  register formulas for FlopCounterMode, and the vmap rules
    from ._explain import Explanation, explain
    from ._explain_packed import explain_kvcache, explain_varlen
    from .flex import flex_attention
    from .functional import dropout_mask, flash_attn, new_rng_state
    from .indexer import indexer_loss, indexer_scores, indexer_topk
    from .inspection import active_kernel, available_kernels, build_info, force_cuda_tier, force_kernel
    from .int4 import dequantize_int4, quantize_int4
    from .kvcache import flash_attn_with_kvcache
    from .nn import (
        ActivationReport,
        MultiheadAttention,
        ReplacedAttention,
        SdpaExplanation,
        activate,
        activated,
        activation_report,
        deactivate,
        explain_sdpa,
        is_active,
        replace_attention,
    )
    from .varlen import flash_attn_varlen

__all__ = [
    "ActivationReport",
    "Explanation",
    "MultiheadAttention",
    "ReplacedAttention",
    "SdpaExplanation",
    "__version__",
    "activate",
    "activated",
    "activation_report",
    "active_kernel",
    "available_kernels",
    "build_info",
    "deactivate",
    "dequantize_int4",
    "dropout_mask",
    "explain",
    "explain_kvcache",
    "explain_sdpa",
    "explain_varlen",
    "flash_attn",
    "flash_attn_varlen",
    "flash_attn_with_kvcache",
    "flex_attention",
    "force_cuda_tier",
    "force_kernel",
    "indexer_loss",
    "indexer_scores",
    "indexer_topk",
    "is_active",
    "new_rng_state",
    "quantize_int4",
    "replace_attention",
]
