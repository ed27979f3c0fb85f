"""activate: torch's own attention calls run on flash_attn_ext, in models that know nothing of it.

The kernels that do so are registered in torch's dispatcher by csrc/torch_overrides/; this module switches them on and
off and shows what they did.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.attention
from torch import Tensor

from .. import _ops
from .._explain import Explanation, explain

__all__ = [
    "ActivationReport",
    "SdpaExplanation",
    "activate",
    "activated",
    "activation_report",
    "deactivate",
    "explain_sdpa",
    "is_active",
]

IMPLEMENTATION = "flash_attn_ext"


@dataclass(frozen=True)
class ActivationReport:
    """How often torch's attention operators were called while active, since the start or the last reset.

    Attributes:
        taken: operator -> number of calls that ran on flash_attn_ext.
        left: (operator, reason) -> number of calls that ran torch's own kernel, and why.

    One call of a model may count at two operators: scaled_dot_product_attention leaves traced calls to torch,
    which breaks them into other operators, of which some are taken.
    """

    taken: dict[str, int]
    left: dict[tuple[str, str], int]

    def __str__(self) -> str:
        lines = [f"{count:>8}  {operator}" for operator, count in self.taken.items()] or ["    none"]
        text = "\n".join(["calls taken by flash_attn_ext:", *lines])
        if self.left:
            lines = [f"{count:>8}  {operator}: {reason}" for (operator, reason), count in self.left.items()]
            text = "\n".join([text, "calls left to torch:", *lines])
        return text


def activate() -> None:
    """From now on, torch's attention on CPU runs flash_attn_ext, in the whole process and in all threads.

    Taken are :func:`torch.nn.functional.scaled_dot_product_attention`, eager, with autograd in both modes, autocast,
    torch.func and torch.compile; and so ``nn.MultiheadAttention`` and ``nn.TransformerEncoder``, their fused inference
    path too; and ``torch.nn.attention.varlen.varlen_attn``, which has no kernel of torch's on CPU.
    What our kernels do not take runs torch's own kernel as before, and :func:`activation_report` says why, as
    :func:`explain_sdpa` does beforehand. On CUDA devices the operators are taken that FlashAttention-3 takes in torch,
    if this build has CUDA kernels.
    :func:`deactivate` restores torch. A second call does nothing. The environment variable
    ``FLASH_ATTN_EXT_ACTIVATE=1`` calls this when flash_attn_ext is imported.

    What differs from torch, beside speed:

    - Rounding, and the elements that dropout drops: the seed is torch's generator's, the random numbers are not.
    - A row to which all keys are masked gives 0 in the fused inference path too, where torch gives NaN.
    - There, a float ``mask`` is added to the scores; torch hides every key whose mask is not 0.
    - Memory: no tensor of size S_q x S_k, also where torch has one: with dropout, with a mask that needs a
      gradient, with a head dimension of ``value`` of its own, and in the fused inference path.
    """
    _ops.activate()
    _forget_dispatch()


def deactivate() -> None:
    """torch's own kernels run again. Calls in other threads end with the kernel that they began with."""
    _ops.deactivate()
    _forget_dispatch()


def _forget_dispatch() -> None:
    """Empties torch.compile's cache of the kernel that this operator has: it would go on tracing the old one."""
    torch.ops.aten.scaled_dot_product_attention.default._dispatch_cache.clear()


def is_active() -> bool:
    """Whether torch's attention runs flash_attn_ext at the moment."""
    return _ops.is_active()


class _Handle:
    """torch keeps it while an implementation is active, and calls `remove` to end that."""

    def remove(self) -> None:
        deactivate()


def _activate_for_torch() -> _Handle:
    activate()
    return _Handle()


# torch.nn.attention.activate_flash_attention_impl("flash_attn_ext") and restore_flash_attention_impl() work too.
torch.nn.attention.register_flash_attention_impl(IMPLEMENTATION, register_fn=_activate_for_torch)


@contextmanager
def activated() -> Iterator[None]:
    """:func:`activate` for a block of code, in all threads; afterwards everything is as it was before the block."""
    before = is_active()
    activate()
    try:
        yield
    finally:
        if not before:
            deactivate()


def activation_report(*, reset: bool = False) -> ActivationReport:
    """Which calls of torch's attention operators were taken, and why others were not; ``reset`` starts at 0 again."""
    counts = _ops.activation_counts()
    if reset:
        _ops.reset_activation_counts()
    named = {(operator.removeprefix("aten::"), reason): n for (operator, reason), n in counts.items()}
    return ActivationReport(
        taken={operator: n for (operator, reason), n in named.items() if not reason},
        left={key: n for key, n in named.items() if key[1]},
    )


@dataclass(frozen=True)
class SdpaExplanation:
    """What :func:`explain_sdpa` found. Printed, it can be read.

    Attributes:
        why_not: why the call is left to torch; None if it is taken.
        call: what our kernels do with it; None if it is left.
    """

    why_not: str | None
    call: Explanation | None

    @property
    def taken(self) -> bool:
        return self.why_not is None

    def __str__(self) -> str:
        return f"taken by flash_attn_ext\n{self.call}" if self.taken else f"left to torch: {self.why_not}"


def explain_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> SdpaExplanation:
    """Whether this call of :func:`torch.nn.functional.scaled_dot_product_attention` runs on our kernels while active.

    Arguments: those of torch's function. Nothing runs, whether active or not, and nothing is counted in
    :func:`activation_report`; the checks are those of the call itself. Calls in compiled code, and on other devices
    than CPU, go to other operators of torch and are not explained: ``why_not`` says so.
    """
    if query.device.type != "cpu":
        return SdpaExplanation(f"the tensors are on {query.device.type}; only calls on cpu are explained", None)
    arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    why_not = _ops.why_not_sdpa(*arguments)
    return SdpaExplanation(why_not, None if why_not else explain(*arguments))


def _read_environment() -> None:
    asked = os.environ.get("FLASH_ATTN_EXT_ACTIVATE", "")
    if asked not in ("", "0", "1"):
        raise ImportError(f"FLASH_ATTN_EXT_ACTIVATE: got {asked!r}; allowed: 0, 1 or unset")
    if asked == "1":
        activate()


_read_environment()
