"""The FLOP formulas of the operators for torch.utils.flop_counter.FlopCounterMode, equal to torch's for its attention.

Every pair of a query and a key of the same sequence counts, even if a mask, a window or the diagonal hides it. The
backward counts five products for every choice of gradients. Packed sequences and caches count with their own lengths,
as torch counts nested tensors; on CUDA this waits for the GPU. If the lengths have no values (fake and meta tensors),
each query counts with as many keys as the longest sequence, an upper bound.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils.flop_counter import register_flop_formula

from . import _ops

# FLOPs of a (query, key) pair: (for each column of query and key, for each column of value). A multiply-add is 2.
_PER_PAIR = {
    "attention": (2, 2),  # Q K^T and P V
    "attention_backward": (6, 4),  # Q K^T again, dO V^T, P^T dO, dS K and dS^T Q
    "attention_jvp": (6, 6),  # Q K^T, P V, tQ K^T, Q tK^T, (P e) V and P tV, for every choice of tangents
    "attention_double_backward": (14, 6),  # ten products: docs/derivative_formulas.md
    "attention_weights": (2, 0),  # Q K^T
    "attention_weights_backward": (6, 0),  # Q K^T again, dS K and dS^T Q
}


def _dense_pairs(given: dict) -> int:
    """B * H * S_q * S_k"""
    return given["query"].shape[:3].numel() * given["key"].shape[2]


def _indexed_pairs(given: dict) -> int:
    """B * H * S_q * n, times the block size for blocks. Every number counts, even -1."""
    named = given["key_indices"].shape[3] * max(given.get("key_block_size", 0), 1)
    return given["query"].shape[:3].numel() * min(named, given["key"].shape[2])


def _packed_pairs(given: dict) -> int:
    """H times the sum of seqlen_q * seqlen_k over the sequences."""
    query, key = given["query"], given["key"]
    lengths_q = _lengths(given["cu_seqlens_q"], given.get("seqused_q"))
    lengths_k = _lengths(given["cu_seqlens_k"], given.get("seqused_k"))
    if lengths_q is None or lengths_k is None:
        longest_q, longest_k = given.get("max_seqlen_q"), given.get("max_seqlen_k")
        (rows, heads), keys = query.shape[:2], key.shape[0]
        of_queries = rows * (keys if longest_k is None else min(longest_k, keys))
        of_keys = keys * (rows if longest_q is None else min(longest_q, rows))
        return heads * min(of_queries, of_keys)
    return query.shape[1] * sum(q * k for q, k in zip(lengths_q, lengths_k, strict=True))


def _cache_pairs(given: dict) -> int:
    """H times the sum of seqlen_q * cache_seqlens over the sequences, without their left padding."""
    query, key, block_table, leftpad = given["query"], given["key"], given.get("block_table"), given.get("leftpad")
    lengths_q, lengths_k = _lengths(given["cu_seqlens_q"]), _numbers(given["seqused_k"])
    padding = [0] * given["seqused_k"].shape[0] if leftpad is None else _numbers(leftpad)
    if lengths_q is None or lengths_k is None or padding is None:
        return query.shape[:2].numel() * key.shape[1] * (1 if block_table is None else block_table.shape[1])
    return query.shape[1] * sum(q * max(k - p, 0) for q, k, p in zip(lengths_q, lengths_k, padding, strict=True))


def _lengths(offsets: Tensor, used: Tensor | None = None) -> list[int] | None:
    """The length of each packed sequence; None if the offsets have no values."""
    ends = _numbers(offsets)
    in_use = None if used is None else _numbers(used)
    if ends is None or (used is not None and in_use is None):
        return None
    lengths = [end - begin for begin, end in pairwise(ends)]
    return lengths if in_use is None else [min(n, m) for n, m in zip(lengths, in_use, strict=True)]


def _numbers(t: Tensor) -> list[int] | None:
    if isinstance(t, (FakeTensor, FunctionalTensor)) or t.is_meta:
        return None
    return t.tolist()


def _register(op: OpOverload, pairs: Callable[[dict], int], per_pair: tuple[int, int]) -> None:
    names = [argument.name for argument in op._schema.arguments]

    def flops(*args, out_val=None, **kwargs) -> int:
        given = dict(zip(names, args, strict=False)) | kwargs
        per_column, per_value_column = per_pair
        columns = per_column * given["query"].shape[-1]
        if per_value_column:
            value = given["value"]
            # int4: two columns in each byte
            columns += per_value_column * value.shape[-1] * (2 if value.dtype == torch.uint8 else 1)
        return pairs(given) * columns

    register_flop_formula(op.overloadpacket, get_raw=True)(flops)


for _name, _columns in _PER_PAIR.items():
    _register(getattr(_ops, _name), _dense_pairs, _columns)
for _name in ("attention", "attention_backward", "attention_jvp", "attention_double_backward"):
    _register(getattr(_ops, _name.replace("attention", "attention_varlen")), _packed_pairs, _PER_PAIR[_name])
    _register(getattr(_ops, _name.replace("attention", "attention_flex")), _dense_pairs, _PER_PAIR[_name])
    _register(getattr(_ops, _name.replace("attention", "attention_varlen_flex")), _packed_pairs, _PER_PAIR[_name])
for _name in ("attention", "attention_backward"):
    _register(getattr(_ops, _name.replace("attention", "attention_indexed")), _indexed_pairs, _PER_PAIR[_name])
_register(_ops.attention_int8, _dense_pairs, _PER_PAIR["attention"])
for _cached in (_ops.attention_cache, _ops.attention_cache_flex):
    _register(_cached, _cache_pairs, _PER_PAIR["attention"])
