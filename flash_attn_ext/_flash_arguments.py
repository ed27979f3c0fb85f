"""Converts flash-attention's arguments to the arguments of :func:`flash_attn`."""

import contextlib
import numbers
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NO_WINDOW = ((-1, -1), (None, None))


def whole_number(name: str, value: object) -> int | None:
    """Returns an int. Allows numpy numbers and tensors with one element, because flash-attention's tests pass them."""
    if type(value) is int:  # the usual case is first: isinstance() of an abstract class takes longer than all else
        return value
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point() and value.dtype != torch.bool:
        return int(value)
    if isinstance(value, torch.SymInt) or value is None:
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if hasattr(value, "__index__") and not isinstance(value, (bool, Tensor)):
        with contextlib.suppress(TypeError):  # a numpy array with several elements
            return value.__index__()
    raise TypeError(f"{name}: got {_shown(value)}; allowed: None or an int")


def true_or_false(name: str, value: object) -> bool:
    """Returns a bool. Allows numpy bools, the ints 0 and 1, and tensors with one of these values."""
    if isinstance(value, (bool, torch.SymBool)):
        return value
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point() and not value.is_meta:
        value = value.item()
    is_number = isinstance(value, numbers.Integral) or type(value).__name__ in ("bool", "bool_")  # bool_: numpy
    if is_number and value in (0, 1):
        return bool(value)
    raise TypeError(f"{name}: got {_shown(value)}; allowed: True or False")


def _shown(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def window_sides_of(window_size: object, allowed: str) -> tuple[int | None, int | None]:
    """Returns the two sides of a ``window_size``: a tuple, a list, a numpy array, or a tensor."""
    sides = window_size
    if hasattr(sides, "tolist"):  # a tensor or a numpy array
        with contextlib.suppress(RuntimeError):  # a tensor without values, such as a meta tensor
            sides = sides.tolist()
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        raise TypeError(f"window_size: got {_shown(window_size)}; allowed: {allowed}")
    try:
        left, right = (whole_number("window_size", side) for side in sides)
    except TypeError:
        raise TypeError(f"window_size: got {window_size!r}; allowed: {allowed}") from None
    return left, right


def window_of(window_size: object) -> tuple[int | None, int | None] | None:
    """Returns the ``window`` of a ``window_size`` (left, right). None: no window."""
    if window_size is None:
        return None
    window = window_sides_of(window_size, "two ints (left, right); -1 is no limit")
    return None if window in NO_WINDOW else window


def sink_of(sink: Tensor | None, query: Tensor) -> Tensor | None:
    """Returns ``sink`` in a dtype of the operators. flash-attention 4 has a bfloat16 sink for every dtype of q."""
    if not isinstance(sink, Tensor) or not sink.is_floating_point() or sink.dtype in (query.dtype, torch.float32):
        return sink
    return sink.to(torch.promote_types(torch.float32, query.dtype))


def check_dimensions(form: str, **tensors: object) -> None:
    """Raises unless each argument is a tensor with as many dimensions as ``form``, for example "(B, S, heads, D)"."""
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: got {type(t).__name__}; allowed: a torch.Tensor")
        if t.dim() != form.count(",") + 1:
            raise ValueError(f"{name}: got shape {list(t.shape)}; allowed: {form}")


def unbound(name: str, t: Tensor, dim: int, form: str) -> tuple[Tensor, ...]:
    """Returns the parts of a packed tensor. ``form`` contains the size of dimension ``dim``: 2 or 3."""
    check_dimensions(form, **{name: t})
    if str(t.shape[dim]) != form.strip("()").split(", ")[dim]:
        raise ValueError(f"{name}: got shape {list(t.shape)}; allowed: {form}")
    return t.unbind(dim)


def exactly_one_name(name: str, value: Tensor | None, other: str, given: Tensor | None) -> Tensor | None:
    """Returns the value of an argument that has two names. Raises if both are given."""
    if value is None:
        return given
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}; allowed: a torch.Tensor")
    if given is not None:
        raise ValueError(f"{name}: got one together with {other}, another name of it; allowed: one of them")
    return value


def call_with_names(names: dict[str, str], function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Calls ``function``. If it raises an error about an argument, the new error has the caller's name of the argument.

    Args:
        names: maps the name in the error's first words to the caller's name.
    """
    if torch.compiler.is_compiling():
        return function(*args, **options)
    try:
        return function(*args, **options)
    except (TypeError, ValueError, NotImplementedError) as error:
        name, colon, rest = str(error).partition(":")
        if not colon or name not in names:
            raise
        raise type(error)(f"{names[name]}:{rest}") from None


# Names in the errors of flash_attn and flash_attn_varlen -> flash-attention's names.
_FLASH_NAMES = {
    "query": "q", "key": "k", "value": "v", "key, value": "k, v", "scale": "softmax_scale", "window": "window_size",
    "sink": "learnable_sink",
}  # fmt: skip


def error_with_names(error: Exception, q: Tensor, k: Tensor, v: Tensor) -> Exception:
    """Returns the error of a call with flash-attention's names of arguments and the shapes that the caller passed."""
    text = _shape_error(q, k, v) if isinstance(error, ValueError) else None
    if text is None:
        name, colon, rest = str(error).partition(":")
        rest = re.sub(r"\b(query|key)(?='s)|(?<=rows of )(query|key)$", lambda found: _FLASH_NAMES[found[0]], rest)
        text = f"{_FLASH_NAMES.get(name, name)}{colon}{rest}"
    return type(error)(text)


def _shape_error(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """The error of the first wrong shape of (B, S, H, D) or (T, H, D) tensors. None for other shapes, such as pages."""
    if not q.dim() == k.dim() == v.dim():
        return None
    heads, heads_k, head_dim = q.shape[-2], k.shape[-2], q.shape[-1]
    if k.shape[-1] != head_dim:
        return f"k: got shape {list(k.shape)}; allowed: q's head_dim, {head_dim}"
    if v.shape[:-1] != k.shape[:-1] and 1 not in (len(v), len(k)):
        return f"v: got shape {list(v.shape)}; allowed: k's without the head_dim, {list(k.shape[:-1])}"
    if heads_k == 0 or heads % heads_k == 0:
        return None
    text = f"k: got {heads_k} heads for {heads} heads of q; allowed: a divisor of {heads}"
    fits_transposed = q.dim() == 4 and k.shape[1] > 0 and q.shape[1] % k.shape[1] == 0
    if fits_transposed and q.shape[1] < heads:  # a sequence is rarely shorter than the number of heads
        text += "; did you mean transpose(1, 2)? q, k and v are (batch, seqlen, heads, head_dim)"
    return text


_NO_KERNEL = "There is no kernel for it here"
_FUNCTIONS = (
    "Functions in CuTe have no kernel here: score_mod and mask_mod of flash_attn_ext.flash_attn are torch functions"
)
_INSTEAD = {
    "qv": "flash_attn_ext.flash_attn_3 has the second query of multi-head latent attention",
    **dict.fromkeys(("score_mod", "score_mod_bwd", "mask_mod", "aux_tensors", "aux_scalars"), _FUNCTIONS),
    **dict.fromkeys(
        ("block_sparse_tensors", "block_sparse_tensors_bwd"),
        "flash_attn_ext.flex.create.listed_block_mask makes a block_mask of flash_attn_ext.flash_attn from such lists",
    ),
}


def refuse_given(**arguments: object) -> None:
    """Raises if an argument that no kernel supports was given."""
    for name, value in arguments.items():
        if value is not None:
            got = "a tensor" if isinstance(value, Tensor) else type(value).__name__
            raise NotImplementedError(f"{name}: got {got}; allowed: None. {_INSTEAD.get(name, _NO_KERNEL)}")


def check_hints(num_splits: object, pack_gqa: object = None, sm_margin: object = 0) -> int:
    """Checks the types of hints about speed. Returns ``num_splits``, or 0 (automatic) if it is below 1."""
    if pack_gqa is not None and not isinstance(pack_gqa, (bool, int)):
        raise TypeError(f"pack_gqa: got {pack_gqa!r}; allowed: None or a bool")
    whole_number("sm_margin", sm_margin)
    return max(whole_number("num_splits", num_splits) or 0, 0)
