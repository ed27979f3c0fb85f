"""explain: what a call of flash_attn would do, without doing it."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from . import _functorch, _ops
from .functional import (
    causal_of_bias,
    check_is_dense,
    checked_options,
    flash_attn,
    operator_options,
    operator_tensors,
)
from .iomodel.calls import Cost, Problem, kernel_tiles, largest_blocks, pass_cost

# Of a block on every GPU from compute capability 8.0 on: kMaxSharedBytes of csrc/cuda/shared_memory.h.
SHARED_BYTES = 99 << 10


@dataclass(frozen=True)
class Pass:
    """The forward or the backward of one call."""

    kernel: str | None  # the instruction set on CPU, the tier on CUDA; None: nothing to compute, or `error`
    splits: int  # pieces of the keys, where the CPU's decode kernel runs; else 0
    why_not: tuple[str, ...]  # the faster kernels, each with the reason why it does not run
    error: str | None  # of the NotImplementedError that the call raises, if it does
    allocates: Mapping[str, int]  # bytes, by what they are for
    flops: int  # predicted by iomodel, as is the next
    traffic: int  # bytes to and from slow memory: a GPU's HBM
    tiles: tuple[int, int]  # queries x keys, in which the two were counted

    @property
    def allocated_bytes(self) -> int:
        return sum(self.allocates.values())

    def __str__(self) -> str:
        why_not = [f"not {reason}" for reason in self.why_not]
        if self.error:
            return "\n".join([f"raises NotImplementedError: {self.error}", *why_not])
        kernel = self.kernel or "no kernel, there is nothing to compute"
        if self.splits:
            kernel += f", decode kernel, {self.splits} split{'s' * (self.splits > 1)}"
        parts = ", ".join(f"{name} {_size(count)}" for name, count in self.allocates.items() if count)
        memory = f"allocates {_size(self.allocated_bytes)}" + (f": {parts}" if parts else "")
        counted = f"{self.flops / 1e9:.3g} GFLOP, {_size(self.traffic)} of memory traffic"
        tiles = f"{self.tiles[0]} x {self.tiles[1]}"
        return "\n".join([kernel, *why_not, memory, f"predicted, in tiles of {tiles}: {counted}"])


@dataclass(frozen=True)
class Explanation:
    """What :func:`explain` found. Printed, it can be read."""

    call: str
    forward: Pass
    backward: Pass
    gradients: tuple[str, ...]  # the inputs whose gradients the backward computes
    deterministic: bool  # what the backward is asked for; CPU kernels always are

    def __str__(self) -> str:
        passes = {"forward": self.forward, f"backward of {', '.join(self.gradients)}": self.backward}
        return "\n".join([self.call, *(f"{name}: {p}".replace("\n", "\n  ") for name, p in passes.items())])


_SIGNATURE = inspect.signature(flash_attn)


def explain(*args, **kwargs) -> Explanation:
    """What :func:`flash_attn` would do with these arguments: its kernels, memory and traffic. It runs nothing.

    Arguments: those of :func:`flash_attn`.

    The kernels and workspaces are those that the call itself would ask for, on the tensors' device, with what is forced
    at the moment. FLOPs and traffic are predicted by :mod:`flash_attn_ext.iomodel`, which counts FlashAttention-2 in
    tiles: those of the CPU kernels, or on a GPU the largest that fit a block's shared memory. A tile that the diagonal
    or the window cuts counts whole. Of a mask only the size is looked at, and heads that share keys are counted as if
    each read its own, unless the decode kernel runs.

    The backward is that of the inputs that require a gradient; if none does, of query, key and value. Memory is what
    torch's allocator is asked for, with a contiguous gradient of out and none of lse. Small workspaces on CPU lie on
    the stack and count 0.

    Raises:
        TypeError, ValueError: as :func:`flash_attn`.
        NotImplementedError: no kernels for the tensors' device. What a kernel refuses is in :attr:`Pass.error` instead.

    Tensors on the Meta device have no kernels; memory without workspace and the predictions are still there.
    """
    call = _SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    return _explain(**call.arguments)


explain.__signature__ = _SIGNATURE.replace(return_annotation=Explanation)


def _explain(
    query, key, value, attn_mask, alibi_slopes, sink, rng_state, key_mask, enable_gqa, return_lse, **options
) -> Explanation:
    if isinstance(attn_mask, CausalBias):
        attn_mask, options["causal"] = (
            None,
            causal_of_bias(attn_mask, query, key, options["is_causal"], options["causal"]),
        )
    options = checked_options(operator_options(alibi_slopes=alibi_slopes, **options))
    drawn = None
    if options["dropout_p"] > 0.0 and rng_state is None:
        check_is_dense("query", query)
        drawn = rng_state = torch.empty(2, dtype=torch.int64, device=query.device)
    given = (query, key, value, attn_mask, alibi_slopes, sink, rng_state, key_mask)
    tensors, _ = operator_tensors(*given, enable_gqa)
    copies = [drawn, *(t for t, g in zip(tensors, given, strict=True) if _is_copy(t, g))]
    device = query.device.type
    if device != "meta" and torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        cast = _functorch.autocast_forms(*tensors)
        copies += [c for c, t in zip(cast, tensors, strict=True) if c is not t]
        tensors = cast
    wanted = [t is not None and t.requires_grad for t in given[: len(_ops.DIFFERENTIABLE)]]
    if not any(wanted):
        wanted = [name in ("query", "key", "value") for name in _ops.DIFFERENTIABLE]

    forward = _ops.plan_attention(tensors, tuple(options.values()))
    backward = _ops.plan_attention_backward(tensors, tuple(options.values()), wanted)
    dropout_p = options["dropout_p"]
    return Explanation(
        call=_describe(*tensors[:3]),
        forward=_explained("forward", forward, tensors, dropout_p, sum(t.nbytes for t in copies if t is not None)),
        backward=_explained("backward", backward, tensors, dropout_p),
        gradients=tuple(name for name, want in zip(_ops.DIFFERENTIABLE, wanted, strict=True) if want),
        deterministic=backward.deterministic,
    )


def _explained(which: str, plan, tensors: tuple, dropout_p: float, copied_bytes: int = 0) -> Pass:
    choice, allocates = plan.choice, dict(plan.bytes)
    allocates["copies"] += copied_bytes
    cost, tiles = _predict(which, plan, *tensors[:4], dropout_p)
    return Pass(
        kernel=choice.kernel or None,
        splits=choice.decode_splits,
        why_not=tuple(choice.why_not),
        error=choice.refusal or None,
        allocates=allocates,
        flops=cost.flops,
        traffic=cost.bytes,
        tiles=tiles,
    )


def _predict(which: str, plan, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float):
    """The pass's Cost, and the tiles that it was counted in."""
    (B, H, S_q, D), (_, H_kv, S_k, _), D_v = q.shape, k.shape, v.shape[3]
    on_cpu = q.device.type == "cpu"
    tiles = kernel_tiles()[which] if on_cpu else largest_blocks(which, max(D, D_v), SHARED_BYTES // q.element_size())
    if 0 in (B, H, S_q, S_k):
        return Cost(), tiles
    dtype = str(q.dtype).removeprefix("torch.")
    problem = Problem(B, H, S_q, D, dtype, dropout=dropout_p, S_k=S_k, D_v=D_v)
    visible = plan.visible_tiles(*tiles)
    if plan.choice.decode_splits:  # the query heads that share keys are rows of one tile
        visible = plan.visible_tiles(S_q, tiles[1])
        problem = replace(problem, H=H_kv, S=S_q * (H // H_kv))
        tiles = (problem.S, tiles[1])
    return pass_cost(which, problem, tiles, visible) + Cost(0, 0 if mask is None else _bytes_in_memory(mask)), tiles


def _bytes_in_memory(t: Tensor) -> int:
    """Without what is broadcast."""
    elements = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * t.element_size()


def _is_copy(t: Tensor | None, given: Tensor | None) -> bool:
    """Whether bringing an input to four dimensions took memory of its own."""
    return t is not given and t is not None and t.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()


def _describe(q: Tensor, k: Tensor, v: Tensor) -> str:
    shapes = ", ".join(f"{name} {tuple(t.shape)}" for name, t in zip(_ops.DIFFERENTIABLE, (q, k, v), strict=False))
    return f"flash_attn of {shapes}, {str(q.dtype).removeprefix('torch.')} on {q.device}"


def _size(count: float) -> str:
    """Bytes, for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
