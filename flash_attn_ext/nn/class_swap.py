"""How an nn.MultiheadAttention becomes a MultiheadAttention, and back: which class, which hook, and when not."""

from __future__ import annotations

import sys

import torch
from torch import nn

from ..inspection import build_info

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _run_forward(module: nn.Module, args: tuple) -> None:
    """A forward pre-hook that does nothing. Attaching it makes torch call this module's forward.

    In eval without grad, nn.TransformerEncoderLayer passes the weights of its self_attn to one fused operator of
    torch and never calls self_attn.forward. It does not take that path when any module below it has a forward
    hook. (Its other conditions, `_qkv_same_embed_dim`, `in_proj_bias` and `batch_first`, describe the weights.
    Other code reads them too, so they must stay true.) It is a plain function of this file, so that deepcopy and
    pickle keep it.
    """


def keep_forward(module: nn.Module) -> None:
    """Attaches `_run_forward`, once."""
    if not any(hook is _run_forward for hook in module._forward_pre_hooks.values()):
        module.register_forward_pre_hook(_run_forward)


def drop_keep_forward(module: nn.Module) -> None:
    """Undoes `keep_forward`."""
    for handle_id, hook in list(module._forward_pre_hooks.items()):
        if hook is _run_forward:
            del module._forward_pre_hooks[handle_id]


def exchange_base(cls: type, old: type, new: type) -> type:
    """`new` if `cls` is `old`; else a class like `cls`, with `new` in the place of its base `old`.

    torch's parametrize and fully_shard give a module a class of its own, derived from the module's: it becomes
    the same class on another base.
    """
    if cls is old:
        return new
    bases = tuple(exchange_base(base, old, new) if issubclass(base, old) else base for base in cls.__bases__)
    body = {name: entry for name, entry in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, bases, body)


def class_under_wrappers(module: nn.Module) -> type:
    """The class that `module` had before torch's parametrize or fully_shard (FSDP2) gave it one of their own."""
    cls = type(module)
    while (inner := _wrapped_by(cls, module)) is not None:
        cls = inner
    return cls


def _wrapped_by(cls: type, module: nn.Module) -> type | None:
    """The class that `cls` was made from; None if torch did not make `cls`."""
    first = cls.__bases__[0]
    if nn.utils.parametrize.is_parametrized(module) and cls.__name__ == f"Parametrized{first.__name__}":
        return first
    if len(cls.__bases__) == 2 and _is_of_fsdp(first):
        return cls.__bases__[1]
    return None


def is_sharded(module: nn.Module) -> bool:
    """Whether fully_shard (FSDP2) was called on `module` itself."""
    return _is_of_fsdp(type(module))


def _is_of_fsdp(cls: type) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # no module is sharded before it is imported
    return hasattr(fsdp, "FSDPModule") and issubclass(cls, fsdp.FSDPModule)


def why_not_replaceable(module: nn.MultiheadAttention) -> str | None:
    """Why `module` cannot become a MultiheadAttention, or would not run as one; None if it would."""
    original = class_under_wrappers(module)
    if original is not nn.MultiheadAttention:
        return (
            f"it is a {original.__module__}.{original.__qualname__}, which may compute something else than "
            "torch.nn.MultiheadAttention itself"
        )
    if "forward" in vars(module):
        return "its forward was replaced on the instance, and that replacement would go on running torch's"
    info = build_info()
    if module.head_dim > info["max_head_dim"]:
        return f"its head dimension is {module.head_dim}; the kernels take up to {info['max_head_dim']}"
    devices = ("cpu", "cuda", "meta") if info["cuda"] else ("cpu", "meta")  # meta: not loaded yet
    for name, parameter in module.named_parameters():
        if parameter.dtype not in _DTYPES:
            return f"its {name} is {parameter.dtype}; the kernels take float16, bfloat16, float32 and float64"
        if parameter.device.type not in devices:
            return f"its {name} is on {parameter.device}; this build has kernels for {' and '.join(devices[:-1])} only"
    return None
