"""Loads the compiled extension and names its operators. No other module uses torch.ops.flash_attn_ext."""

import importlib.machinery
import importlib.util
import mmap
from pathlib import Path
from typing import NamedTuple

import torch
from torch._ops import OpOverload

from . import _unbuilt

REBUILD = "build it again where its sources are: pip install --force-reinstall --no-deps ."


def torch_built_for() -> str | None:
    """Reads torch's version from the extension's file (csrc/built_for.cpp) without loading the file."""
    found = importlib.util.find_spec("._C", __package__)
    if found is None or not isinstance(found.loader, importlib.machinery.ExtensionFileLoader):
        return None
    with Path(found.origin).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        text = b"flash_attn_ext was built for torch "
        at = library.find(text)
        return None if at < 0 else library[at + len(text) : library.find(b"\0", at)].decode()


def minor(version: str) -> list[str]:
    return version.split(".")[:2]


if _unbuilt.is_unbuilt():
    raise ImportError(_unbuilt.message())
# With another minor version of torch, symbols are missing or have another meaning.
built_for = torch_built_for()
if built_for is not None and minor(built_for) != minor(torch.__version__):
    raise ImportError(
        f"flash_attn_ext was built for torch {built_for}, but torch {torch.__version__} is installed; {REBUILD}"
    )
try:
    from . import _C
except ImportError as error:
    built = f"It was built for torch {built_for}; " if built_for else ""
    raise ImportError(
        f"flash_attn_ext's compiled half cannot be loaded ({error}). {built}torch {torch.__version__} is installed. If "
        f"they differ, {REBUILD}"
    ) from error

attention = torch.ops.flash_attn_ext.attention.default
attention_backward = torch.ops.flash_attn_ext.attention_backward.default
attention_jvp = torch.ops.flash_attn_ext.attention_jvp.default
attention_double_backward = torch.ops.flash_attn_ext.attention_double_backward.default
attention_varlen = torch.ops.flash_attn_ext.attention_varlen.default
attention_varlen_backward = torch.ops.flash_attn_ext.attention_varlen_backward.default
attention_varlen_jvp = torch.ops.flash_attn_ext.attention_varlen_jvp.default
attention_varlen_double_backward = torch.ops.flash_attn_ext.attention_varlen_double_backward.default
attention_cache = torch.ops.flash_attn_ext.attention_cache.default
append_to_cache = torch.ops.flash_attn_ext.append_to_cache.default
attention_weights = torch.ops.flash_attn_ext.attention_weights.default
attention_weights_backward = torch.ops.flash_attn_ext.attention_weights_backward.default
attention_flex = torch.ops.flash_attn_ext.attention_flex.default
attention_flex_backward = torch.ops.flash_attn_ext.attention_flex_backward.default
attention_flex_jvp = torch.ops.flash_attn_ext.attention_flex_jvp.default
attention_flex_double_backward = torch.ops.flash_attn_ext.attention_flex_double_backward.default
attention_varlen_flex = torch.ops.flash_attn_ext.attention_varlen_flex.default
attention_varlen_flex_backward = torch.ops.flash_attn_ext.attention_varlen_flex_backward.default
attention_varlen_flex_jvp = torch.ops.flash_attn_ext.attention_varlen_flex_jvp.default
attention_varlen_flex_double_backward = torch.ops.flash_attn_ext.attention_varlen_flex_double_backward.default
attention_cache_flex = torch.ops.flash_attn_ext.attention_cache_flex.default
attention_indexed = torch.ops.flash_attn_ext.attention_indexed.default
attention_indexed_backward = torch.ops.flash_attn_ext.attention_indexed_backward.default
attention_int8 = torch.ops.flash_attn_ext.attention_int8.default
indexer_topk = torch.ops.flash_attn_ext.indexer_topk.default
indexer_scores = torch.ops.flash_attn_ext.indexer_scores.default
indexer_scores_backward = torch.ops.flash_attn_ext.indexer_scores_backward.default
indexer_loss = torch.ops.flash_attn_ext.indexer_loss.default
indexer_loss_backward = torch.ops.flash_attn_ext.indexer_loss_backward.default
program_operations = _C.program_operations
attention_merge_ = torch.ops.flash_attn_ext.attention_merge_.default
dropout_mask = torch.ops.flash_attn_ext.dropout_mask.default

# Functions that are not operators (csrc/ops/keys/eager.h).
# Arguments: the positional arguments of flash_attn, and a dictionary of its keyword arguments.
flash_attn_if_ordinary = _C.flash_attn_if_ordinary
# Arguments: enable_gqa, return_lse, and the tensors and options of the operator in its schema's order.
attention_if_ordinary = _C.attention_if_ordinary
flex_if_ordinary = _C.flex_if_ordinary
varlen_if_ordinary = _C.varlen_if_ordinary
# Arguments: a list of tensors, the positions of captured floats and ints, and the dtype of the accumulators.
captured_rows_if_ordinary = _C.captured_rows_if_ordinary
# Calls on caches, CPU only. If a call is not ordinary, they write nothing and return None.
kvcache_if_ordinary = _C.kvcache_if_ordinary
write_cache_if_ordinary = _C.write_cache_if_ordinary
read_cache_if_ordinary = _C.read_cache_if_ordinary
plan_attention = _C.plan_attention
plan_attention_backward = _C.plan_attention_backward
plan_int8 = _C.plan_int8
plan_varlen = _C.plan_varlen
plan_varlen_backward = _C.plan_varlen_backward
plan_cache = _C.plan_cache
plan_flex = _C.plan_flex
plan_flex_backward = _C.plan_flex_backward
plan_varlen_flex = _C.plan_varlen_flex
plan_varlen_flex_backward = _C.plan_varlen_flex_backward
plan_cache_flex = _C.plan_cache_flex
check_append = _C.check_append
check_cache = _C.check_cache
check_cache_flex = _C.check_cache_flex

activate = _C.activate
deactivate = _C.deactivate
is_active = _C.is_active
activation_counts = _C.activation_counts
why_not_sdpa = _C.why_not_sdpa
reset_activation_counts = _C.reset_activation_counts


class TensorRow(NamedTuple):
    """The row of a tensor in csrc/ops/dense/attention.h, with its treatment by autocast and vmap."""

    name: str
    autocast: str
    vmap: str


def rows_of(operator: OpOverload) -> tuple[TensorRow, ...]:
    """The rows of an operator's tensors, in the order of its schema."""
    return tuple(TensorRow(*row) for row in _C.tensor_rows[operator.overloadpacket.__name__])


class Operator(NamedTuple):
    """An operator, its schema and its derivatives."""

    function: str  # the public function, for error messages
    forward: OpOverload
    rows: tuple[TensorRow, ...]
    tensor_names: tuple[str, ...]
    option_types: dict[str, str]  # "float", "int" or "bool", with "?" if None is allowed
    option_defaults: dict[str, object]
    backward: OpOverload | None = None
    jvp: OpOverload | None = None
    double_backward: OpOverload | None = None

    @property
    def gradients(self) -> int:
        """The number of tensors with a gradient. They are first in the schema, and in the results of the backward."""
        return 0 if self.backward is None else len(self.backward._schema.returns)


def _operator(function: str, forward: OpOverload, *derivatives: OpOverload) -> Operator:
    options = [argument for argument in forward._schema.arguments if argument.kwarg_only]
    types = {a.name: str(a.type).replace("Optional[", "").replace("]", "?").replace("SymInt", "int") for a in options}
    defaults = {a.name: a.default_value for a in options}
    rows = rows_of(forward)
    return Operator(function, forward, rows, tuple(row.name for row in rows), types, defaults, *derivatives)


DENSE = _operator(
    "flash_attn", attention, attention_backward, attention_jvp, attention_double_backward
)  # fmt: skip
VARLEN = _operator(
    "flash_attn_varlen", attention_varlen, attention_varlen_backward, attention_varlen_jvp,
    attention_varlen_double_backward,
)  # fmt: skip
INT8 = _operator("flash_attn", attention_int8)
CACHE = _operator("flash_attn_with_kvcache", attention_cache)
# The operators of calls with functions of the user.
FLEX = _operator(
    "flex_attention", attention_flex, attention_flex_backward, attention_flex_jvp, attention_flex_double_backward
)  # fmt: skip
VARLEN_FLEX = _operator(
    "flash_attn_varlen", attention_varlen_flex, attention_varlen_flex_backward, attention_varlen_flex_jvp,
    attention_varlen_flex_double_backward,
)  # fmt: skip
CACHE_FLEX = _operator("flash_attn_with_kvcache", attention_cache_flex)
APPEND = _operator("flash_attn_with_kvcache", append_to_cache)
# The tensors of DENSE and VARLEN that have a gradient, in the order of the schemas.
DIFFERENTIABLE = _C.differentiable

# A wrong FLASH_ATTN_EXT_ISA or FLASH_ATTN_EXT_CUDA_TIER raises an error now, at import, not later in a training run.
_C.active_kernel()
_C.forced_cuda_tier()
