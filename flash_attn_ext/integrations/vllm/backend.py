"""vLLM's classes of an attention backend: the supported options, the metadata of a step, and the layers."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

from . import NAME
from .cache_format import FORMATS, content_bytes
from .layer import AttentionLayerCalls
from .packed_step import PackedStep

ENCODERS = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class FlashAttnExtBackend(AttentionBackend):
    """Attention of decoders, encoders and cross-attention on CPU."""

    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(FORMATS)  # type: ignore[assignment]

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[FlashAttnExtImpl]:
        return FlashAttnExtImpl

    @staticmethod
    def get_builder_cls() -> type[FlashAttnExtMetadataBuilder]:
        return FlashAttnExtMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]  # the kernels read 16 rows of a page in place

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        # Every layout is read in place. In the first layout all rows of a head in a page are contiguous.
        return tuple(KVCacheLayout)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Adds space for scales to caches with a scale for each token and head."""
        if spec.state_content_bytes is not None or not spec.kv_quant_mode.is_per_token_head:
            return spec
        return replace(spec, state_content_bytes=content_bytes(spec.head_size, spec.head_size_v))

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 1 <= head_size <= 1024

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False  # not tested

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (*ENCODERS, AttentionType.DECODER, AttentionType.ENCODER_DECODER)

    @classmethod
    def supports_combination(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix,
        device_capability,
    ) -> str | None:  # fmt: skip
        """Returns the reason why a combination of arguments is not supported, or None."""
        stored = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(kv_cache_dtype)
        if stored is not None and stored != dtype:
            return f"a cache of {stored} for a model of {dtype}"
        if kv_cache_dtype in FORMATS and FORMATS[kv_cache_dtype].scale_per_token and head_size % 4 != 0:
            return f"kv_cache_dtype {kv_cache_dtype} with head size {head_size}, which is no multiple of 4"
        return None


class FlashAttnExtMetadataBuilder(AttentionMetadataBuilder[PackedStep]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.page_size = kv_cache_spec.block_size

    def build(self, common_prefix_len: int, common_attn_metadata, fast_build: bool = False) -> PackedStep:
        return PackedStep.from_vllm(common_attn_metadata, self.page_size)


class FlashAttnExtImpl(AttentionImpl[PackedStep]):
    """One layer."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None, attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None, sinks: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window = -1 if sliding_window is None else sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or 0.0
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        # vLLM may make the layer under another default device, such as "meta".
        self.alibi_slopes = (
            None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32, device="cpu")
        )
        self.calls: AttentionLayerCalls | None = None  # made in the first call, when the columns of a value are known

    def _make_calls(self, value_columns: int) -> AttentionLayerCalls:
        return AttentionLayerCalls(
            self.head_size, value_columns, self.scale, self.kv_cache_dtype,
            None if self.sliding_window == -1 else self.sliding_window, self.logits_soft_cap, self.alibi_slopes,
            self.sinks,
        )  # fmt: skip

    def forward(
        self, layer, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: PackedStep | None, output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """vLLM's interface: writes (tokens, H, D_v) to ``output``.

        ``query`` is (tokens, H, D), ``key`` and ``value`` are (tokens, H_k, D) and (tokens, H_k, D_v), or None if the
        cache holds them already. ``kv_cache`` is (pages, H_k, page size, D + D_v).
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                "output_scale: got a tensor; allowed with FLASH_ATTN_EXT: None, no fused rounding"
            )
        if attn_metadata is None:  # vLLM measures memory, or compiles
            return output
        if self.calls is None:
            self.calls = self._make_calls(output.shape[-1])
        if self.attn_type in ENCODERS:
            self.calls.attend_without_cache(query, key, value, attn_metadata, output)
            return output
        scales = layer._k_scale_float, layer._v_scale_float
        if key is not None and value is not None and self.kv_sharing_target_layer_name is None:
            self.calls.write(key, value, kv_cache, attn_metadata, *scales)
        self.calls.attend(query, kv_cache, attn_metadata, output, *scales)
        return output
