"""The processes of a group compare their calls before they exchange tensors.

If the calls differ, for example by one row on one process, a backend would abort or confuse messages. So every process
first sends a short description of its call. If the descriptions differ, all processes raise.
"""

import json
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import get_backend_config
from torch.utils._python_dispatch import _disable_current_modes

from ._exchange import all_gather
from ._group import Group

BYTES = 1024  # the size of a description
_LONGEST_ERROR = 500

Checked = TypeVar("Checked")

# Descriptions that were equal on all processes of a group. Only for GPUs, where reading an answer waits for the GPU.
_agreed: set[tuple[str, bytes]] = set()


def checked_everywhere(
    group: Group, tensor: object, check: Callable[[], Checked], describe: Callable[[Checked], dict[str, object]]
) -> Checked:
    """Returns ``check()`` of this process, if no process raises and all processes have the same ``describe(result)``.

    ``tensor`` is a tensor of the call: descriptions are sent from its device. If ``check()`` raises, this process
    raises its error, and the other processes raise a ValueError with the error's text. In a compiled graph each process
    checks only its own call.
    """
    if torch.compiler.is_compiling() or group.size == 1:
        return check()
    try:
        result = check()
    except Exception as error:
        _compare(group, tensor, {"error": str(error)[:_LONGEST_ERROR]})
        raise
    _compare(group, tensor, describe(result))
    return result


def _compare(group: Group, tensor: object, call: dict[str, object]) -> None:
    text = json.dumps(call, separators=(",", ":")).encode().ljust(BYTES)
    device = _device(group, tensor)
    if device.type != "cpu" and (group.name, text) in _agreed:
        return
    with _disable_current_modes():  # FlopCounterMode and other modes must see only the attention
        own = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        sent = all_gather(group, own).cpu().numpy()
    if "error" in call:
        return
    texts = [of_process.tobytes() for of_process in sent]
    if any(other != text for other in texts):
        _raise_difference(group, [json.loads(of_process) for of_process in texts])
    _agreed.add((group.name, text))


def _device(group: Group, tensor: object) -> torch.device:
    kinds = [part.split(":")[0] for part in get_backend_config(group.handle).split(",")]
    if isinstance(tensor, Tensor) and tensor.device.type in kinds:
        return tensor.device
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def _raise_difference(group: Group, calls: list[dict]) -> None:
    for rank, call in enumerate(calls):
        if "error" in call:
            raise ValueError(f"process {rank} of {group.size} refused its arguments: {call['error']}")
    for rank, call in enumerate(calls):
        for name, value in call.items():
            if value != calls[0].get(name):
                raise ValueError(
                    f"{name}: got {calls[0].get(name)} on process 0 and {value} on process {rank}; allowed: the same "
                    "on every process. Shards of unequal length need seqlen=, the length of the whole sequence"
                )


def shape_of(t: Tensor | None, without: int | None = None) -> list[int] | None:
    """Returns the sizes of a tensor for a description. ``without``: a dimension that may differ between processes."""
    if t is None:
        return None
    return [-1 if n == without else int(size) for n, size in enumerate(t.shape)]
