"""HeadParallel: MultiheadAttention with heads sharded over processes, for torch's parallelize_module."""

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import _StridedShard

from ..functional import flash_attn
from ..nn import MultiheadAttention
from ..nn.attention_weights import attention_weights
from ._work import HEADS, Work


class HeadParallel(ParallelStyle):
    """Tensor parallelism over heads for :class:`flash_attn_ext.MultiheadAttention` (Shoeybi et al. 2019).

    ``parallelize_module(model, mesh["tp"], {"layers.0.self_attn": HeadParallel()})`` gives each process num_heads / n
    heads. The process has the rows of these heads in the projections of query, key and value, and their columns of the
    output projection. Parameters become DTensors with torch's names and shapes, so checkpoints do not change. Inputs
    and output are the same on every process of the mesh: plain tensors, or replicated DTensors. Forward and backward
    have one all-reduce each. With ``need_weights=True`` attention weights are sent, too: averaged weights by one
    all-reduce, otherwise the weights of all heads. With ``top_k`` of averaged weights, a (B, S_q, S_k) tensor is
    allocated temporarily.

    Raises:
        TypeError: another kind of module. ``replace_attention`` converts torch's modules.
        ValueError: n does not divide num_heads; add_bias_kv or add_zero_attn.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, MultiheadAttention):
            raise TypeError(
                f"module: got {type(module).__qualname__}; allowed: flash_attn_ext.MultiheadAttention, which "
                "flash_attn_ext.replace_attention makes of torch's"
            )
        if device_mesh.ndim != 1:
            raise ValueError(f"device_mesh: got {device_mesh.ndim} dimensions; allowed: one, such as mesh['tp']")
        if module.num_heads % device_mesh.size():
            raise ValueError(
                f"module: got {module.num_heads} heads for {device_mesh.size()} processes; allowed: a multiple of them"
            )
        if module.bias_k is not None or module.add_zero_attn:
            raise ValueError("module: got add_bias_kv or add_zero_attn; allowed: a module without them")
        thirds = _StridedShard(0, split_factor=3)  # in_proj: shards each third of the rows (query, key, value)
        wanted = {
            "in_proj_weight": thirds, "in_proj_bias": thirds, "q_proj_weight": Shard(0), "k_proj_weight": Shard(0),
            "v_proj_weight": Shard(0), "out_proj.weight": Shard(1), "out_proj.bias": Replicate(),
        }  # fmt: skip
        for name, placement in wanted.items():
            owner = module.out_proj if name.startswith("out_proj.") else module
            name = name.removeprefix("out_proj.")
            parameter = getattr(owner, name)
            if parameter is not None:
                sharded = distribute_tensor(parameter.detach(), device_mesh, [placement])
                setattr(owner, name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))
        module.__class__ = _HeadParallelAttention
        return module


class _HeadParallelAttention(MultiheadAttention):
    """A MultiheadAttention after HeadParallel sharded its parameters."""

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
        self._check(query, key, value, key_padding_mask, attn_mask, need_weights, is_causal)
        mesh = self.out_proj.weight.device_mesh
        work = Work(mesh, (HEADS,))
        batched = query.dim() == 3
        q, k, v = (self._split_own_heads(x, batched) for x in self._project_locally(query, key, value, mesh))
        self._check_top_k(top_k, need_weights, k.size(2))
        causal = is_causal and key_padding_mask is None and not need_weights
        mask, key_mask = self._masks(None if causal else attn_mask, key_padding_mask, q.shape[0], 0)
        if mask is not None:
            mask = work.local(mask, {HEADS: 1} if mask.dim() == 4 and mask.shape[1] != 1 else {})
        key_mask = work.local_if_given(key_mask, {})
        dropout_p = self.dropout if self.training else 0.0
        rng_state = work.rng_state(None, q.shape[0], self.num_heads, q.device) if dropout_p > 0.0 else None
        out, lse = flash_attn(
            q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=causal, key_mask=key_mask, rng_state=rng_state,
            return_lse=True,
        )  # fmt: skip
        out = F.linear(self._join_heads(out, batched), self.out_proj.weight.to_local())
        out = _replicate(out, mesh, Partial())
        if self.out_proj.bias is not None:
            out = out + self.out_proj.bias.to_local()
        if not need_weights:
            return self._as_given(query, out), None

        # top_k needs the average over all processes first.
        weights = attention_weights(
            q, k, mask, key_mask, lse, rng_state, dropout_p, average_attn_weights,
            None if average_attn_weights else top_k,
        )  # fmt: skip
        if average_attn_weights:
            weights = _replicate(weights / mesh.size(), mesh, Partial())
            parts = (weights,) if top_k is None else tuple(weights.topk(top_k, dim=-1))
        else:
            parts = (weights,) if top_k is None else weights
            parts = tuple(_replicate(part, mesh, Shard(1)) for part in parts)
        parts = tuple(self._as_given(query, part if batched else part.squeeze(0)) for part in parts)
        return self._as_given(query, out), parts[0] if top_k is None else parts

    def _as_given(self, query: Tensor, t: Tensor) -> Tensor:
        """Returns a DTensor if query is one."""
        if not isinstance(query, DTensor):
            return t
        return DTensor.from_local(t, query.device_mesh, [Replicate()], run_check=False)

    def _project_locally(self, query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh) -> list[Tensor]:
        """Projects to q, k and v of this process's heads."""
        inputs: dict[int, Tensor] = {}
        for x in (query, key, value):  # the gradients of all heads are added
            if id(x) not in inputs:
                shared = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
                inputs[id(x)] = shared.redistribute(mesh, [Replicate()]).to_local(grad_placements=[Partial()])
        if self._qkv_same_embed_dim:
            matrices = self.in_proj_weight.to_local().chunk(3)
        else:
            matrices = tuple(w.to_local() for w in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight))
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.to_local().chunk(3)
        return [F.linear(inputs[id(x)], w, b) for x, w, b in zip((query, key, value), matrices, biases, strict=True)]

    def _split_own_heads(self, x: Tensor, batched: bool) -> Tensor:
        x = x.unflatten(-1, (-1, self.head_dim))
        if not batched:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)


def _replicate(t: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    """Returns the whole tensor from the parts of all processes."""
    return DTensor.from_local(t, mesh, [placement], run_check=False).redistribute(mesh, [Replicate()]).to_local()
