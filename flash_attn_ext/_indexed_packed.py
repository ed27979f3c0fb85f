"""Attention by index of packed sequences and of caches, as one dense call.

In the dense call all rows of query are one sequence, and all rows of key another. Each number is converted to the
number of the key among all rows. Diagonals, windows and lengths belong to each sequence, so hidden keys become -1 here.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _ops, _packed
from ._call import Call
from ._chosen_rows import EIGHT_BIT, CacheRows, copy_chosen
from ._indexed import KeyNumbers, check_where


def attend_packed(call: Call, numbers: KeyNumbers) -> tuple[Tensor, Tensor]:
    """Returns (out, lse): (T_q, H, D_v) and (H, T_q)."""
    t = call.tensors
    check_where(numbers, t["query"])
    call = _packed.to_operator_form(call)
    _refuse(call, "attn_mask", "alibi_slopes")
    rows = _Rows.of("cu_seqlens_q", t["cu_seqlens_q"], t["query"].shape[0], t["seqused_q"])
    keys = _Rows.of("cu_seqlens_k", t["cu_seqlens_k"], t["key"].shape[0], t["seqused_k"])
    first_key = keys.begin[rows.sequence][:, None]
    indices = _indices(call, numbers, rows, keys.lengths[rows.sequence], lambda own: own + first_key)
    places = None
    if call.options.get("dropout_p", 0.0) != 0.0:
        call, places = _with_dropout_places(call, rows, first_key[:, 0])
    return _run(call, rows, indices, t["key"], t["value"], places)


def _with_dropout_places(call: Call, rows: "_Rows", first_key: Tensor) -> tuple[Call, Tensor]:
    """Returns the call with a dropout state of 2 elements, and the place of each row of query in a padded call, (T_q,
    4).

    A place is {row, column, head, heads} of DropoutParams (core/params.h). With it, dropout drops the same elements as
    in a dense call of the padded sequences. ``first_key``: for each row of query, the first key of its sequence among
    all keys.
    """
    state = call.with_rng_state().tensors["rng_state"]
    if state.dim() != 1 or len(state) not in (2, 6):
        raise ValueError(f"rng_state: got shape {list(state.shape)}; allowed: [2], or [6] for a part of a larger call")
    total, heads = call.tensors["query"].shape[:2]
    zero = torch.zeros(4, dtype=torch.int64, device=state.device)
    row, column, head, heads = state[2:] if len(state) > 2 else (*zero[:3], zero[3] + heads)
    own = rows.position - torch.arange(total, device=state.device)
    places = torch.stack([own + row, column - first_key, rows.sequence * heads + head, heads.expand(total)], 1)
    return call.with_tensors(rng_state=state[:2].contiguous()), places.contiguous()


def prepare_cached(call: Call, numbers: KeyNumbers) -> Callable[[Call], tuple[Tensor, Tensor]]:
    """Checks a call of attention_cache, and returns the function that runs it.

    A number counts the rows of the sequence's cache. ``call`` has the lengths after appending. The function receives
    the call with the rotated query.
    """
    t = call.tensors
    check_where(numbers, t["query"])
    _refuse(call, "tree_mask", "alibi_slopes")
    if call.options["num_splits"] > 1:
        raise ValueError(f"num_splits: got {call.options['num_splits']} with {numbers.name}; allowed: 0 and 1")
    key, value = t["key"], t["value"]
    joins = bool(call.options.get("key_has_value"))
    latent = bool(call.options.get("latent_rows"))
    copies = joins or (not latent and (key.dtype != t["query"].dtype or value.dtype != t["query"].dtype))
    for name, cache in (("key_scale", key), ("value_scale", value)):
        if t[name] is not None and cache.dtype not in EIGHT_BIT:
            own = {"key_scale": "k_descale", "value_scale": "v_descale"}[name]
            raise ValueError(f"{own}: got a tensor with a cache of {cache.dtype}; allowed: None, or 8-bit caches")
    if not latent and not torch.compiler.is_compiling():  # in a compiled graph, the operator checks
        _ops.check_cache(t, call.options)
    rows = _Rows.of("cu_seqlens_q", t["cu_seqlens_q"], t["query"].shape[0], None)
    key_rows, value_rows = _all_rows("k_cache", key), _all_rows("v_cache", value)
    size = key.shape[1]
    if t["block_table"] is not None:
        table = t["block_table"].long()[rows.sequence]

        def move(own: Tensor) -> Tensor:
            page = own.clamp(min=0).div(size, rounding_mode="floor")
            return table.expand(*own.shape[:1], *table.shape).gather(2, page) * size + own % size
    else:
        cache = rows.sequence if t["batch_idx"] is None else t["batch_idx"].long()[rows.sequence]

        def move(own: Tensor) -> Tensor:
            return own + cache[:, None] * size

    length_k = t["seqused_k"].long()[rows.sequence]
    leftpad = None if t["leftpad"] is None else t["leftpad"].long()[rows.sequence]
    indices = _indices(call, numbers, rows, length_k, move, leftpad)

    def run(call: Call) -> tuple[Tensor, Tensor]:
        if copies:
            caches = CacheRows(key_rows, t["key_scale"]), CacheRows(value_rows, t["value_scale"])
            query, own, *rows_of_caches = copy_chosen(call.tensors["query"], indices, *caches, joins)
            return _run(call.with_tensors(query=query), rows, own, *rows_of_caches)
        with _without_autocast(call.tensors["query"].device.type):  # a cast would copy the caches
            return _run(call, rows, indices, key_rows, value_rows)

    return run


def _without_autocast(device: str) -> contextlib.AbstractContextManager:
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


class _Rows(NamedTuple):
    """The rows of a packed tensor."""

    sequence: Tensor  # (T): the sequence of each row
    position: Tensor  # (T): the position of each row in its sequence
    begin: Tensor  # (B): the first row of each sequence
    lengths: Tensor  # (B): the rows in use of each sequence
    used: Tensor | None  # (T), bool: rows in use. None: all

    @classmethod
    def of(cls, name: str, offsets: Tensor, total: int, in_use: Tensor | None) -> "_Rows":
        offsets = offsets.long()
        lengths = offsets.diff()
        can_read_values = offsets.is_cpu and not torch.compiler.is_compiling()
        if can_read_values and (offsets[0] != 0 or offsets[-1] != total or (lengths < 0).any()):
            raise ValueError(f"{name}: got {offsets.tolist()}; allowed: ascending from 0 to {total}")
        sequence = torch.repeat_interleave(
            torch.arange(len(lengths), device=offsets.device), lengths, output_size=total
        )
        position = torch.arange(total, device=offsets.device) - offsets[sequence]
        used = None
        if in_use is not None:
            lengths = in_use.long()
            used = position < lengths[sequence]
        return cls(sequence, position, offsets[:-1], lengths, used)


def _refuse(call: Call, *names: str) -> None:
    for name in names:
        if call.tensors.get(name) is not None:
            raise NotImplementedError(f"{name}: got a tensor with keys by index in a packed call; allowed: None")
    sink = call.tensors["sink"]
    if sink is not None and sink.dim() != 1:
        raise NotImplementedError(f"sink: got shape {list(sink.shape)} with keys by index; allowed: (heads,)")


def _all_rows(name: str, cache: Tensor) -> Tensor:
    """Returns (caches or pages, rows, H_kv, D) as (caches * rows, H_kv, D), without a copy.

    A value that is a view of the key must keep the key's strides. view() would choose other strides for a dimension of
    size 1.
    """
    try:
        rows = cache.view(-1, *cache.shape[2:])
        first = cache.stride(1) if cache.shape[1] > 1 else cache.stride(0)
        return rows.as_strided(rows.shape, (first, *cache.stride()[2:]))
    except RuntimeError:
        raise ValueError(
            f"{name}: got strides {list(cache.stride())} for shape {list(cache.shape)} with keys by index; allowed: "
            "caches or pages one after another in memory"
        ) from None


def _indices(
    call: Call,
    numbers: KeyNumbers,
    rows: _Rows,
    length_k: Tensor,
    move: Callable[[Tensor], Tensor],
    leftpad: Tensor | None = None,
) -> Tensor:
    """Returns the numbers of the dense call, (1 or H_kv, T_q, n).

    ``move`` converts a number in a sequence to a number in the dense call.
    """
    option = call.operator.option_defaults | call.options
    own = _of_rows(numbers, call.tensors["query"].shape[0], call.tensors["key"].shape[-2], length_k)
    seen = own >= 0
    if leftpad is not None:
        seen &= own >= leftpad[:, None]
    if rows.used is not None:
        seen &= rows.used[:, None]
    diagonal = rows.position + option["diagonal"]
    if option["lower_right"]:
        diagonal = diagonal + length_k - rows.lengths[rows.sequence]
    distance = own - diagonal[:, None]
    if option["causal"]:
        seen &= distance <= 0
    if option["window_left"] is not None:
        seen &= distance >= -option["window_left"]
    if option["window_right"] is not None:
        seen &= distance <= option["window_right"]
    if option["attention_chunk"]:
        # the key at which chunks start
        first = option.get("first_key", 0) - (0 if leftpad is None else leftpad[:, None])

        def chunk_of(position: Tensor) -> Tensor:
            return (position + first).div(option["attention_chunk"], rounding_mode="floor")

        seen &= chunk_of(own) == chunk_of(diagonal[:, None])
    return torch.where(seen, move(own), -1)


def _run(
    call: Call, rows: _Rows, indices: Tensor, key: Tensor, value: Tensor, dropout_places: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    names = ("scale", "softcap", "num_splits", "unified_max", "latent_rows", "dropout_p")
    options: dict[str, Any] = {name: call.options[name] for name in names if name in call.options}
    if dropout_places is not None:
        options |= {"rng_state": call.tensors["rng_state"], "dropout_places": dropout_places}
    tensors = (t.transpose(0, 1)[None] for t in (call.tensors["query"], key, value))
    out, lse = _ops.attention_indexed(*tensors, sink=call.tensors["sink"], key_indices=indices[None], **options)
    out, lse = out[0].transpose(0, 1), lse[0]
    return out, lse if rows.used is None else lse.masked_fill(~rows.used, -torch.inf)


def _of_rows(numbers: KeyNumbers, total: int, heads: int, length_k: Tensor) -> Tensor:
    """Returns the numbers of single keys, (1 or H_kv, T_q, n), int64.

    ``length_k``: the key length of each row's sequence.
    """
    given = numbers.given
    if given.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{numbers.name}: got dtype {given.dtype}; allowed: int32, int64")
    if given.dim() != 3 or given.shape[0] not in (1, heads) or given.shape[1] != total:
        raise ValueError(
            f"{numbers.name}: got shape {list(given.shape)}; allowed: (heads_kv or 1, total_q, any number) = "
            f"[{heads}, {total}, ...]"
        )
    own = given.long()
    size = numbers.block_size
    limit = (length_k + (size - 1)).div(size, rounding_mode="floor")[:, None]
    if own.is_cpu and not torch.compiler.is_compiling():
        wrong = (own < -1) | (own >= limit)
        if wrong.any():
            where = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"{numbers.name}: got {own[tuple(where)]} for row {where[1]} of query; allowed: -1 (none) to "
                f"{limit[where[1], 0] - 1}, in the row's own sequence"
            )
    if size == 1:
        return own
    keys = own[..., None] * size + torch.arange(size, device=own.device)
    return torch.where((own[..., None] >= 0) & (keys < length_k[:, None, None]), keys, -1).flatten(-2)
