"""Attention over several processes, on torch.distributed: sequences that are sharded over a process group.

``import flash_attn_ext.distributed`` is what makes it known; the package itself does not import it.
"""

from .._attend import ON_DTENSORS
from . import _dtensor, _dtensor_packed, _placements  # noqa: F401  _placements registers what the operators do with DTensors
from .attention import context_parallel_attn
from .sdpa import context_parallel_sdpa
from .sharding import shard_sequence, unshard_sequence
from .tensor_parallel import HeadParallel

__all__ = ["HeadParallel", "context_parallel_attn", "context_parallel_sdpa", "shard_sequence", "unshard_sequence"]

ON_DTENSORS.update(
    flash_attn=_dtensor.attend,
    flash_attn_varlen=_dtensor_packed.attend,
    flash_attn_with_kvcache=_dtensor_packed.attend_to_cache,
)
