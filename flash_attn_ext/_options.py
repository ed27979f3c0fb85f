"""Converts arguments of the public functions to options of an operator's schema, by name.

An option with the same name and meaning in both needs no line in this file. Its row in csrc/ops/dense/attention.h has
the name, the type and the default.
"""

import numbers
from collections.abc import Mapping

import torch
from torch import Tensor

from ._flash_arguments import whole_number

# Option of the schema -> public argument, for options that the public functions do not have.
_PUBLIC_NAMES = {"causal": "is_causal", "window_left": "window", "window_right": "window"}
_EXACT = {"float": float, "float?": float, "bool": bool}  # ints have a range, too
_ALLOWED = {"float": "a number", "int": "an int", "bool": "True, False"}


def operator_options(
    *,
    alibi_slopes: Tensor | None = None,
    is_causal: bool = False,
    causal: str | None = None,
    window: object = None,
    attention_chunk: object = 0,
    deterministic: bool | None = None,
    **same_in_both: object,
) -> dict[str, object]:
    """Returns the operator's options, by name, for arguments of :func:`flash_attn`. Types are not checked yet."""
    options = same_in_both
    options["attention_chunk"] = attention_chunk
    options |= zip(BAND, band_of(causal, is_causal, window, alibi_slopes, attention_chunk), strict=True)
    options["deterministic"] = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    return options


BAND = ("causal", "lower_right", "window_left", "window_right")


def band_of(
    causal: str | None, is_causal: bool, window: object, alibi_slopes: Tensor | None, attention_chunk: object
) -> tuple[bool, bool, int | None, int | None]:
    """Returns the options BAND for arguments of :func:`flash_attn`."""
    aligned = alibi_slopes is not None or type(attention_chunk) is not int or attention_chunk > 0
    if causal is None and window is None and not aligned:
        return is_causal, False, None, None
    return band(causal, is_causal, window, aligned)


def band(
    causal: str | None, is_causal: bool, window: object, aligned: bool
) -> tuple[bool, bool, int | None, int | None]:
    """Returns the options BAND, which decide by position which keys a query sees.

    ``aligned``: True if another option reads the diagonal. Then its corner matters even without a causal mask and a
    window.
    """
    if causal is None:
        lower_right = not is_causal and (window is not None or aligned)
    elif causal in ("upper_left", "lower_right"):
        lower_right, is_causal = causal == "lower_right", True
    else:
        raise ValueError(f"causal: got {causal!r}; allowed: None, 'upper_left', 'lower_right'")
    left, right = window_sides(window)
    return is_causal, lower_right, left, right


def window_sides(window: object) -> tuple[int | None, int | None]:
    """Returns the operator's (left, right) for ``window``. None means no limit.

    Numbers may be ints, numpy numbers, or tensors with one element. Two numbers may be a tuple, a list, an array or a
    tensor.
    """
    if window is None:
        return None, None
    sides = window
    if not isinstance(window, (tuple, list)):
        if not isinstance(window, int) and hasattr(window, "tolist"):  # a tensor or a numpy array
            sides = window.tolist()
        sides = sides if isinstance(sides, list) else (sides, sides)
    try:
        left, right = (side if type(side) is int else whole_number("window", side) for side in sides)
    except (TypeError, ValueError):
        raise ValueError(
            f"window: got {window!r}; allowed: None, an int, or two of them (left, right); -1 and None are no limit"
        ) from None
    return None if left == -1 else left, None if right == -1 else right


def checked_options(types: Mapping[str, str], options: Mapping[str, object]) -> dict[str, object]:
    """Converts each option to its type in the schema. A TypeError names the wrong argument."""
    checked = {}
    for name, value in options.items():
        kind = types[name]
        # The usual cases are first.
        usual = kind[-1] == "?" if value is None else type(value) is _EXACT.get(kind)
        checked[name] = value if usual else as_type(kind, name, value)
    return checked


def as_type(kind: str, name: str, value: object) -> object:
    """Returns ``value`` as ``kind``: "float", "int" or "bool", with "?" if None is allowed."""
    optional, kind = kind.endswith("?"), kind.removesuffix("?")
    if value is None and optional:
        return None
    if isinstance(value, bool) and kind == "bool":
        return value
    if kind == "int" and type(value) is int and -(2**63) <= value < 2**63:
        return value
    if isinstance(value, numbers.Integral) and name == "causal":  # torch's functions also allow is_causal=1
        return bool(value)
    if isinstance(value, (torch.SymInt, torch.SymFloat)):
        return value
    if kind == "int" and isinstance(value, numbers.Integral) and -(2**63) <= value < 2**63:
        return int(value)
    if kind == "float" and not isinstance(value, bool):
        number_tensor = isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad
        if isinstance(value, (float, int, numbers.Real)) or number_tensor:
            return float(value)
    allowed = ("None, " if optional or name == "deterministic" else "") + _ALLOWED[kind]
    raise TypeError(f"{_PUBLIC_NAMES.get(name, name)}: got {value!r}; allowed: {allowed}")
