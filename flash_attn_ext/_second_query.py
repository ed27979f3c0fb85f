"""``qv`` of FlashAttention-3: scores q k^T + qv v^T, as one product of [q, qv] and [k, v].

In multi-head latent attention k is the rotary part of a token, and v is the latent row of the token. If both are
neighbouring columns of one tensor, such as a latent cache, [k, v] is a view of this tensor. Otherwise [k, v] is a copy;
for caches, the kernels join the rows of one tile at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_interpreter_stack
from torch.autograd import forward_ad

from ._tensor_checks import check_are_dense, check_is_dense


@dataclass(frozen=True)
class SecondQuery:
    """``qv``, and the order of the joined columns."""

    qv: Tensor
    first: bool  # the columns of v are before the columns of k

    def joined(self, q: Tensor) -> Tensor:
        return torch.cat([self.qv, q] if self.first else [q, self.qv], dim=-1)


def check_second_query(qv: object, q: Tensor, v: Tensor, names: tuple[str, str] = ("q", "v")) -> None:
    """Raises unless ``qv`` has the shape of q, with the head dimension of v."""
    name_of_q, name_of_v = names
    if not isinstance(qv, Tensor):
        raise TypeError(f"qv: got {type(qv).__name__}; allowed: None or a torch.Tensor")
    check_is_dense("qv", qv)
    if qv.shape != (*q.shape[:-1], v.shape[-1]):
        raise ValueError(
            f"qv: got shape {list(qv.shape)}; allowed: {[*q.shape[:-1], v.shape[-1]]}, {name_of_q}'s shape with the "
            f"head dimension of {name_of_v}"
        )
    if qv.dtype != q.dtype and not torch.is_autocast_enabled(q.device.type):
        raise TypeError(f"qv: got dtype {qv.dtype}; allowed: {q.dtype}, {name_of_q}'s dtype")
    if qv.device != q.device:
        raise ValueError(f"qv: got device {qv.device}; allowed: {q.device}, {name_of_q}'s device")


def join(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor, names: tuple[str, str, str] = ("q", "k", "v")
) -> tuple[Tensor, Tensor]:
    """Returns [q, qv] and [k, v]. [k, v] is a copy, unless k and v are neighbouring columns without a gradient."""
    check_are_dense(dict(zip(names, (q, k, v), strict=True)), names)
    name_of_q, name_of_k, name_of_v = names
    check_second_query(qv, q, v, (name_of_q, name_of_v))
    if k.shape[:-1] != v.shape[:-1] or k.dtype != v.dtype or k.device != v.device:
        raise ValueError(
            f"{name_of_v}: got shape {list(v.shape)}, {v.dtype}, {v.device}; allowed with qv: {name_of_k}'s shape "
            f"{list(k.shape)} except the last dimension, {k.dtype}, {k.device}"
        )
    found = neighbours(k, v) if _is_plain(k) and _is_plain(v) else None
    if found is None:
        return torch.cat([q, qv], dim=-1), torch.cat([k, v], dim=-1)
    joined, v_first = found
    return SecondQuery(qv, v_first).joined(q), joined


def without_second_query(arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of flash_attn_varlen without ``qv``, which is joined with query, key and value."""
    arguments = dict(arguments)
    if (qv := arguments.pop("qv")) is not None:
        names = ("query", "key", "value")
        query, key, value = (arguments[name] for name in names)
        arguments["query"], arguments["key"] = join(query, key, value, qv, names)
    return arguments


def _is_plain(t: Tensor) -> bool:
    """Whether a view by strides is allowed: no derivative, no transform, no subclass."""
    return (
        type(t) is Tensor
        and not torch.compiler.is_compiling()
        and not (torch.is_grad_enabled() and t.requires_grad)
        and not get_interpreter_stack()
        and forward_ad.unpack_dual(t).tangent is None
    )


def join_caches(qv: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[SecondQuery, Tensor, bool]:
    """Returns the packed second query, the operator's keys, and its option key_has_value.

    The keys are the view [k, v]. If the caches are separate, the keys are ``k_cache``, because a copy [k, v] would take
    as long as the attention.
    """
    check_second_query(qv, q, v_cache, ("q", "v_cache"))
    if k_cache.dtype != q.dtype:
        raise NotImplementedError(f"qv: got a tensor with caches of {k_cache.dtype}; allowed: caches of q's dtype")
    found = neighbours(k_cache, v_cache)
    packed = qv.reshape(-1, *qv.shape[-2:])
    if found is None:
        return SecondQuery(packed, first=False), k_cache, True
    joined, v_first = found
    return SecondQuery(packed, v_first), joined, False


def neighbours(k: Tensor, v: Tensor) -> tuple[Tensor, bool] | None:
    """Returns ([k, v], False) or ([v, k], True), a view. None: k and v are not neighbouring columns of one tensor."""
    same_rows = k.shape[:-1] == v.shape[:-1] and k.stride()[:-1] == v.stride()[:-1]
    if k.dtype != v.dtype or k.device != v.device or not same_rows or k.stride(-1) != 1 or v.stride(-1) != 1:
        return None
    if k.untyped_storage()._cdata != v.untyped_storage()._cdata:
        return None
    for first, second in ((k, v), (v, k)):
        if first.storage_offset() + first.shape[-1] == second.storage_offset():
            columns = first.shape[-1] + second.shape[-1]
            joined = first.detach().as_strided((*first.shape[:-1], columns), first.stride(), first.storage_offset())
            return joined, first is v
    return None
