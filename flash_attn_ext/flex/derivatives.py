"""Forward mode and double backward of attention with functions of the user or by index, composed of torch's operators.

There are no kernels for these derivatives. torch's operators compute a block of queries of one batch densely, and torch
differentiates the block. Then the memory of the block is freed, so memory is linear in the sequence lengths.

docs/derivative_formulas.md has the formulas: J is the derivative of the backward with respect to the cotangents, and H
is the gradient of <backward, tangents>.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from . import evaluate

_DIFFERENTIABLE = ("query", "key", "value", "attn_mask", "alibi_slopes", "sink", "captured")
_ELEMENTS = 1 << 19  # the largest number of scores in a block
_AUTOGRAD_KEYS = (
    torch._C.DispatchKey.AutogradCPU, torch._C.DispatchKey.AutogradOther, torch._C.DispatchKey.AutogradFunctionality,
    torch._C.DispatchKey.ADInplaceOrView,
)  # fmt: skip

_Tensors = dict[str, Any]  # by the names of the schema; None: no tensor


class _Block(NamedTuple):
    """A block: some queries of one batch or packed sequence, and views of the tensors that these queries read."""

    batch: int
    first: int  # query
    rows: slice  # of out and query
    queries: int
    cut: Callable[[str, Tensor], Tensor]  # (name, tensor): the part that the block reads
    diagonal: int


def _blocks(x: _Tensors, options: dict[str, Any]) -> Iterator[_Block]:
    packed = x.get("cu_seqlens_q") is not None
    heads = x["query"].shape[1]
    if packed:
        q_ends, k_ends = x["cu_seqlens_q"].tolist(), x["cu_seqlens_k"].tolist()
        used_q, used_k = (None if x[name] is None else x[name].tolist() for name in ("seqused_q", "seqused_k"))
    for b in range(len(q_ends) - 1 if packed else x["query"].shape[0]):
        if packed:
            q0, k0 = q_ends[b], k_ends[b]
            q_len = used_q[b] if used_q else q_ends[b + 1] - q0
            k_len = used_k[b] if used_k else k_ends[b + 1] - k0
        else:
            q0, k0, q_len, k_len = 0, 0, x["query"].shape[2], x["key"].shape[2]
        diagonal = options["diagonal"] + (k_len - q_len if options["lower_right"] else 0)
        step = max(1, _ELEMENTS // max(1, heads * k_len))
        for i in range(0, q_len, step):
            queries = min(step, q_len - i)
            cut = _cutter(b, i, slice(q0 + i, q0 + i + queries), slice(k0, k0 + k_len), packed)
            yield _Block(b, i, slice(q0 + i, q0 + i + queries), queries, cut, diagonal)


def _cutter(b: int, first: int, rows: slice, keys: slice, packed: bool) -> Callable[[str, Tensor], Tensor]:
    """Returns the function that cuts a tensor to the block.

    Its results are views: (H, queries or keys, D), (H, queries), ...
    """
    own_rows = slice(first, first + rows.stop - rows.start)  # from the start of the sequence
    count = keys.stop - keys.start

    def cut(name: str, t: Tensor) -> Tensor:
        name = name.removeprefix("tangent_").removeprefix("grad_")
        if name == "captured":
            return t
        if name in ("query", "out"):
            return t[rows].transpose(0, 1) if packed else t[b, :, rows]
        if name in ("key", "value"):
            return t[keys].transpose(0, 1) if packed else t[b, :, keys]
        if name == "lse":
            return t[:, rows] if packed else t[b, :, rows]
        if name in ("alibi_slopes", "sink"):
            return t if t.dim() == 1 else t[b]
        if name == "key_mask":
            return t[b]
        if name == "key_indices":
            return t[b if t.shape[0] > 1 else 0, :, rows]
        assert name == "attn_mask"
        by_row = t.dim() == 3
        t = t if by_row else t[b if t.shape[0] > 1 else 0]
        if t.shape[1] > 1:
            t = t[:, rows if by_row else own_rows]
        return t[..., :count] if t.shape[2] > 1 else t

    return cut


def _attend(
    block: _Block, x: _Tensors, options: dict[str, Any], programs: list[list[int] | None], keep: Tensor | None
) -> tuple:
    """Returns (out, lse) of a block, (H, queries, D_v) and (H, queries), in the dtype of the leaves ``x``.

    ``keep`` has the factors of dropout, (H, queries, keys).
    """
    query, key, value = x["query"], x["key"], x["value"]
    group = query.shape[0] // key.shape[0]
    key, value = (t.repeat_interleave(group, 0) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
    scores = query @ key.transpose(-1, -2) * scale
    if options["softcap"]:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    i = torch.arange(block.first, block.first + block.queries, device=query.device)[:, None]
    j = torch.arange(key.shape[1], device=query.device)
    ahead = j - (i + block.diagonal)
    if x["alibi_slopes"] is not None:
        scores = scores - x["alibi_slopes"][:, None, None] * ahead.abs()
    head = torch.arange(query.shape[0], device=query.device)[:, None, None]
    tile = evaluate.Tile(scores, block.batch, head, i, j, x["captured"], x["captured_ints"])
    score_program, _, _, mask_program = programs
    if score_program is not None:
        scores = evaluate.run(score_program, tile).expand_as(scores)
    visible = torch.ones_like(scores, dtype=torch.bool)
    for name in ("attn_mask", "key_mask"):
        mask = x.get(name)
        if mask is not None and mask.dtype == torch.bool:
            visible = visible & mask
        elif mask is not None:
            scores = scores + mask
    visible = visible & _shown(block, x, options, mask_program, tile) & _named(x, options, scores.shape)
    if chunk := options["attention_chunk"]:
        first = options["first_key"]
        same = (i + block.diagonal + first).div(chunk, rounding_mode="floor") == (j + first) // chunk
        visible = visible & same
    left, right = options["window_left"], options["window_right"]
    right = min(0, 0 if right is None else right) if options["causal"] else right
    if left is not None:
        visible = visible & (ahead >= -left)
    if right is not None:
        visible = visible & (ahead <= right)
    scores = scores.masked_fill(~visible | scores.isneginf(), -torch.inf)
    return _softmax_times(scores, value, x["sink"], keep)


def _shown(block: _Block, x: _Tensors, options: dict[str, Any], program: list[int] | None, tile: Any) -> Tensor:
    """Returns a bool for each score: visible by the block mask and the mask function."""
    shown = torch.tensor(True, device=tile.score.device) if program is None else evaluate.run(program, tile)
    states = x.get("block_states")
    if states is None:
        return shown
    states = states[block.batch if states.shape[0] > 1 else 0]
    rows = (tile.query[:, 0] // options["block_size_q"]).clamp(max=states.shape[1] - 1)
    columns = (tile.key // options["block_size_k"]).clamp(max=states.shape[2] - 1)
    states = states[:, rows][:, :, columns]
    return (states == 2) | ((states == 1) & shown)


def _named(x: _Tensors, options: dict[str, Any], shape: torch.Size) -> Tensor:
    """Returns a bool for each score, (H, queries, keys): the query lists the key."""
    numbers = x.get("key_indices")
    if numbers is None:
        return torch.ones((), dtype=torch.bool, device=x["query"].device)
    size, keys = max(options["key_block_size"], 1), shape[2]
    blocks = -(-keys // size)
    seen = torch.zeros(*numbers.shape[:2], blocks + 1, dtype=torch.bool, device=numbers.device)
    seen.scatter_(2, numbers.long() % (blocks + 1), True)  # -1 is the last column
    seen = seen[..., :blocks].repeat_interleave(size, 2)[..., :keys]
    return seen.repeat_interleave(shape[0] // len(seen), 0)


def _softmax_times(scores: Tensor, value: Tensor, sink: Tensor | None, keep: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)  # so that a row without keys has one
    value = torch.nn.functional.pad(value, (0, 0, 0, 1))
    highest = scores.detach().amax(-1)
    if sink is not None:
        highest = torch.maximum(highest, sink.detach()[:, None])
    highest = highest.masked_fill(highest.isneginf(), 0.0)
    weights = torch.exp(scores - highest[..., None])
    total = weights.sum(-1)
    if sink is not None:
        total = total + torch.exp(sink[:, None] - highest)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, highest + torch.log(total))
    if keep is not None:
        weights = weights * torch.nn.functional.pad(keep, (0, 1))
    return (weights @ value) / total[..., None], lse


def _kept(block: _Block, x: _Tensors, options: dict[str, Any], keys: int, dtype: torch.dtype) -> Tensor | None:
    """Returns the factors of dropout, (H, queries, keys). The block is a part of a larger call (core/params.h)."""
    dropout_p = options["dropout_p"]
    if dropout_p == 0.0:
        return None
    heads = x["query"].shape[1]
    seed, offset, *place = x["rng_state"].tolist()
    scale = 1.0 / (1.0 - dropout_p) if dropout_p < 1.0 else 0.0
    # attention by index of packed sequences: one place for each row
    if (places := x.get("dropout_places")) is not None:
        parts = []
        for i, (row, *column_and_heads) in enumerate(
            places[block.first : block.first + block.queries].tolist(), block.first
        ):
            part = x["rng_state"].new_tensor([seed, offset, row + i, *column_and_heads])
            parts.append(torch.ops.flash_attn_ext.dropout_mask(part, 1, heads, 1, keys, dropout_p)[0])
        return torch.cat(parts, 1).to(dtype) * scale
    row, column, head, heads_of_call = place or (0, 0, 0, heads)
    part = [seed, offset, row + block.first, column, block.batch * heads_of_call + head, heads_of_call]
    kept = torch.ops.flash_attn_ext.dropout_mask(
        x["rng_state"].new_tensor(part), 1, heads, block.queries, keys, dropout_p
    )[0]
    return kept.to(dtype) * scale


@contextlib.contextmanager
def _differentiation() -> Iterator[None]:
    """Enables autograd inside a kernel, where torch has disabled it."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded), torch.enable_grad():
        yield


def _programs_of(x: _Tensors) -> list[list[int] | None]:
    if x.get("programs") is None:
        return [None] * 4
    words = x["programs"].tolist()
    return [None if first < 0 else words[first:] for first in words[:4]]


class _Derivative:
    """The derivatives of a call, block by block. ``x`` has all tensors of the schema."""

    def __init__(self, x: _Tensors, options: dict[str, Any]) -> None:
        self.x, self.options, self.programs = x, options, _programs_of(x)
        self.dtype = torch.float64 if x["query"].dtype == torch.float64 else torch.float32

    def leaf_of(self, block: _Block, name: str) -> Tensor | None:
        t = self.x.get(name)
        if t is None or name in ("captured_ints", "block_states", "programs"):
            return t
        t = block.cut(name, t).detach()
        if not t.is_floating_point():
            return t
        return t.to(self.dtype).requires_grad_(name in _DIFFERENTIABLE)

    def kept(self, block: _Block) -> Tensor | None:
        return _kept(block, self.x, self.options, block.cut("key", self.x["key"]).shape[1], self.dtype)

    def gradient_times_tangents(
        self, block: _Block, cotangents: tuple[Tensor | None, ...], keep: Tensor | None
    ) -> tuple:
        """Returns (<B(X, c), t>, leaves by name) of one block."""
        names = (*_DIFFERENTIABLE, "key_mask", "key_indices", "captured_ints", "block_states")
        leaves = {name: self.leaf_of(block, name) for name in names}
        results = _attend(block, leaves, self.options, self.programs, keep)
        differentiable = {name: t for name in _DIFFERENTIABLE if (t := leaves[name]) is not None and t.requires_grad}
        products = [(r * c).sum() for r, c in zip(results, cotangents, strict=True) if c is not None]
        first = torch.autograd.grad(sum(products), list(differentiable.values()), create_graph=True, allow_unused=True)
        total = torch.zeros((), dtype=self.dtype, device=self.x["query"].device)
        for name, g in zip(differentiable, first, strict=True):
            tangent = self.x.get(f"tangent_{name}")
            if tangent is not None and g is not None:
                total = total + (g * block.cut(name, tangent).to(self.dtype)).sum()
        return total, differentiable, results

    def jvp(self, result: tuple[Tensor, ...]) -> None:
        """Fills (out, lse, tangent_out, tangent_lse)."""
        for t, value in zip(result, (0.0, -torch.inf, 0.0, 0.0), strict=True):
            t.fill_(value)
        for block in _blocks(self.x, self.options):
            out, lse = (block.cut(name, t) for name, t in zip(("out", "lse"), result, strict=False))
            keep = self.kept(block)
            with _differentiation():
                cotangents = tuple(
                    torch.zeros(t.shape, dtype=self.dtype, device=t.device, requires_grad=True) for t in (out, lse)
                )
                total, _, computed = self.gradient_times_tangents(block, cotangents, keep)
                tangents: tuple[Tensor | None, ...] = (None, None)
                if total.requires_grad:
                    tangents = torch.autograd.grad(total, cotangents, allow_unused=True)
            out.copy_(computed[0].detach())
            lse.copy_(computed[1].detach())
            for name, t, tangent in zip(("out", "lse"), result[2:], tangents, strict=True):
                if tangent is not None:
                    block.cut(name, t).copy_(tangent)

    def double_backward(self, wanted: list[bool]) -> tuple[Tensor | None, ...]:
        names = _DIFFERENTIABLE[: len(wanted)]  # without functions no tensors are captured
        sums = {
            name: torch.zeros(self.x[name].shape, dtype=self.dtype, device=self.x[name].device)
            for name, want in zip(names, wanted, strict=True)
            if want
        }
        for block in _blocks(self.x, self.options):
            keep = self.kept(block)
            with _differentiation():
                cotangents = tuple(
                    None if self.x[name] is None else block.cut(name, self.x[name]).to(self.dtype)
                    for name in ("grad_out", "grad_lse")
                )
                total, leaves, _ = self.gradient_times_tangents(block, cotangents, keep)
                if not total.requires_grad:
                    continue
                gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
            for name, g in zip(leaves, gradients, strict=True):
                if g is not None and name in sums:
                    block.cut(name, sums[name]).add_(g)
        return tuple(sums[name].to(self.x[name].dtype) if name in sums else None for name in names)


def _register() -> torch.library.Library:
    library = torch.library.Library("flash_attn_ext", "IMPL")

    def register(operator: Any) -> None:
        names = [argument.name for argument in operator._schema.arguments]
        defaults = {a.name: a.default_value for a in operator._schema.arguments if a.has_default_value()}

        def derivative_of(args: tuple, kwargs: dict[str, Any]) -> tuple[_Derivative, dict[str, Any]]:
            given = defaults | dict(zip(names, args, strict=False)) | kwargs
            return _Derivative(given, given), given

        def jvp(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
            derivative, given = derivative_of(args, kwargs)
            with torch._C._DisableTorchDispatch():
                meta = operator(*_on_meta(args), **_on_meta(kwargs))
            result = tuple(torch.empty(t.shape, dtype=t.dtype, device=given["query"].device) for t in meta)
            derivative.jvp(result)
            return result

        def double_backward(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
            derivative, given = derivative_of(args, kwargs)
            return derivative.double_backward(list(given["grad_mask"]))

        is_jvp = operator._schema.name.endswith("jvp")
        library.impl(operator, jvp if is_jvp else double_backward, "CPU")

        def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            got = "forward mode" if is_jvp else "a second derivative"
            got += " with key_indices" if "indexed" in operator._schema.name else " with score_mod or mask_mod"
            raise NotImplementedError(f"query: got {got} on CUDA; allowed on CUDA: the first gradients")

        library.impl(operator, refuse, "CUDA")

    operators = torch.ops.flash_attn_ext
    for kind in ("jvp", "double_backward"):
        for family in ("flex", "varlen_flex", "indexed"):
            register(getattr(operators, f"attention_{family}_{kind}").default)
    return library


def _on_meta(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.to("meta")
    if isinstance(x, tuple):
        return tuple(_on_meta(item) for item in x)
    return {name: _on_meta(item) for name, item in x.items()} if isinstance(x, dict) else x


_library = _register()
