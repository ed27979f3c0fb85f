"""A call of flash_attn_with_kvcache: two operators, append_to_cache and attention_cache."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from . import _append, _float8, _ops  # noqa: F401  _append registers the operator for CUDA
from ._call import FUNCTIONS, Call, take
from ._flash_arguments import exactly_one_name, sink_of, true_or_false, whole_number, window_of
from ._indexed import KeyNumbers
from ._indexed_packed import prepare_cached
from ._options import checked_options, operator_options
from ._second_query import SecondQuery, join_caches
from ._tensor_checks import check_are_dense, check_is_dense, check_no_gradients, check_no_tangents
from .flex.attention import check_captured_tangents, refuse_dtensors_with_functions, run_with_functions, with_functions

# Names in the operators' error messages -> the caller's names.
_NAMES_OF_APPEND = {
    "query": "q", "key": "k", "value": "v", "key_cache": "k_cache", "value_cache": "v_cache",
    "query's": "q's", "key's": "k's", "key_group_scale": "k_scales", "value_group_scale": "v_scales",
    "key_group_zero": "k_zeros", "value_group_zero": "v_zeros",
}  # fmt: skip
_NAMES_OF_ATTENTION = {
    "query": "q", "key": "k_cache", "value": "v_cache", "seqused_k": "cache_seqlens", "batch_idx": "cache_batch_idx",
    "leftpad": "cache_leftpad", "scale": "softmax_scale", "window": "window_size", "query's": "q's",
    "key's": "k_cache's",
}  # fmt: skip


_TENSORS = (
    "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_batch_idx", "cache_leftpad", "block_table",
    "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k_new", "rotary_seqlens", "k_descale", "v_descale", "tree_mask", "sink",
    "qv", "q_descale", "k_scales", "v_scales", "k_zeros", "v_zeros",
)  # fmt: skip


# Tensors that are not allowed with cache_format.
_NOT_WITH_FORMAT = ("k", "v", "qv", "k_descale", "v_descale", "k_scales", "v_scales", "k_zeros", "v_zeros")


@dataclass(frozen=True)
class CacheCall:
    """The arguments of :func:`flash_attn_with_kvcache`, by name."""

    tensors: dict[str, Tensor | None]
    options: dict[str, object]  # all other arguments
    return_lse: bool = False
    functions: dict[str, Any] = field(default_factory=dict)  # of the user
    numbers: KeyNumbers | None = None  # of keys by index

    @classmethod
    def from_arguments(
        cls, *, return_softmax_lse: bool = False, page_table: Tensor | None, block_table: Tensor | None,
        learnable_sink: Tensor | None, sink: Tensor | None, key_indices: Tensor | None = None,
        key_block_indices: Tensor | None = None, key_block_size: int = 128, **arguments,
    ) -> CacheCall:  # fmt: skip
        """``page_table`` becomes ``block_table``, and ``learnable_sink`` becomes ``sink``."""
        arguments["block_table"] = exactly_one_name("page_table", page_table, "block_table", block_table)
        arguments["sink"] = exactly_one_name("learnable_sink", learnable_sink, "sink", sink)
        return_lse = true_or_false("return_softmax_lse", return_softmax_lse)
        functions = take(arguments, FUNCTIONS)
        if all(function is None for function in functions.values()):
            functions = {}
        numbers = KeyNumbers.from_arguments(
            key_indices=key_indices, key_block_indices=key_block_indices, key_block_size=key_block_size
        )
        if numbers is not None and functions:
            raise NotImplementedError(f"{numbers.name}: got a tensor with a function; allowed: one of them")
        return cls({name: arguments.pop(name) for name in _TENSORS}, arguments, return_lse, functions, numbers)

    def with_tensors(self, **tensors: Tensor | None) -> CacheCall:
        return replace(self, tensors=self.tensors | tensors)

    def with_options(self, **options: object) -> CacheCall:
        return replace(self, options=self.options | options)


def attend(call: CacheCall) -> tuple[Tensor, Tensor]:
    """Returns (out, lse): (B, S_q, H, D_v) and (B, H, S_q), or packed like the queries."""
    q, cu_seqlens_q = call.tensors["q"], call.tensors["cu_seqlens_q"]
    check_no_gradients(
        "flash_attn_with_kvcache",
        {name: call.tensors[name] for name in ("q", "k_cache", "v_cache", "k", "v", "qv")},
        way_out="flash_attn_varlen has gradients",
    )
    check_no_tangents("flash_attn_with_kvcache", call.tensors)
    append, attention, second = operator_calls(call)
    if call.functions:
        _check_functions(call, append, attention)
    run_by_index = None if call.numbers is None else _by_index(append, attention, call.numbers, q)
    if append is not None:
        if not torch.compiler.is_compiling():  # tracing already checked a compiled graph
            with _renamed_errors(_NAMES_OF_ATTENTION):
                _ops.check_cache(attention.tensors, attention.options)
        with _renamed_errors(_NAMES_OF_APPEND):
            rotated, lengths = append.run()
        attention = attention.with_tensors(seqused_k=lengths)
        if append.tensors["rotary_cos"] is not None:
            attention = attention.with_tensors(query=rotated if second is None else second.joined(rotated))
    with _renamed_errors(_NAMES_OF_ATTENTION):
        if call.functions:
            out, lse = run_with_functions(attention, **call.functions)
        else:
            out, lse = attention.run() if run_by_index is None else run_by_index(attention)
    if q.dtype is _float8.DTYPE:
        out = out.to(call.options["out_dtype"] or _float8.OUT_DTYPE)  # out has the dtype of the widened queries
    if cu_seqlens_q is None:
        out = out.unflatten(0, q.shape[:2])
        lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return out, lse


def _check_functions(call: CacheCall, append: Call | None, attention: Call) -> None:
    """Traces the functions, and checks the block mask against the lengths after appending, before a row is written."""
    refuse_dtensors_with_functions(call.tensors)
    if torch.compiler.is_compiling():  # torch.compile traces the graph before a row is written
        return
    traced = with_functions(attention, **call.functions)
    check_captured_tangents("flash_attn_with_kvcache", traced.tensors, call.functions)
    with _renamed_errors(_NAMES_OF_ATTENTION):
        _ops.check_cache_flex(traced.tensors, traced.options)
    block_mask, lengths = call.functions["block_mask"], attention.tensors["seqused_k"]
    if block_mask is None or lengths is None or lengths.is_meta or len(lengths) == 0:
        return
    if append is not None:
        new = append.tensors["cu_seqlens_k_new"]
        assert new is not None
        lengths = lengths + new.diff()
    longest, covered = int(lengths.max()), min(block_mask.seq_lengths)
    states = traced.tensors["block_states"]
    assert states is not None
    counts = states.shape[-2] - 1, states.shape[-1]  # row 0 is before the mask
    most = min(count * size for count, size in zip(counts, block_mask.BLOCK_SIZE, strict=True))
    if longest > most or (longest > covered and longest > max(block_mask.BLOCK_SIZE)):
        raise ValueError(f"block_mask: got one for {covered} keys; allowed: at least the longest sequence's {longest}")


def _by_index(
    append: Call | None, attention: Call, numbers: KeyNumbers, q: Tensor
) -> Callable[[Call], tuple[Tensor, Tensor]]:
    """Checks the indices before a row is written. Returns the function that runs the attention."""
    if q.dim() == 4:  # (B or 1, H_kv or 1, S_q, n) for (B, S_q, H, D)
        given = numbers.given
        if given.dim() != 4 or given.shape[0] not in (1, q.shape[0]) or given.shape[2] != q.shape[1]:
            raise ValueError(
                f"{numbers.name}: got shape {list(given.shape)}; allowed: (batch or 1, heads_kv or 1, seqlen_q, any "
                f"number) = [{q.shape[0]}, {attention.tensors['key'].shape[2]}, {q.shape[1]}, ...]"
            )
        given = given.expand(q.shape[0], *given.shape[1:]).transpose(0, 1).flatten(1, 2)
        numbers = numbers._replace(given=given)
    if append is not None:
        new = append.tensors["cu_seqlens_k_new"].diff()
        attention = attention.with_tensors(seqused_k=attention.tensors["seqused_k"] + new)
    with _renamed_errors(_NAMES_OF_ATTENTION):
        return prepare_cached(attention, numbers)


@contextlib.contextmanager
def _renamed_errors(names: dict[str, str]):
    """Replaces the operator's names of arguments in its errors by the caller's names."""
    if torch.compiler.is_compiling():
        yield
        return
    try:
        yield
    except (TypeError, ValueError) as error:
        name, colon, rest = str(error).partition(":")
        if not colon or name not in names:
            raise
        rest = re.sub(
            r"\b(query's|key's|key_cache|value_cache)(?=\W)", lambda found: names.get(found[0], found[0]), rest
        )
        raise type(error)(f"{names[name]}:{rest}") from None


def operator_calls(call: CacheCall) -> tuple[Call | None, Call, SecondQuery | None]:
    """Returns the call of append_to_cache (None if nothing is appended), the call of attention_cache, and the second
    query.

    The call of attention_cache has the queries before the rotation and the lengths before appending. append_to_cache
    returns the rotated queries and the new lengths.
    """
    given, options = call.tensors, dict(call.options)
    check_are_dense(given, ("q", "k_cache", "v_cache"))
    cache_format = options.pop("cache_format", None)
    if cache_format is not None:
        given = given | _latent_caches(cache_format, call)
    out_dtype, query_factor = options.pop("out_dtype"), None
    is_float8 = _float8.is_float8(given["q"], given["q_descale"], out_dtype)
    if is_float8:
        given, query_factor = _float8.widened_for_cache(given, cache_format, out_dtype)
    q, k_cache, v_cache, k, v = (given[name] for name in ("q", "k_cache", "v_cache", "k", "v"))
    if given["k_scales"] is not None or given["v_scales"] is not None:
        _refuse_with_int4(call)
    for name, t in (("k_cache", k_cache), ("v_cache", v_cache)):
        if t.dim() != 4:
            raise ValueError(f"{name}: got shape {list(t.shape)}; allowed: (caches or pages, rows, heads_k, head_dim)")
    for name in ("block_table", "tree_mask"):
        t = given[name]
        if t is not None and t.dim() < 2:
            raise ValueError(f"{name}: got shape {list(t.shape)}; allowed: at least 2 dimensions")
    for name, needed in (
        ("rotary_cos", "rotary_sin"), ("rotary_sin", "rotary_cos"), ("rotary_cos", "k"), ("k", "v"), ("v", "k"),
    ):  # fmt: skip
        if given[name] is not None and given[needed] is None:
            raise ValueError(f"{name}: got one without {needed}; allowed: both or none")
    causal = true_or_false("causal", options.pop("causal"))
    interleaved = true_or_false("rotary_interleaved", options.pop("rotary_interleaved"))
    window = window_of(options.pop("window_size"))
    max_seqlen_q = whole_number("max_seqlen_q", options.pop("max_seqlen_q"))
    options["num_splits"] = whole_number("num_splits", options["num_splits"])
    tree_mask, packed = given["tree_mask"], given["cu_seqlens_q"] is not None
    if packed and tree_mask is not None and max_seqlen_q is None:
        max_seqlen_q = tree_mask.shape[-1]
    if isinstance(max_seqlen_q, int) and not 0 <= max_seqlen_q < 2**63:
        raise ValueError(f"max_seqlen_q: got {max_seqlen_q}; allowed: None, or an int of 0 or more")
    cu_seqlens, batch, longest = _query_offsets(q, given["cu_seqlens_q"], max_seqlen_q)
    block_table, cache_batch_idx = given["block_table"], given["cache_batch_idx"]
    if block_table is not None and cache_batch_idx is not None:
        block_table, cache_batch_idx = _rows_of_table(block_table, cache_batch_idx, batch), None
    rows_of_sequence = k_cache.shape[1] * (1 if block_table is None else block_table.shape[-1])
    lengths = _lengths(options.pop("cache_seqlens"), batch, rows_of_sequence, q)
    in_both = {
        "query": q.reshape(-1, *q.shape[-2:]),
        "cu_seqlens_q": cu_seqlens,
        "block_table": block_table,
        "key_scale": _expanded_scale("k_descale", given["k_descale"], k_cache),
        "value_scale": _expanded_scale("v_descale", given["v_descale"], v_cache),
        "key_group_scale": given["k_scales"],
        "value_group_scale": given["v_scales"],
        "key_group_zero": given["k_zeros"],
        "value_group_zero": given["v_zeros"],
    }
    append = None
    if k is not None:
        k, v, cu_seqlens_new = _new_rows(k, v, k_cache, batch, given["cu_seqlens_k_new"])
        tensors = in_both | {
            "key": k, "value": v, "key_cache": k_cache, "value_cache": v_cache, "cu_seqlens_k_new": cu_seqlens_new,
            "cache_seqlens": lengths, "cache_batch_idx": cache_batch_idx,
        }  # fmt: skip
        same_name = ("rotary_cos", "rotary_sin", "rotary_seqlens", "cache_leftpad")
        tensors |= {name: given[name] for name in same_name}
        advance = causal or window is not None
        append = Call(_ops.APPEND, tensors, {"interleaved": interleaved, "advance_query_positions": advance})
        if is_float8:  # the new rows already use the factors of the cache
            append = append.with_tensors(key_scale=None, value_scale=None)
    if query_factor is not None:
        factor = _float8.with_query_factor(given["k_descale"], query_factor)
        in_both["key_scale"] = _expanded_scale("q_descale", factor, k_cache)
    with _renamed_errors(_NAMES_OF_ATTENTION):
        options = operator_options(
            causal="lower_right" if causal else None, window=window, alibi_slopes=given["alibi_slopes"],
            scale=options.pop("softmax_scale"), deterministic=False, max_seqlen_q=longest, **options,
        )  # fmt: skip
        options = checked_options(_ops.CACHE.option_types, options)
    second, key = None, k_cache
    options["latent_rows"] = cache_format is not None
    options["float8_products"] = is_float8 and _float8.allows_products(q, given["k_descale"], given["v_descale"])
    if given["qv"] is not None:
        second, key, options["key_has_value"] = join_caches(given["qv"], q, k_cache, v_cache)
        in_both["query"] = second.joined(in_both["query"])
    tensors = in_both | {
        "key": key,
        "value": v_cache,
        "alibi_slopes": given["alibi_slopes"],
        "seqused_k": lengths,
        "batch_idx": cache_batch_idx,
        "leftpad": given["cache_leftpad"],
        "tree_mask": _tree_mask_of_operator(tree_mask, packed),
        "sink": sink_of(given["sink"], q),
    }
    return append, Call(_ops.CACHE, tensors, options | {"lower_right": True}), second


def _latent_caches(cache_format: object, call: CacheCall) -> dict[str, Tensor]:
    """Returns views of the columns of keys and of values in FlashMLA's rows of 656 bytes."""
    if cache_format != "flashmla_fp8":
        raise ValueError(f"cache_format: got {cache_format!r}; allowed: None, 'flashmla_fp8'")
    cache = call.tensors["k_cache"]
    if call.tensors["v_cache"] is not cache:
        raise ValueError(f"v_cache: got another tensor with cache_format={cache_format!r}; allowed: k_cache itself")
    if cache.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise TypeError(f"k_cache: got dtype {cache.dtype}; allowed with {cache_format!r}: float8_e4m3fn, uint8")
    if cache.dim() != 4 or cache.shape[-1] != 656 or cache.stride(-1) != 1:
        raise ValueError(
            f"k_cache: got shape {list(cache.shape)}, strides {list(cache.stride())}; allowed with {cache_format!r}: "
            "(caches or pages, rows, heads_k, 656), with adjacent bytes in a row"
        )
    refused = [name for name in _NOT_WITH_FORMAT if call.tensors[name] is not None]
    if refused:
        raise NotImplementedError(f"{refused[0]}: got a tensor with cache_format={cache_format!r}; allowed: None")
    rows = cache.view(torch.float8_e4m3fn)
    return {"k_cache": rows[..., :576], "v_cache": rows[..., :512]}


def _refuse_with_int4(call: CacheCall) -> None:
    if call.tensors["qv"] is not None:
        raise NotImplementedError("qv: got a tensor with k_scales or v_scales; allowed: None, caches of q's dtype")
    if call.numbers is not None:
        raise NotImplementedError(f"{call.numbers.name}: got a tensor with k_scales or v_scales; allowed: None")


def columns_of(cache: Tensor) -> int:
    """Returns the number of columns of a cache row. int4 has two columns in each byte."""
    return cache.shape[-1] * (2 if cache.dtype == torch.uint8 else 1)


def _query_offsets(q: Tensor, cu_seqlens_q: Tensor | None, max_seqlen_q: int | None):
    """Returns the offsets, the number of sequences, and the longest length."""
    if cu_seqlens_q is None:
        if q.dim() != 4:
            raise ValueError(
                f"q: got shape {list(q.shape)}; allowed: (batch, seqlen_q, heads, head_dim), or 3-D with cu_seqlens_q"
            )
        batch, rows = q.shape[:2]
        return torch.arange(batch + 1, device=q.device) * rows, batch, rows
    if q.dim() != 3:
        raise ValueError(f"q: got shape {list(q.shape)}; allowed: (total_q, heads, head_dim) with cu_seqlens_q")
    return cu_seqlens_q, len(cu_seqlens_q) - 1, max_seqlen_q


def _lengths(cache_seqlens: int | Tensor | None, batch: int, most: int, q: Tensor) -> Tensor:
    """Returns the number of rows in use of each sequence's cache, (B). ``most``: the number of rows of a cache."""
    if isinstance(cache_seqlens, Tensor) and cache_seqlens.dim() > 0:
        check_is_dense("cache_seqlens", cache_seqlens)
        if cache_seqlens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"cache_seqlens: got dtype {cache_seqlens.dtype}; allowed: an int, int32 or int64")
        if cache_seqlens.shape != (batch,):
            raise ValueError(f"cache_seqlens: got shape {list(cache_seqlens.shape)}; allowed: an int or [{batch}]")
        return cache_seqlens
    length = whole_number("cache_seqlens", cache_seqlens)
    if isinstance(length, int) and not 0 <= length <= most:
        raise ValueError(f"cache_seqlens: got {length}; allowed: 0 to {most}, the rows of a sequence's cache")
    return torch.full((batch,), most if length is None else length, device=q.device)


def _rows_of_table(block_table: Tensor, rows: Tensor, batch: int) -> Tensor:
    """Returns the row of ``block_table`` for each sequence, by cache_batch_idx."""
    if rows.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cache_batch_idx: got dtype {rows.dtype}; allowed: int32, int64")
    if rows.shape != (batch,):
        raise ValueError(f"cache_batch_idx: got shape {list(rows.shape)}; allowed: ({batch},)")
    if block_table.dim() != 2:
        raise ValueError(f"block_table: got shape {list(block_table.shape)}; allowed: (rows, pages of a sequence)")
    if rows.is_cpu and not torch.compiler.is_compiling() and ((rows < 0) | (rows >= len(block_table))).any():
        raise ValueError(
            f"cache_batch_idx: got {rows.tolist()}; allowed: 0 to {len(block_table) - 1}, the rows of block_table"
        )
    return block_table.index_select(0, rows)


def _new_rows(
    k: Tensor, v: Tensor, k_cache: Tensor, batch: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns k and v packed, and their offsets."""
    if cu_seqlens is not None:
        for name, t in (("k", k), ("v", v)):
            if t.dim() != 3:
                raise ValueError(
                    f"{name}: got shape {list(t.shape)}; allowed: (total_new, heads_k, head_dim) with cu_seqlens_k_new"
                )
        return k, v, cu_seqlens
    heads, head_dim = k_cache.shape[2], columns_of(k_cache)
    if k.dim() != 4 or k.shape[0] != batch or k.shape[2:] != (heads, head_dim):
        raise ValueError(f"k: got shape {list(k.shape)}; allowed: ({batch}, seqlen_new, {heads}, {head_dim})")
    if v.dim() != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"v: got shape {list(v.shape)}; allowed: ({', '.join(map(str, k.shape[:3]))}, head_dim_v)")
    offsets = torch.arange(batch + 1, device=k.device) * k.shape[1]
    return k.flatten(0, 1), v.flatten(0, 1), offsets


def _tree_mask_of_operator(mask: Tensor | None, packed: bool) -> Tensor | None:
    """Returns the mask as (B, H, S_q, S_q), or as (H, T_q, max_seqlen_q) for packed queries."""
    if mask is None or mask.dim() == 4:
        return mask
    if packed:
        return mask[None] if mask.dim() == 2 else mask
    return mask[None, None] if mask.dim() == 2 else mask[:, None]


def _expanded_scale(name: str, scale: Tensor | None, cache: Tensor) -> Tensor | None:
    """Expands the factors of 8-bit rows to (caches or pages, rows, H_k)."""
    if scale is None:
        return None
    given = list(scale.shape)
    if scale.dim() == 2:
        scale = scale[:, None]
    sizes = zip(reversed(scale.shape), reversed(cache.shape[:3]), strict=False)
    if not 1 <= scale.dim() <= 3 or any(size not in (1, full) for size, full in sizes):
        caches, rows, heads = cache.shape[:3]
        raise ValueError(
            f"{name}: got shape {given}; allowed: ({heads},), ({caches}, {heads}), or a shape that broadcasts to "
            f"({caches}, {rows}, {heads})"
        )
    return scale.expand(cache.shape[:3]).float()
