"""The format of int4 caches: two values in each byte, with a scale and an optional zero point for each column group."""

import torch
from torch import Tensor

GROUP_MULTIPLE = 32
_ZERO = 8.0  # the zero point if none is stored
_LEVELS = 15
_LEAST_RANGE = 1 / 1024  # a zero point of float16 below 1024 is within a quarter of a level


def quantize_int4(
    x: Tensor, group: int | None = None, *, with_zeros: bool = False, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rounds rows to values of 4 bits, as :func:`flash_attn_with_kvcache` rounds new rows of an int4 cache.

    Byte c of a row has column 2c in its low 4 bits and column 2c + 1 in its high 4 bits. A value is
    scale * (nibble - zero), nibble in 0 to 15. Groups are neighbouring columns. Without zero points, zero is 8, and
    the scale is x / -8 for the element x of largest magnitude, so that x is exact (llama.cpp's q4_0). With zero
    points, the scale is (max - min) / 15, but at least 1 / 1024 of the largest magnitude. The zero point is
    -min / scale. Scale and zero point are rounded to ``dtype``. Then the nibbles are computed in float32.

    Args:
        x: (..., D), floating point, D even. A group with a NaN decodes to NaN. A group with an infinity decodes to NaN
            or infinities.
        group: the number of columns of a group, a multiple of 32 that divides D. None: the whole row, for any even D.
        with_zeros: stores zero points, for values that are not centred at 0.
        dtype: the dtype of scales and zero points, float16 or float32. The largest float16 scale is 65504.

    Returns:
        values (..., D / 2) uint8, scales (..., D / group), zeros (..., D / group) or None.

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x: got {getattr(x, 'dtype', type(x).__name__)}; allowed: a floating-point tensor")
    if dtype not in (torch.float16, torch.float32):
        raise TypeError(f"dtype: got {dtype}; allowed: torch.float16, torch.float32")
    if x.dim() == 0 or x.shape[-1] == 0 or x.shape[-1] % 2 != 0:
        raise ValueError(f"x: got shape {list(x.shape)}; allowed: an even last dimension")
    columns = x.shape[-1]
    group = columns if group is None else group
    _check_group("group", group, columns)
    grouped = x.float().unflatten(-1, (columns // group, group))
    low, high = grouped.amin(-1), grouped.amax(-1)
    zeros: Tensor | None = None
    zero: Tensor | float = _ZERO
    if with_zeros:
        scales = torch.maximum((high - low) / _LEVELS, torch.maximum(low.abs(), high.abs()) * _LEAST_RANGE).to(dtype)
        wide = scales.float()
        zeros = torch.where(wide == 0, 0.0, -low / wide).to(dtype)
        zero = zeros.float()[..., None]
    else:
        scales = (torch.where(high > -low, high, low) / -_ZERO).to(dtype)
        wide = scales.float()
    nibbles = (grouped / wide[..., None] + zero).round().nan_to_num(0.0, _LEVELS, 0.0).clamp(0, _LEVELS)
    nibbles = nibbles.to(torch.uint8).flatten(-2)
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4, scales, zeros


def dequantize_int4(
    values: Tensor, scales: Tensor, zeros: Tensor | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns scale * (nibble - zero), computed in float32: the inverse of :func:`quantize_int4`.

    Args:
        values: (..., D / 2), uint8.
        scales: (..., groups), float16 or float32.
        zeros: (..., groups), as ``scales``. None: 8.
        dtype: the dtype of the result.

    Returns:
        (..., D).

    Raises:
        TypeError, ValueError: an argument is not allowed.
    """
    if values.dtype != torch.uint8:
        raise TypeError(f"values: got dtype {values.dtype}; allowed: torch.uint8")
    if scales.dim() != values.dim() or scales.shape[:-1] != values.shape[:-1] or scales.shape[-1] == 0:
        raise ValueError(f"scales: got shape {list(scales.shape)}; allowed: {[*values.shape[:-1]]} and groups")
    if zeros is not None and zeros.shape != scales.shape:
        raise ValueError(f"zeros: got shape {list(zeros.shape)}; allowed: the shape of scales, {list(scales.shape)}")
    columns, groups = 2 * values.shape[-1], scales.shape[-1]
    if columns % groups != 0:
        raise ValueError(f"scales: got {groups} groups for {columns} columns; allowed: a divisor")
    _check_group("scales", columns // groups, columns)
    nibbles = torch.stack([values & 15, values >> 4], -1).flatten(-2).float().unflatten(-1, (groups, -1))
    zero: Tensor | float = _ZERO if zeros is None else zeros.float()[..., None]
    return ((nibbles - zero) * scales.float()[..., None]).flatten(-2).to(dtype)


def _check_group(name: str, group: int, columns: int) -> None:
    if not isinstance(group, int) or isinstance(group, bool):
        raise TypeError(f"{name}: got {group!r}; allowed: an int or None")
    if group != columns and (group < 1 or columns % group != 0 or group % GROUP_MULTIPLE != 0):
        raise ValueError(
            f"{name}: got groups of {group} columns for rows of {columns}; allowed: the whole row, or a multiple of "
            f"{GROUP_MULTIPLE} that divides it"
        )
