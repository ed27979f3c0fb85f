"""flash_attn with ``quantize="int8"``: products of integers, for inference. csrc/cpu/kernels/int8_forward-inl.h."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import _dense, _functorch, _ops
from ._call import FUNCTIONS, INDICES, QUANTIZE, Call
from ._tensor_checks import check_not_differentiated, some_dtensor

# Arguments that the operator attention_int8 does not have.
_REFUSED = (*FUNCTIONS, *INDICES, "rng_state", "unified_max")


def attend(arguments: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of :func:`flash_attn`. ``arguments``: by name."""
    return _dense.attend(checked_call(arguments), run)


def checked_call(arguments: dict[str, Any]) -> Call:
    """Returns the call without ``quantize``."""
    if arguments[QUANTIZE] != "int8":
        raise ValueError(f"quantize: got {arguments[QUANTIZE]!r}; allowed: None, 'int8'")
    for name in _REFUSED:
        if arguments[name] is not None:
            raise NotImplementedError(f"{name}: got one with quantize='int8'; allowed: None")
    if arguments["dropout_p"] != 0.0:
        raise NotImplementedError(f"dropout_p: got {arguments['dropout_p']} with quantize='int8'; allowed: 0.0")
    if arguments["num_splits"] != 0:
        raise NotImplementedError(f"num_splits: got {arguments['num_splits']} with quantize='int8'; allowed: 0")
    call = Call.from_arguments(_ops.DENSE, **{name: value for name, value in arguments.items() if name != QUANTIZE})
    for name, t in call.tensors.items():
        if some_dtensor(t):
            raise NotImplementedError(f"{name}: got a DTensor with quantize='int8'; allowed: to_local()")
    if not torch.compiler.is_compiling() and _functorch.active():
        raise NotImplementedError("quantize: got 'int8' under torch.func; allowed: None")
    check_not_differentiated(
        "flash_attn with quantize='int8'", call.tensors, way_out="Without quantize, attention has gradients"
    )
    return call


def of_operator(form: Call) -> Call:
    """Returns the call of attention_int8. ``form``: a call of DENSE with tensors (B, H, S, D)."""
    return Call(
        _ops.INT8,
        {name: form.tensors[name] for name in _ops.INT8.tensor_names},
        {name: value for name, value in form.options.items() if name in _ops.INT8.option_types},
    )


def run(form: Call) -> tuple[Tensor, Tensor]:
    query = form.tensors["query"]
    assert query is not None
    if query.device.type not in ("cpu", "meta"):
        raise NotImplementedError(f"quantize: got 'int8' with tensors on {query.device}; allowed: tensors on CPU")
    return of_operator(form).run()
