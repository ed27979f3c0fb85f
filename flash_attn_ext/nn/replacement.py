"""replace_attention: run the nn.MultiheadAttention modules of an existing model on flash_attn_ext.

A module is swapped by giving it another class. Nothing is built or copied, so whatever refers to the module
or lies in it stays valid: parents, tied registrations, the user's variables, optimizers, hooks and their
handles, training flags, devices. (torch does the same in torch.nn.utils.parametrize and in FSDP2's
fully_shard.)
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

from .class_swap import drop_keep_forward, exchange_base, keep_forward, why_not_replaceable
from .multihead_attention import MultiheadAttention

__all__ = ["ReplacedAttention", "replace_attention"]

# Relative to the largest value of the original output. Wider than one operator's error: models are deep.
_DEFAULT_RTOL = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class ReplacedAttention:
    """What `replace_attention` did. Printed, it is a table.

    Attributes:
        replaced: names of the modules that now run on flash_attn_ext, as in `model.named_modules()`; "" is
            `model` itself. A module registered at several places has the first of its names.
        already: names of those that were a flash_attn_ext.MultiheadAttention before.
        skipped: name -> reason, of nn.MultiheadAttention modules that were left as they are.
        others: name -> reason, of modules of other classes that seem to attend: whose forward names
            torch.nn.functional.scaled_dot_product_attention, as timm's do, or whose class is called attention, as
            torchvision's for Swin. They are never replaced.
        max_difference: largest absolute difference of the outputs on `sample_input`; None without that.
    """

    replaced: tuple[str, ...]
    already: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    max_difference: float | None = None
    others: dict[str, str] = field(default_factory=dict)
    # Each module that was changed, the class that it had and the class that it got.
    _changed: tuple[tuple[nn.Module, type, type], ...] = field(default=(), repr=False, compare=False)

    def undo(self) -> None:
        """Makes torch's modules of those in `replaced` again, in place; parameters, hooks and flags stay as they are.

        Those that are not ours any more are left. A class that torch wrapped around a module since (parametrize,
        fully_shard) stays. A second call changes nothing.
        """
        for module, before, after in self._changed:
            if not isinstance(module, MultiheadAttention):
                continue
            now = type(module)
            module.__class__ = before if now is after else exchange_base(now, MultiheadAttention, nn.MultiheadAttention)
            drop_keep_forward(module)

    def __str__(self) -> str:
        rows = [(name, "replaced", "") for name in self.replaced]
        rows += [(name, "already", "it was a flash_attn_ext.MultiheadAttention before") for name in self.already]
        rows += [(name, "left", reason) for reasons in (self.skipped, self.others) for name, reason in reasons.items()]
        rows = [(name or "(the model)", *rest) for name, *rest in rows]
        width = max(len(name) for name, *_ in rows)
        lines = [f"{name:{width}}  {what:8}  {why}".rstrip() for name, what, why in rows]
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

    The module objects, their parameters (the same objects: optimizers go on working), hooks, training flags,
    parametrizations, dtype and device stay; state_dict does not change. This includes the self_attn of
    nn.TransformerEncoderLayer, whose fused inference path is not taken any more, and `model` itself if it
    is an nn.MultiheadAttention. `model` is changed and need not be assigned; the report of what happened is
    returned, and its `undo()` gives torch's modules back.

    Exactly the class nn.MultiheadAttention is replaced, also under torch's parametrize and fully_shard (FSDP2).
    Modules of a subclass (such as torch.ao's quantizable one), with a forward of their own on the instance, or
    that the kernels could not run (head dimension, dtype, device) are left as they are: each is named in
    `skipped`, and in a warning. Modules that attend by themselves are named in `others`.

    Args:
        model: the model, or a single nn.MultiheadAttention.
        sample_input: if given, `model` is run on it before and after, in eval mode, without grad and with the
            same random numbers, and the results are compared. A tuple is passed as positional arguments, a
            dict as keywords, anything else as the only argument. Training flags are restored.
        rtol, atol: the results are the same if ``|new - old| <= atol + rtol * max|old|`` everywhere, tensor by
            tensor, max over finite values. `rtol` None: 1e-9 for float64, 1e-4 float32, 1e-2 float16, 5e-2
            bfloat16, 0 otherwise.

    Returns:
        A ReplacedAttention. A model that was replaced before gives an empty `replaced`.

    Raises:
        ValueError: `model` has no nn.MultiheadAttention at all; names the modules that seem to attend. Or nothing
            can be compared, because the output on `sample_input` before the replacement has no tensor or has NaN
            (which torch's fused path gives for fully padded rows).
        RuntimeError: the results differ; names the largest difference.
        An error of `model` itself on `sample_input` passes through. After any of them the model is as it was.
    """
    modules = {name: m for name, m in model.named_modules() if isinstance(m, nn.MultiheadAttention)}
    others = _others(model, modules)
    if not modules:
        raise ValueError(
            f"model: {type(model).__name__} contains no torch.nn.MultiheadAttention, there is nothing to "
            "replace; attention that calls scaled_dot_product_attention itself can call "
            "flash_attn_ext.flash_attn instead, or runs on our kernels after flash_attn_ext.activate()"
            + "".join(f"\n{name or '(the model)'}: {reason}" for name, reason in others.items())
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
        warnings.warn(f"replace_attention left {name or 'the model'!r} as it is: {reason}", stacklevel=2)
    changes = []
    for module in replaced.values():
        before = type(module)
        changes.append((module, before, exchange_base(before, nn.MultiheadAttention, MultiheadAttention)))
    report = ReplacedAttention(tuple(replaced), already, skipped, None, others, tuple(changes))
    try:
        for module, _, after in changes:
            module.__class__ = after
            keep_forward(module)
        if expected is not None:
            difference = _largest_difference(expected, _run(model, sample_input), rtol, atol)
            report = dataclasses.replace(report, max_difference=difference)
    except BaseException:
        report.undo()
        raise
    return report


_CALLS_SDPA = (
    "it is no nn.MultiheadAttention; its forward calls scaled_dot_product_attention itself, which "
    "flash_attn_ext.activate() runs on our kernels"
)
_SEEMS_TO_ATTEND = (
    "it is no nn.MultiheadAttention, and its forward does not call scaled_dot_product_attention itself; "
    "activation_report() says whether activate() takes its calls"
)


def _others(model: nn.Module, replaceable: dict[str, nn.Module]) -> dict[str, str]:
    """name -> reason of the other modules that attend, or are called so and have none of these in them."""
    found = {}
    named = [(name, m) for name, m in model.named_modules() if not isinstance(m, nn.MultiheadAttention)]
    for name, module in reversed(named):  # children before their parents
        inner = any(n.startswith(f"{name}." if name else "") and n != name for n in (*found, *replaceable))
        if _calls_sdpa(module):
            found[name] = _CALLS_SDPA
        elif "attention" in type(module).__name__.lower() and not inner:
            found[name] = _SEEMS_TO_ATTEND
    return {name: found[name] for name, _ in named if name in found}


def _calls_sdpa(module: nn.Module) -> bool:
    """Whether the text of the class's forward names torch's scaled_dot_product_attention."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and "scaled_dot_product_attention" in code.co_names


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    # Flag by flag: parts of a model may be frozen in eval while the rest trains.
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training


def _run(model: nn.Module, sample_input: Any) -> list[Tensor]:
    """The tensors of the model's output."""
    args, kwargs = (sample_input,), {}
    if isinstance(sample_input, tuple):
        args = sample_input
    elif isinstance(sample_input, dict):
        args, kwargs = (), sample_input
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    # fork_rng restores the generators afterwards, so that the next run draws the same random numbers.
    with _eval_mode(model), torch.no_grad(), torch.random.fork_rng(sorted(devices)):
        leaves, _ = tree_flatten(model(*args, **kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors:
        raise ValueError("sample_input: the model returns no tensor for it, so nothing can be compared")
    # Detached copies: a model may return a view of a buffer that its next call writes.
    return [(x.to_padded_tensor(0.0) if x.is_nested else x).clone() for x in tensors]


def _largest_difference(expected: list[Tensor], got: list[Tensor], rtol: float | None, atol: float) -> float:
    """The largest absolute difference; RuntimeError if one is beyond the tolerance of its tensor."""
    shapes = [[tuple(x.shape) for x in tensors] for tensors in (expected, got)]
    if shapes[0] != shapes[1]:
        raise RuntimeError(f"replace_attention: output shapes were {shapes[0]}, would become {shapes[1]}")
    largest = 0.0
    for i, (old, new) in enumerate(zip(expected, got, strict=True)):
        if old.numel() == 0:
            continue
        relative = _DEFAULT_RTOL.get(old.dtype, 0.0) if rtol is None else rtol
        # Wide, as differences of 16-bit numbers would be rounded.
        wide = torch.complex128 if old.is_complex() else torch.float64
        old, new = old.to(wide), new.to(wide)
        difference = torch.where(old == new, 0.0, (new - old).abs()).max().item()  # inf - inf is 0 here
        scale = torch.where(old.isfinite(), old.abs(), 0.0).max().item()
        if not difference <= atol + relative * scale:
            raise RuntimeError(
                f"replace_attention: output tensor {i} would change by up to {difference:.3g}, where its "
                f"largest value is {scale:.3g} and atol={atol:.3g}, rtol={relative:.3g} are allowed; nothing "
                "was replaced"
            )
        largest = max(largest, difference)
    return largest
