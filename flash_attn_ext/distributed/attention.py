"""context_parallel_attn: attention over a sequence that is sharded over processes."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from .. import _ops
from .._call import Call
from .._dropout import new_rng_state
from .._tensor_checks import check_are_dense, check_heads
from . import _ulysses
from ._agreement import checked_everywhere, shape_of
from ._exchange import broadcast_first
from ._group import Group, check_device, resolve_group
from ._operator import context_parallel
from ._sharded_call import Inputs, Sharding, make_sharded_call, meta_inputs

METHODS = ("ring", "all_gather", "ulysses")


def context_parallel_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    method: str | None = None,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    balanced: bool = True,
    seqlen: int | tuple[int | None, int | None] | None = None,
    cu_seqlens: Tensor | None = None,
    causal: str | None = None,
    window: int | tuple[int | None, int | None] | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    key_mask: Tensor | None = None,
    return_lse: bool = False,
    rng_state: Tensor | None = None,
    deterministic: bool | None = None,
    attention_chunk: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_attn` on a sequence that is sharded over a process group (:func:`shard_sequence`).

    Every process calls it with the same options, and gets the result for its own rows of ``query``. Except for
    rounding, the result equals the result of one process with the whole sequence. Every run gives the same bits.
    Letters are as in :func:`flash_attn`. n is the number of processes. s_q and s_k are the numbers of rows on this
    process, S_q and S_k the numbers of rows of the whole sequence.

    Args:
        query: (B, H, s_q, D), this process's rows.
        key: (B, H_kv, s_k, D), this process's rows; dtype and device of ``query``.
        value: (B, H_kv, s_k, D_v), as ``key``.
        attn_mask: broadcastable to (B, H, s_q, S_k): the rows of this process, and all keys in the order of the
            sequence. No mask is sent. bool or float as for :func:`flash_attn`.
        dropout_p, is_causal, scale, enable_gqa, causal, window, softcap: as for :func:`flash_attn`. They apply to
            the whole sequence: "lower_right" and windows count from S_q and S_k.
        method: how the processes share the work. None: "all_gather" if n * H_kv <= H, because then the gathered keys
            are not larger than this process's queries; otherwise "ring".

            - "ring": processes pass keys and values around, and compute at the same time. Memory O(S / n).
            - "all_gather": every process gathers all keys and values, once in the forward and once in the backward.
              Memory O(S_k). One message instead of n - 1: better for short sequences, few key heads and many documents.
            - "ulysses": exchanges rows for heads by all-to-all, computes an ordinary attention, and exchanges back.
              Memory O(S / n). Sends the fewest bytes if there are many heads. Messages and computation do not
              overlap. n must divide H and H_kv.
        group: the ProcessGroup that shares the sequence. Without ``group`` and ``mesh`` it is the default group.
        mesh: a DeviceMesh of one dimension, in place of ``group``, such as ``mesh["cp"]``.
        balanced: True if ``shard_sequence(..., balanced=True)`` made the shards.
        seqlen: S, or (S_q, S_k), needed if shards have unequal lengths. None: n times this process's rows.
        cu_seqlens: (documents + 1) offsets of packed sequences ("documents") in the whole sequence, from 0 to S, on any
            device. A document attends only to itself, even if shards cut it. B must be 1, and S_q = S_k. Options apply
            to each document, as in :func:`flash_attn_varlen`. Slopes and sink have shape (H). The host reads the
            offsets.
        alibi_slopes, sink: (H) or (B, H), the same on every process.
        key_mask: (B, S_k), all keys in the order of the sequence, such as padding: one byte for each token on each
            process. ``unshard_sequence(padding, 1)`` makes it from shards. Otherwise as for :func:`flash_attn`.
        return_lse: also returns the logsumexp (B, H, s_q), which is differentiable.
        rng_state: int64 (seed, offset), the same on every process. Then dropout drops the same elements as
            :func:`flash_attn` on the whole sequence. None: every process draws a state, and all use the state of the
            group's first process (16 bytes are sent).
        deterministic: as for :func:`flash_attn`.
        attention_chunk: as for :func:`flash_attn`. Chunks count in the whole sequence, or in each document.

    Returns:
        out (B, H, s_q, D_v), or (out, lse).

    The gradients of query, key and value are complete for this process's rows. Slopes, sink and a mask without rows are
    the same on every process. Each process computes a part of their gradients. Add the parts of all processes, as for
    the parameters of a model with sharded tokens. Differentiable once, with "ulysses" twice.

    Each process sends these bytes. An element has e bytes. An accumulator has a bytes: 8 for float64, otherwise 4. With
    KV = B * H_kv * S_k / n * (D + D_v):

        ===========  ==============================  =====================================================
        method       forward                         backward
        ring         (v - 1) * KV * e                (v - 1) * KV * e + v * KV * a  (0 if v = 1)
        all_gather   (n - 1) * KV * e                (n - 1) * KV * e + (n - 1) * KV * a
        ulysses      (n - 1) / n * (Q + KV + O) * e  (n - 1) / n * (Q + KV + O) * e
        ===========  ==============================  =====================================================

    with Q = B * H * S_q / n * D, O = B * H * S_q / n * D_v (with ``return_lse`` also (n - 1) / n * B * H * S_q / n * a
    each way). v counts the distances t, from 0 on, for which a process r needs the keys of process r - t. It is n, or
    less with a window or with documents. Unequal shards are sent with their own length; with "all_gather" they are
    padded to the longest shard. Before the call each process sends 1 KiB to every other process, to compare the calls.
    On CPU this happens for every call, on a GPU once for each new call.

    Raises:
        ValueError: no shard of the sequence has this number of rows; the method is not possible; the calls of the
            processes differ. Or the group lacks this process, or a backend for the device. If a process raises an error
            for its arguments, the other processes raise a ValueError.
        TypeError: as :func:`flash_attn`.
        RuntimeError: an error of torch.distributed, for example if a process died or did not answer within the
        time-out.

    Sources: Liu et al. 2023 (arXiv 2310.01889), ring; Dubey et al. 2024 (arXiv 2407.21783, section 3.3.2), all-gather
    and the balanced order; Jacobs et al. 2023 (arXiv 2309.14509), Ulysses.
    """
    processes = resolve_group(group, mesh)

    def make_call() -> Call:
        return Call.from_arguments(
            _ops.DENSE, query=query, key=key, value=value, attn_mask=attn_mask, dropout_p=dropout_p,
            is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, causal=causal, window=window, softcap=softcap,
            alibi_slopes=alibi_slopes, sink=sink, key_mask=key_mask, return_lse=return_lse, rng_state=rng_state,
            deterministic=deterministic, attention_chunk=attention_chunk,
        )  # fmt: skip

    out, lse = attend_over_processes(
        make_call, query, processes, method=method, balanced=balanced, seqlen=seqlen, cu_seqlens=cu_seqlens
    )
    return (out, lse) if return_lse else out


def attend_over_processes(
    make_call: Callable[[], Call],
    query: object,
    processes: Group,
    *,
    method: str | None = None,
    balanced: bool = True,
    seqlen: int | tuple[int | None, int | None] | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Returns (out, lse) of this process's queries. lse may be None if the call does not return it.

    All processes raise if ``make_call`` or a check raises on one process.
    """

    def check() -> _CheckedCall:
        return _checked_call(make_call(), processes, method, balanced, seqlen, cu_seqlens)

    call, inputs, sharding, method, options = checked_everywhere(processes, query, check, _CheckedCall.description)
    if call.needs_rng_state():
        drawn = new_rng_state(inputs.query.device)
        inputs = inputs._replace(rng_state=broadcast_first(drawn, processes.name))
    if options["dropout_p"] == 0.0:
        inputs = inputs._replace(rng_state=None)
    if method == "ulysses":
        return _ulysses.attention(make_sharded_call(processes, inputs, sharding, options), inputs, call.return_lse)
    return context_parallel(*inputs, method, *sharding, **options)


class _CheckedCall(NamedTuple):
    """A call that this process has checked."""

    call: Call
    inputs: Inputs
    sharding: Sharding
    method: str
    options: dict

    def description(self) -> dict[str, object]:
        """The values that must be the same on every process. With ``seqlen`` the number of rows may differ."""
        inputs, sharding = self.inputs, self.sharding
        own_rows = [None if seqlen is None else 2 for seqlen in (sharding.seqlen_q, sharding.seqlen_k)]
        mask, offsets = inputs.attn_mask, sharding.documents
        return {
            "query": shape_of(inputs.query, own_rows[0]),
            "key": shape_of(inputs.key, own_rows[1]),
            "value": shape_of(inputs.value, own_rows[1]),
            "query.dtype": str(inputs.query.dtype),
            "attn_mask": shape_of(mask, None if mask is None or mask.shape[2] == 1 else own_rows[0]),
            "key_mask": shape_of(inputs.key_mask),
            "alibi_slopes": shape_of(inputs.alibi_slopes),
            "sink": shape_of(inputs.sink),
            "rng_state": None if inputs.rng_state is None else "a tensor",
            "method": self.method,
            "balanced": sharding.balanced,
            "seqlen": [sharding.seqlen_q, sharding.seqlen_k],
            "cu_seqlens": None if offsets is None else f"{len(offsets)} offsets with checksum {hash(tuple(offsets))}",
            **self.options,
        }


def _checked_call(call: Call, processes: Group, method, balanced, seqlen, cu_seqlens) -> _CheckedCall:
    """Checks this process's arguments. Nothing is sent."""
    inputs, options = Inputs(**call.tensors), call.operator.option_defaults | call.options
    _check_tensors(processes, inputs)
    check_heads(inputs.query.shape[1], inputs.key.shape[1], call.enable_gqa)
    inputs = _autocast(inputs._replace(attn_mask=_mask_as_4d(inputs.attn_mask)))
    documents = None if cu_seqlens is None else _documents(cu_seqlens)
    sharding = Sharding(processes.name, bool(balanced), *_lengths(seqlen), documents)
    method = _method(method, processes, inputs)
    if not torch.compiler.is_compiling():  # when the operators are traced, they make these checks
        checked = inputs
        if call.needs_rng_state():  # drawn after the checks
            checked = inputs._replace(rng_state=torch.empty(2, dtype=torch.int64, device=inputs.query.device))
        with _disable_current_modes():  # FlopCounterMode must not count the check
            _ops.attention(*meta_inputs(processes, checked, sharding, options), **options)
    return _CheckedCall(call, inputs, sharding, method, options)


def _check_tensors(group: Group, inputs: Inputs) -> None:
    given = {name: t for name, t in inputs._asdict().items() if t is not None}
    check_are_dense(inputs._asdict(), ("query", "key", "value"))
    for name in ("query", "key", "value"):
        t = given[name]
        if t.dim() != 4:
            raise ValueError(f"{name}: got shape {list(t.shape)}; allowed: 4 dimensions, (B, heads, rows, head_dim)")
    if not torch.compiler.is_compiling():
        check_device(group, "query", inputs.query.device)
    for name, t in given.items():
        if t.device != inputs.query.device:
            raise TypeError(f"{name}: got a tensor on {t.device}; allowed: query's device, {inputs.query.device}")


def _lengths(seqlen: object) -> tuple[int | None, int | None]:
    """Returns (S_q, S_k)."""
    seqlen_q, seqlen_k = seqlen if isinstance(seqlen, (tuple, list)) and len(seqlen) == 2 else (seqlen, seqlen)
    for length in (seqlen_q, seqlen_k):
        if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 0):
            raise ValueError(f"seqlen: got {length!r}; allowed: None, an int of 0 or more, or two of them (S_q, S_k)")
    return seqlen_q, seqlen_k


def _autocast(inputs: Inputs) -> Inputs:
    """Casts as the operator does under autocast, before tensors are sent."""
    kind = inputs.query.device.type
    if not torch.is_autocast_enabled(kind):
        return inputs
    dtype = torch.get_autocast_dtype(kind)
    castable = (torch.float32, torch.bfloat16, torch.float16)
    query, key, value = (t.to(dtype) if t.dtype in castable else t for t in inputs[:3])
    mask, key_mask = (
        t.to(dtype) if t is not None and t.dtype in castable[1:] else t for t in (inputs.attn_mask, inputs.key_mask)
    )
    return inputs._replace(query=query, key=key, value=value, attn_mask=mask, key_mask=key_mask)


def _mask_as_4d(mask: Tensor | None) -> Tensor | None:
    if mask is None or mask.dim() == 4:
        return mask
    if mask.dim() > 4:
        raise ValueError(f"attn_mask: got shape {list(mask.shape)}; allowed: at most 4 dimensions")
    return mask.reshape((1,) * (4 - mask.dim()) + mask.shape)


def _documents(cu_seqlens: Tensor) -> list[int]:
    """Returns the offsets as ints. make_sharded_call checks them."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens: got {got}; allowed: a tensor of int32 or int64")
    return cu_seqlens.tolist() if cu_seqlens.dim() == 1 else []


def _method(method: str | None, group: Group, inputs: Inputs) -> str:
    heads, heads_kv, mask = inputs.query.shape[1], inputs.key.shape[1], inputs.attn_mask
    if method is None:
        return "all_gather" if group.size * heads_kv <= heads else "ring"
    if method not in METHODS:
        raise ValueError(f"method: got {method!r}; allowed: None, {', '.join(METHODS)}")
    if method == "ulysses":
        if heads % group.size or heads_kv % group.size:
            raise ValueError(
                f"method: got 'ulysses' with {heads} query heads and {heads_kv} key heads on {group.size} processes; "
                "allowed: where both divide by the processes; 'ring' and 'all_gather' take any number"
            )
        if mask is not None and mask.shape[2] != 1:
            raise ValueError(
                f"method: got 'ulysses' with attn_mask of shape {list(mask.shape)}, which has rows; allowed: one "
                "that is the same for each row, as each process computes all rows; 'ring' and 'all_gather' take any"
            )
    return method
