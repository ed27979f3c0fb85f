"""The processes that share a sequence, from what a caller names them by."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class Group(NamedTuple):
    """A process group, this process's number in it, and how many processes it has."""

    handle: dist.ProcessGroup
    rank: int
    size: int

    @property
    def name(self) -> str:
        """What torch finds the group by: an operator takes a string, and no group."""
        return self.handle.group_name


def named_group(name: str) -> Group:
    handle = dist.distributed_c10d._resolve_process_group(name)
    return Group(handle, dist.get_rank(handle), dist.get_world_size(handle))


def resolve_group(group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> Group:
    """The group of ``group=`` or ``mesh=``; without either, the default group. Errors name the argument."""
    if not dist.is_available():
        raise RuntimeError("group, mesh: this build of torch has no torch.distributed")
    if group is not None and mesh is not None:
        raise ValueError("group, mesh: got both; allowed: one of them")
    if mesh is not None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh: got {type(mesh).__name__}; allowed: a DeviceMesh")
        if mesh.ndim != 1:
            raise ValueError(
                f"mesh: got {mesh.ndim} dimensions, {mesh.mesh_dim_names or 'without names'}; allowed: one, "
                "over which the sequence is sharded, such as mesh['cp']"
            )
        if mesh.get_coordinate() is None:
            raise ValueError("mesh: got one without this process; allowed: a mesh that it is part of")
        group = mesh.get_group()
    elif group is None:
        if not dist.is_initialized():
            raise ValueError(
                "group, mesh: got neither, and torch.distributed has no default group; allowed: a ProcessGroup, a "
                "DeviceMesh of one dimension, or init_process_group before"
            )
        group = dist.distributed_c10d._get_default_group()
    elif group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group: got one without this process; allowed: a group that it is part of")
    elif not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: got {type(group).__name__}; allowed: a torch.distributed.ProcessGroup")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("group: got one without this process; allowed: a group that it is part of")
    return Group(group, rank, dist.get_world_size(group))


def check_device(group: Group, name: str, device: torch.device) -> None:
    """Whether the group's backend carries tensors of this device."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group.handle).split(","))
    if device.type not in backends:
        raise ValueError(
            f"{name}: got a tensor on {device}, which the process group does not carry; allowed: {', '.join(backends)}"
        )
