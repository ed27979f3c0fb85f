"""How the processes of a mesh share a call with DTensors: each process computes its batches, heads or rows."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .._dropout import new_rng_state
from ._exchange import broadcast_first
from ._sharded_call import rng_state_at

BATCH, HEADS, SEQUENCE = "batch", "heads", "sequence"


class Work(NamedTuple):
    """For each dimension of the mesh: the kind of work that its processes share, BATCH, HEADS or SEQUENCE.

    None: all processes of this mesh dimension compute the same. ``dims``: the dimensions of a tensor, such as
    ``{BATCH: 0, HEADS: 1}``.
    """

    mesh: DeviceMesh
    shared: tuple[str | None, ...]

    def mesh_dims(self, kind: str) -> list[int]:
        """Returns the dimensions of the mesh that share ``kind``."""
        return [n for n, shared in enumerate(self.shared) if shared == kind]

    def num_parts(self, kind: str) -> int:
        return math.prod([self.mesh.size(n) for n in self.mesh_dims(kind)])

    def placements(self, dims: Mapping[str, int]) -> list[Placement]:
        """Returns the placements of a tensor. If the tensor lacks the shared dimension, it is replicated."""
        return [Shard(dims[kind]) if kind in dims else Replicate() for kind in self.shared]

    def placements_of_gradient(self, dims: Mapping[str, int]) -> list[Placement]:
        """Returns the placements of a tensor's gradient.

        If the tensor is replicated, its gradients are partial sums.
        """
        return [
            Partial() if kind is not None and kind not in dims else placement
            for kind, placement in zip(self.shared, self.placements(dims), strict=True)
        ]

    def local(self, t: Tensor, dims: Mapping[str, int]) -> Tensor:
        """Returns this process's part of a tensor. The gradient is summed over the processes with the same part."""
        if not isinstance(t, DTensor):
            t = DTensor.from_local(t, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        wanted = self.placements(dims)
        return t.redistribute(self.mesh, wanted).to_local(grad_placements=self.placements_of_gradient(dims))

    def local_if_given(self, t: Tensor | None, dims: Mapping[str, int]) -> Tensor | None:
        return None if t is None else self.local(t, dims)

    def local_per_head(self, t: Tensor | None) -> Tensor | None:
        """Returns this process's part of a tensor (H) or (B, H)."""
        if t is None:
            return None
        return self.local(t, {HEADS: 0} if t.dim() == 1 else {BATCH: 0, HEADS: 1})

    def assemble(self, t: Tensor, dims: Mapping[str, int], shape: tuple[int, ...]) -> DTensor:
        """Returns the DTensor of ``shape`` from this process's part ``t``."""
        return self._dtensor(t, self.placements(dims), shape)

    def assemble_gradient(self, t: Tensor, dims: Mapping[str, int], shape: tuple[int, ...]) -> DTensor:
        """Returns the DTensor of a gradient from this process's part ``t``."""
        return self._dtensor(t, self.placements_of_gradient(dims), shape)

    def _dtensor(self, t: Tensor, placements: list[Placement], shape: tuple[int, ...]) -> DTensor:
        stride = 1
        strides: list[int] = []
        for size in reversed(shape):
            strides.insert(0, stride)
            stride *= max(size, 1)
        return DTensor.from_local(
            t, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
        )

    def first_index(self, kind: str, size: int) -> int:
        """Returns the number of this process's first batch or head, out of ``size``."""
        first, coordinate = 0, self.mesh.get_coordinate()
        assert coordinate is not None
        for n in self.mesh_dims(kind):  # torch.chunk cuts for one mesh dimension after the other
            chunk = math.ceil(size / self.mesh.size(n))
            begin = min(coordinate[n] * chunk, size)
            first, size = first + begin, max(min(chunk, size - begin), 0)
        return first

    def rng_state(self, rng_state: Tensor | None, batch: int, heads: int, device: torch.device) -> Tensor:
        """Returns a dropout state for this process's part. It drops the same elements as a call on one process."""
        if isinstance(rng_state, DTensor):
            rng_state = rng_state.full_tensor()
        elif rng_state is None:
            rng_state = new_rng_state(device)
        for n in range(self.mesh.ndim):  # uses the state of the mesh's first process
            rng_state = broadcast_first(rng_state, self.mesh.get_group(n).group_name)
        if not (self.mesh_dims(BATCH) or self.mesh_dims(HEADS)):
            return rng_state
        head = self.first_index(BATCH, batch) * heads + self.first_index(HEADS, heads)
        return rng_state_at(rng_state, 0, 0, head, heads)


def mesh_of(tensors: Mapping[str, Tensor]) -> DeviceMesh:
    """Returns the mesh of some tensors. All of them must be DTensors on the same mesh."""
    names = list(tensors)
    for name, t in tensors.items():
        if not isinstance(t, DTensor):
            allowed = f"{', '.join(names[:-1])} and {names[-1]} as DTensors"
            raise TypeError(f"{name}: got a {type(t).__name__} together with DTensors; allowed: {allowed}")
    meshes = [t.device_mesh for t in tensors.values() if isinstance(t, DTensor)]
    if any(mesh != meshes[0] for mesh in meshes):
        raise ValueError(f"{', '.join(names[1:])}: got a mesh other than {names[0]}'s; allowed: the same")
    return meshes[0]


def check_heads(name: str, heads: int, heads_kv: int, parts: int) -> None:
    """Raises if a process would have query heads without their key heads."""
    if heads_kv not in (1, heads) and heads_kv % parts:
        raise ValueError(f"{name}: got {heads_kv} heads sharded over {parts} processes; allowed: a multiple, or 1")
