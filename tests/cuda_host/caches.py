"""The operator attention_cache, run by the CUDA kernels' host build on CPU tensors."""

import ctypes
import functools
from contextlib import contextmanager

import torch
from cuda_host import library


def attention_cache(
    kernels, query, key, value, alibi_slopes, cu_seqlens_q, seqused_k, batch_idx=None, leftpad=None, block_table=None,
    key_scale=None, value_scale=None, tree_mask=None, sink=None, max_seqlen_q=None, **options,
):  # fmt: skip
    """out (T, H, D_v) and lse (H, T), packed as csrc/ops/kvcache.cpp does; `kernels.tier` is the one that ran."""
    options = library.DEFAULTS | options
    acc = library.accumulate_type(query)
    out = torch.zeros(*query.shape[:2], value.shape[3], dtype=query.dtype)
    lse = torch.zeros(query.shape[1], len(query), dtype=acc)
    by_row = tree_mask is not None and tree_mask.dim() == 3
    mask = tree_mask[None] if by_row else tree_mask
    alibi_slopes, sink = (None if t is None else t.to(acc) for t in (alibi_slopes, sink))
    tensors = {"q": query.transpose(0, 1)[None], "k": key.transpose(1, 2), "v": value.transpose(1, 2)}
    tensors |= {"out": out.transpose(0, 1)[None], "lse": lse, "attn_mask": mask, "slopes": alibi_slopes, "sink": sink}
    params = kernels.pack(library.AttentionParams(), tensors, options)
    params.band.diagonal = options["diagonal"]
    params.q.stride_b = params.out.stride_b = 0
    params.sizes.batch = len(cu_seqlens_q) - 1
    params.sizes.seqlen_q = min(params.sizes.seqlen_q, len(query) if max_seqlen_q is None else max_seqlen_q)
    varlen = params.varlen
    varlen.cu_seqlens_q, varlen.seqused_k = library.offsets(cu_seqlens_q), library.offsets(seqused_k)
    varlen.total_q, varlen.lower_right, varlen.mask_by_row = len(query), options["lower_right"], by_row
    cache = varlen.cache
    cache.batch_idx, cache.leftpad = library.offsets(batch_idx), library.offsets(leftpad)
    cache.caches, cache.tree_mask = len(key), tree_mask is not None
    cache.dtype = DTYPES.get(key.dtype, 0)
    cache.k_scale, cache.v_scale = scale_params(key_scale), scale_params(value_scale)
    if block_table is not None:
        pages = block_table.shape[1]
        cache.pages = library.PARAMS["PageTable"](library.offsets(block_table), pages, key.shape[1], len(key))
        params.sizes.seqlen_k *= pages
    kernels.tier, kernels.why_not = kernels.choice(params)
    if kernels.tier not in ("simt", "sm80"):
        raise NotImplementedError(kernels.tier, *kernels.why_not)
    workspace = library.empty_workspace(kernels.c.forward_workspace(ctypes.byref(params)))
    known = {"query": query, "key": key, "value": value, "slopes": alibi_slopes, "tree_mask": tree_mask, "sink": sink}
    known |= {"cu_seqlens_q": cu_seqlens_q, "seqused_k": seqused_k, "batch_idx": batch_idx, "leftpad": leftpad}
    known |= {"block_table": block_table, "key_scale": key_scale, "value_scale": value_scale}
    kernels.show(known | {"out": out, "lse": lse, "workspace": workspace}, ("out", "lse", "workspace"))
    kernels.check(kernels.c.forward(ctypes.byref(params), ctypes.c_void_p(workspace.data_ptr())))
    return out, lse


DTYPES = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}


def scale_params(t):
    """Of a scale (caches or pages, rows, heads)."""
    kind = library.PARAMS["CacheScale"]
    return kind() if t is None else kind(t.data_ptr(), t.stride(0), t.stride(2), t.stride(1))


@contextmanager
def as_cpu_kernels(kernels):
    """Inside, flash_attn_with_kvcache on CPU tensors attends through the host build; CPU kernels append."""
    with library.registered(attention_cache=functools.partial(attention_cache, kernels)):
        yield kernels
