"""Adds the backend's name to vLLM, and makes vLLM's CPU platform accept this choice."""

from __future__ import annotations

import functools
from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from . import NAME

CLASS_PATH = f"{__package__}.backend.FlashAttnExtBackend"


def register() -> AttentionBackendEnum:
    """Adds the backend to vLLM's list in this process, and returns its member. A second call changes nothing."""
    if NAME not in AttentionBackendEnum.__members__:
        register_backend(NAME, CLASS_PATH)
    member = AttentionBackendEnum[NAME]
    # vLLM sends its configuration to new processes, and they read it before they load plugins. The member must exist
    # then, so a pickled member is a call of this function.
    member.__reduce_ex__ = lambda protocol: (register, ())
    _respect_choice(member)
    return member


def _respect_choice(member: AttentionBackendEnum) -> None:
    """Wraps the choice of vLLM's CPU platform for ``member``. The platform ignores all backends except its own."""
    vllms_choice = CpuPlatform.__dict__["get_attn_backend_cls"].__func__
    if hasattr(vllms_choice, "flash_attn_ext"):
        return

    @functools.wraps(vllms_choice)
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, *args, **kwargs) -> str:
        if selected_backend is not member:
            return vllms_choice(cls, selected_backend, attn_selector_config, *args, **kwargs)
        raise_if_refused(member, attn_selector_config)
        return CLASS_PATH

    get_attn_backend_cls.flash_attn_ext = True  # type: ignore[attr-defined]
    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)  # type: ignore[method-assign]


def raise_if_refused(member: AttentionBackendEnum, config: Any) -> None:
    """Raises ValueError with all reasons if the backend cannot run a layer of ``config`` (AttentionSelectorConfig)."""
    backend = member.get_class()  # imported now: most processes that load plugins need no backend
    reasons = backend.validate_configuration(device_capability=None, **config._asdict())  # type: ignore[arg-type]
    if reasons:
        raise ValueError(
            f"attention backend: got {NAME} for {config}; not allowed: {', '.join(reasons)}. "
            "Choose another backend, for example CPU_ATTN"
        )
