"""Caches of keys and values in every form, and attention to them against the dense reference."""

import math

import reference
import torch
from tolerances import assert_as_exact_as_torch

H, HK, D, DV = 4, 2, 32, 16
LENGTHS = [70, 0, 200, 5, 129]  # rows in the caches
ROWS = 256


def make(dtype=torch.float32, seqlen_q=1, page_size=None, lengths=LENGTHS):
    """Returns q, caches, block_table or None. Cache rows that are not in use are NaN."""
    batch = len(lengths)
    q = torch.randn(batch, seqlen_q, H, D).to(dtype)
    shape = (batch, ROWS)
    block_table = None
    if page_size:
        pages = math.ceil(ROWS / page_size)
        block_table = torch.randperm(2 * batch * pages, dtype=torch.int32)[: batch * pages].view(batch, pages)
        shape = (2 * batch * pages, page_size)
    caches = []
    for d in (D, DV):
        rows = torch.randn(batch, ROWS, HK, d).to(dtype)
        rows.masked_fill_((torch.arange(ROWS) >= torch.tensor(lengths)[:, None])[..., None, None], torch.nan)
        if block_table is None:
            caches.append(rows)
            continue
        cache = torch.full((*shape, HK, d), torch.nan, dtype=dtype)
        rows = torch.cat([rows, rows.new_full((batch, pages * page_size - ROWS, HK, d), torch.nan)], 1)
        cache[block_table.long()] = rows.unflatten(1, (pages, page_size))
        caches.append(cache)
    return q, *caches, block_table


def row_of_cache(cache, block_table, b, row):
    if block_table is None:
        return cache[b, row]
    page_size = cache.shape[1]
    return cache[int(block_table[b, row // page_size]), row % page_size]


def rows_of(cache, block_table, b, begin, end):
    """Returns rows [begin, end) of sequence b as (1, H_k, end - begin, D)."""
    rows = cache[b] if block_table is None else cache[block_table[b].long()].flatten(0, 1)
    return rows[begin:end].transpose(0, 1)[None]


def check(out, lse, q, k_cache, v_cache, lengths, block_table=None, *, caches=None, leftpad=None, causal=False,
          slopes=None, mask=None, sink=None, **options):  # fmt: skip
    """Compares each sequence with the reference. mask(b, seqlen_k) is its dense mask."""
    for b, length in enumerate(lengths):
        cache, begin = b if caches is None else int(caches[b]), 0 if leftpad is None else int(leftpad[b])
        k, v = (rows_of(t, block_table, cache, begin, length) for t in (k_cache, v_cache))
        results = [
            reference.attention(
                q[b].transpose(0, 1)[None].to(t), k.to(t), v.to(t), None if mask is None else mask(b, length - begin),
                causal="lower_right" if causal else None, alibi_slopes=slopes,
                sink=sink if sink is None or sink.dim() == 1 else sink[b : b + 1], **options,
            )
            for t in (torch.float64, q.dtype)
        ]  # fmt: skip
        ours = out[b].transpose(0, 1)[None], lse[b][None]
        for name, a, exact, theirs in zip(("out", "lse"), ours, *results, strict=True):
            assert_as_exact_as_torch(name, a, theirs, exact, 2)


def rotary_tables(rows, rotary_dim):
    angles = torch.arange(rows)[:, None] / 10000 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    return angles.cos(), angles.sin()


def rotated_pair(x, position, rotary_dim, interleaved):
    """Rotates one row of one head, pair by pair, by the definition."""
    x = x.clone()
    for n in range(rotary_dim // 2):
        a, b = (2 * n, 2 * n + 1) if interleaved else (n, n + rotary_dim // 2)
        angle = position / 10000 ** (2 * n / rotary_dim)
        x[a], x[b] = (
            x[a] * math.cos(angle) - x[b] * math.sin(angle), x[a] * math.sin(angle) + x[b] * math.cos(angle)
        )  # fmt: skip
    return x
