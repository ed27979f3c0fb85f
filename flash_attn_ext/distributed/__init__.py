"""Attention over several processes, by torch.distributed. The sequence is sharded over a process group.

Import it by ``import flash_attn_ext.distributed``. ``import flash_attn_ext`` alone does not import it.
"""

from . import _dtensor, _dtensor_packed, _placements  # noqa: F401  _placements registers the operators for DTensors
from .attention import context_parallel_attn
from .sdpa import context_parallel_sdpa
from .sharding import shard_sequence, unshard_sequence
from .tensor_parallel import HeadParallel

__all__ = ["HeadParallel", "context_parallel_attn", "context_parallel_sdpa", "shard_sequence", "unshard_sequence"]

# The functions for calls with DTensors, by the name of the public function: flash_attn_ext/_attend.py.
ON_DTENSORS = {
    "flash_attn": _dtensor.attend,
    "flash_attn_varlen": _dtensor_packed.attend,
    "flash_attn_with_kvcache": _dtensor_packed.attend_to_cache,
}
