"""Hints in the errors of flash_attn: for names of flash-attention, and for tensors in the layout (B, S, H, D)."""

import re
from collections.abc import Mapping

from torch import Tensor

# Names in flash-attention and torch for arguments of flash_attn.
_OUR_NAMES = {
    "window_size": "window",
    "softmax_scale": "scale",
    "return_softmax_lse": "return_lse",
    "return_attn_probs": "return_lse",
    "learnable_sink": "sink",
    "mask": "attn_mask",
    "dropout": "dropout_p",
}
_SHAPE_ERROR = re.compile(r"(key|value|attn_mask|alibi_slopes|sink|key_mask)\b[^:]*: got (shape|.* heads)")


def unknown_argument(function: str, name: str) -> TypeError:
    """The error for a keyword that ``function`` does not have."""
    if name in _OUR_NAMES:
        return TypeError(f"{name}: got an argument that {function} does not have; allowed: {_OUR_NAMES[name]}")
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def with_layout_hint(error: ValueError, tensors: Mapping[str, Tensor | None]) -> ValueError:
    """Returns the error. If the shapes would be valid in the layout (B, S, H, D), the error has a hint."""
    if not _SHAPE_ERROR.match(str(error)) or not _fits_transposed(**tensors):
        return error
    hint = "did you mean transpose(1, 2)? query, key and value are (batch, heads, sequence, head_dim)"
    return ValueError(f"{error}; {hint}")


def _fits_transposed(query: Tensor, key: Tensor, value: Tensor, **optional: Tensor | None) -> bool:
    """Whether the shapes are valid in the layout (B, S, H, D)."""
    if any(not isinstance(t, Tensor) or t.dim() != 4 for t in (query, key, value)):
        return False
    batch, seqlen_q, heads, head_dim = query.shape
    seqlen_k, heads_kv = key.shape[1:3]
    fits = (key.shape[0], key.shape[3]) == (batch, head_dim) and value.shape[:3] == key.shape[:3]
    if not fits or heads_kv == 0 or heads % heads_kv != 0:
        return False
    allowed = {
        "attn_mask": (batch, heads, seqlen_q, seqlen_k),
        "alibi_slopes": (batch, heads),
        "sink": (batch, heads),
        "key_mask": (batch, seqlen_k),
    }
    return all(_broadcasts(optional[name], shape) for name, shape in allowed.items())


def _broadcasts(t: object, shape: tuple[int, ...]) -> bool:
    if not isinstance(t, Tensor):
        return t is None
    sizes = zip(reversed(t.shape), reversed(shape), strict=False)
    return t.dim() <= len(shape) and all(size in (1, full) for size, full in sizes)
