"""Exact attention on CPU as a kernel of the Hugging Face Hub, for inference and training.

In transformers: ``attn_implementation="org/repo"``. Elsewhere: ``kernels.get_kernel("org/repo").flash_attn(q, k, v)``.
The package flash_attn_ext has more: packed sequences, caches, functions of the user, torch.compile of all of these.
"""

import torch
from torch import Tensor

from ._ops import ops

__all__ = ["flash_attn", "flash_attn_forward", "supports_flash_attn"]

# Keywords that transformers passes to attention functions, and that its eager attention ignores, too.
WITHOUT_EFFECT = {
    "cache_params", "cache_position", "decoder_attention_mask", "decoder_input_ids", "decoder_inputs_embeds",
    "decoder_position_ids", "encoder_outputs", "grid_thw", "input_ids", "inputs_embeds", "logits_indices",
    "logits_processor_args", "num_items_in_batch", "output_hidden_states", "output_router_logits", "past_key_values",
    "position_embeddings", "position_ids", "return_dict", "seq_idx", "use_cache",
}  # fmt: skip


def flash_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    key_mask: Tensor | None = None,
    attention_chunk: int = 0,
    return_lse: bool = False,
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes softmax(scale query key^T + attn_mask) value, tile by tile. Every tensor gets a gradient.

    Args:
        query, key, value: (B, H, S_q, D), (B, H_kv, S_k, D), (B, H_kv, S_k, D_v), in float32, float64, bfloat16 or
            float16, on a CPU. H is a multiple of H_kv.
        attn_mask: broadcasts to (B, H, S_q, S_k). bool: True is visible. float: added to the scores.
        dropout_p: the probability to drop an element of the softmax.
        is_causal: query i sees the keys up to i, as in torch's scaled_dot_product_attention.
        scale: None is D ** -0.5.
        softcap: scores become softcap * tanh(score / softcap). 0 is off.
        alibi_slopes: (H,) or (B, H). Subtracts slope * |i - j|.
        sink: (H,) or (B, H): one more score in each row, without a value.
        key_mask: broadcasts to (B, S_k). Hides keys from all queries and heads.
        attention_chunk: a query sees keys of its own chunk only. 0 is off.
        return_lse: also returns the logsumexp of the scores, (B, H, S_q).
        deterministic: changes nothing on a CPU, where all results are deterministic.

    Returns:
        out (B, H, S_q, D_v). A row without a visible key is 0.

    Raises:
        ValueError, TypeError: the message names the argument, the value and the allowed values.
    """
    if attn_mask is not None and attn_mask.dim() < 4:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    rng_state = torch.randint(torch.iinfo(torch.int64).max, (2,), dtype=torch.int64) if dropout_p else None
    out, lse = ops.attention(
        query, key, value, attn_mask, alibi_slopes, sink, rng_state, key_mask, scale=scale, causal=is_causal,
        attention_chunk=attention_chunk, softcap=softcap, dropout_p=dropout_p, deterministic=deterministic,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def supports_flash_attn(*args, **kwargs) -> bool:
    """transformers asks for this function, and then gives flash_attn_forward the masks of its "sdpa"."""
    return True


def flash_attn_forward(
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
    sliding_window: int | None = None,
    **keywords: object,
) -> tuple[Tensor, None]:
    """transformers' interface for attention.

    Args:
        attention_mask: (B or 1, H or 1, S_q, S_k), bool or float, with the window if there is one; or None. With None
            and several queries, a causal module gets a causal mask.
        s_aux: (H,), the attention sink of gpt-oss.
        sliding_window: not read, because attention_mask has the window.
        keywords: only names of ``WITHOUT_EFFECT``, or None.

    Returns:
        out (B, S_q, H, D_v), and None for the weights.

    Raises:
        TypeError: a keyword that might change the result.
    """
    for name, given in keywords.items():
        if given is not None and given is not False and name not in WITHOUT_EFFECT:
            raise TypeError(
                f"{name}: got {type(given).__name__}; allowed: None, as this kernel does not support the keyword; the "
                "package flash_attn_ext may: attn_implementation=register()"
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = flash_attn(
        query, key, value, attention_mask, dropout, bool(causal and attention_mask is None and query.shape[2] > 1),
        scale=scaling, softcap=softcap or 0.0, sink=s_aux,
    )  # fmt: skip
    return out.transpose(1, 2), None
