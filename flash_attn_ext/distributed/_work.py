"""How DTensors share the work of a call over a mesh: each process computes the batches, heads or rows that it holds."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .._dropout import new_rng_state
from ._exchange import of_first_process
from ._sharded_call import rng_state_at

BATCH, HEADS, SEQUENCE = "batch", "heads", "sequence"


class Work(NamedTuple):
    """What each dimension of the mesh shares: batches, heads, the sequence; None: all its processes do the same.

    Where a tensor has these is a dictionary, such as ``{BATCH: 0, HEADS: 1}``.
    """

    mesh: DeviceMesh
    shared: tuple[str | None, ...]

    def over(self, what: str) -> list[int]:
        """The dimensions of the mesh that share this."""
        return [n for n, shared in enumerate(self.shared) if shared == what]

    def parts(self, what: str) -> int:
        return math.prod([self.mesh.size(n) for n in self.over(what)])

    def placements(self, dims: Mapping[str, int]) -> list[Placement]:
        """Those of a tensor that has what is shared in these dimensions; what it does not have, it has whole."""
        return [Shard(dims[what]) if what in dims else Replicate() for what in self.shared]

    def placements_of_share(self, dims: Mapping[str, int]) -> list[Placement]:
        """Those of the gradient of such a tensor: each process has that of its part, and of what all have its share."""
        return [
            Partial() if what is not None and what not in dims else placement
            for what, placement in zip(self.shared, self.placements(dims), strict=True)
        ]

    def local(self, t: Tensor, dims: Mapping[str, int]) -> Tensor:
        """This process's part of a tensor; its gradient is summed over the processes that share its work."""
        if not isinstance(t, DTensor):
            t = DTensor.from_local(t, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        wanted = self.placements(dims)
        return t.redistribute(self.mesh, wanted).to_local(grad_placements=self.placements_of_share(dims))

    def local_if_given(self, t: Tensor | None, dims: Mapping[str, int]) -> Tensor | None:
        return None if t is None else self.local(t, dims)

    def local_per_head(self, t: Tensor | None) -> Tensor | None:
        """Of a tensor (H) or (B, H)."""
        if t is None:
            return None
        return self.local(t, {HEADS: 0} if t.dim() == 1 else {BATCH: 0, HEADS: 1})

    def whole(self, t: Tensor, dims: Mapping[str, int], shape: tuple[int, ...]) -> DTensor:
        """The DTensor of ``shape`` of which this process has the part ``t``."""
        return self._dtensor(t, self.placements(dims), shape)

    def whole_of_shares(self, t: Tensor, dims: Mapping[str, int], shape: tuple[int, ...]) -> DTensor:
        """The DTensor of a gradient."""
        return self._dtensor(t, self.placements_of_share(dims), shape)

    def _dtensor(self, t: Tensor, placements: list[Placement], shape: tuple[int, ...]) -> DTensor:
        stride = 1
        strides: list[int] = []
        for size in reversed(shape):
            strides.insert(0, stride)
            stride *= max(size, 1)
        return DTensor.from_local(
            t, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
        )

    def first(self, what: str, size: int) -> int:
        """The number of the first batch or head that this process has, of ``size``."""
        first, coordinate = 0, self.mesh.get_coordinate()
        assert coordinate is not None
        for n in self.over(what):  # torch.chunk's pieces, one dimension of the mesh after the other
            chunk = math.ceil(size / self.mesh.size(n))
            begin = min(coordinate[n] * chunk, size)
            first, size = first + begin, max(min(chunk, size - begin), 0)
        return first

    def rng_state(self, rng_state: Tensor | None, batch: int, heads: int, device: torch.device) -> Tensor:
        """A dropout state with which this process drops of its part what one process drops of the whole."""
        if isinstance(rng_state, DTensor):
            rng_state = rng_state.full_tensor()
        elif rng_state is None:
            rng_state = new_rng_state(device)
        for n in range(self.mesh.ndim):  # that of the mesh's first process
            rng_state = of_first_process(rng_state, self.mesh.get_group(n).group_name)
        if not (self.over(BATCH) or self.over(HEADS)):
            return rng_state
        head = self.first(BATCH, batch) * heads + self.first(HEADS, heads)
        return rng_state_at(rng_state, 0, 0, head, heads)


def mesh_of(tensors: Mapping[str, Tensor]) -> DeviceMesh:
    """The mesh of tensors that have to be DTensors of one mesh; errors name the argument."""
    names = list(tensors)
    for name, t in tensors.items():
        if not isinstance(t, DTensor):
            allowed = f"{', '.join(names[:-1])} and {names[-1]} as DTensors"
            raise TypeError(f"{name}: got a {type(t).__name__} beside DTensors; allowed: {allowed}")
    meshes = [t.device_mesh for t in tensors.values() if isinstance(t, DTensor)]
    if any(mesh != meshes[0] for mesh in meshes):
        raise ValueError(f"{', '.join(names[1:])}: got a mesh other than {names[0]}'s; allowed: the same")
    return meshes[0]


def check_heads(name: str, heads: int, heads_kv: int, parts: int) -> None:
    """Whether each process's query heads are those of its key heads."""
    if heads_kv not in (1, heads) and heads_kv % parts:
        raise ValueError(f"{name}: got {heads_kv} heads sharded over {parts} processes; allowed: a multiple, or 1")
