"""Loads the compiled extension and names its operators: the only module that touches torch.ops.flash_attn_ext."""

import torch

try:
    from . import _C
except ImportError as error:
    raise ImportError(
        f"flash_attn_ext's compiled half cannot be loaded ({error}). It must be built against the torch that is "
        f"installed, {torch.__version__}: pip install --no-build-isolation . (in its source folder)"
    ) from error

attention = torch.ops.flash_attn_ext.attention.default
attention_backward = torch.ops.flash_attn_ext.attention_backward.default
attention_if_plain = _C.attention_if_plain
plan_attention = _C.plan_attention
plan_attention_backward = _C.plan_attention_backward
dropout_mask = torch.ops.flash_attn_ext.dropout_mask.default

# An impossible FLASH_ATTN_EXT_ISA or FLASH_ATTN_EXT_CUDA_TIER raises here, at import, and not in the middle of a
# training run.
_C.active_kernel()
_C.forced_cuda_tier()
