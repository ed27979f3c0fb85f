"""Small calls of the attention functions, one for each kind of option, with their inputs and derivatives."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flash_attn_ext import flash_attn, flash_attn_varlen, flash_attn_with_kvcache, flex_attention, quantize_int4

B, H, HK, SQ, SK, D, DV = 2, 4, 2, 9, 37, 16, 8
LENGTHS_Q, LENGTHS_K = [5, 0, 13], [20, 7, 31]  # packed sequences
ROWS, PAGE_SIZE, IN_CACHE = 64, 16, [40, 7]


FORWARD, GRADIENTS = "", "gradients"
WITHOUT_FUNC = "gradients, double backward, jvp"
ALL = WITHOUT_FUNC + ", torch.func"


class Call(NamedTuple):
    """``run(*tensors)`` returns tensors. ``derivatives`` are those that the call has."""

    run: Callable
    tensors: tuple[Tensor, ...]
    derivatives: str = ALL


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


def with_options(function: Callable, tensors: tuple, derivatives: str, options: dict) -> Call:
    """Float tensors among the options get derivatives, too."""
    added = {name: t for name, t in options.items() if isinstance(t, Tensor) and t.dtype == torch.float32}
    fixed = {name: value for name, value in options.items() if name not in added}

    def run(*x):
        return function(*x[: len(tensors)], **dict(zip(added, x[len(tensors) :], strict=True)), **fixed)

    return Call(run, (*tensors, *added.values()), derivatives)


def dense(derivatives: str = ALL, *, dtype: torch.dtype = torch.float32, **options) -> Call:
    tensors = random(B, H, SQ, D, dtype=dtype), random(B, HK, SK, D, dtype=dtype), random(B, HK, SK, DV, dtype=dtype)
    return with_options(partial(flash_attn, enable_gqa=True, return_lse=True), tensors, derivatives, options)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed(derivatives: str = ALL, *, dtype: torch.dtype = torch.float32, **options) -> Call:
    shapes = (sum(LENGTHS_Q), H, D), (sum(LENGTHS_K), HK, D), (sum(LENGTHS_K), HK, DV)
    cu = {"cu_seqlens_q": offsets(LENGTHS_Q), "cu_seqlens_k": offsets(LENGTHS_K)}
    function = partial(flash_attn_varlen, enable_gqa=True, return_lse=True)
    return with_options(function, tuple(random(*s, dtype=dtype) for s in shapes), derivatives, cu | options)


def cache(coded: torch.dtype | None = None, *, pages: bool = False, rows_of_queries: int = 2, **options) -> Call:
    """``coded``: the dtype of the caches, torch.uint8 is int4. ``pages``: the caches are pages."""
    q = random(B, rows_of_queries, H, D)
    lengths = torch.tensor(IN_CACHE)
    table = torch.randperm(B * ROWS // PAGE_SIZE).view(B, -1).int() if pages else None
    shape = (B * ROWS // PAGE_SIZE, PAGE_SIZE) if pages else (B, ROWS)
    k, v = random(*shape, HK, D), random(*shape, HK, DV)
    scales = {}
    if coded == torch.uint8:
        (k, scales["k_scales"], _), (v, scales["v_scales"], _) = quantize_int4(k), quantize_int4(v)
    elif coded is not None:
        k, v = (16 * k).to(coded), (16 * v).to(coded)
        options |= {"k_descale": torch.rand(HK), "v_descale": torch.rand(HK)}

    def run(q):
        # Without clones the second run of the call would append to the caches of the first run.
        caches, factors = (k.clone(), v.clone()), {name: t.clone() for name, t in scales.items()}
        out, lse = flash_attn_with_kvcache(
            q, *caches, cache_seqlens=lengths, block_table=table, return_softmax_lse=True, **factors, **options
        )
        return out, lse, *(t.view(torch.uint8) for t in caches), *factors.values()

    return Call(run, (q,), FORWARD)


def new_rows(rotary: bool = True) -> dict:
    given = {"k": random(B, 2, HK, D), "v": random(B, 2, HK, DV)}
    return given | ({"rotary_cos": random(ROWS, D // 2), "rotary_sin": random(ROWS, D // 2)} if rotary else {})


def numbers(*shape: int, limit: int) -> Tensor:
    return torch.randint(-1, limit, shape)


def numbers_of_rows(n: int = 6) -> Tensor:
    rows = [torch.randint(-1, k, (1, q, n)) for q, k in zip(LENGTHS_Q, LENGTHS_K, strict=True)]
    return torch.cat(rows, 1)


def window(b, h, q, k):
    return (q - k).abs() <= 12


def functions(
    attention: Callable, tensors: tuple, derivatives: str = ALL, mask: Callable | None = None, **options
) -> Call:
    """A score function with captured tensors of floats and ints, and a constant. ``mask()`` makes the masks' option."""
    documents = torch.arange(SK) // 11

    def run(q, k, v, table, temperature):
        def score_mod(score, b, h, q_idx, kv_idx):
            near = torch.where(documents[q_idx] == documents[kv_idx], 0.25, -0.5)
            return torch.tanh(score * temperature) + table[h, q_idx - kv_idx + SK] + near

        return attention(q, k, v, score_mod=score_mod, **mask() if mask else {}, **options)

    return Call(run, (*tensors, random(H, 2 * SK), random()), derivatives)


def square() -> tuple[Tensor, ...]:
    return random(B, H, SK, D), random(B, HK, SK, D), random(B, HK, SK, DV)


def flex(**masks: Callable) -> Call:
    return functions(partial(flex_attention, enable_gqa=True, return_lse=True), square(), **masks)


def block_mask(name: str) -> Callable[[], dict]:
    """The option with a block mask of flash_attn_ext.flex.create. It is made where the call runs."""
    from flash_attn_ext.flex import create

    size, cu = {"BLOCK_SIZE": 16}, torch.tensor([0, 10, 30, SK])
    visible, counts = torch.rand(SK, SK) < 0.5, torch.full((1, 1, 3), 2, dtype=torch.int32)
    lists = counts, torch.tensor([0, 1, 2]).int().expand(1, 1, 3, 3)
    make = {
        "function": lambda: create.create_block_mask(window, None, None, SK, SK, **size),
        "dense": lambda: create.dense_block_mask(visible, **size),
        "documents": lambda: create.documents_block_mask(cu, causal=True, **size),
        "window": lambda: create.window_block_mask(SK, SK, 9, 0, **size),
        "lists": lambda: create.listed_block_mask(*lists, Q_LEN=SK, KV_LEN=SK, mask_mod=window, **size),
    }[name]
    return lambda: {"block_mask": make()}


def flex_of_cache() -> Call:
    call = cache(rows_of_queries=2)
    k, v = random(B, ROWS, HK, D), random(B, ROWS, HK, DV)
    attend = partial(flash_attn_with_kvcache, cache_seqlens=torch.tensor(IN_CACHE), return_softmax_lse=True)
    table = random(H)

    def run(q):
        return attend(q, k, v, score_mod=lambda s, b, h, i, j: s * table[h] - 0.1 * (i - j), mask_mod=window)

    return Call(run, call.tensors, FORWARD)


def flex_of_packed() -> Call:
    call = packed()
    cu = {"cu_seqlens_q": offsets(LENGTHS_Q), "cu_seqlens_k": offsets(LENGTHS_K)}
    return functions(partial(flash_attn_varlen, enable_gqa=True, return_lse=True, **cu), call.tensors)


DROPOUT = {"dropout_p": 0.3}
CALLS: dict[str, Callable[[], Call]] = {
    "plain": dense,
    "bfloat16": lambda: dense(GRADIENTS, dtype=torch.bfloat16, causal="lower_right"),
    "window": lambda: dense(causal="lower_right", window=(5, 0), softcap=2.0, scale=0.5),
    "bool mask": lambda: dense(attn_mask=torch.rand(B, 1, SQ, SK) < 0.5),
    "float mask": lambda: dense(attn_mask=random(1, H, SQ, SK)),
    "key mask": lambda: dense(WITHOUT_FUNC, key_mask=torch.rand(B, SK) < 0.7),
    "slopes": lambda: dense(alibi_slopes=random(H)),
    "sink": lambda: dense(sink=random(B, H)),
    "dropout": lambda: dense(**DROPOUT),
    "dropout with a state": lambda: dense(**DROPOUT, rng_state=torch.tensor([123, 456])),
    "chunks": lambda: dense(causal="lower_right", attention_chunk=8, first_key=3, diagonal=1),
    "splits": lambda: dense(num_splits=3),
    "unified maximum": lambda: dense(num_splits=2, unified_max=3.0),
    "keys": lambda: dense(WITHOUT_FUNC, key_indices=numbers(B, 1, SQ, 6, limit=SK)),
    "keys, dropout": lambda: dense(WITHOUT_FUNC, key_indices=numbers(B, 1, SQ, 6, limit=SK), sink=random(H), **DROPOUT),
    "blocks of keys": lambda: dense(WITHOUT_FUNC, key_block_indices=numbers(B, HK, SQ, 2, limit=5), key_block_size=8),
    "integers": lambda: dense(FORWARD, quantize="int8", is_causal=True),
    "float8": lambda: dense(FORWARD, dtype=torch.float8_e4m3fn, q_descale=torch.rand(B, HK), out_dtype=torch.bfloat16),
    "packed": packed,
    "packed, all options": lambda: packed(
        causal="lower_right", window=(9, 0), softcap=2.0, alibi_slopes=random(H), sink=random(H), **DROPOUT
    ),
    "packed, mask": lambda: packed(attn_mask=random(sum(LENGTHS_Q), sum(LENGTHS_K))),
    "packed, rows in use": lambda: packed(seqused_q=torch.tensor([3, 0, 13]), seqused_k=torch.tensor([20, 2, 30])),
    "packed, second query": lambda: packed(FORWARD, qv=random(sum(LENGTHS_Q), H, DV)),
    "packed, keys": lambda: packed(WITHOUT_FUNC, key_indices=numbers_of_rows(), **DROPOUT),
    "packed, float8": lambda: packed(FORWARD, dtype=torch.float8_e4m3fn),
    "cache": cache,
    "cache, new rows": lambda: cache(causal=True, **new_rows()),
    "cache, options": lambda: cache(
        causal=True, window_size=(20, 0), softcap=2.0, alibi_slopes=random(H), num_splits=2
    ),
    "cache, indices and padding": lambda: cache(
        cache_batch_idx=torch.tensor([1, 0]).int(), cache_leftpad=torch.tensor([3, 0]).int(), sink=random(H)
    ),
    "cache, tree": lambda: cache(tree_mask=torch.eye(2, dtype=torch.bool)),
    "cache, keys": lambda: cache(key_indices=numbers(B, 1, 2, 4, limit=7)),
    "pages": lambda: cache(pages=True),
    "pages, new rows": lambda: cache(pages=True, causal=True, **new_rows()),
    "int8 cache": lambda: cache(torch.int8, **new_rows()),
    "float8 pages": lambda: cache(torch.float8_e4m3fn, pages=True, **new_rows()),
    "int4 cache": lambda: cache(torch.uint8, causal=True),
    "int4 pages, new rows": lambda: cache(torch.uint8, pages=True, **new_rows(rotary=False)),
    "flex": flex,
    "flex, mask": lambda: functions(
        partial(flash_attn, enable_gqa=True, return_lse=True, mask_mod=window, **DROPOUT), square()
    ),
    "flex, mask alone": lambda: dense(mask_mod=window),
    **{
        f"flex, block mask of {name}": lambda name=name: flex(mask=block_mask(name))
        for name in ("function", "dense", "documents", "window", "lists")
    },
    "flex, packed": flex_of_packed,
    "flex, cache": flex_of_cache,
}  # fmt: skip
