"""The keywords that transformers passes to an attention function, and the effect of each one on the result.

transformers passes every keyword that a model does not know to the attention function. If a keyword were ignored by
mistake, the result would be wrong without a message. So each keyword is in one of three lists, and any other keyword
raises.
"""

__all__ = ["HONOURED", "REFUSED", "WITHOUT_EFFECT", "check_keywords"]

# Read by attention(), or by the cache of continuous batching.
HONOURED = frozenset(
    {
        "cu_seq_lens_k",
        "cu_seq_lens_q",
        "max_length_k",
        "max_length_q",
        "output_attentions",  # True raises: the weights are not stored
        "read_index",
        "sliding_window",
        "write_index",
    }
)

# Keywords that transformers' eager attention ignores, too. A program may add names to this set.
WITHOUT_EFFECT = {
    "cache_params",
    "cache_position",
    "decoder_attention_mask",
    "decoder_input_ids",
    "decoder_inputs_embeds",
    "decoder_position_ids",
    "encoder_outputs",
    "grid_thw",
    "input_ids",
    "inputs_embeds",
    "logits_indices",
    "logits_processor_args",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "past_key_values",
    "position_embeddings",
    "position_ids",  # already used by the mask function
    "return_dict",
    "seq_idx",
    "use_cache",
}

# keyword -> meaning. These keywords change the result, and the kernels do not support them.
REFUSED = {
    "block_table": "keys and values are read from the pages of a cache",
}


def check_keywords(keywords: dict) -> None:
    """Raises for a keyword that changes or might change the result, and is not supported. None is always allowed."""
    for name, value in keywords.items():
        if value is None or name in HONOURED or name in WITHOUT_EFFECT:
            continue
        if name in REFUSED:
            raise ValueError(
                f"{name}: got {type(value).__name__}; allowed: None, as flash_attn_ext does not support this keyword "
                f"({REFUSED[name]}). attn_implementation='eager' does"
            )
        raise TypeError(
            f"{name}: flash_attn_ext does not know this keyword of transformers, and it might change the result. If it "
            f"does not, add it: flash_attn_ext.integrations.transformers.WITHOUT_EFFECT.add({name!r})"
        )
