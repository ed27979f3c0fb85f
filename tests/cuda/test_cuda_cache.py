"""Queries against caches (CacheParams of csrc/core/params.h) in the CUDA kernels' host build: by simt, and, 16 bits, by
sm80.
"""

from itertools import accumulate

import pytest
import reference
import torch
from tolerances import assert_as_exact_as_torch

from flash_attn_ext import _ops

HEADS, HEADS_KV = 4, 2
USED = [300, 64, 1, 0, 95]  # rows of each sequence's cache
FEW = [1, 3, 1, 2, 16]  # its queries
MANY = [40, 3, 1, 2, 129]

pytestmark = pytest.mark.usefixtures("kernels")

halves = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


def run(kernels, q, caches_given, lengths, *, used, batch_idx=None, leftpad=None, block_table=None, **options):
    """out (T, H, D), lse (H, T) and the tier. `caches_given`: two of (caches or pages, rows, H_kv, D)."""
    numbers = {"seqused_k": used, "batch_idx": batch_idx, "leftpad": leftpad, "block_table": block_table}
    numbers = {name: None if t is None else torch.as_tensor(t, dtype=torch.int32) for name, t in numbers.items()}
    cu_seqlens_q = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    options = {"max_seqlen_q": max(lengths), **options}
    out, lse = _ops.attention_cache(
        q, *caches_given, **{"alibi_slopes": None, "sink": None, **options}, cu_seqlens_q=cu_seqlens_q, **numbers
    )
    return out, lse, kernels.tier


def paged(contiguous, page_size):
    """The caches in pages of any order, and the block table. Some pages belong to no sequence, and are NaN."""
    count, rows = contiguous[0].shape[:2]
    each = -(-rows // page_size)
    order = torch.randperm(count * each + 3)[: count * each].view(count, each)
    pages = []
    for cache in contiguous:
        padded = torch.nn.functional.pad(cache, (0, 0, 0, 0, 0, each * page_size - rows), value=torch.nan)
        pages.append(torch.full((count * each + 3, page_size, *cache.shape[2:]), torch.nan, dtype=cache.dtype))
        pages[-1][order.flatten()] = padded.view(-1, page_size, *cache.shape[2:])
    return pages, order


def check(kernels, lengths, dtype, head_dim=64, *, page_size=None, leftpad=(0,) * 5, batch_idx=range(5), **options):
    """Checks each sequence by the error rule. Unused cache rows are NaN. Returns the tier."""
    q = torch.randn(sum(lengths), HEADS, head_dim).to(dtype)
    caches = [torch.randn(6, 300, HEADS_KV, head_dim).to(dtype) for _ in range(2)]
    for cache in caches:
        for which, pad, end in zip(batch_idx, leftpad, USED, strict=True):
            cache[which, :pad] = cache[which, end:] = torch.nan
    given, table = (caches, None) if page_size is None else paged(caches, page_size)
    where = {"batch_idx": batch_idx} if table is None else {"block_table": table[list(batch_idx)]}
    out, lse, tier = run(kernels, q, given, lengths, used=USED, leftpad=leftpad, **where, **options)
    at = [0, *accumulate(lengths)]
    for b, (which, pad, end) in enumerate(zip(batch_idx, leftpad, USED, strict=True)):
        own = slice(at[b], at[b + 1])
        inputs = [t.transpose(0, 1)[None] for t in (q[own], *(c[which, min(pad, end) : end] for c in caches))]
        dense = {"softcap": options.get("softcap", 0.0)}
        if options.get("causal"):
            dense["causal"] = "lower_right" if options.get("lower_right") else "upper_left"
        exact = reference.attention(*(t.double() for t in inputs), **dense)
        theirs = reference.attention(*inputs, **dense)
        ours = out[own].transpose(0, 1)[None], lse[None, :, own]
        for name, a, c, e in zip(("out", "lse"), ours, theirs, exact, strict=True):
            assert_as_exact_as_torch(name, a, c, e, 2)
    return tier


@pytest.mark.parametrize("lengths", [FEW, MANY], ids=["few", "many"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_contiguous(kernels, dtype, lengths):
    tier = check(kernels, lengths, dtype, causal=True, lower_right=True)
    assert tier == ("simt" if dtype == torch.float32 else "sm80")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_left_padding_and_another_order_of_caches(kernels, dtype):
    check(kernels, FEW, dtype, leftpad=(7, 64, 0, 0, 33), batch_idx=(5, 0, 3, 1, 2))


@halves
@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 1), (64, 16), (24, 24), (128, 20), (256, 256)])
def test_pages(kernels, dtype, head_dim, page_size):
    assert check(kernels, FEW, dtype, head_dim, page_size=page_size, causal=True, lower_right=True) == "sm80"


@pytest.mark.parametrize("num_splits", [0, 1, 3])
def test_many_queries_and_pages(kernels, num_splits):
    check(kernels, MANY, torch.bfloat16, page_size=16, causal=True, lower_right=True, num_splits=num_splits)


def test_left_padding_of_pages(kernels):
    check(kernels, FEW, torch.bfloat16, page_size=24, leftpad=(7, 64, 0, 0, 33), batch_idx=(5, 0, 3, 1, 2), softcap=3.0)


def test_pages_give_the_bits_of_a_contiguous_cache(kernels):
    q = torch.randn(sum(FEW), HEADS, 64).bfloat16()
    caches = [torch.randn(5, 300, HEADS_KV, 64).bfloat16() for _ in range(2)]
    pages, table = paged(caches, 20)
    expected = run(kernels, q, caches, FEW, used=USED)
    found = run(kernels, q, pages, FEW, used=USED, block_table=table)
    assert all(torch.equal(a, b) for a, b in zip(found[:2], expected[:2], strict=True))


@pytest.mark.parametrize("hostile", [-5, 1 << 30])
def test_hostile_numbers_read_nothing_outside(kernels, hostile):
    """The host run checks every access. The results are not compared."""
    q = torch.randn(sum(FEW), HEADS, 64).bfloat16()
    caches = [torch.randn(5, 300, HEADS_KV, 64).bfloat16() for _ in range(2)]
    pages, table = paged(caches, 20)
    for name in ("used", "leftpad", "batch_idx"):
        numbers = {"used": USED} | {name: [hostile] * 5}
        run(kernels, q, caches, FEW, **numbers)
    run(kernels, q, pages, FEW, used=USED, block_table=torch.full_like(table, hostile))
    run(kernels, q, pages, FEW, used=[hostile] * 5, leftpad=[hostile] * 5, block_table=table)
