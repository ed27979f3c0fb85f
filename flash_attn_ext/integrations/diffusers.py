"""diffusers: ``model.set_attention_backend(register())`` runs a model's attention on flash_attn_ext.

diffusers has a registry of attention backends, and an enumeration of their names. The registry accepts any function. An
enumeration cannot get a new member by its public interface, so :func:`register` adds one in the same way as its
constructor.
"""

import inspect

from diffusers.models import attention_dispatch
from torch import Tensor

from ..functional import flash_attn

__all__ = ["NAME", "register"]

NAME = "flash_attn_ext"


def register() -> str:
    """Registers flash_attn_ext in diffusers, and returns the name for ``model.set_attention_backend``,
    ``diffusers.models.attention_dispatch.attention_backend`` and ``dispatch_attention_fn``. A second call changes
    nothing.

    Raises ImportError if the installed diffusers has another registry (tried with 0.42).
    """
    names = attention_dispatch.AttentionBackendName
    registry = getattr(attention_dispatch, "_AttentionBackendRegistry", None)
    if registry is None or "backend" not in inspect.signature(registry.register).parameters:
        raise ImportError("diffusers: its registry of attention backends was not found; allowed: 0.42")
    if NAME not in names._value2member_map_:
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        names._member_names_.append(member._name_)
        names._member_map_[member._name_] = member
        names._value2member_map_[NAME] = member
    registry.register(names(NAME))(attention)
    return NAME


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config=None,
) -> Tensor | tuple[Tensor, Tensor]:
    """diffusers' interface for attention. Tensors and out are (B, S, H, D), lse is (B, S, H), as in diffusers' other
    backends. A mask (B, S_k) hides or biases keys. Raises ValueError with a parallel config:
    ``flash_attn_ext.distributed`` has attention over several processes.
    """
    if _parallel_config is not None:
        raise ValueError("parallel_config: the backend flash_attn_ext runs in one process; allowed: None")
    if attn_mask is not None and attn_mask.ndim == 2:
        attn_mask = attn_mask[:, None, None, :]
    result = flash_attn(
        query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), attn_mask, dropout_p, is_causal, scale,
        enable_gqa, return_lse=return_lse,
    )  # fmt: skip
    if return_lse:
        out, lse = result
        return out.transpose(1, 2), lse.transpose(1, 2)
    return result.transpose(1, 2)
