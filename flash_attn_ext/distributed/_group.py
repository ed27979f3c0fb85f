"""Finds the process group of a call from ``group=`` or ``mesh=``."""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class Group(NamedTuple):
    """A process group, the rank of this process in it, and its number of processes."""

    handle: dist.ProcessGroup
    rank: int
    size: int

    @property
    def name(self) -> str:
        """The name by which torch finds the group. An operator of torch cannot have a group as an argument."""
        return self.handle.group_name


def named_group(name: str) -> Group:
    handle = dist.distributed_c10d._resolve_process_group(name)
    return Group(handle, dist.get_rank(handle), dist.get_world_size(handle))


def resolve_group(group: dist.ProcessGroup | None, mesh: DeviceMesh | None) -> Group:
    """Returns the group of ``group=`` or ``mesh=``, or the default group if both are None."""
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
    """Raises if the group has no backend for tensors on this device."""
    backends = dict(part.split(":") for part in dist.get_backend_config(group.handle).split(","))
    if device.type not in backends:
        raise ValueError(
            f"{name}: got a tensor on {device}, which the process group does not carry; allowed: {', '.join(backends)}"
        )
