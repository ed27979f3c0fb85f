"""transformers 5: ``attn_implementation=register()`` runs a model's attention on flash_attn_ext.

transformers calls two functions of this file. ``attention_mask`` describes the visible keys of each query. If possible,
the result is a :class:`PatternMask`, so that no S_q x S_k mask is made. ``attention`` converts this description to the
arguments of ``flash_attn``, or of ``flash_attn_varlen`` for packed sequences.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

from ..functional import flash_attn
from ..varlen import flash_attn_varlen
from .mask_pattern import Chunks, Pattern, PatternMask, read_packed, read_pattern, sequence_offsets
from .row_keywords import ChosenKeys, check_sinks, with_sinks
from .transformers_keywords import HONOURED, REFUSED, WITHOUT_EFFECT, check_keywords

__all__ = ["HONOURED", "NAME", "REFUSED", "WITHOUT_EFFECT", "continuous_batching", "register"]

if int(transformers.__version__.split(".")[0]) < 5:
    raise ImportError(f"transformers: got version {transformers.__version__}; allowed: 5 or later")

# model_type of models that append float columns to the mask (0: visible). In a bool mask these columns would be
# inverted.
FLOAT_MASKS = frozenset({"deepseek_v4"})

# Without "flash": transformers imports flash-attention for every name that contains it.
NAME = "fa_ext"
# With "flash": continuous batching accepts only names with "flash" and two other names, and imports nothing for them.
PAGED_NAME = "fa_ext_flash_paged"


def register() -> str:
    """Registers flash_attn_ext in transformers, and returns the name for ``attn_implementation``.

    Use ``AutoModel.from_pretrained(..., attn_implementation=register())`` or, for an existing model,
    ``model.set_attn_implementation(register())``. A second call changes nothing.
    """
    for name in (NAME, PAGED_NAME):
        AttentionInterface.register(name, attention)
        AttentionMaskInterface.register(name, attention_mask)
    return NAME


@contextmanager
def continuous_batching(model: PreTrainedModel) -> Iterator[None]:
    """In this block, continuous batching (``model.generate_batch`` and similar functions) runs on flash_attn_ext.

    A block is necessary, because continuous batching in transformers does not accept :func:`register`'s name. The end
    of the block restores the model's previous implementation.
    """
    register()
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        for config in configs.values():
            config._attn_implementation = PAGED_NAME
        yield
    finally:
        for config, name in before:
            config._attn_implementation = name


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
    """transformers' interface for masks. Returns a bool mask (B, 1, S_q, S_k), a :class:`PatternMask` if possible.

    For a model of ``FLOAT_MASKS`` the mask is float, 0 or -inf. None means: causal if the attention module is causal
    and there are several queries, otherwise no mask. The result is transformers' dense mask if no pattern describes it
    (a user's function), and always while a graph is traced.
    """

    if "config" in options:
        allow_is_causal_skip = allow_is_causal_skip and _has_causal_modules(type(options["config"]))

    def dense(may_skip: bool = False) -> Tensor | None:
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=allow_is_causal_skip and may_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip and may_skip,
            **options,
        )  # fmt: skip

    if getattr(options.get("config"), "model_type", None) in FLOAT_MASKS:
        visible = dense()
        zeros = torch.zeros(visible.shape, dtype=options.get("dtype", torch.float32), device=visible.device)
        return zeros.masked_fill(~visible, -torch.inf)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return dense(may_skip=True)
    within_sequence, sequence_numbers = read_packed(mask_function) or (mask_function, None)
    band = read_pattern(within_sequence)
    shift = int(q_offset) - int(kv_offset)  # position of the first query minus position of the first key
    if band is None or shift < 0:
        return dense(may_skip=True)
    left, right, chunks = band
    # No query sees later keys: they are the unused end of a static cache.
    keys = kv_length if right < 0 else min(kv_length, shift + q_length + right)
    if keys < 1:
        return dense()
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + keys].bool()
        padding = None if padding.all() else padding
    if left >= shift + q_length - 1:  # the window of every query includes the first key: no limit
        left = -1
    if right >= keys - 1 - shift:
        right = -1
    last_position = kv_offset + max(shift + q_length, keys) - 1
    chunked = chunks is not None and _chunks_matter(chunks, kv_offset, last_position, padding)
    skippable = padding is None and left < 0 and sequence_numbers is None and not chunked
    if skippable and allow_is_bidirectional_skip and right < 0 and keys == kv_length:
        return None
    # If the mask is None, attention() uses the upper left diagonal and as many keys as queries.
    if skippable and allow_is_causal_skip and ((shift == 0 and right == 0) or (q_length == 1 and keys == kv_length)):
        return None
    pattern = Pattern(keys=keys, shift=shift, left=left, right=right, padding=padding)
    if chunked and sequence_numbers is None:
        pattern = _with_chunks(pattern, chunks, kv_offset, q_length)
    if sequence_numbers is not None:
        if padding is not None or shift != 0 or sequence_numbers.shape != (batch_size, q_length) or keys != q_length:
            return dense()
        if chunks is not None and chunks.starts.any():
            return dense()
        pattern = Pattern(keys, shift, left, right, padding=None, sequences=sequence_offsets(sequence_numbers),
                          chunk=chunks.size if chunks else 0)  # fmt: skip
    if pattern is None or pattern.options(q_length) is None:
        return dense()
    return PatternMask.make(pattern, (batch_size, 1, q_length, kv_length), dense, options.get("device", "cpu"))


def _chunks_matter(chunks: Chunks, first: int, last: int, padding: Tensor | None) -> bool:
    """Whether a chunk ends between the positions ``first`` and ``last``, in some element of the batch."""
    begins = first - chunks.starts
    if padding is not None:  # padding hides the keys before the first chunk
        begins = begins.clamp(min=0)
    return bool((begins // chunks.size != (last - chunks.starts) // chunks.size).any())


def _with_chunks(pattern: Pattern, chunks: Chunks, kv_offset: int, seqlen_q: int) -> Pattern | None:
    """Returns the pattern with chunks; None if no pattern describes them.

    Elements of a batch may have left paddings of different lengths. Then their chunks begin at different keys.
    """
    firsts = kv_offset - chunks.starts  # (B): the position of key 0 in the chunks
    keys, padding = pattern.keys, pattern.padding
    if (firsts == firsts[0]).all():
        return replace(pattern, chunk=chunks.size, first_key=int(firsts[0]))
    columns = torch.arange(keys, device=firsts.device)
    if seqlen_q == 1:  # one query: its chunk is a mask of the keys
        own = (columns + firsts[:, None]) // chunks.size == ((pattern.shift + firsts) // chunks.size)[:, None]
        return replace(pattern, padding=own if padding is None else own & padding)
    starts = chunks.starts[:, None]
    is_prefill = pattern.right == 0 and pattern.shift == 0 and keys == seqlen_q and kv_offset == 0
    if not is_prefill or padding is None:
        return None
    tokens = (columns >= starts) & (columns < starts + padding.sum(1, keepdim=True))
    if not torch.equal(padding, tokens):
        return None
    # Padding and tokens of each element are separate packed sequences. The causal mask hides later padding from tokens.
    begins = torch.arange(len(firsts), device=firsts.device) * keys
    ends = torch.stack([begins, begins + chunks.starts], 1).flatten()
    offsets = torch.cat([ends, ends.new_tensor([len(firsts) * keys])]).to(torch.int32)
    return replace(pattern, padding=None, sequences=offsets, chunk=chunks.size)


@torch.compiler.assume_constant_result
def _has_causal_modules(config_class: type) -> bool:
    """Whether the attention modules of this configuration's model have a correct `is_causal`.

    transformers requires it only for models that support `sdpa`. In other models (NLLB-MoE, Pegasus-X) `is_causal` of a
    decoder module may be False, and without a mask the module would see all keys.
    """
    modeling = sys.modules.get(config_class.__module__.replace("configuration_", "modeling_"))
    classes = [c for c in vars(modeling).values() if isinstance(c, type)] if modeling else []
    return any(c._supports_sdpa for c in classes if issubclass(c, PreTrainedModel) and c is not PreTrainedModel)


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
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: object | None = None,
    deterministic: bool | None = None,
    **options,
) -> tuple[Tensor, None]:
    """transformers' interface for attention.

    Args:
        query, key, value: (B, H, S_q, D), (B, H_kv, S_k, D) and (B, H_kv, S_k, D_v).
        attention_mask: a :class:`PatternMask`; or (B or 1, H or 1, S_q, S_k), bool (True is visible) or float (added to
            the scores); or None. With None and several queries, a causal module gets a causal mask with the upper left
            diagonal. In other cases None is no mask.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        s_aux: (H,), the attention sink of gpt-oss: one more score in each row, without a key.
        sinks: (B, H, S_q, 1): a sink for each query (Inkling 2), with a gradient. It is applied after the kernel, from
            the logsumexp.
        indices: (B, S_q, n) int32 or int64: the keys that each query may attend to (DeepSeek 3.2). The mask applies,
            too; the two are not merged.
        block_indices: (B, H_kv or fewer, S_q, n), int32 or int64: blocks of keys; -1 means no block (MiniMax M3). A
            block has ``module.indexer.block_size`` keys, or 128.
        position_bias: (1 or B, H, S_q, S_k), added to the scores (T5). Receives a gradient.
        cache: the cache of continuous batching, before transformers 5.24. It stores the new keys and values, and
            returns all keys and values.
        deterministic: as in ``flash_attn`` (ModernBERT).
        options: ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k`` describe packed sequences:
            the rows of the batch, one after another. ``sliding_window`` is used only in continuous batching; otherwise
            the mask includes the window, as for transformers' eager attention. ``transformers_keywords.py`` lists all
            keywords.

    Returns:
        out (B, S_q, H, D_v), and None for the weights.

    Raises:
        ValueError: ``output_attentions=True``, a keyword of ``REFUSED``, only one of the two offsets, or a mask that is
            not 4-D.
        TypeError: a keyword that is in none of the three lists of ``transformers_keywords.py``.
    """
    check_keywords(options)
    check_arguments(attention_mask, options)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    settings = {"dropout_p": dropout, "scale": scaling, "enable_gqa": True, "softcap": softcap or 0.0}
    if deterministic is not None:
        settings["deterministic"] = deterministic
    if s_aux is not None:
        settings["sink"] = s_aux if s_aux.dtype == torch.float32 else s_aux.to(query.dtype)
    check_sinks(sinks, query)
    chosen = ChosenKeys.from_keywords(module, indices, block_indices)
    # In transformers 5.24 the models update the cache, and pass read_index, but no cache.
    is_batched = cache is not None or options.get("read_index") is not None
    if chosen is not None and is_batched:
        raise ValueError(f"{chosen.keyword}: got a tensor with continuous batching; allowed there: None")
    if cache is not None:
        key, value = cache.update(key, value, module.layer_idx, options)  # also writes the offsets into `options`
    if is_batched:
        size = options.get("sliding_window")
        window = None if size is None else (size - 1, -1 if is_causal else size - 1)
        causal = "lower_right" if is_causal else None
        settings |= {"causal": causal, "window": window}
        return attend_packed(query, key, value, given_sequences(options), sinks, **settings), None

    mask, key_mask, band = attention_mask, None, {}
    offsets = given_sequences(options)
    if offsets is not None and offsets[0].numel() <= 2 and offsets[1].numel() <= 2:
        offsets = None  # one sequence needs no offsets
    packed = position_bias is None and chosen is None and packed_band(mask, offsets, is_causal, query, key)
    if packed:
        offsets, band = packed
        if isinstance(mask, PatternMask):  # a static cache has an unused end
            key, value = key[:, :, : mask.pattern.keys], value[:, :, : mask.pattern.keys]
        return attend_packed(query, key, value, offsets, sinks, **band, **settings), None
    if offsets is not None:
        mask = only_within_sequences(mask, offsets, is_causal, query, key)
    seqlen_q = query.shape[2]
    if isinstance(mask, PatternMask) and mask.pattern.sequences is not None:
        mask = mask.dense()
    if isinstance(mask, PatternMask):
        pattern = mask.pattern
        key, value = key[:, :, : pattern.keys], value[:, :, : pattern.keys]
        position_bias = None if position_bias is None else position_bias[..., : pattern.keys]
        band = pattern.options(seqlen_q)
        mask, key_mask = None, pattern.padding
    elif mask is None and is_causal and seqlen_q > 1:
        # The keys after the queries are the unused end of a static cache.
        key, value = key[:, :, :seqlen_q], value[:, :, :seqlen_q]
        position_bias = None if position_bias is None else position_bias[..., :seqlen_q]
        band = {"causal": "upper_left"}
    if position_bias is not None:
        mask = with_position_bias(mask, position_bias)
    if key_mask is not None:
        key_mask = key_mask.expand(query.shape[0], -1)
    if chosen is not None:
        settings |= chosen.options(key)
    out, lse = flash_attn(query, key, value, mask, key_mask=key_mask, return_lse=True, **band, **settings)
    if sinks is not None:
        out = with_sinks(out, lse, sinks)
    return out.transpose(1, 2).contiguous(), None


def check_arguments(mask: Tensor | None, options: dict) -> None:
    """Raises for requested attention weights, and for a mask that is not 4-D."""
    if options.get("output_attentions"):
        raise ValueError(
            f"output_attentions: got True with attn_implementation={NAME!r}; allowed: False, as the weights are not "
            "stored. attn_implementation='eager' returns them"
        )
    if mask is not None and mask.dim() != 4:
        raise ValueError(f"attention_mask: got shape {tuple(mask.shape)}; allowed: 4 dimensions, (B, 1 or H, S_q, S_k)")


# Packed sequences: (cu_seqlens_q, cu_seqlens_k, longest q or None, longest k or None).
Offsets = tuple[Tensor, Tensor, int | None, int | None]


def given_sequences(options: dict) -> Offsets | None:
    """Returns the packed sequences that the keywords describe, or None."""
    given = [options.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    if given[0] is None and given[1] is None:
        return None
    if given[0] is None or given[1] is None:
        raise ValueError("cu_seq_lens_q, cu_seq_lens_k: got one of them; allowed: both or none")
    longest = [options.get(name) for name in ("max_length_q", "max_length_k")]
    return (*given, *(None if length is None else int(length) for length in longest))


def packed_band(
    mask: Tensor | None, offsets: Offsets | None, is_causal: bool, query: Tensor, key: Tensor
) -> tuple[Offsets, dict] | None:
    """Returns the sequences and the options for ``flash_attn_varlen``; None if they cannot express the whole mask."""
    pattern = mask.pattern if isinstance(mask, PatternMask) else None
    if mask is not None and (pattern is None or pattern.padding is not None or pattern.shift != 0):
        return None
    if pattern is not None and pattern.sequences is not None:
        own = pattern.sequences.to(query.device)
        if offsets is not None and not (torch.equal(offsets[0], own) and torch.equal(offsets[1], own)):
            return None
        offsets = offsets or (own, own, None, None)
    if offsets is None:
        return None
    if pattern is None:
        return offsets, {"causal": "lower_right"} if is_causal else {}
    if pattern.keys != query.shape[2] or (pattern.sequences is None and pattern.keys != key.shape[2]):
        return None
    return offsets, pattern.options(query.shape[2])


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, offsets: Offsets, sinks: Tensor | None, **options
) -> Tensor:
    """Runs ``flash_attn_varlen`` on the rows of a batch, one after another. Result: (B, S_q, H, D_v)."""
    rows = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    out, lse = flash_attn_varlen(*rows, *offsets, return_lse=True, **options)
    if sinks is not None:
        out = with_sinks(out, lse.T, sinks.transpose(1, 2).flatten(0, 1))
    return out.unflatten(0, (query.shape[0], query.shape[2]))


def only_within_sequences(mask: Tensor | None, offsets: Offsets, is_causal: bool, query: Tensor, key: Tensor) -> Tensor:
    """Returns a dense mask that also hides the keys of other sequences, for any mask or bias."""
    numbers = []
    for t, cu_seqlens in zip((query, key), offsets[:2], strict=True):
        rows = torch.arange(t.shape[0] * t.shape[2], device=t.device)
        numbers.append(torch.bucketize(rows, cu_seqlens[1:], right=True).view(t.shape[0], 1, t.shape[2]))
    same = numbers[0][..., :, None] == numbers[1][..., None, :]
    if mask is None:
        return same.tril() if is_causal and query.shape[2] > 1 else same
    mask = mask.dense() if isinstance(mask, PatternMask) else mask
    return mask & same if mask.dtype == torch.bool else mask.masked_fill(~same, -torch.inf)


def with_position_bias(mask: Tensor | None, position_bias: Tensor) -> Tensor:
    """Merges mask and bias into one float mask: the bias plus the float mask, or -inf where a bool mask hides."""
    if mask is None:
        return position_bias
    if mask.dtype == torch.bool:
        return torch.where(mask, position_bias, -torch.inf)
    return position_bias + mask
