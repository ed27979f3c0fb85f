"""context_parallel_attn: attention over sequences that are sharded over processes."""

from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _ops
from ..functional import check_is_dense, checked_options, new_rng_state, operator_options
from ._all_gather import AllGatherAttention
from ._exchange import broadcast
from ._group import Group, check_device, resolve_group
from ._layout import Layout, layout_of
from ._plan import Plan
from ._ring import RingAttention
from ._tiles import Band, Geometry
from ._ulysses import ulysses_attention

METHODS = ("ring", "all_gather", "ulysses")


@torch.compiler.disable
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
    return_lse: bool = False,
    rng_state: Tensor | None = None,
    deterministic: bool | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_attn` on a sequence of which each process of a group holds its rows (:func:`shard_sequence`).

    Every process calls it with the same options, and gets the rows of the result that belong to its rows of ``query``:
    those that one process with the whole sequence would get, to rounding, and the same bits at every run. Letters are
    those of :func:`flash_attn`; n is the number of processes, s_q and s_k are this process's rows, S_q and S_k those
    of all.

    Args:
        query: (B, H, s_q, D), this process's rows.
        key: (B, H_kv, s_k, D), this process's rows; dtype and device of ``query``.
        value: (B, H_kv, s_k, D_v), likewise.
        attn_mask: broadcastable to (B, H, s_q, S_k): the rows of this process, all keys in the order of the sequence,
            so that no mask is sent. Key padding is (B, 1, 1, S_k): one byte a token on each process;
            ``unshard_sequence(padding, 1)[:, None, None]`` makes it from shards. bool or float as for
            :func:`flash_attn`.
        dropout_p, is_causal, scale, enable_gqa, causal, window, softcap: as for :func:`flash_attn`; they are about the
            whole sequence. "lower_right" and windows count from S_q and S_k.
        method: how the processes share the work. None takes "all_gather" where n * H_kv <= H, as then the gathered
            keys are no larger than this process's queries, and otherwise "ring": memory is O(S / n) then.

            - "ring": keys and values go from process to process, while each computes with those it has. Memory
              O(S / n).
            - "all_gather": every process gathers all keys and values, once forward and once backward. Memory O(S_k) for
              them, one message instead of n - 1: better for short sequences, few key heads, many documents.
            - "ulysses": heads for sequence by all-to-all, an ordinary attention, and back. Memory O(S / n). It sends
              least where heads are many, and hides nothing behind computation. n has to divide H and H_kv.
        group: the ProcessGroup over which the sequence is sharded; the default group if there is no ``mesh`` either.
        mesh: a DeviceMesh of one dimension instead, such as ``mesh["cp"]``.
        balanced: whether the rows are those of ``shard_sequence(..., balanced=True)``.
        seqlen: S, or (S_q, S_k), where shards are not equal. None: n times this process's rows.
        cu_seqlens: (documents + 1) offsets of packed sequences ("documents") in the whole sequence, from 0 to S, on any
            device: a document attends to itself alone, wherever the shards cut it. B has to be 1, S_q = S_k. Options
            hold for each document by itself, as in :func:`flash_attn_varlen`; slopes and sink have shape (H). Read by
            the host.
        alibi_slopes, sink: (H) or (B, H), the same on every process.
        return_lse: also return the logsumexp (B, H, s_q). Its gradient is not dropped.
        rng_state: int64 (seed, offset), the same on every process; what is dropped is what :func:`flash_attn` drops
            with it on the whole sequence. If None, it is drawn by every process, and that of the group's first counts
            (16 bytes).
        deterministic: as for :func:`flash_attn`.

    Returns:
        out (B, H, s_q, D_v), or (out, lse).

    Gradients of query, key and value are those of this process's rows, all of them. What every process holds alike (a
    mask without rows, slopes, sink) gets this process's share: the gradient is the sum over the processes, as for the
    weights of a model whose tokens are sharded. Differentiable once; "ulysses" twice.

    What each process sends, in bytes, with e bytes an element, a bytes an accumulator (8 for float64, otherwise 4) and
    KV = B * H_kv * S_k / n * (D + D_v):

        ===========  ==============================  =====================================================
        method       forward                         backward
        ring         (v - 1) * KV * e                (v - 1) * KV * e + v * KV * a  (0 if v = 1)
        all_gather   (n - 1) * KV * e                (n - 1) * KV * e + (n - 1) * KV * a
        ulysses      (n - 1) / n * (Q + KV + O) * e  (n - 1) / n * (Q + KV + O) * e
        ===========  ==============================  =====================================================

    with Q = B * H * S_q / n * D, O = B * H * S_q / n * D_v (with ``return_lse`` also (n - 1) / n * B * H * S_q / n * a
    each way), and v the number of processes whose keys somebody needs: n, or fewer with a window or with documents.
    Uneven shards are sent as they are ("all_gather": as long as the longest).

    Raises:
        ValueError: rows that are no share of the sequence, a method that is not possible, a group without this process
            or without a backend for the device, what :func:`flash_attn` raises.
        TypeError: as :func:`flash_attn`.
        RuntimeError: torch.distributed's own, such as when a process dies or does not answer within the group's
            time-out.

    Sources: Liu et al. 2023 (arXiv 2310.01889), ring; Dubey et al. 2024 (arXiv 2407.21783, section 3.3.2), all-gather
    and the balanced order; Jacobs et al. 2023 (arXiv 2309.14509), Ulysses.
    """
    where = resolve_group(group, mesh)
    tensors = {"query": query, "key": key, "value": value}
    optional = {"attn_mask": attn_mask, "alibi_slopes": alibi_slopes, "sink": sink, "rng_state": rng_state}
    _check_tensors(where, tensors, {name: t for name, t in optional.items() if t is not None})
    seqlen_q, seqlen_k = seqlen if isinstance(seqlen, (tuple, list)) and len(seqlen) == 2 else (seqlen, seqlen)
    queries = _layout("query", query, seqlen_q, where, balanced)
    keys = _layout("key", key, seqlen_k, where, balanced)
    _check_heads(query, key, enable_gqa)
    options = checked_options(
        operator_options(
            dropout_p, is_causal, scale, causal, window, softcap, alibi_slopes, 0, None, deterministic
        )
    )  # fmt: skip
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    attn_mask = _mask_as_4d(attn_mask)
    documents = None if cu_seqlens is None else _documents(cu_seqlens, query, queries, keys, optional)
    method = _method(method, where, query, key, attn_mask)
    if options["dropout_p"] > 0.0 and rng_state is None:
        rng_state = broadcast(where, new_rng_state(query.device))
    _check_call(query, key, value, attn_mask, alibi_slopes, sink, rng_state, keys, options)
    if options["dropout_p"] == 0.0:
        rng_state = None

    position_free = rng_state is None and alibi_slopes is None and (attn_mask is None or attn_mask.shape[3] == 1)
    geometry = Geometry(queries, keys, _band(options, queries, keys), documents, position_free)
    plan = Plan(where, geometry, options, query.shape[1])
    arguments = (plan, query, key, value, attn_mask, alibi_slopes, sink, rng_state)
    if method == "ulysses":
        out, lse = ulysses_attention(*arguments, return_lse)
    else:
        out, lse = (RingAttention if method == "ring" else AllGatherAttention).apply(*arguments)
    return (out, lse) if return_lse else out


def _check_tensors(group: Group, needed: dict[str, Tensor], optional: dict[str, Tensor]) -> None:
    for name, t in (needed | optional).items():
        check_is_dense(name, t)
    for name, t in needed.items():
        if t.dim() != 4:
            raise ValueError(f"{name}: got shape {list(t.shape)}; allowed: 4 dimensions, (B, heads, rows, head_dim)")
    device = needed["query"].device
    check_device(group, "query", device)
    for name, t in (needed | optional).items():
        if t.device != device:
            raise TypeError(f"{name}: got a tensor on {t.device}; allowed: query's device, {device}")


def _layout(name: str, t: Tensor, seqlen: object, group: Group, balanced: bool) -> Layout:
    if seqlen is not None and (not isinstance(seqlen, int) or isinstance(seqlen, bool) or seqlen < 0):
        raise ValueError(f"seqlen: got {seqlen!r}; allowed: None, an int of 0 or more, or two of them (S_q, S_k)")
    return layout_of(name, t.shape[2], seqlen, group.rank, group.size, bool(balanced))


def _check_heads(query: Tensor, key: Tensor, enable_gqa: bool) -> None:
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"key: got {key.shape[1]} heads for {query.shape[1]} query heads; allowed: the same number, or a divisor "
            "with enable_gqa=True"
        )


def _autocast(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None):
    """As the operator's autocast rules do it: before anything is sent."""
    kind = query.device.type
    if not torch.is_autocast_enabled(kind):
        return query, key, value, mask
    dtype = torch.get_autocast_dtype(kind)
    castable = (torch.float32, torch.bfloat16, torch.float16)
    query, key, value = (t.to(dtype) if t.dtype in castable else t for t in (query, key, value))
    if mask is not None and mask.dtype in castable[1:]:
        mask = mask.to(dtype)
    return query, key, value, mask


def _mask_as_4d(mask: Tensor | None) -> Tensor | None:
    if mask is None or mask.dim() == 4:
        return mask
    if mask.dim() > 4:
        raise ValueError(f"attn_mask: got shape {list(mask.shape)}; allowed: at most 4 dimensions")
    return mask.reshape((1,) * (4 - mask.dim()) + mask.shape)


def _documents(
    cu_seqlens: Tensor, query: Tensor, queries: Layout, keys: Layout, optional: dict[str, Tensor | None]
) -> tuple[int, ...]:
    """The offsets as numbers, checked."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"cu_seqlens: got {got}; allowed: a tensor of int32 or int64")
    offsets = tuple(cu_seqlens.tolist()) if cu_seqlens.dim() == 1 else ()
    ascending = all(a <= b for a, b in pairwise(offsets))
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != queries.seqlen or not ascending:
        raise ValueError(
            f"cu_seqlens: got {list(cu_seqlens.shape)} offsets that do not ascend from 0 to {queries.seqlen}; allowed: "
            "where each document of the whole sequence begins, and the sequence's length"
        )
    if query.shape[0] != 1 or queries.seqlen != keys.seqlen:
        raise ValueError(
            f"query: got a batch of {query.shape[0]}, {queries.seqlen} queries and {keys.seqlen} keys; allowed with "
            "cu_seqlens: a batch of 1, as many keys as queries"
        )
    if optional["attn_mask"] is not None:
        raise ValueError("attn_mask: got one together with cu_seqlens; allowed: one of them")
    for name in ("alibi_slopes", "sink"):
        t = optional[name]
        if t is not None and t.dim() != 1:
            raise ValueError(f"{name}: got shape {list(t.shape)}; allowed with cu_seqlens: ({query.shape[1]})")
    return offsets


def _method(method: str | None, group: Group, query: Tensor, key: Tensor, mask: Tensor | None) -> str:
    heads, heads_kv = query.shape[1], key.shape[1]
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


def _check_call(query, key, value, mask, slopes, sink, rng_state, keys: Layout, options: dict) -> None:
    """What the operator checks, before anything is sent: on tensors without memory, with all keys."""

    def meta(t: Tensor | None, rows: int | None = None) -> Tensor | None:
        if t is None:
            return None
        shape = t.shape if rows is None else (*t.shape[:2], rows, t.shape[3])
        return torch.empty(shape, dtype=t.dtype, device="meta")

    if key.shape[2] != value.shape[2]:
        raise ValueError(f"value: got {value.shape[2]} rows; allowed: those of key, {key.shape[2]}")
    _ops.attention(
        meta(query), meta(key, keys.seqlen), meta(value, keys.seqlen), meta(mask), meta(slopes), meta(sink),
        meta(rng_state), **options,
    )  # fmt: skip


def _band(options: dict, queries: Layout, keys: Layout) -> Band:
    """The operator's band, on the whole sequence."""
    right = options["window_right"]
    if options["causal"]:
        right = 0 if right is None else min(0, right)
    diagonal = keys.seqlen - queries.seqlen if options["lower_right"] else 0
    return Band(options["window_left"], right, diagonal)
