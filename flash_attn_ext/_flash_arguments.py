"""flash-attention's spellings of arguments as those of :func:`flash_attn`: windows, whole numbers, sinks, two names."""

import numbers

import torch
from torch import Tensor

NO_WINDOW = ((-1, -1), (None, None))


def whole_number(name: str, value: object) -> int | None:
    """An int: also a number of numpy, or a tensor with one element, as flash-attention's own tests pass lengths."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point() and value.dtype != torch.bool:
        return int(value)
    if isinstance(value, torch.SymInt) or value is None:
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    if hasattr(value, "__index__") and not isinstance(value, (bool, Tensor)):
        return value.__index__()
    got = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
    raise TypeError(f"{name}: got {got}; allowed: None or an int")


def window_of(window_size: object) -> tuple[int | None, int | None] | None:
    """``window`` for a ``window_size`` (left, right). None: no window."""
    if window_size is None:
        return None
    sides = window_size
    if hasattr(sides, "tolist"):  # a tensor, or an array of numpy
        sides = sides.tolist()
    if not isinstance(sides, (tuple, list)) or len(sides) != 2:
        got = f"a tensor of shape {list(window_size.shape)}" if isinstance(window_size, Tensor) else repr(window_size)
        raise TypeError(f"window_size: got {got}; allowed: two ints (left, right); -1 is no limit")
    try:
        window = tuple(whole_number("window_size", side) for side in sides)
    except TypeError:
        raise TypeError(f"window_size: got {window_size!r}; allowed: two ints (left, right); -1 is no limit") from None
    return None if window in NO_WINDOW else window


def sink_of(sink: Tensor | None, query: Tensor) -> Tensor | None:
    """``sink`` in a dtype that the operators take. FlashAttention-4 takes bfloat16 whatever q's dtype is."""
    if not isinstance(sink, Tensor) or not sink.is_floating_point() or sink.dtype in (query.dtype, torch.float32):
        return sink
    return sink.to(torch.promote_types(torch.float32, query.dtype))


def exactly_one_name(name: str, value: Tensor | None, other: str, given: Tensor | None) -> Tensor | None:
    """The value of an argument that has two names; an error if both are given."""
    if value is None:
        return given
    if given is not None:
        raise ValueError(f"{name}: got one besides {other}, which is another name for it; allowed: one of them")
    return value
