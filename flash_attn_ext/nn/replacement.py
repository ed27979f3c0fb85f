"""replace_attention: runs the nn.MultiheadAttention modules of an existing model on flash_attn_ext.

A module is replaced by an assignment to its `__class__`. No module is built or copied. So all references to the module
and all objects in the module stay valid: parents, tied registrations, the user's variables, optimizers, hooks and their
handles, training flags, devices. torch does the same in torch.nn.utils.parametrize and in FSDP2's fully_shard.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from .class_swap import attach_forward_hook, exchange_base, remove_forward_hook, why_not_replaceable
from .multihead_attention import MultiheadAttention

__all__ = ["ReplacedAttention", "replace_attention"]

# Relative to the largest value of the original output. Larger than the error of one operator, because models are deep.
_DEFAULT_RTOL = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class ReplacedAttention:
    """The report of `replace_attention`. Its text is a table.

    Attributes:
        replaced: names of the modules that now run on flash_attn_ext, as in `model.named_modules()`; "" is
            `model` itself. A module that is registered several times has its first name.
        already: names of the modules that were a flash_attn_ext.MultiheadAttention before.
        skipped: name -> reason, for nn.MultiheadAttention modules that did not change.
        other_attention: name -> reason, for modules of other classes that seem to compute attention. They are never
            replaced. Either their forward mentions torch.nn.functional.scaled_dot_product_attention (timm), or the
            name of their class contains "attention" (torchvision's Swin).
        max_difference: largest absolute difference of the outputs on `sample_input`; None without `sample_input`.
    """

    replaced: tuple[str, ...]
    already: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    max_difference: float | None = None
    other_attention: dict[str, str] = field(default_factory=dict)
    # (module, class before, class after) for each changed module.
    _changed: tuple[tuple[nn.Module, type, type], ...] = field(default=(), repr=False, compare=False)

    def undo(self) -> None:
        """Restores torch's class of each module in `replaced`, in place. Parameters, hooks and flags do not change.

        A module that has another class now is skipped. A class that torch derived after the replacement (parametrize,
        fully_shard) stays. A second call changes nothing.
        """
        for module, before, after in self._changed:
            if not isinstance(module, MultiheadAttention):
                continue
            now = type(module)
            module.__class__ = before if now is after else exchange_base(now, MultiheadAttention, nn.MultiheadAttention)
            remove_forward_hook(module)

    def __str__(self) -> str:
        rows = [(name, "replaced", "") for name in self.replaced]
        rows += [(name, "already", "it was a flash_attn_ext.MultiheadAttention before") for name in self.already]
        rows += [(name, "skipped", reason) for name, reason in [*self.skipped.items(), *self.other_attention.items()]]
        rows = [(name or "(the model)", status, reason) for name, status, reason in rows]
        width = max(len(name) for name, *_ in rows)
        lines = [f"{name:{width}}  {status:8}  {reason}".rstrip() for name, status, reason in rows]
        if self.max_difference is not None:
            lines.append(f"largest difference on sample_input: {self.max_difference:.3g}")
        return "\n".join(lines)


def replace_attention(
    model: nn.Module,
    *,
    sample_input: Any = None,
    rtol: float | None = None,
    atol: float = 0.0,
) -> ReplacedAttention:
    """Makes every torch.nn.MultiheadAttention of `model` a flash_attn_ext.MultiheadAttention, in place.

    The module objects, their parameters (the same objects, so optimizers continue), hooks, training flags,
    parametrizations, dtype, device and the state_dict do not change. The self_attn of nn.TransformerEncoderLayer is
    replaced, too, and the layer no longer uses its fused inference path. If `model` is an nn.MultiheadAttention, it is
    replaced, too. `undo()` of the returned report restores torch's modules.

    Only the class nn.MultiheadAttention itself is replaced, also under torch's parametrize and fully_shard (FSDP2).
    Three kinds of modules do not change. They are instances of a subclass (for example of torch.ao's quantizable
    class), instances with their own forward, and modules without kernels (head dimension, dtype, device). `skipped` and
    a warning name each of these modules. `other_attention` names modules of other classes that seem to compute
    attention.

    Args:
        model: the model, or a single nn.MultiheadAttention.
        sample_input: if given, `model` runs on it before and after the replacement, and the results are compared. Both
            runs are in eval mode, without grad and with the same random numbers. A tuple is passed as positional
            arguments, a dict as keywords, anything else as the only argument. Training flags are restored.
        rtol, atol: the results are equal if ``|new - old| <= atol + rtol * max|old|`` for all elements of each
            tensor. The maximum is over finite values. `rtol` None: 1e-9 for float64, 1e-4 float32, 1e-2 float16, 5e-2
            bfloat16, 0 otherwise.

    Returns:
        A ReplacedAttention. Its `replaced` is empty for a model that was replaced before.

    Raises:
        ValueError: `model` has no nn.MultiheadAttention; the error names the modules that seem to compute attention. Or
        the results cannot be compared: the output on `sample_input` before the replacement has no tensor, or has NaN.
        torch's fused path returns NaN for fully padded rows.
        RuntimeError: the results differ. The error names the largest difference.
        An error of `model` on `sample_input` is raised unchanged. After each of these errors the model is unchanged.
    """
    modules = {name: m for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    other_attention = _other_attention(model, modules)
    if not modules:
        raise ValueError(
            f"model: {type(model).__name__} contains no torch.nn.MultiheadAttention, there is nothing to "
            "replace; a forward that calls scaled_dot_product_attention can call flash_attn_ext.flash_attn "
            "instead, or run unchanged after flash_attn_ext.activate()"
            + "".join(f"\n{name or '(the model)'}: {reason}" for name, reason in other_attention.items())
        )
    already = tuple(name for name, module in modules.items() if isinstance(module, MultiheadAttention))
    reasons = {name: why_not_replaceable(module) for name, module in modules.items() if name not in already}
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    replaced = {name: modules[name] for name, reason in reasons.items() if reason is None}

    expected = None if sample_input is None else _run(model, sample_input)
    if expected is not None and any(x.isnan().any() for x in expected):
        raise ValueError(
            "sample_input: the output of the original model has NaN, so nothing can be compared; allowed is "
            "an input on which it has none (torch's fused path gives NaN where all keys are masked)"
        )
    for name, reason in skipped.items():
        warnings.warn(f"replace_attention skipped {name or 'the model'!r}: {reason}", stacklevel=2)
    changes = []
    for module in replaced.values():
        before = type(module)
        changes.append((module, before, exchange_base(before, nn.MultiheadAttention, MultiheadAttention)))
    report = ReplacedAttention(tuple(replaced), already, skipped, None, other_attention, tuple(changes))
    try:
        for module, _, after in changes:
            module.__class__ = after
            attach_forward_hook(module)
        if expected is not None:
            difference = _largest_difference(expected, _run(model, sample_input), rtol, atol)
            report = dataclasses.replace(report, max_difference=difference)
    except BaseException:
        report.undo()
        raise
    return report


_MENTIONS_SDPA = (
    "it is no nn.MultiheadAttention; its forward mentions scaled_dot_product_attention, and "
    "flash_attn_ext.activate() runs each call of that function on our kernels"
)
_SWITCHED_OFF = (
    "it is no nn.MultiheadAttention; its forward mentions scaled_dot_product_attention, but its {flags} is False, so "
    "it may compute attention by matrix products, which flash_attn_ext.activate() does not see"
)
_NAMED_ATTENTION = (
    "it is no nn.MultiheadAttention, and its forward does not mention scaled_dot_product_attention; "
    "activation_report() counts the calls that activate() runs"
)


def _other_attention(model: nn.Module, replaceable: dict[str, nn.Module]) -> dict[str, str]:
    """Returns {name: reason} for modules of other classes that seem to compute attention.

    A module that only has "attention" in its class name is skipped if a module inside it is reported or replaced.
    """
    found = {}
    named = [(name, m) for name, m in model.named_modules() if not isinstance(m, nn.MultiheadAttention)]
    for name, module in reversed(named):  # children before their parents
        inner = any(n.startswith(f"{name}." if name else "") and n != name for n in (*found, *replaceable))
        reason = _reason_of_sdpa(module)
        if reason is not None:
            found[name] = reason
        elif "attention" in type(module).__name__.lower() and not inner:
            found[name] = _NAMED_ATTENTION
    return {name: found[name] for name, _ in named if name in found}


def _reason_of_sdpa(module: nn.Module) -> str | None:
    """Returns the reason to report if the forward of the module's class mentions scaled_dot_product_attention, or None.

    The code of a function lists names, not calls. A flag may choose another branch: timm's Swin has `fused_attn`, which
    is False by default, and nanoGPT has `flash`.
    """
    code = getattr(type(module).forward, "__code__", None)
    if code is None or "scaled_dot_product_attention" not in code.co_names:
        return None
    flags = [name for name in code.co_names if any(part in name.lower() for part in ("flash", "fused", "sdpa"))]
    flags = [name for name in flags if getattr(module, name, None) is False]
    return _SWITCHED_OFF.format(flags=", ".join(flags)) if flags else _MENTIONS_SDPA


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    # Saves one flag for each module: some modules may be frozen in eval while the model trains.
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def _run(model: nn.Module, sample_input: Any) -> list[Tensor]:
    """Returns the tensors of the model's output."""
    args, kwargs = (sample_input,), {}
    if isinstance(sample_input, tuple):
        args = sample_input
    elif isinstance(sample_input, dict):
        args, kwargs = (), sample_input
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    # fork_rng restores the generators, so that the next run draws the same random numbers.
    with _eval_mode(model), torch.no_grad(), torch.random.fork_rng(sorted(devices)):
        leaves, _ = tree_flatten(model(*args, **kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        raise ValueError("sample_input: the model returns no tensor for it, so nothing can be compared")
    # Copies, because a model may return a view of a buffer and overwrite the buffer in its next call.
    return [(x.to_padded_tensor(0.0) if x.is_nested else x).clone() for x in tensors]


def _largest_difference(expected: list[Tensor], got: list[Tensor], rtol: float | None, atol: float) -> float:
    """Returns the largest absolute difference.

    Raises RuntimeError if a difference exceeds the tolerance of its tensor.
    """
    shapes = [[tuple(x.shape) for x in tensors] for tensors in (expected, got)]
    if shapes[0] != shapes[1]:
        raise RuntimeError(f"replace_attention: output shapes were {shapes[0]}, would become {shapes[1]}")
    largest = 0.0
    for i, (old, new) in enumerate(zip(expected, got, strict=True)):
        if old.numel() == 0:
            continue
        relative = _DEFAULT_RTOL.get(old.dtype, 0.0) if rtol is None else rtol
        # In float64, because differences of 16-bit numbers would be rounded.
        wide = torch.complex128 if old.is_complex() else torch.float64
        old, new = old.to(wide), new.to(wide)
        difference = torch.where(old == new, 0.0, (new - old).abs()).max().item()  # inf - inf counts as 0
        scale = torch.where(old.isfinite(), old.abs(), 0.0).max().item()
        if not difference <= atol + relative * scale:
            raise RuntimeError(
                f"replace_attention: output tensor {i} would change by up to {difference:.3g}, where its "
                f"largest value is {scale:.3g} and atol={atol:.3g}, rtol={relative:.3g} are allowed; nothing "
                "was replaced"
            )
        largest = max(largest, difference)
    return largest
