"""Lists the GPU kernels that a call launches."""

import re
from collections.abc import Callable

import torch


def short_name(name: str) -> str:
    """Of our kernels tier and name: "void flash_attn_ext::cuda::sm80::f<(int)1>(T)" is sm80::f."""
    found = re.search(r"flash_attn_ext::cuda::([\w:]+)", name)
    return found.group(1) if found else name


def kernels_of(call: Callable) -> list[str]:
    """Returns the kernels' names, each once, in the order of their launches, from torch's profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_gpu = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return list(dict.fromkeys(short_name(e.name) for e in sorted(on_gpu, key=lambda e: e.time_range.start)))
