"""explain: the kernels, memory and traffic of a call of flash_attn.

For packed sequences and caches: _explain_packed.py.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from . import _dense, _float8, _functorch, _int8, _ops
from ._call import FUNCTIONS, OF_FLOAT8, QUANTIZE, Call, take
from ._hints import unknown_argument
from ._tensor_checks import check_is_dense, is_causal_bias, some_dtensor
from .flex.attention import with_functions
from .flex.report import report_of
from .functional import flash_attn, without_causal_bias
from .iomodel.calls import Cost, Problem, kernel_tiles, largest_blocks, pass_cost

# Shared memory that a block may use on every GPU from compute capability 8.0 on (csrc/cuda/shared_memory.h).
SHARED_BYTES = 99 << 10


@dataclass(frozen=True)
class Pass:
    """The forward or the backward of one call."""

    kernel: str | None  # the instruction set on CPU, the tier on CUDA. None: nothing to compute, or an `error`
    splits: int  # splits of the keys in the CPU's decode kernel, the maximum over the sequences; 0: another kernel
    decoded: int  # the number of sequences that the decode kernel computes
    why_not: tuple[str, ...]  # faster kernels, each with the reason why it does not run
    error: str | None  # the message of the NotImplementedError that the call raises
    allocates: Mapping[str, int]  # bytes, by purpose
    flops: int  # predicted by iomodel
    traffic: int  # predicted by iomodel: bytes to and from slow memory, such as a GPU's HBM
    tiles: tuple[int, int]  # queries x keys of iomodel's tiles; in the decode kernel all queries
    sequences: int = 1  # of a packed call

    @property
    def allocated_bytes(self) -> int:
        return sum(self.allocates.values())

    def __str__(self) -> str:
        why_not = [f"not {reason}" for reason in self.why_not]
        if self.error:
            return "\n".join([f"raises NotImplementedError: {self.error}", *why_not])
        kernel = self.kernel or "no kernel, there is nothing to compute"
        if self.splits:
            splits = f"{self.splits} split{'s' * (self.splits > 1)}"
            packed = f" for {self.decoded} of {self.sequences} sequences, at most" if self.sequences > 1 else ","
            kernel += f", decode kernel{packed} {splits}"
        parts = ", ".join(f"{name} {_size(count)}" for name, count in self.allocates.items() if count)
        memory = f"allocates {_size(self.allocated_bytes)}" + (f": {parts}" if parts else "")
        counted = f"{self.flops / 1e9:.3g} GFLOP, {_size(self.traffic)} of memory traffic"
        tiles = f"{self.tiles[0]} x {self.tiles[1]}"
        return "\n".join([kernel, *why_not, memory, f"predicted, in tiles of {tiles}: {counted}"])


@dataclass(frozen=True)
class Explanation:
    """The result of :func:`explain`, :func:`explain_varlen` or :func:`explain_kvcache`. ``print`` shows it as text."""

    call: str
    forward: Pass
    backward: Pass | None  # None: the call has no gradients
    gradients: tuple[str, ...]  # the inputs that get a gradient in the backward
    deterministic: bool  # whether the call requests a deterministic backward. CPU kernels are always deterministic
    functions: tuple[str, ...] = ()  # the programs of score_mod and mask_mod, and the visited blocks, as lines of text

    def __str__(self) -> str:
        passes = {"forward": self.forward}
        if self.backward is not None:
            passes[f"backward of {', '.join(self.gradients)}"] = self.backward
        return "\n".join(
            [self.call, *(f"{name}: {p}".replace("\n", "\n  ") for name, p in passes.items()), *self.functions]
        )


_SIGNATURE = inspect.signature(flash_attn)


def explain(*args, **kwargs) -> Explanation:
    """Reports the kernels, the memory and the traffic of a call of :func:`flash_attn`. It computes nothing.

    The arguments are the same as in :func:`flash_attn`.

    The kernels and workspaces are the same as in the call, on the tensors' device and with the kernels that are forced
    now. :mod:`flash_attn_ext.iomodel` predicts FLOPs and traffic. It counts FlashAttention-2 with the tiles of the CPU
    kernels, or, on a GPU, with the largest tiles that fit into a block's shared memory. A tile that the diagonal or the
    window cuts counts as a whole tile. The traffic of a mask is its size. Each head reads its keys separately in the
    model, unless the decode kernel runs.

    The backward computes the gradients of all inputs that require a gradient. If no input requires a gradient, it
    computes the gradients of query, key and value. Memory is the bytes that the call allocates through torch, for a
    contiguous gradient of out and no gradient of lse. A CPU workspace of up to 256 KiB is a buffer of the thread, and
    counts as 0.

    Calls with ``quantize="int8"`` have no backward. Their kernel is "avx512_vnni", or the instruction set that computes
    the same sums of integers without VNNI. Tensors in float8_e4m3fn have no backward: ``allocates["widened query"]`` is
    a copy of the query in the dtype of out.

    With functions of the user, :attr:`Explanation.functions` shows their programs, how often each instruction runs,
    and how many blocks are visited. FLOPs and traffic ignore the block mask: they include its hidden blocks.

    Raises:
        TypeError, ValueError: as :func:`flash_attn`.
        NotImplementedError: no kernels for the tensors' device. If the kernels do not support the call,
        :attr:`Pass.error` has the reason.

    Tensors on the Meta device have no kernels: the report has memory without workspaces, and the predictions.
    """
    arguments = arguments_of("flash_attn", _SIGNATURE, args, kwargs)
    if is_causal_bias(arguments["attn_mask"]):
        arguments = without_causal_bias(arguments)
    if _float8.is_float8(arguments["query"], *(arguments[name] for name in OF_FLOAT8)):
        form, _ = _dense.to_operator_form(_float8.dense_call(arguments))
        return of_float8("flash_attn", form, _float8.dense_on_cache(form, arguments))
    if arguments[QUANTIZE] is not None:
        return _of_int8(arguments)
    functions = take(arguments, FUNCTIONS)
    given = Call.from_arguments(_ops.DENSE, **arguments)
    refuse_dtensors(given.tensors)
    given, drawn = with_undrawn_rng_state(given)
    call, _ = _dense.to_operator_form(given)
    copies = [drawn, *(t for name, t in call.tensors.items() if _is_copy(t, given.tensors[name]))]
    call, cast = after_autocast(call)
    described = describe("flash_attn", call, query="query", key="key", value="value")
    plans = _ops.plan_attention, _ops.plan_attention_backward
    if any(function is not None for function in functions.values()):
        call = with_functions(call, **functions)
        plans = _ops.plan_flex, _ops.plan_flex_backward
    return explanation(described, plans, call, given, [*copies, *cast])


explain.__signature__ = _SIGNATURE.replace(return_annotation=Explanation)


def arguments_of(function: str, signature: inspect.Signature, args: tuple, kwargs: dict) -> dict:
    """Returns the arguments of a call by name, with defaults for missing arguments."""
    for name in kwargs:
        if name not in signature.parameters:
            raise unknown_argument(function, name)
    call = signature.bind(*args, **kwargs)
    call.apply_defaults()
    return dict(call.arguments)


def with_undrawn_rng_state(call: Call) -> tuple[Call, Tensor | None]:
    """Returns the call with a placeholder for the dropout state that the call would draw, and the placeholder."""
    if not call.needs_rng_state():
        return call, None
    query = call.tensors["query"]
    check_is_dense("query", query)
    drawn = torch.empty(2, dtype=torch.int64, device=query.device)
    return call.with_tensors(rng_state=drawn), drawn


def refuse_dtensors(tensors: Mapping[str, Tensor | None]) -> None:
    for name, t in tensors.items():
        if some_dtensor(t):
            raise TypeError(f"{name}: got a DTensor; allowed: a process's own part of it, to_local()")


def after_autocast(call: Call) -> tuple[Call, list[Tensor]]:
    """Returns the call after autocast, and the tensors that autocast would make, without values."""
    query = call.tensors["query"]
    assert query is not None
    device = query.device.type
    if device == "meta" or not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return call, []
    cast = _functorch.cast_without_values(call)
    return cast, [t for name, t in cast.tensors.items() if t is not None and t is not call.tensors[name]]


def explanation(described: str, plans: tuple, call: Call, given: Call, copies: list) -> Explanation:
    """Makes the Explanation of a call that has a backward.

    Args:
        described: the call in one line.
        plans: the functions of _ops that plan the forward and the backward.
        call: the call with the operator's tensors.
        given: the call with the caller's tensors.
        copies: tensors that are allocated before the operator runs.
    """
    names = call.operator.tensor_names[: call.operator.gradients]
    inputs = call.tensors | given.tensors
    wanted = [t is not None and t.requires_grad for t in (inputs[name] for name in names)]
    if not any(wanted):
        wanted = [name in ("query", "key", "value") for name in names]
    q, k, v, mask = (call.tensors[name] for name in ("query", "key", "value", "attn_mask"))
    shape = HeadShape(q.shape[1], k.shape[1], q.shape[-1], v.shape[-1], q.dtype, q.dtype.itemsize, q.device.type)
    forward = plans[0](call.tensors, call.options)
    backward = plans[1](call.tensors, call.options, wanted)
    dropout_p = call.options["dropout_p"]
    copied = sum(t.nbytes for t in copies if t is not None)
    return Explanation(
        call=described,
        forward=pass_report("forward", forward, shape, mask, dropout_p, copied),
        backward=pass_report("backward", backward, shape, mask, dropout_p),
        gradients=tuple(name for name, want in zip(names, wanted, strict=True) if want),
        deterministic=backward.deterministic,
        functions=report_of(call.tensors) if "programs" in call.tensors else (),
    )


def _of_int8(arguments: dict) -> Explanation:
    """Makes the Explanation of a call with ``quantize="int8"``."""
    given = _int8.checked_call(arguments)
    form, _ = _dense.to_operator_form(given)
    call, cast = after_autocast(_int8.of_operator(form))
    q, k, v = (call.tensors[name] for name in ("query", "key", "value"))
    shape = HeadShape(q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype, q.dtype.itemsize, q.device.type)
    plan = _ops.plan_int8(call.tensors, call.options)
    copied = sum(t.nbytes for t in cast)
    return Explanation(
        call=describe("flash_attn", call, query="query", key="key", value="value") + ", quantize='int8'",
        forward=pass_report("forward", plan, shape, call.tensors["attn_mask"], copied_bytes=copied),
        backward=None,
        gradients=(),
        deterministic=True,
    )


def of_float8(function: str, given: Call, on_cache: Call) -> Explanation:
    """Makes the Explanation of a call with float8 tensors.

    ``on_cache``: the call of attention_cache that computes it.
    """
    described = describe(function, given, query="query", key="key", value="value")
    widened = on_cache.tensors["query"]
    return of_cache(described, _ops.plan_cache, on_cache, {"widened query": widened.nbytes})  # type: ignore[union-attr]


def of_cache(described: str, plan_of: Callable, call: Call, allocates: Mapping[str, int]) -> Explanation:
    """Makes the Explanation of a call of attention_cache.

    ``allocates``: bytes that are allocated before the operator.
    """
    q, k, v = (call.tensors[name] for name in ("query", "key", "value"))
    is_int4 = k.dtype == torch.uint8  # two columns in each byte
    itemsize, head_dim_v = (0.5, 2 * v.shape[3]) if is_int4 else (k.dtype.itemsize, v.shape[3])
    shape = HeadShape(q.shape[1], k.shape[2], q.shape[2], head_dim_v, q.dtype, itemsize, q.device.type)
    forward = pass_report("forward", plan_of(call.tensors, call.options), shape, call.tensors["tree_mask"])
    return Explanation(
        call=described,
        forward=replace(forward, allocates={**forward.allocates, **allocates}),
        backward=None,
        gradients=(),
        deterministic=True,
        functions=report_of(call.tensors, is_cache=True) if "programs" in call.tensors else (),
    )


class HeadShape(NamedTuple):
    """The sizes and dtypes that all parts of a call share."""

    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    key_itemsize: float  # bytes of an element of key and value; caches may have 8 or 4 bits
    device: str


def pass_report(
    which: str, plan, shape: HeadShape, mask: Tensor | None, dropout_p: float = 0.0, copied_bytes: int = 0
) -> Pass:
    """Returns the Pass of a plan. ``which``: "forward" or "backward"."""
    choice, allocates = plan.choice, dict(plan.bytes)
    allocates["copies"] += copied_bytes
    cost, tiles = _predict(which, plan, shape, mask, dropout_p)
    splits = [part.decode_splits for part in plan.parts]
    return Pass(
        kernel=choice.kernel or None,
        splits=max(splits, default=0),
        decoded=sum(n > 0 for n in splits),
        sequences=len(splits),
        why_not=tuple(choice.why_not),
        error=choice.refusal or None,
        allocates=allocates,
        flops=cost.flops,
        traffic=cost.bytes,
        tiles=tiles,
    )


def _predict(which: str, plan, shape: HeadShape, mask: Tensor | None, dropout_p: float) -> tuple[Cost, tuple[int, int]]:
    """Returns the cost of a pass, and the tiles in which it was counted."""
    if shape.device == "cpu":
        tiles = kernel_tiles()[which]
    else:
        widest = max(shape.head_dim, shape.head_dim_v)
        tiles = largest_blocks(which, widest, SHARED_BYTES // shape.dtype.itemsize)
    costs: dict[tuple[int, ...], Cost] = {}  # sequences of the same lengths cost the same
    total = Cost()
    for part in plan.parts:
        key = part.batch, part.seqlen_q, part.seqlen_k, part.decode_splits
        if key not in costs:
            costs[key] = _cost_of_part(which, part, shape, tiles, dropout_p)
        total += costs[key]
    decoded = [_decode_rows(part, shape) for part in plan.parts if part.decode_splits]
    if decoded and len(decoded) == len(plan.parts):
        tiles = max(decoded), tiles[1]
    if total.bytes and mask is not None:
        total += Cost(0, _bytes_in_memory(mask))
    return total, tiles


def _decode_rows(part, shape: HeadShape) -> int:
    """The number of rows in the decode kernel's tile: queries times the query heads that share a key head."""
    return part.seqlen_q * (shape.heads // shape.heads_kv)


def _cost_of_part(which: str, part, shape: HeadShape, tiles: tuple[int, int], dropout_p: float) -> Cost:
    S_q, S_k = part.seqlen_q, part.seqlen_k
    if 0 in (part.batch, shape.heads, S_q, S_k):
        return Cost()
    dtype = str(shape.dtype).removeprefix("torch.")
    problem = Problem(
        part.batch, shape.heads, S_q, shape.head_dim, dtype, dropout=dropout_p, S_k=S_k, D_v=shape.head_dim_v,
        key_itemsize=shape.key_itemsize,
    )  # fmt: skip
    if not part.decode_splits:
        return pass_cost(which, problem, tiles, part.visible_tiles(*tiles))
    visible = part.visible_tiles(S_q, tiles[1])
    problem = replace(problem, H=shape.heads_kv, S=_decode_rows(part, shape))
    return pass_cost(which, problem, (problem.S, tiles[1]), visible)


def _bytes_in_memory(t: Tensor) -> int:
    """Counts broadcast dimensions once."""
    elements = 1
    for size, stride in zip(t.shape, t.stride(), strict=True):
        elements *= size if stride else min(size, 1)
    return elements * t.element_size()


def _is_copy(t: Tensor | None, given: Tensor | None) -> bool:
    """Whether the operator's tensor is a copy of the caller's tensor."""
    return t is not given and t is not None and t.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()


def describe(function: str, call: Call, **names: str) -> str:
    """Describes a call in one line. ``names``: caller's name = schema's name, for each tensor in the line."""
    shapes = ", ".join(f"{name} {tuple(call.tensors[schema].shape)}" for name, schema in names.items())
    query = call.tensors["query"]
    return f"{function} of {shapes}, {str(query.dtype).removeprefix('torch.')} on {query.device}"


def _size(count: float) -> str:
    """Formats a number of bytes, such as 1.5 MiB."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
