"""6. Flash-Decoding: few queries and many keys, so the keys are split.

Source: Dao, Haziza, Massa, Sizov, "Flash-Decoding for long-context inference", 2023 (pytorch.org/blog/flash-decoding).

With one block of queries FlashAttention-2 has one task for each head, and most of the machine is idle. Here each split
of the keys is a task: it computes O_s and lse_s of its keys. A second, small kernel merges them:

    lse = log sum_s e^(lse_s)        O = sum_s e^(lse_s - lse) O_s

This is exact: e^(lse_s - lse) is the fraction of split s in the whole denominator.
"""

import math

from torch import Tensor

from .flash2 import attend
from .memory import SlowMemory, SlowTensor, blocks, statistics_dtype
from .standard import default_scale
from .tile import exp_minus, log, maximum


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    num_splits: int,
    block_k: int = 64,
    scale: float | None = None,
    mask: Tensor | None = None,
    memory: SlowMemory | None = None,
) -> tuple[Tensor, Tensor]:
    """out (N_q, d_v) and lse (N_q, 1) for few queries q (N_q, d) over a long cache k, v."""
    memory = memory or SlowMemory()
    Q, K, V = memory.put("q", q), memory.put("k", k), memory.put("v", v)
    MASK = None if mask is None else memory.put("mask", mask)
    scale, dtype = default_scale(scale, q), statistics_dtype(q.dtype)

    partials = []
    for split in splits(k.shape[0], num_splits):  # a real machine computes the splits in parallel
        O_s = memory.new("partial out", Q, q.shape[0], v.shape[1], dtype=dtype)
        lse_s = memory.new("partial lse", Q, q.shape[0], 1, dtype=dtype)
        keys = blocks(split.stop, block_k, split.start)
        O_i, l_i, m_i = attend(Q, K, V, slice(0, q.shape[0]), keys, scale=scale, MASK=MASK)
        O_s.store(O_i.divide_rows_(l_i))
        lse_s.store(m_i + log(l_i))
        partials.append((O_s, lse_s))
    return merge(Q, v.shape[1], partials)


def merge(Q: SlowTensor, d_v: int, partials: list[tuple[SlowTensor, SlowTensor]]) -> tuple[Tensor, Tensor]:
    """The second kernel: a softmax over the splits, with lse_s as scores."""
    rows, memory = Q.shape[0], Q.memory
    O = memory.new("out", Q, rows, d_v, result=True)
    L = memory.new("lse", Q, rows, 1, dtype=statistics_dtype(Q.tensor.dtype))

    lses = [lse_s.load() for _, lse_s in partials]
    largest = Q.on_chip(rows, 1, -math.inf)
    for lse_s in lses:
        largest = maximum(largest, lse_s)
    total = Q.on_chip(rows, 1, 0.0)
    for lse_s in lses:
        total += exp_minus(lse_s, largest)
    lse = largest + log(total)

    merged = Q.on_chip(rows, d_v, 0.0)
    for (O_s, _), lse_s in zip(partials, lses, strict=True):
        share = O_s.load()
        share *= exp_minus(lse_s, lse)
        merged += share
    O.store(merged)
    L.store(lse)
    return O.tensor, L.tensor


def splits(keys: int, num_splits: int) -> list[slice]:
    """Cuts the keys into at most `num_splits` parts of equal length; the last one may be shorter."""
    if num_splits < 1:
        raise ValueError(f"num_splits: got {num_splits}; allowed: at least 1")
    return list(blocks(keys, max(1, math.ceil(keys / num_splits))))
