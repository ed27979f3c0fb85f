"""transformers 5.x: ``attn_implementation=register()`` runs a model's attention on flash_attn_ext.

The mask function says which keys each query sees, and leaves that a pattern where it can, so that nothing of size
S_q x S_k is made; the attention function turns a pattern or a mask into the arguments of ``flash_attn``.
"""

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

from ..functional import flash_attn
from .mask_pattern import Pattern, PatternMask, read_pattern

__all__ = ["NAME", "register"]

# transformers takes a name that contains "flash" for flash-attention's own, and imports that.
NAME = "fa_ext"


def register() -> str:
    """Makes flash_attn_ext known to transformers, and returns the name to give as ``attn_implementation``.

    ``AutoModel.from_pretrained(..., attn_implementation=register())`` or, for a model that exists already,
    ``model.set_attn_implementation(register())``. Calling it again does nothing new.
    """
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, attention_mask)
    return NAME


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function=causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **options,
) -> Tensor | None:
    """transformers' interface for masks: (B, 1, S_q, S_k) of bool, as a :class:`PatternMask` where that suffices.

    None stands for: causal if the attention module is and there are several queries, otherwise everything. What the
    pattern cannot say (packed sequences, chunks, functions of the user) is transformers' own dense mask; so is
    everything while a graph is traced.
    """

    def dense(may_skip: bool = False) -> Tensor | None:
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=allow_is_causal_skip and may_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip and may_skip,
            **options,
        )  # fmt: skip

    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return dense(may_skip=True)
    band = read_pattern(mask_function)
    shift = int(q_offset) - int(kv_offset)  # how far the first query lies behind the first key
    if band is None or shift < 0:
        return dense(may_skip=True)
    left, right = band
    # Keys behind the last query's right side are invisible to all: they are the unused end of a static cache.
    keys = kv_length if right < 0 else min(kv_length, shift + q_length + right)
    if keys < 1:
        return dense()
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + keys].bool()
        padding = None if padding.all() else padding
    if left >= shift + q_length - 1:  # the window reaches back to the first key from every query
        left = -1
    if right >= keys - 1 - shift:
        right = -1
    skippable = padding is None and left < 0
    if skippable and allow_is_bidirectional_skip and right < 0 and keys == kv_length:
        return None
    # None lets attention() take the upper left diagonal, over as many keys as there are queries.
    if skippable and allow_is_causal_skip and ((shift == 0 and right == 0) or (q_length == 1 and keys == kv_length)):
        return None
    pattern = Pattern(keys=keys, shift=shift, left=left, right=right, padding=padding)
    if pattern.options(q_length) is None:
        return dense()
    return PatternMask.make(pattern, (batch_size, 1, q_length, kv_length), dense, options.get("device", "cpu"))


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: object | None = None,
    **options,
) -> tuple[Tensor, None]:
    """transformers' interface for attention.

    Args:
        query, key, value: (B, H, S_q, D), (B, H_kv, S_k, D) and (B, H_kv, S_k, D_v).
        attention_mask: a :class:`PatternMask`; (B or 1, H or 1, S_q, S_k), bool (True attends) or added to the
            scores; or None: causal with the upper left diagonal if the module is causal and there are several
            queries, else everything.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        s_aux: (H,): a score without a key, the attention sink of gpt-oss, that every query's softmax sums too.
        position_bias: (1 or B, H, S_q, S_k), added to the scores (T5). Receives a gradient.
        options: of these ``sliding_window`` is ignored, as transformers' own eager attention does: the mask has it.

    Returns:
        out (B, S_q, H, D_v), and None for the weights.

    Raises:
        ValueError: what cannot be computed here: the weights, a paged cache, packed sequences that no mask describes.
    """
    refuse(cache, attention_mask, options)
    seqlen_q = query.shape[2]
    mask, band = attention_mask, {}
    if isinstance(mask, PatternMask):
        pattern = mask.pattern
        key, value = key[:, :, : pattern.keys], value[:, :, : pattern.keys]
        position_bias = None if position_bias is None else position_bias[..., : pattern.keys]
        band = pattern.options(seqlen_q)
        mask = None if pattern.padding is None else pattern.padding[:, None, None, :]
    elif mask is None:
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        if is_causal and seqlen_q > 1:
            # Keys beyond the queries are the unused end of a static cache.
            key, value = key[:, :, :seqlen_q], value[:, :, :seqlen_q]
            position_bias = None if position_bias is None else position_bias[..., :seqlen_q]
            band = {"causal": "upper_left"}
    if position_bias is not None:
        mask = with_position_bias(mask, position_bias)
    result = flash_attn(
        query, key, value, mask, dropout, scale=scaling, enable_gqa=True, softcap=softcap or 0.0,
        return_lse=s_aux is not None, **band,
    )  # fmt: skip
    if s_aux is not None:
        out, lse = result
        # The sink adds exp(s_aux) to the sum of each row's softmax. flash_attn(sink=s_aux) is to replace this.
        result = out * torch.sigmoid(lse - s_aux.to(lse.dtype)[:, None]).to(out.dtype)[..., None]
    return result.transpose(1, 2).contiguous(), None


def refuse(cache: object, mask: Tensor | None, options: dict) -> None:
    """Raises for what would be wrong or missing in the result."""
    if options.get("output_attentions"):
        raise ValueError(
            f"output_attentions: got True with attn_implementation={NAME!r}; allowed: False, as the weights are not "
            "stored. attn_implementation='eager' returns them"
        )
    if cache is not None:
        raise ValueError(
            f"cache: got a {type(cache).__name__} with attn_implementation={NAME!r}; allowed: none. For continuous "
            "batching use attn_implementation='sdpa' with flash_attn_ext.activate()"
        )
    if mask is None:
        for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
            offsets = options.get(name)
            if offsets is not None and offsets.numel() > 2:
                raise ValueError(
                    f"{name}: got {offsets.numel() - 1} packed sequences without a mask that tells them apart; "
                    "allowed: position_ids that start at 0 in each sequence, from which the model makes one"
                )
    elif mask.dim() != 4:
        raise ValueError(f"attention_mask: got shape {tuple(mask.shape)}; allowed: 4 dimensions, (B, 1 or H, S_q, S_k)")


def with_position_bias(mask: Tensor | None, position_bias: Tensor) -> Tensor:
    """One mask that is added to the scores."""
    if mask is None:
        return position_bias
    if mask.dtype == torch.bool:
        return torch.where(mask, position_bias, -torch.inf)
    return position_bias + mask
