"""A call on packed sequences or jagged tensors: checks its tensors and runs the operator."""

import torch
from torch import Tensor

from . import _functorch, _ops
from ._call import Call
from ._tensor_checks import check_are_dense, check_heads

REQUIRED = ("query", "key", "value", "cu_seqlens_q", "cu_seqlens_k")


def attend(call: Call) -> tuple[Tensor, Tensor]:
    """Returns (out, lse): (T_q, H, D_v) and (H, T_q)."""
    return _functorch.run(to_operator_form(call))


def to_operator_form(call: Call) -> Call:
    """Returns the call with the tensors of the schema."""
    check_are_dense(call.tensors, REQUIRED)
    query, key, mask = (call.tensors[name] for name in ("query", "key", "attn_mask"))
    if key.dim() == 3 == query.dim():
        check_heads(query.shape[1], key.shape[1], call.enable_gqa)
    return call if mask is None or mask.dim() != 2 else call.with_tensors(attn_mask=mask[None])


def attend_jagged(call: Call) -> tuple[Tensor, Tensor | None]:
    """Returns (out, lse) of a call with jagged tensors (B, H, j, D). lse is None if the call does not return it."""
    if call.tensors["key_mask"] is not None:
        raise ValueError(
            "key_mask: got a tensor with nested query, key, value; allowed: None. Leave keys out of the sequences"
        )
    packed: dict[str, Tensor | None] = dict.fromkeys(_ops.VARLEN.tensor_names)
    offsets = []
    for name in ("query", "key", "value"):
        packed[name], t_offsets = _rows_and_offsets(name, call.tensors[name])
        offsets.append(t_offsets)
    packed["cu_seqlens_q"], packed["cu_seqlens_k"] = offsets[:2]
    _check_same_lengths(*offsets[1:])
    packed |= {name: call.tensors[name] for name in ("attn_mask", "alibi_slopes", "sink", "rng_state")}
    longest = [int(t.diff().max()) if len(t) > 1 and t.is_cpu else None for t in offsets[:2]]
    options = call.options | {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
    out, lse = attend(Call(_ops.VARLEN, packed, options, call.enable_gqa))
    out = torch.nested.nested_tensor_from_jagged(out, offsets[0]).transpose(1, 2)
    if not call.return_lse:
        return out, None
    return out, torch.nested.nested_tensor_from_jagged(lse.T.contiguous(), offsets[0]).transpose(1, 2)


def _check_same_lengths(of_key: Tensor, of_value: Tensor) -> None:
    if of_key is of_value or of_key.is_meta:
        return
    lengths_k, lengths_v = of_key.diff().tolist(), of_value.diff().tolist()
    if lengths_k != lengths_v:
        raise ValueError(f"value: got sequence lengths {lengths_v}; allowed: key's, {lengths_k}")


def _rows_and_offsets(name: str, t: object) -> tuple[Tensor, Tensor]:
    """Returns the packed rows of a jagged tensor, (T, H, D), and the offsets of the sequences."""
    if getattr(t, "layout", None) is not torch.jagged or t.dim() != 4 or t._ragged_idx not in (1, 2):
        kind = f"a tensor of shape {list(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
        raise ValueError(f"{name}: got {kind}; allowed with nested tensors: jagged ones, (batch, heads, j, head_dim)")
    t = t.transpose(1, 2)  # (B, j, H, D): rows first
    if t._ragged_idx != 1 or t.lengths() is not None:
        raise ValueError(f"{name}: got a jagged tensor with holes, or ragged heads; allowed: rows one after another")
    return t.values(), t.offsets()
