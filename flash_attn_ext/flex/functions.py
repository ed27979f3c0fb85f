"""Converts the functions of a call to tensors of the operator: programs, and rows of captured elements."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _ops
from . import lowering_activations, lowering_operators  # noqa: F401  register operators
from .custom_functions import functions_are_traced
from .dependencies import Dependencies, QuickKey
from .gradients import Gradients, gradients_of
from .lowering import lower
from .tracing import Traced, trace

_MOST_KEPT = 1024
_CHECKED_AS = "_flash_attn_ext_checked"  # an attribute of captured int tensors: the version that was checked


# The operator's tensors programs, captured and captured_ints. No NamedTuple, which takes 0.3 us.
Functions = tuple[Tensor | None, Tensor | None, Tensor | None]


class Compiled(NamedTuple):
    """Programs of a score function and a mask function, and the tensors that they read, in the order of the rows."""

    programs: Tensor
    score: Traced | None
    mask: Traced | None
    gradients: Gradients | None
    floats: tuple[Tensor, ...]
    ints: tuple[Tensor, ...]
    is_for_one_call: bool  # True: the programs contain elements of captured tensors, or lack a derivative


class _Kept(NamedTuple):
    programs: Tensor
    floats: tuple[int, ...]  # positions among the tensors of QuickKey or Dependencies
    ints: tuple[int, ...]


_kept: dict[tuple, _Kept] = {}


def functions_of(
    score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None, device: torch.device, dtype: torch.dtype
) -> Functions:
    """``dtype`` is the dtype of the accumulators."""
    if score_mod is None and mask_mod is None:
        return None, None, None
    if is_traced():  # each graph has a separate constant
        compiled = compile_functions(score_mod, mask_mod, device, dtype)
        return rows_of_tensors(compiled.programs, compiled.floats, compiled.ints, dtype)
    quick = QuickKey(score_mod, mask_mod)
    quick_key = (device, dtype, *quick.parts) if quick.is_complete else None
    kept = None if quick_key is None else _kept.get(quick_key)
    if kept is not None:
        return rows_of(kept.programs, quick.tensors, kept.floats, kept.ints, dtype)
    read = Dependencies(score_mod, mask_mod)
    key = (device, dtype, *read.parts) if read.is_complete else None
    kept = _kept.get(key) if key is not None else None
    if kept is None:
        compiled = compile_functions(score_mod, mask_mod, device, dtype)
        floats = [read.number_of(t) for t in compiled.floats]
        ints = [read.number_of(t) for t in compiled.ints]
        if key is None or None in floats or None in ints or compiled.is_for_one_call:
            return rows_of_tensors(compiled.programs, compiled.floats, compiled.ints, dtype)
        kept = _Kept(
            compiled.programs, tuple(n for n in floats if n is not None), tuple(n for n in ints if n is not None)
        )
        _keep(key, kept)
    numbers = {id(t): n for n, t in enumerate(quick.tensors)}
    # A tensor that appears twice may be two different tensors in the next call.
    if quick_key is not None and len(numbers) == len(quick.tensors):
        floats, ints = (tuple(numbers[id(read.tensors[n])] for n in row) for row in (kept.floats, kept.ints))
        _keep(quick_key, _Kept(kept.programs, floats, ints))
    return rows_of(kept.programs, read.tensors, kept.floats, kept.ints, dtype)


def _keep(key: tuple, kept: _Kept) -> None:
    if len(_kept) >= _MOST_KEPT:
        _kept.pop(next(iter(_kept)), None)  # the oldest
    _kept[key] = kept


def compile_functions(
    score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None, device: torch.device, dtype: torch.dtype
) -> Compiled:
    """Traces both functions, differentiates the score function, and encodes the programs."""
    # If Dynamo cannot trace a call, it runs the call and compiles the functions that the call runs. In a compiled
    # `with` of a mode an error leaves the mode on torch's stack.
    compile_ = torch._dynamo.disable(_compile) if "torch._dynamo" in sys.modules else _compile
    with functions_are_traced():
        return compile_(score_mod, mask_mod, device, dtype)


def _compile(
    score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None, device: torch.device, dtype: torch.dtype
) -> Compiled:
    score = (
        None if score_mod is None else trace(score_mod, "score_mod", lower, with_score=True, device=device, dtype=dtype)
    )
    mask = (
        None if mask_mod is None else trace(mask_mod, "mask_mod", lower, with_score=False, device=device, dtype=dtype)
    )
    traced = [t for t in (score, mask) if t is not None]
    if score is not None and score.program.operation() == "score":
        score = None  # the identity
    if mask is not None and mask.program.is_true():
        mask = None
    encoded: list[list[int] | None] = [None] * 4
    gradients = None
    is_differentiated = True
    if score is not None:
        # Encode the forward's program first: the derivative adds nodes that the forward does not need.
        encoded[0] = score.program.encode()
        ends, position = {}, 0
        for t in score.floats:
            ends[position] = t.requires_grad
            position += t.numel()
        try:
            gradients = gradients_of(score.program, lambda base: ends[base])
            encoded[1] = gradients.score.encode()
            encoded[2] = None if gradients.captured is None else gradients.captured.encode()
        except NotImplementedError:  # in the backward of a user's autograd.Function
            if torch.is_grad_enabled():
                raise
            is_differentiated = False
    # The backward may have captured more tensors than the forward.
    floats, ints = (score.floats, score.ints) if score is not None else ((), ())
    is_for_one_call = not is_differentiated or any(t.reads_elements for t in traced)
    if mask is not None:
        encoded[3] = mask.program.encode(sum(t.numel() for t in floats), sum(t.numel() for t in ints))
        floats, ints = floats + mask.floats, ints + mask.ints
    directory: list[int] = []
    words: list[int] = []
    for program in encoded:
        directory.append(-1 if program is None else len(encoded) + len(words))
        words += program or []
    programs = torch.tensor(directory + words, dtype=torch.int64, device="cpu")
    return Compiled(programs, score, mask, gradients, floats, ints, is_for_one_call)


def rows_of_tensors(
    programs: Tensor, floats: tuple[Tensor, ...], ints: tuple[Tensor, ...], dtype: torch.dtype
) -> Functions:
    """Returns the operator's tensors. ``dtype`` is the dtype of the accumulators."""
    first, end = len(floats), len(floats) + len(ints)
    return rows_of(programs, [*floats, *ints], tuple(range(first)), tuple(range(first, end)), dtype)


def rows_of(
    programs: Tensor, tensors: list[Tensor], floats: tuple[int, ...], ints: tuple[int, ...], dtype: torch.dtype
) -> Functions:
    """Returns the operator's tensors. ``floats`` and ``ints`` are positions of captured tensors in ``tensors``."""
    if not floats and not ints:
        return programs, None, None
    if not torch.compiler.is_compiling():
        rows = _ops.captured_rows_if_ordinary(tensors, floats, ints, dtype)
        if rows is not None:
            return programs, *rows
    captured = _row([tensors[n] for n in floats], dtype) if floats else None
    integer = torch.int64 if dtype is torch.float64 else torch.int32
    captured_ints = _row([tensors[n] for n in ints], integer) if ints else None
    return programs, captured, captured_ints


def is_traced() -> bool:
    """Whether a graph is being traced, so that tensors have no elements."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _row(tensors: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Returns all elements in one dimension."""
    if dtype is torch.int32:
        for t in tensors:
            _check_range(t)
    flat = [t.to(dtype).ravel() for t in tensors]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _check_range(t: Tensor) -> None:
    """Raises if an int does not fit the integers of programs, which are as wide as the scores.

    Skips tensors without elements.
    """
    checked = None if t.is_cpu else getattr(t, _CHECKED_AS, None)  # numpy writes on a CPU without a new version
    if checked is not None and checked == t._version:
        return
    if (
        type(t) is not Tensor
        or is_traced()
        or t.dtype not in (torch.int64, torch.uint32, torch.uint64)
        or t.numel() == 0
    ):
        return
    lowest, highest = (int(x) for x in torch.aminmax(t))
    if lowest < -(2**31) or highest >= 2**31:
        raise ValueError(
            f"score_mod, mask_mod: got a captured {t.dtype} tensor with elements from {lowest} to {highest}; allowed: "
            "elements of 32 bits (64 where query is float64)"
        )
    if not t.is_cpu and not t.is_inference():  # tensors of inference mode have no version
        setattr(t, _CHECKED_AS, t._version)
