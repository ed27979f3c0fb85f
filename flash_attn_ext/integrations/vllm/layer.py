"""The calls of one attention layer: writes new rows to the cache, then attends to the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from ... import _ops
from ..._flash_arguments import sink_of
from ..._options import checked_options, operator_options
from ...varlen import flash_attn_varlen
from .cache_format import FORMATS, CacheViews, cache_views
from .packed_step import PackedStep


class AttentionLayerCalls:
    """Runs one layer. Options are converted once, so a decode step passes only tensors."""

    def __init__(
        self, head_dim: int, head_dim_v: int, scale: float, cache_dtype: str = "auto", window: int | None = None,
        softcap: float = 0.0, alibi_slopes: Tensor | None = None, sink: Tensor | None = None,
    ) -> None:  # fmt: skip
        """``window``: a number of keys, including the query's own key, as in vLLM. None: no limit."""
        self.head_dim, self.head_dim_v = head_dim, head_dim_v
        self.cache_format = FORMATS[cache_dtype]
        self.scale, self.window, self.softcap = scale, window, softcap
        self.alibi_slopes, self.sink = alibi_slopes, sink
        self._options = {causal: self._operator_options(causal) for causal in (True, False)}
        self._cache: Tensor | None = None
        self._views: CacheViews | None = None
        self._scales: tuple[float, float, Tensor, Tensor] | None = None

    def _operator_options(self, causal: bool) -> dict[str, object]:
        options = operator_options(
            causal="lower_right" if causal else None, window=None if self.window is None else (self.window - 1, -1),
            alibi_slopes=self.alibi_slopes, scale=self.scale, softcap=self.softcap, deterministic=False,
        )  # fmt: skip
        options = checked_options(_ops.CACHE.option_types, options) | {"lower_right": True}
        # Each option takes time in a call, so options with their default are omitted.
        defaults = _ops.CACHE.option_defaults
        return {name: value for name, value in options.items() if value != defaults[name]}

    def views(self, cache: Tensor) -> CacheViews:
        """Returns views of the cache. vLLM passes the same tensor in each step."""
        if self._views is None or cache is not self._cache:
            self._views = cache_views(cache, self.head_dim, self.head_dim_v, self.cache_format)
            self._cache = cache
        return self._views

    def scales(self, views: CacheViews, key_scale: float, value_scale: float) -> tuple[Tensor | None, Tensor | None]:
        """Returns the factors of 8-bit rows: one for each token, or the layer's two numbers."""
        if self.cache_format.scale_per_token:
            return views.key_scales, views.value_scales
        if self.cache_format.coded is None or key_scale == value_scale == 1.0:
            return None, None
        if self._scales is None or self._scales[:2] != (key_scale, value_scale):
            of_keys, of_values = (
                torch.tensor(s, dtype=torch.float32, device=views.keys.device) for s in (key_scale, value_scale)
            )
            self._scales = key_scale, value_scale, of_keys, of_values
        shape = views.keys.shape[:3]
        return self._scales[2].expand(shape), self._scales[3].expand(shape)

    def write(
        self, key: Tensor, value: Tensor, cache: Tensor, step: PackedStep, key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Writes new rows, (tokens, H_k, D), to their slots in the cache."""
        views = self.views(cache)
        page_size = views.keys.shape[1]
        new = step.new_rows(page_size)
        key, value = (t[: new.count] if new.tokens is None else t[new.tokens] for t in (key, value))
        if self.cache_format.scale_per_token:
            at = new.pages[:, 0].long(), new.rows.long()
            for rows, scales in ((key, views.key_scales), (value, views.value_scales)):
                # A row of zeros has scale 1, so that no zero is divided by zero.
                largest = rows.abs().amax(-1).float() / self.cache_format.largest
                scales[at] = torch.where(largest == 0, 1.0, largest)
        of_keys, of_values = self.scales(views, key_scale, value_scale)
        tensors = (
            key, key, value, views.keys, views.values, new.offsets, new.offsets, new.rows, None, None, None, None, None,
            new.pages, of_keys, of_values, None, None, None, None,
        )  # fmt: skip
        if _ops.write_cache_if_ordinary(*tensors) is None:
            _ops.append_to_cache(*tensors)

    def attend(
        self, query: Tensor, cache: Tensor, step: PackedStep, out: Tensor, key_scale: float = 1.0,
        value_scale: float = 1.0,
    ) -> None:  # fmt: skip
        """Attends from packed queries (tokens, H, D) to the cached rows of their sequences.

        Writes ``out``, (tokens, H, D_v).
        """
        if not step.causal and self.window is not None:
            raise NotImplementedError(
                f"sliding_window: got {self.window} with attention that is not causal; allowed on a cache: causal"
            )
        views = self.views(cache)
        of_keys, of_values = self.scales(views, key_scale, value_scale)
        if len(query) != step.num_tokens:  # the batch is padded
            query, out = query[: step.num_tokens], out[: step.num_tokens]
        options = self._options[step.causal] | {"max_seqlen_q": step.longest_query}
        tensors = (
            query, views.keys, views.values, self.alibi_slopes, sink_of(self.sink, query), step.query_offsets,
            step.lengths, None, None, step.block_table, of_keys, of_values, None, None, None, None,
            None,
        )  # fmt: skip
        if _ops.read_cache_if_ordinary(out, *tensors, options) is None:
            out.copy_(_ops.attention_cache(*tensors, **options)[0])

    def attend_without_cache(self, query: Tensor, key: Tensor, value: Tensor, step: PackedStep, out: Tensor) -> None:
        """Attends within packed sequences of an encoder. A window limits both sides."""
        tokens = step.num_tokens
        window = None if self.window is None else self.window - 1
        result = flash_attn_varlen(
            query[:tokens], key[:tokens], value[:tokens], step.query_offsets, step.query_offsets, step.longest_query,
            step.longest_query, causal="lower_right" if step.causal else None,
            window=window if window is None or not step.causal else (window, -1), scale=self.scale, enable_gqa=True,
            softcap=self.softcap, alibi_slopes=self.alibi_slopes, sink=sink_of(self.sink, query),
        )  # fmt: skip
        out[:tokens].copy_(result)
