"""context_parallel_sdpa: runs torch's scaled_dot_product_attention as context_parallel_attn, in a block of code."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ._group import resolve_group
from .attention import context_parallel_attn


@contextmanager
def context_parallel_sdpa(
    *,
    group: dist.ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    method: str | None = None,
    balanced: bool | None = None,
) -> Iterator[None]:
    """In this block ``torch.nn.functional.scaled_dot_product_attention`` is :func:`context_parallel_attn`.

    For models without code for context parallelism. torch's experimental context shards tensors in place, but has no
    attention on CPU (torch 2.13). Use both together::

        with context_parallel(mesh, buffers=[x, labels], buffer_seq_dims=[1, 1]), context_parallel_sdpa(mesh=mesh):
            loss = loss_function(model(x), labels)

    Either block may be the outer one. Without torch's block, use :func:`shard_sequence`. The backward may run inside or
    outside of the block. Like torch's context, this block replaces an attribute of torch.nn.functional, in all threads.
    Some functions still attend only to this process's rows. They are a function that was imported by name before the
    block, :func:`flash_attn`, torch's fused inference path, and attention weights (``need_weights=True``). Blocks must
    end in the reverse order of their starts.

    Args:
        group, mesh, method: as for :func:`context_parallel_attn`. A mask of a call has the rows of this process and all
            keys.
        balanced: as for :func:`context_parallel_attn`. None: as torch's context: balanced if this process has an even
            number of rows. The number of processes must divide the length.

    Raises:
        ValueError, TypeError: in the block, as :func:`context_parallel_attn`, and for DTensors that are not Shard(2).
    """
    resolve_group(group, mesh)  # raises before the block starts
    original = F.scaled_dot_product_attention

    def scaled_dot_product_attention(query: Tensor, key: Tensor, value: Tensor, attn_mask=None, *positional, **options):
        tensors = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
        local = [_local(name, t) for name, t in tensors.items()]
        options["balanced"] = balanced if balanced is not None else query.dim() == 4 and local[0].shape[2] % 2 == 0
        out = context_parallel_attn(*local, *positional, group=group, mesh=mesh, method=method, **options)
        return DTensor.from_local(out, query.device_mesh, [Shard(2)]) if isinstance(query, DTensor) else out

    F.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def _local(name: str, t: Tensor | None) -> Tensor | None:
    """Returns this process's rows. torch's context, if it is the inner block, passes DTensors."""
    if not isinstance(t, DTensor):
        return t
    if t.placements != (Shard(2),):
        raise ValueError(f"{name}: got placements {t.placements}; allowed: (Shard(2),), or an ordinary tensor")
    return t.to_local()
