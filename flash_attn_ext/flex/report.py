"""Describes programs and block masks as text, for explain."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from .operations import OPERATIONS
from .program import HEADER_WORDS, INSTRUCTION_WORDS

_NAMES = list(OPERATIONS)
_PROGRAMS = ("score", "gradient", "captured gradient", "mask")
# rank -> a value of this rank is computed once for each ...
_PER = ("tile", "row of queries", "column of keys", "score")
_LETTERS = "uqkt"


def report_of(tensors: Mapping[str, Tensor | None], *, is_cache: bool = False) -> tuple[str, ...]:
    """Returns for each program a line and the lines of its instructions, and a line for the blocks."""
    lines: list[str] = []
    programs = tensors["programs"]
    if programs is not None and not programs.is_meta:
        words = programs.tolist()
        for name, first in zip(_PROGRAMS, words, strict=False):
            if first >= 0:
                lines += _lines_of(name, words[first:])
    states = tensors["block_states"]
    if states is not None and not states.is_meta:
        if is_cache:
            states = states[..., 1:, :]  # without the row before the mask
        partial, full = (int((states == state).sum()) for state in (1, 2))
        lines.append(f"blocks: {partial + full} of {states.numel()} visited, {full} full, {partial} partial")
    return tuple(lines)


def _lines_of(name: str, words: Sequence[int]) -> list[str]:
    count = words[1]
    instructions = [words[HEADER_WORDS + n * INSTRUCTION_WORDS :][:INSTRUCTION_WORDS] for n in range(count)]
    ranks = [0, 0, 0, 0]
    for _, target, *_rest in instructions:
        ranks[3 if target < 0 else target & 3] += 1
    per = ", ".join(f"{n} per {where}" for n, where in zip(ranks, _PER, strict=True) if n)
    lines = [f"program of the {name}: {count} instructions" + (f" ({per})" if per else "")]
    for operation, target, *rest in instructions:
        row = OPERATIONS[_NAMES[operation]]
        operands = [_operand(word) for word in rest[: len(row.arguments)]]
        operands += [str(x) for x in _immediates(_NAMES[operation], rest[3:5])]
        assigned = "" if target < 0 else f"{_operand(target)} = "
        lines.append(f"  {assigned}{_NAMES[operation]}({', '.join(operands)})")
    return lines if words[6] < 0 else [*lines, f"  result {_operand(words[6])}"]


def _operand(word: int) -> str:
    slot, rank = divmod(word, 4)
    if rank == 3 and slot < 2:
        return ("score", "gradient")[slot]
    return f"{_LETTERS[rank]}{slot}"


def _immediates(operation: str, words: Sequence[int]) -> list[Any]:
    if operation == "float_constant":
        return [struct.unpack("<d", struct.pack("<q", words[0]))[0]]
    if operation in ("int_constant", "bool_constant", "wrap_index"):
        return [words[0]]
    if operation in ("gather", "gather_int", "scatter_add"):
        return [f"elements {words[0]} to {words[0] + words[1] - 1}"]
    return []
