"""activate: torch's attention calls run on flash_attn_ext, in unchanged models.

csrc/torch_overrides/ registers kernels for torch's operators. This module switches the kernels on and off, and reports
their calls.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.attention
from torch import Tensor

from .. import _ops
from .._explain import Explanation, explain
from ..flex import activation as flex_activation

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
    """Number of calls of torch's attention operators while active, since the start or the last reset.

    Attributes:
        taken: operator -> number of calls that ran on flash_attn_ext.
        left: (operator, reason) -> number of calls that ran on torch's own kernel.

    One call of a model may count at two operators: torch splits a traced scaled_dot_product_attention into other
    operators, and flash_attn_ext may run some of them.
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


# Protects the two variables below. Reentrant, because the garbage collector may end an abandoned block at any time.
_lock = threading.RLock()
_switched_on = False  # by activate()
_open_blocks = 0  # of activated(), in all threads


def _apply() -> None:
    """Registers our kernels if activate() or an open block requires them, otherwise torch's.

    The caller holds `_lock`.
    """
    wanted = _switched_on or _open_blocks > 0
    if wanted == _ops.is_active():
        return
    if wanted:
        _ops.activate()
        flex_activation.activate()
    else:
        _ops.deactivate()
        flex_activation.deactivate()
    # torch.compile caches the kernel of this operator, and would continue to trace the old one.
    torch.ops.aten.scaled_dot_product_attention.default._dispatch_cache.clear()


def activate() -> None:
    """From now on, torch's attention on CPU runs flash_attn_ext, in the whole process and in all threads.

    This includes :func:`torch.nn.functional.scaled_dot_product_attention` in eager mode, with autograd in both modes,
    autocast, torch.func and torch.compile. It includes ``nn.MultiheadAttention`` and ``nn.TransformerEncoder`` with
    their fused inference path, and ``torch.nn.attention.varlen.varlen_attn``, for which torch has no CPU kernel. It
    includes torch's ``flex_attention``, compiled or not, also with inputs that require gradients, which torch refuses
    on CPU. A compiled call of ``flex_attention`` is counted when it is traced, once or more. A call that our kernels do
    not support runs on torch's kernel: :func:`activation_report` shows the reason after the call, and
    :func:`explain_sdpa` before it. On CUDA devices, in a build with CUDA kernels, it includes the operators that
    FlashAttention-3 may replace in torch.

    :func:`deactivate` restores torch. A second call does nothing. With the environment variable
    ``FLASH_ATTN_EXT_ACTIVATE=1`` the import of flash_attn_ext calls this function.

    Differences from torch, in addition to speed:

    - Rounding, and the elements that dropout drops: the seed comes from torch's generator, but the random numbers
      differ.
    - In the fused inference path, a row in which all keys are masked is 0; torch returns NaN. A float ``mask`` is added
      to the scores; torch hides every key with a nonzero mask value.
    - No S_q x S_k tensor is allocated. torch allocates one with dropout, with a mask that needs a gradient, if the head
      dimension of ``value`` differs, and in the fused inference path.
    """
    global _switched_on
    with _lock:
        _switched_on = True
        _apply()


def deactivate() -> None:
    """Undoes :func:`activate`: torch's kernels run again, as soon as no block of :func:`activated` is open.

    Calls that already run in other threads do not change.
    """
    global _switched_on
    with _lock:
        _switched_on = False
        _apply()


@contextmanager
def activated() -> Iterator[None]:
    """:func:`activate` for a block of code, in all threads.

    Blocks may nest and overlap, also in several threads. After the last block torch's kernels run again, unless
    :func:`activate` was called.
    """
    global _open_blocks
    with _lock:
        _open_blocks += 1
    try:
        with _lock:
            _apply()
        yield
    finally:
        with _lock:
            _open_blocks -= 1
            _apply()


def is_active() -> bool:
    """Whether torch's attention runs on flash_attn_ext now."""
    return _ops.is_active()


class _Handle:
    """torch holds this object while an implementation is active, and calls `remove` to deactivate it."""

    def remove(self) -> None:
        deactivate()


def _activate_for_torch() -> _Handle:
    activate()
    return _Handle()


# torch.nn.attention.activate_flash_attention_impl("flash_attn_ext") and restore_flash_attention_impl() work too.
torch.nn.attention.register_flash_attention_impl(IMPLEMENTATION, register_fn=_activate_for_torch)


def activation_report(*, reset: bool = False) -> ActivationReport:
    """Reports the calls of torch's attention operators that ran on flash_attn_ext, and the reasons for all other calls.

    ``reset`` sets all counts to 0 afterwards.
    """
    counts = _ops.activation_counts() | flex_activation.counts
    if reset:
        _ops.reset_activation_counts()
        flex_activation.counts.clear()
    named = {(operator.removeprefix("aten::"), reason): n for (operator, reason), n in counts.items()}
    return ActivationReport(
        taken={operator: n for (operator, reason), n in named.items() if not reason},
        left={key: n for key, n in named.items() if key[1]},
    )


@dataclass(frozen=True)
class SdpaExplanation:
    """The result of :func:`explain_sdpa`. Its text is readable.

    Attributes:
        why_not: the reason why torch runs the call; None if flash_attn_ext runs it.
        call: the explanation of the call on our kernels; None if torch runs the call.
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
    """Explains whether a call of :func:`torch.nn.functional.scaled_dot_product_attention` would run on our kernels.

    The arguments are the same as for torch's function, and are checked as in the call. Nothing runs, and
    :func:`activation_report` does not count the call. This works with and without :func:`activate`. Calls in compiled
    code, and on devices other than CPU, use other operators of torch. Then ``why_not`` has this reason.
    """
    if query.device.type != "cpu":
        return SdpaExplanation(f"the tensors are on {query.device.type}; only calls on cpu are explained", None)
    arguments = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    why_not = _ops.why_not_sdpa(*arguments)
    return SdpaExplanation(why_not, None if why_not else explain(*arguments))


def _read_environment() -> None:
    value = os.environ.get("FLASH_ATTN_EXT_ACTIVATE", "")
    if value not in ("", "0", "1"):
        raise ImportError(f"FLASH_ATTN_EXT_ACTIVATE: got {value!r}; allowed: 0, 1 or unset")
    if value == "1":
        activate()


_read_environment()
