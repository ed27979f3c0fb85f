"""MultiheadAttention: torch.nn.MultiheadAttention on the tiled kernel.

Reading order: `forward` (check, project, convert the masks, attend, project back), then the functions that it calls.
`nested.py` computes nested tensors.
"""

from __future__ import annotations

import copy
import math
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..functional import flash_attn, new_rng_state
from . import nested
from .attention_weights import attention_weights, merge_masks
from .class_swap import attach_forward_hook, exchange_base, is_sharded, why_not_replaceable

__all__ = ["MultiheadAttention"]


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention, computed by `flash_attn`.

    This is a subclass of torch.nn.MultiheadAttention with the same constructor, forward arguments, return values,
    parameters and state_dict. Checkpoints load in both directions, and isinstance checks continue to work. Differences:

    - With `need_weights=False` no S_q x S_k tensor is allocated, except a copy of a bool `attn_mask` in its own shape.
      The copy is needed because True has the opposite meaning for the kernel. `attn_mask` and `key_padding_mask`
      together are not merged into (B, 1, S_q, S_k), unless `key_padding_mask` needs a gradient.
    - If all keys of a query are masked, its attention output, weights and gradient are 0, never NaN.
    - `need_weights=True` (torch's default) does not change the output if the `is_causal` hint is true. The weights are
      computed from q, k and lse. The average over the heads allocates B x S_q x S_k elements, not `num_heads` times as
      many, except under torch.func and for DTensors. With `top_k`, the B x S_q x S_k elements are not allocated either,
      except under torch.compile.
    - The fused inference paths of torch, in this module and in nn.TransformerEncoderLayer, are not used: this package's
      kernel runs instead. torch supports nested inputs only on these paths and only in the strided layout. This module
      always supports nested inputs, in both layouts, and does not pad them.
    - torch.jit.script is not supported.

    Args:
        embed_dim: features of query and output, divisible by `num_heads`.
        num_heads: number of heads.
        dropout: the probability to drop an attention weight in training.
        bias: True: the input and output projections have a bias.
        add_bias_kv: appends a learned key and value to the sequences.
        add_zero_attn: appends a key and a value of zeros.
        kdim, vdim: features of key and value, `embed_dim` if None.
        batch_first: batched inputs and output are (B, S, E) instead of (S, B, E).
        device, dtype: the device and dtype of the parameters.

    Source: Vaswani et al., "Attention Is All You Need", https://arxiv.org/abs/1706.03762, section 3.2.2.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim,
            num_heads,
            dropout=dropout,
            bias=bias,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            kdim=kdim,
            vdim=vdim,
            batch_first=batch_first,
            device=device,
            dtype=dtype,
        )
        attach_forward_hook(self)

    @classmethod
    def from_torch(cls, mha: nn.MultiheadAttention) -> MultiheadAttention:
        """Returns a MultiheadAttention that shares its Parameter objects, buffers, submodules and hooks with `mha`.

        `mha` does not change. Raises TypeError if `mha` is not exactly a torch.nn.MultiheadAttention, or has its own
        forward on the instance. A head dimension, dtype or device without kernels raises TypeError, too. So does a
        module that FSDP2 has sharded: `replace_attention` can change it in place.
        """
        if not isinstance(mha, nn.MultiheadAttention):
            raise TypeError(f"mha: got {type(mha).__qualname__}; allowed: a torch.nn.MultiheadAttention")
        obstacle = why_not_replaceable(mha)
        if obstacle is None and is_sharded(mha):
            obstacle = "FSDP2 (fully_shard) manages its parameters; replace_attention can change it in place"
        if obstacle is not None:
            raise TypeError(f"mha: must be a torch.nn.MultiheadAttention as torch made it; {obstacle}")
        own_class = exchange_base(type(mha), nn.MultiheadAttention, cls)
        new = own_class.__new__(own_class)
        # The registries are copied, so that a registration in one module does not change the other. The entries are
        # shared.
        for name, entry in vars(mha).items():
            new.__dict__[name] = copy.copy(entry) if isinstance(entry, (dict, set)) else entry
        attach_forward_hook(new)
        return new

    def merge_masks(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor):
        """Raises: torch calls this function only before a fused operator that bypasses this module."""
        raise RuntimeError(
            "a fused torch path is about to bypass flash_attn_ext, because the forward pre-hook that "
            "prevents it was removed from this MultiheadAttention; do not remove it, or disable that path with "
            "torch.backends.mha.set_fastpath_enabled(False)"
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        top_k: int | None = None,
    ) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor] | None]:
        """Attention of `query` to `key` and `value`.

        Args:
            query, key, value: (S_q, B, embed_dim), (S_k, B, kdim), (S_k, B, vdim); with `batch_first`
                (B, S, features); unbatched (S, features). float16, bfloat16, float32 or float64: the dtype of
                the parameters, or any under autocast.
            key_padding_mask: (B, S_k), unbatched (S_k,). Bool: True hides the key. Float: added to the scores.
            need_weights: also returns the attention weights, an S_q x S_k tensor.
            attn_mask: (S_q, S_k) or (B * num_heads, S_q, S_k); bool or float as `key_padding_mask`.
            average_attn_weights: returns the average of the weights over the heads, instead of the weights of each
                head.
            is_causal: a hint that `attn_mask` is the causal mask. `attn_mask` is also required. As in torch, with
                `need_weights=False` and no `key_padding_mask` the values of `attn_mask` are not read. Otherwise
                they are read, and the hint changes only the speed.
            top_k: not in torch. Returns only the `top_k` largest weights of each query, largest first. From 1 to S_k,
                where S_k includes the appended columns.

        Returns:
            (out, weights). out has the shape of `query`. weights, after dropout, are (B, S_q, S_k), or (B, num_heads,
            S_q, S_k) if not averaged, without B if unbatched. With `need_weights=False` they are None. `add_bias_kv`
            and `add_zero_attn` append one column each. With `top_k` weights are a pair: the values and their int64 key
            indices. Then the last dimension is `top_k`.

        Raises:
            ValueError: `top_k` out of range, or given with `need_weights=False`.
            AssertionError, RuntimeError: in the same cases as torch.nn.MultiheadAttention.
            TypeError: from `flash_attn`, for a float mask that has neither the inputs' dtype nor float32.
        """
        arguments = (
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )  # fmt: skip
        for argument in arguments:
            if isinstance(argument, torch.fx.Proxy):
                # torch.fx.symbolic_trace: one node, as for torch's module.
                name = argument.tracer.path_of_module(self)
                return argument.tracer.create_proxy("call_module", name, arguments, {"top_k": top_k})
        if query.is_nested or key.is_nested or value.is_nested:
            inputs = {"query": query, "key": key, "value": value}
            nested.check(self, inputs, {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask})
            return nested.forward(self, query, key, value, need_weights, average_attn_weights, is_causal, top_k)
        self._check(query, key, value, key_padding_mask, attn_mask, need_weights, is_causal)
        batched = query.dim() == 3

        q, k, v = self._project(query, key, value)
        k, v = self._append_keys(k, v, batched)
        q, k, v = (self._split_heads(x, batched) for x in (q, k, v))
        appended = (self.bias_k is not None) + bool(self.add_zero_attn)
        self._check_top_k(top_k, need_weights, k.size(2))

        # torch trusts the hint only without key_padding_mask. With key_padding_mask, our kernel may use the causal
        # band, which saves half of the work, if attn_mask is known to be causal. Appended keys are to the right of the
        # diagonal, so the band would hide them.
        causal = is_causal and not need_weights
        if causal and key_padding_mask is not None:
            causal = not appended and _is_known_to_be_causal(attn_mask)
        mask, key_mask = self._masks(None if causal else attn_mask, key_padding_mask, q.size(0), appended)

        dropout_p = self.dropout if self.training else 0.0
        rng_state = new_rng_state(q.device) if need_weights and dropout_p > 0.0 else None
        out = flash_attn(
            q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=causal, key_mask=key_mask, rng_state=rng_state,
            return_lse=need_weights,
        )  # fmt: skip
        out, lse = out if need_weights else (out, None)
        out = F.linear(self._join_heads(out, batched), self.out_proj.weight, self.out_proj.bias)
        if not need_weights:
            return out, None

        weights = attention_weights(q, k, mask, key_mask, lse, rng_state, dropout_p, average_attn_weights, top_k)
        if not batched:
            weights = weights.squeeze(0) if top_k is None else tuple(part.squeeze(0) for part in weights)
        return out, weights

    def _check_top_k(self, top_k: int | None, need_weights: bool, seqlen_k: int) -> None:
        if top_k is None:
            return
        if not need_weights:
            raise ValueError(f"top_k: got {top_k} with need_weights=False; allowed: None, or need_weights=True")
        if not 1 <= top_k <= seqlen_k:
            raise ValueError(f"top_k: got {top_k}; allowed: 1 to {seqlen_k}, the number of keys")

    def _check(self, query, key, value, key_padding_mask, attn_mask, need_weights, is_causal) -> None:
        """Makes the checks of torch.nn.MultiheadAttention, with the same types of exceptions."""
        if query.dim() not in (2, 3):
            raise AssertionError(f"query: got a {query.dim()}-D tensor, allowed are 2-D (unbatched) and 3-D")
        features = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        for (name, size), x in zip(features.items(), (query, key, value), strict=True):
            if x.dim() != query.dim():
                raise AssertionError(f"{name}: got a {x.dim()}-D tensor, must be {query.dim()}-D as query is")
            if x.size(-1) != size:
                raise AssertionError(f"{name}: got embedding dimension {x.size(-1)}, must be {size}")
        if key.shape[:-1] != value.shape[:-1]:
            got, allowed = tuple(value.shape[:-1]), tuple(key.shape[:-1])
            raise AssertionError(f"value: got sequence and batch sizes {got}, must be key's {allowed}")
        batched = query.dim() == 3
        batch_dim, seq_dim = (0, 1) if self.batch_first and batched else (1, 0)
        batch = (query.size(batch_dim),) if batched else ()
        if batched and key.size(batch_dim) != batch[0]:
            raise RuntimeError(f"key: got batch size {key.size(batch_dim)}, must be query's {batch[0]}")
        seqlen_q, seqlen_k = query.size(seq_dim), key.size(seq_dim)

        for name, mask in (("key_padding_mask", key_padding_mask), ("attn_mask", attn_mask)):
            if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
                raise AssertionError(f"{name}: got {mask.dtype}, only bool and floating types are supported")
        if key_padding_mask is not None and key_padding_mask.shape != (*batch, seqlen_k):
            got = tuple(key_padding_mask.shape)
            raise AssertionError(f"key_padding_mask: got shape {got}, must be {(*batch, seqlen_k)}")
        if attn_mask is None:
            if is_causal:
                raise RuntimeError(
                    "attn_mask: got None. Need attn_mask if specifying the is_causal hint; "
                    "torch.nn.Transformer.generate_square_subsequent_mask creates this mask"
                )
            return
        if attn_mask.dim() not in (2, 3):
            raise AssertionError(f"attn_mask: got a {attn_mask.dim()}-D tensor, allowed are 2-D and 3-D")
        if is_causal and not need_weights and key_padding_mask is None:
            return  # as in torch, the mask is not read
        allowed = (seqlen_q, seqlen_k)
        if attn_mask.dim() == 3:
            allowed = (math.prod(batch) * self.num_heads, seqlen_q, seqlen_k)
        if attn_mask.shape != allowed:
            error = AssertionError if attn_mask.dim() == 3 and not batched else RuntimeError
            raise error(f"attn_mask: got shape {tuple(attn_mask.shape)}, should be {allowed}")
        if key_padding_mask is not None and key_padding_mask.dtype != attn_mask.dtype:
            warnings.warn(
                "Support for mismatched key_padding_mask and attn_mask is deprecated. Use same type for both "
                f"instead (got {key_padding_mask.dtype} and {attn_mask.dtype}).",
                stacklevel=2,
            )

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Returns q, k, v with embed_dim features, in the layout of the inputs. Equal input tensors share a GEMM."""
        bias = self.in_proj_bias
        if bias is not None and bias.dtype != self.out_proj.weight.dtype:
            bias = bias.to(self.out_proj.weight.dtype)  # for some layouts torch's linear refuses two dtypes
        if not self._qkv_same_embed_dim:
            biases = (None, None, None) if bias is None else bias.chunk(3)
            projections = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            return tuple(map(F.linear, (query, key, value), projections, biases))
        # Read once, because under a parametrization every read computes the parameter.
        projection = self.in_proj_weight
        if query is key and key is value:
            return F.linear(query, projection, bias).chunk(3, dim=-1)
        if key is value:
            split = [self.embed_dim, 2 * self.embed_dim]
            projection_q, projection_kv = projection.split(split)
            bias_q, bias_kv = (None, None) if bias is None else bias.split(split)
            return F.linear(query, projection_q, bias_q), *F.linear(key, projection_kv, bias_kv).chunk(2, dim=-1)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        return tuple(map(F.linear, (query, key, value), projection.chunk(3), biases))

    def _append_keys(self, k: Tensor, v: Tensor, batched: bool) -> tuple[Tensor, Tensor]:
        """Appends bias_k, bias_v and the zeros of add_zero_attn to the keys and values."""
        bias_k, bias_v = self.bias_k, self.bias_v
        if bias_k is None and not self.add_zero_attn:
            return k, v
        seq_dim = 1 if self.batch_first and batched else 0
        shape = list(k.shape)
        shape[seq_dim] = 1
        tails = [], []
        for x, bias, tail in ((k, bias_k, tails[0]), (v, bias_v, tails[1])):
            if bias is not None:
                # To x's dtype: under autocast the parameter is float32, but the projection is not.
                tail.append(bias.to(x.dtype).view(-1).expand(shape))
            if self.add_zero_attn:
                tail.append(x.new_zeros(shape))
        return torch.cat([k, *tails[0]], dim=seq_dim), torch.cat([v, *tails[1]], dim=seq_dim)

    def _split_heads(self, x: Tensor, batched: bool) -> Tensor:
        """Returns (B, S, E), (S, B, E) or (S, E) as (B, H, S, D), a view."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        if not batched:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _join_heads(self, x: Tensor, batched: bool) -> Tensor:
        """The inverse of _split_heads. No copy, because flash_attn's output has the memory order of q."""
        if not batched:
            x = x.squeeze(0).transpose(0, 1)
        else:
            x = x.transpose(1, 2) if self.batch_first else x.permute(2, 0, 1, 3)
        return x.flatten(-2)

    def _masks(
        self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, batch: int, appended: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns `attn_mask` and `key_mask` of `flash_attn`: views of the masks of this call, or copies of the same
        size.

        True in a bool mask of this module hides a key; True in the kernel's mask shows the key. Float masks are added
        to the scores in both. All queries attend to the appended keys, so the masks get columns of 0 for these keys.
        """
        if attn_mask is not None:
            attn_mask = F.pad(attn_mask, (0, appended)) if appended else attn_mask
            attn_mask = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.unflatten(0, (batch, self.num_heads))
        if key_padding_mask is None:
            return attn_mask, None
        keys = F.pad(key_padding_mask, (0, appended)) if appended else key_padding_mask
        keys = (~keys if keys.dtype == torch.bool else keys).reshape(batch, keys.size(-1))
        if not keys.requires_grad:
            return attn_mask, keys
        # `key_mask` has no gradient.
        return merge_masks(attn_mask, keys), None


def _is_known_to_be_causal(mask: Tensor) -> bool:
    """Whether `mask`, (S_q, S_k) or (B * H, S_q, S_k), is the causal mask.

    False if its values cannot be read immediately: while the call is traced or transformed, and on a device that runs
    asynchronously.
    """
    if (
        type(mask) not in (Tensor, nn.Parameter)
        or mask.device.type != "cpu"
        or mask.requires_grad
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
    ):
        return False
    rows = 256  # compared at once, so that no whole causal mask is allocated
    for start in range(0, mask.size(-2), rows):
        block = mask[..., start : start + rows, :]
        causal = torch.ones(block.shape[-2:], dtype=torch.bool, device=mask.device).triu(start + 1)
        if mask.dtype != torch.bool:
            causal = torch.zeros_like(causal, dtype=mask.dtype).masked_fill(causal, -math.inf)
        if not torch.equal(block, causal.expand_as(block)):
            return False
    return True
