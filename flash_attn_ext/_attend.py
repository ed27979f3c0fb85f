"""Runs a call: flash_attn_ext.distributed runs DTensors, and the module of the call's operator all other tensors."""

from collections.abc import Callable

from torch import Tensor

from . import _dense, _ops, _packed
from ._call import Call
from ._tensor_checks import some_dtensor

_LOCAL = {_ops.DENSE.function: _dense.attend, _ops.VARLEN.function: _packed.attend}


def attend(call: Call) -> tuple[Tensor, Tensor | None]:
    """Returns (out, lse). lse may be None if the call has ``return_lse=False``."""
    query, key, value = (call.tensors[name] for name in ("query", "key", "value"))
    on_dtensors = handler_of_dtensors(call.operator.function, query, key, value)
    return attend_locally(call) if on_dtensors is None else on_dtensors(call)


def attend_locally(call: Call) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of a call without DTensors."""
    return _LOCAL[call.operator.function](call.with_rng_state())


def handler_of_dtensors(function: str, *tensors: object) -> Callable | None:
    """Returns the function for calls with DTensors; None if no tensor is a DTensor.

    The first DTensor imports flash_attn_ext.distributed, which does not exist if torch was built without
    torch.distributed.
    """
    if not some_dtensor(*tensors):
        return None
    import flash_attn_ext.distributed

    return flash_attn_ext.distributed.ON_DTENSORS[function]
