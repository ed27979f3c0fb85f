"""The call object: the tensors and options of one call, by name.

The public functions make a Call. Eager mode, DTensors, torch.func, packed sequences, explain and context parallelism
receive it. A new option of the operator needs no line in this file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from . import _ops
from ._dropout import new_rng_state
from ._options import checked_options, operator_options
from ._tensor_checks import check_is_dense

# Arguments of flash_attn that are neither tensors nor options. flash_attn_ext.flex has their operator.
FUNCTIONS = ("score_mod", "mask_mod", "block_mask")
# Arguments of attention by index. _indexed.py has their operator.
INDICES = ("key_indices", "key_block_indices")
# Arguments of float8 calls. _float8.py has their calls.
DESCALES = ("q_descale", "k_descale", "v_descale")
OF_FLOAT8 = (*DESCALES, "out_dtype")
# The argument of calls with rounded operands. _int8.py has their calls.
QUANTIZE = "quantize"


def take(arguments: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Removes and returns the named arguments.

    As a comprehension in a caller that uses locals(), it would break torch.compile.
    """
    return {name: arguments.pop(name) for name in names}


@dataclass(slots=True)
class Call:
    """A call of ``operator``. Tensors and options have the names of its schema."""

    operator: _ops.Operator
    tensors: dict[str, Tensor | None]  # all tensors of the schema
    options: dict[str, object]  # checked; a missing option has the schema's default
    enable_gqa: bool = False
    return_lse: bool = False

    @classmethod
    def from_arguments(
        cls, operator: _ops.Operator, *, enable_gqa: bool = False, return_lse: bool = False, **arguments
    ) -> Call:
        """Sorts the arguments of :func:`flash_attn` or :func:`flash_attn_varlen` into tensors and options."""
        for name in (*FUNCTIONS, *INDICES, *OF_FLOAT8, QUANTIZE):
            if arguments.pop(name, None) is not None:
                raise NotImplementedError(
                    f"{name}: got one; allowed here: none, and flash_attn of dense tensors takes it"
                )
        arguments.pop("key_block_size", None)
        tensors = {name: arguments.pop(name) for name in operator.tensor_names}
        options = operator_options(alibi_slopes=tensors["alibi_slopes"], **arguments)
        return cls(operator, tensors, checked_options(operator.option_types, options), enable_gqa, return_lse)

    def needs_rng_state(self) -> bool:
        """Whether dropout is on and the caller passed no state."""
        return self.options["dropout_p"] > 0.0 and self.tensors["rng_state"] is None  # type: ignore[operator]

    def with_rng_state(self) -> Call:
        """Returns the call with a dropout state. Draws a state if the call needs one."""
        if not self.needs_rng_state():
            return self
        query = self.tensors["query"]
        check_is_dense("query", query)
        return self.with_tensors(rng_state=new_rng_state(query.device))

    def with_tensors(self, **tensors: Tensor | None) -> Call:
        return Call(self.operator, self.tensors | tensors, self.options, self.enable_gqa, self.return_lse)

    def with_options(self, **options: object) -> Call:
        return Call(self.operator, self.tensors, self.options | options, self.enable_gqa, self.return_lse)

    def positional(self) -> list[Tensor | None]:
        """Returns the tensors in the order of the schema."""
        return [self.tensors[name] for name in self.operator.tensor_names]

    def run(self):
        """Runs the operator."""
        return self.operator.forward(*self.positional(), **self.options)
