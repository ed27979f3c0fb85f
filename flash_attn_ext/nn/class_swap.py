"""Changes the class of an nn.MultiheadAttention to MultiheadAttention and back, and checks which modules allow it."""

from __future__ import annotations

import sys

import torch
from torch import nn

from ..inspection import build_info

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _require_forward(module: nn.Module, args: tuple) -> None:
    """A forward pre-hook that does nothing. With the hook attached, torch calls this module's forward.

    In eval without grad, nn.TransformerEncoderLayer passes the parameters of self_attn to a fused operator of torch and
    never calls self_attn.forward. If any module inside the layer has a forward hook, it calls self_attn.forward. (Its
    other conditions, `_qkv_same_embed_dim`, `in_proj_bias` and `batch_first`, describe the parameters. Other code reads
    them, so they cannot be changed.) The hook is a function at module level, so that deepcopy and pickle can copy it.
    """


def attach_forward_hook(module: nn.Module) -> None:
    """Attaches `_require_forward`, once."""
    if not any(hook is _require_forward for hook in module._forward_pre_hooks.values()):
        module.register_forward_pre_hook(_require_forward)


def remove_forward_hook(module: nn.Module) -> None:
    """Undoes `attach_forward_hook`."""
    for handle_id, hook in list(module._forward_pre_hooks.items()):
        if hook is _require_forward:
            del module._forward_pre_hooks[handle_id]


def exchange_base(cls: type, old: type, new: type) -> type:
    """Returns `new` if `cls` is `old`; otherwise a copy of the class `cls` with base `new` instead of base `old`.

    torch's parametrize and fully_shard derive a new class for a module from the module's class. This function exchanges
    the base of the derived class.
    """
    if cls is old:
        return new
    bases = tuple(exchange_base(base, old, new) if issubclass(base, old) else base for base in cls.__bases__)
    body = {name: entry for name, entry in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, bases, body)


def class_under_wrappers(module: nn.Module) -> type:
    """Returns the class that `module` had before torch's parametrize or fully_shard (FSDP2) derived a new class."""
    cls = type(module)
    while (inner := _class_under(cls, module)) is not None:
        cls = inner
    return cls


def _class_under(cls: type, module: nn.Module) -> type | None:
    """Returns the class from which torch derived `cls`; None if torch did not derive `cls`."""
    first = cls.__bases__[0]
    if nn.utils.parametrize.is_parametrized(module) and cls.__name__ == f"Parametrized{first.__name__}":
        return first
    if len(cls.__bases__) == 2 and _is_fsdp_class(first):
        return cls.__bases__[1]
    return None


def is_sharded(module: nn.Module) -> bool:
    """Whether fully_shard (FSDP2) was called on `module` itself."""
    return _is_fsdp_class(type(module))


def _is_fsdp_class(cls: type) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without this import no module is sharded
    return hasattr(fsdp, "FSDPModule") and issubclass(cls, fsdp.FSDPModule)


def why_not_replaceable(module: nn.MultiheadAttention) -> str | None:
    """Returns the reason why `module` cannot be changed to a MultiheadAttention, or could not run as one; otherwise
    None.
    """
    original = class_under_wrappers(module)
    if original is not nn.MultiheadAttention:
        return (
            f"it is a {original.__module__}.{original.__qualname__}, a subclass that may compute something else than "
            "torch.nn.MultiheadAttention"
        )
    if "forward" in vars(module):
        return "its forward was replaced on the instance, and the replacement would still run torch's attention"
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
