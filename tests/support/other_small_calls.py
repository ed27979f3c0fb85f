"""Small calls of the functions and modules around attention. `small_calls` has attention itself.

Modules are made on CPU, and the calls run them.
"""

import copy
from collections.abc import Callable
from functools import partial

import torch
from small_calls import (
    ALL,
    FORWARD,
    GRADIENTS,
    HK,
    LENGTHS_K,
    LENGTHS_Q,
    ROWS,
    SK,
    SQ,
    WITHOUT_FUNC,
    B,
    Call,
    D,
    H,
    offsets,
    random,
    window,
)
from torch import nn
from torch.nn import functional as F

from flash_attn_ext import (
    MultiheadAttention,
    activated,
    dequantize_int4,
    dropout_mask,
    flash_attn,
    flash_attn_3,
    flash_attn_4,
    flash_attn_interface,
    indexer_loss,
    indexer_scores,
    indexer_topk,
    quantize_int4,
    replace_attention,
)
from flash_attn_ext.bert_padding import pad_input, unpad_input, unpad_input_for_concatenated_sequences
from flash_attn_ext.indexer import _composite
from flash_attn_ext.indexer._arguments import band_options
from flash_attn_ext.layers import rotary
from flash_attn_ext.reference import (
    block_sparse,
    dropout,
    flash1,
    flash2,
    flash3_schedule,
    flash_decoding,
    flash_decoding_pp,
    float8,
    softmax,
    standard,
)

EMBED = H * D
CU = {"cu_seqlens_q": offsets(LENGTHS_Q), "cu_seqlens_k": offsets(LENGTHS_K)}
LONGEST = {"max_seqlen_q": max(LENGTHS_Q), "max_seqlen_k": max(LENGTHS_K)}


def rows_first() -> tuple:
    return random(B, SQ, H, D), random(B, SK, HK, D), random(B, SK, HK, D)


def packed_rows() -> tuple:
    return random(sum(LENGTHS_Q), H, D), random(sum(LENGTHS_K), HK, D), random(sum(LENGTHS_K), HK, D)


def names_of_flash_attention(module, **options) -> Call:
    given = {"return_attn_probs": True} if module is not flash_attn_4 else {}

    def run(q, k, v):
        return tuple(t for t in module.flash_attn_func(q, k, v, causal=True, **given, **options) if t is not None)

    return Call(run, rows_first())


def names_of_packed(module, **options) -> Call:
    function = partial(module.flash_attn_varlen_func, **CU, **LONGEST, causal=True, **options)

    def run(q, k, v):
        out = function(q, k, v)
        return out if isinstance(out, tuple) else (out,)

    return Call(run, packed_rows())


def names_of_caches() -> Call:
    caches = random(B, ROWS, HK, D), random(B, ROWS, HK, D)
    lengths = torch.tensor([40, 7]).int()

    def run(q):
        options = {"cache_seqlens": lengths, "causal": True}
        hints = flash_attn_3.get_scheduler_metadata(B, 2, ROWS, H, HK, D, lengths)
        return flash_attn_3.flash_attn_with_kvcache(q, *caches, scheduler_metadata=hints, **options)

    return Call(run, (random(B, 2, H, D),), FORWARD)


def combine() -> Call:
    return Call(flash_attn_3.flash_attn_combine, (random(3, B, SQ, H, D), random(3, B, SQ, H)))


def rotation(function: Callable, *shape: int, **options) -> Call:
    """The call may rotate in place. Then the tables have no gradient."""
    tables = random(ROWS, D // 2), random(ROWS, D // 2)
    return Call(lambda x: function(x * 1, *tables, **options), (random(*shape),))


def rotary_module(**options) -> Call:
    module = rotary.RotaryEmbedding(D, **options)
    return Call(lambda qkv: copy.deepcopy(module)(qkv * 1, seqlen_offset=3), (random(B, SQ, 3, H, D),))


def padding() -> Call:
    mask = torch.rand(B, SQ) < 0.6
    lengths = torch.tensor([[2, 3, *[0] * (SQ - 2)], [4, *[0] * (SQ - 1)]])

    def run(x):
        rows, indices, *rest = unpad_input(x, mask)
        short = unpad_input_for_concatenated_sequences(x, lengths)
        return pad_input(rows, indices, B, SQ), short[0], *(t for t in (*rest, *short[1:]) if torch.is_tensor(t))

    return Call(run, (random(B, SQ, D),))


def int4(**options) -> Call:
    def run(x):
        coded = quantize_int4(x, **options)
        return *(t for t in coded if t is not None), dequantize_int4(*coded)

    return Call(run, (random(B, SQ, 64),), FORWARD)


def indexer(function: str, **options) -> Call:
    q, k, weights = random(B, H, SQ, D), random(B, SK, D), random(B, SQ, H)
    chosen = torch.arange(SK).expand(B, 1, SQ, SK)[..., 5:17].int()
    if function == "topk":
        return Call(partial(indexer_topk, topk=5, return_scores=True, **options), (q, k, weights), FORWARD)
    if function == "composite":  # runs on CUDA
        band = band_options(False, "lower_right", None, 0)
        run = partial(_composite.topk, count=5, scale=0.5, **band)
        return Call(lambda q, k, w: run(q, k, w, None, None, None), (q, k, weights), FORWARD)
    if function == "scores":
        return Call(partial(indexer_scores, indices=chosen), (q, k, weights), GRADIENTS)
    query, key = random(B, H, SQ, D), random(B, HK, SK, D)
    _, lse = flash_attn(query, key, key, enable_gqa=True, return_lse=True)
    indices = chosen if options.pop("chosen") else None
    return Call(
        lambda *x: indexer_loss(*x, query, key, lse, indices=indices, **options), (q, k, weights), GRADIENTS
    )  # fmt: skip


def module(derivatives: str = WITHOUT_FUNC, train: bool = False, masks: dict | None = None, **options) -> Call:
    module = MultiheadAttention(EMBED, H, batch_first=True, dropout=0.3 if train else 0.0).train(train)
    weights = tuple(t.detach() for t in module.parameters())
    names = [name for name, _ in module.named_parameters()]

    def run(x, *parameters):
        named = dict(zip(names, parameters, strict=True))
        out = torch.func.functional_call(module, named, (x, x, x), (masks or {}) | options)
        return tuple(t for t in out if t is not None)

    return Call(run, (random(B, SQ, EMBED), *weights), derivatives)


def causal_mask(dtype: torch.dtype) -> torch.Tensor:
    hidden = torch.ones(SQ, SQ, dtype=torch.bool).triu(1)
    return hidden if dtype == torch.bool else torch.zeros(SQ, SQ).masked_fill(hidden, -torch.inf)


def causal_module(dtype: torch.dtype) -> Call:
    """The module compares the mask with a causal mask, because there is a padding mask, too."""
    masks = {"attn_mask": causal_mask(dtype), "key_padding_mask": padding_mask(dtype)}
    return module(masks=masks, is_causal=True, need_weights=False)


def padding_mask(dtype: torch.dtype) -> torch.Tensor:
    mask = torch.rand(B, SQ) < 0.3
    return mask if dtype == torch.bool else torch.zeros(B, SQ).masked_fill(mask, -torch.inf)


def nested(layout: torch.layout) -> Call:
    module = MultiheadAttention(EMBED, H, batch_first=True)

    def run(a, b):
        x = torch.nested.as_nested_tensor([a, b], layout=layout)
        return module(x, x, x, need_weights=False)[0].unbind()

    return Call(run, (random(5, EMBED), random(3, EMBED)), GRADIENTS)


def replaced() -> Call:
    model = nn.TransformerEncoderLayer(EMBED, H, 32, dropout=0.0, batch_first=True)

    mask = causal_mask(torch.float32)

    def run(x):
        own = copy.deepcopy(model)
        replace_attention(own, sample_input=x.detach())
        return own(x, is_causal=True, src_mask=mask)

    return Call(run, (random(B, SQ, EMBED),), GRADIENTS)


def active(call: Callable, *tensors: torch.Tensor, derivatives: str = GRADIENTS) -> Call:
    def run(*x):
        with activated():
            return call(*x)

    return Call(run, tensors, derivatives)


def active_flex() -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    table, mask = random(H), create_block_mask(window, None, None, SK, SK, "cpu", BLOCK_SIZE=16)
    attend = partial(flex_attention, score_mod=lambda s, b, h, i, j: s + table[h], block_mask=mask)
    return active(attend, *(random(B, H, SK, D) for _ in range(3)))


def tutorial(run: Callable, **options) -> Call:
    """``run(q, k, v)`` for tensors of one head."""
    tensors = random(40, 16), random(50, 16), random(50, 16)
    return Call(partial(run, **options), tuple(t.double() for t in tensors), FORWARD)


def flash1_passes(q, k, v, drop):
    options = {"M": 1500, "dropout": drop}
    out, *sums_and_maxima = flash1.forward(q, k, v, **options)
    return out, *flash1.backward(q, k, v, out, q.cos(), *sums_and_maxima, **options)


def block_sparse_passes(q, k, v, drop):
    visible = torch.ones(block_sparse.grid(len(q), len(k), 16, 1500), dtype=torch.bool, device="cpu").tril()
    out, *sums_and_maxima = block_sparse.forward(q, k, v, visible, M=1500, dropout=drop)
    grads = block_sparse.backward(q, k, v, out, q.cos(), *sums_and_maxima, visible, M=1500, dropout=drop)
    return out, *grads


def flash2_passes(q, k, v, drop):
    options = {"block_q": 16, "block_k": 16, "dropout": drop, "causal": True}
    out, lse = flash2.forward(q, k, v, **options)
    return out, *flash2.backward(q, k, v, out, q.cos(), lse, **options)


def standard_passes(q, k, v, drop):
    out, saved = standard.forward(q, k, v, dropout=drop)
    return out, *standard.backward(q, k, v, q.cos(), saved, dropout=drop)


def flash3_pass(q, k, v):
    run = flash3_schedule.forward(q, k, v, block_q=16, block_k=16)
    return run.out, run.lse


def float8_of_tutorial(q, k, v):
    generator = torch.Generator().manual_seed(0)
    data = float8.with_outliers(50, 16, generator)
    return float8.forward(q, k, v, block_k=16, signs=float8.random_signs(16, generator)), data


def replayed() -> dropout.Dropout:
    return dropout.Dropout(0.3, torch.tensor([5, 7]))


CALLS: dict[str, Callable[[], Call]] = {
    "flash_attn_interface": lambda: names_of_flash_attention(flash_attn_interface, alibi_slopes=random(H).abs()),
    "flash_attn_interface, dropout": lambda: names_of_flash_attention(flash_attn_interface, dropout_p=0.2),
    "flash_attn_3": lambda: names_of_flash_attention(flash_attn_3, attention_chunk=16),
    "flash_attn_4": lambda: names_of_flash_attention(flash_attn_4, learnable_sink=random(H)),
    "flash_attn_interface, packed": lambda: names_of_packed(flash_attn_interface, dropout_p=0.2),
    "flash_attn_3, packed": lambda: names_of_packed(flash_attn_3),
    "flash_attn_4, packed": lambda: names_of_packed(flash_attn_4),
    "flash_attn_3, cache": names_of_caches,
    "combine": combine,
    "dropout mask": lambda: Call(
        lambda x: dropout_mask(torch.tensor([5, 7], device=x.device), 1, 2, 5, 7, 0.3), (random(1),), FORWARD
    ),
    "rotary": lambda: rotation(rotary.apply_rotary_emb, B, SQ, H, D, interleaved=True),
    "rotary in place": lambda: rotation(rotary.apply_rotary_emb, B, SQ, H, D, inplace=True, seqlen_offsets=2),
    "rotary, packed": lambda: rotation(
        rotary.apply_rotary_emb, sum(LENGTHS_Q), H, D, cu_seqlens=offsets(LENGTHS_Q), max_seqlen=13
    ),
    "rotary, qkv": lambda: rotation(rotary.apply_rotary_emb_qkv_, B, SQ, 3, H, D),
    "rotary, kv": lambda: rotation(rotary.apply_rotary_emb_kv_, B, SQ, 2, H, D),
    "rotary module": rotary_module,
    "rotary module, XPos": lambda: rotary_module(scale_base=512.0),
    "padding": padding,
    "int4": int4,
    "int4, zero points": lambda: int4(group=32, with_zeros=True),
    "indexer, keys": lambda: indexer("topk", is_causal=True),
    "indexer, keys on CUDA": lambda: indexer("composite"),
    "indexer, scores": lambda: indexer("scores"),
    "indexer, loss": lambda: indexer("loss", chosen=False),
    "indexer, loss of chosen keys": lambda: indexer("loss", chosen=True, causal="lower_right"),
    "module": module,
    "module, dropout": lambda: module(train=True),
    "module, causal mask": lambda: causal_module(torch.bool),
    "module, causal float mask": lambda: causal_module(torch.float32),
    "module, padding": lambda: module(masks={"key_padding_mask": padding_mask(torch.bool)}),
    "module, weights of heads": lambda: module(average_attn_weights=False),
    "module, strided nested": lambda: nested(torch.strided),
    "module, jagged nested": lambda: nested(torch.jagged),
    "replaced module": replaced,
    "activated": lambda: active(F.scaled_dot_product_attention, *(random(B, H, SQ, D) for _ in range(3))),
    "activated, dropout": lambda: active(
        partial(F.scaled_dot_product_attention, dropout_p=0.3), *(random(B, H, SQ, D) for _ in range(3))
    ),
    "activated, flex_attention": active_flex,
    "vmap": lambda: Call(torch.vmap(flash_attn), tuple(random(2, B, H, SQ, D) for _ in range(3)), ALL),
    "tutorial, softmax": lambda: tutorial(lambda q, k, v: softmax.online_softmax(q)),
    "tutorial, standard": lambda: tutorial(standard_passes, drop=replayed()),
    "tutorial, flash1": lambda: tutorial(flash1_passes, drop=replayed()),
    "tutorial, block-sparse": lambda: tutorial(block_sparse_passes, drop=replayed()),
    "tutorial, flash2": lambda: tutorial(flash2_passes, drop=replayed()),
    "tutorial, flash3": lambda: tutorial(flash3_pass),
    "tutorial, decoding": lambda: tutorial(flash_decoding.decode, num_splits=3),
    "tutorial, unified maximum": lambda: tutorial(flash_decoding_pp.decode, num_splits=3),
    "tutorial, flat product": lambda: tutorial(lambda q, k, v: flash_decoding_pp.flat_gemm(q, k.T)),
    "tutorial, float8": lambda: tutorial(float8_of_tutorial),
}
