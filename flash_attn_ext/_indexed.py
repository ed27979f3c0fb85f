"""Attention by index: each query lists its keys or its blocks of keys."""

from typing import NamedTuple

import torch
from torch import Tensor

from . import _dense, _functorch, _ops
from ._call import Call
from ._options import as_type
from ._tensor_checks import check_is_dense, some_dtensor


class KeyNumbers(NamedTuple):
    """The numbers of keys, or of blocks of keys, that a caller passed."""

    name: str  # the name of the argument
    given: Tensor
    size: int  # the number of keys in a block; 0: single keys

    @classmethod
    def from_arguments(
        cls, *, key_indices: Tensor | None, key_block_indices: Tensor | None, key_block_size: int
    ) -> "KeyNumbers | None":
        if key_indices is not None and key_block_indices is not None:
            raise ValueError("key_block_indices: got a tensor with key_indices; allowed: one of them")
        if key_indices is not None:
            check_is_dense("key_indices", key_indices)
            return cls("key_indices", key_indices, 0)
        if key_block_indices is None:
            return None
        check_is_dense("key_block_indices", key_block_indices)
        size = as_type("int", "key_block_size", key_block_size)
        if size < 1:
            raise ValueError(f"key_block_size: got {size}; allowed: 1 or more")
        return cls("key_block_indices", key_block_indices, size)

    @property
    def block_size(self) -> int:
        return max(self.size, 1)


def attend(call: Call, numbers: KeyNumbers) -> tuple[Tensor, Tensor]:
    """Returns (out, lse) of a dense call."""
    check_where(numbers, call.tensors["query"])
    key, value = call.tensors["key"], call.tensors["value"]
    if key.dim() >= 3 and value.dim() >= 3 and key.shape[-3] == 1 and value.shape[-3] == 1:
        # All query heads share one key head. If key were expanded to the heads of query, the heads would not share its
        # rows.
        call = Call(call.operator, call.tensors, call.options, True, call.return_lse)
    dims = max(call.tensors[name].dim() for name in ("query", "key", "value"))

    def run(form: Call) -> tuple[Tensor, Tensor]:
        indices = _as_4d(numbers, dims, form.tensors["query"].shape[0])
        return _ops.attention_indexed(**form.tensors, key_indices=indices, key_block_size=numbers.size, **form.options)

    return _dense.attend(call, run)


def refuse_dtensors(numbers: KeyNumbers, *tensors: object) -> None:
    if some_dtensor(*tensors, numbers.given):
        raise TypeError(f"{numbers.name}: got one with a DTensor; allowed: to_local(), a dense tensor")


def check_where(numbers: KeyNumbers, query: Tensor) -> None:
    """Raises for a device without kernels, and under a torch.func transform."""
    check_is_dense("query", query)
    if query.device.type not in ("cpu", "cuda", "meta"):
        raise NotImplementedError(f"{numbers.name}: got tensors on {query.device}; allowed: CPU, CUDA")
    if not torch.compiler.is_compiling() and _functorch.active():
        raise NotImplementedError(f"{numbers.name}: got a call under torch.func; allowed: torch.autograd")


def _as_4d(numbers: KeyNumbers, dims: int, batch: int) -> Tensor:
    """Returns the numbers of a call with ``dims`` dimensions as (batch or 1, heads or 1, seqlen_q, count)."""
    given = numbers.given
    if given.dim() != dims:
        raise ValueError(
            f"{numbers.name}: got shape {list(given.shape)}; allowed: the {dims} dimensions of query, key and value, "
            "with (..., heads_kv or 1, seqlen_q, any number)"
        )
    if dims <= 4:
        return given.reshape((1,) * (4 - dims) + tuple(given.shape))
    leading = given.shape[:-3].numel()
    if leading not in (1, batch):
        raise ValueError(
            f"{numbers.name}: got shape {list(given.shape)}; allowed: the batch dimensions of query, or 1 in each"
        )
    return given.reshape(leading, *given.shape[-3:])
