"""torch.nn's attention on our kernels: the module, the replacement of modules, and overrides of torch's operators."""

from .multihead_attention import MultiheadAttention
from .replacement import ReplacedAttention, replace_attention
from .torch_overrides import (
    ActivationReport,
    SdpaExplanation,
    activate,
    activated,
    activation_report,
    deactivate,
    explain_sdpa,
    is_active,
)

__all__ = [
    "ActivationReport",
    "MultiheadAttention",
    "ReplacedAttention",
    "SdpaExplanation",
    "activate",
    "activated",
    "activation_report",
    "deactivate",
    "explain_sdpa",
    "is_active",
    "replace_attention",
]
