"""What processes send each other: every byte of context parallelism goes through these functions."""

import torch
import torch.distributed as dist
from torch import Tensor

from ._group import Group, named_group

# The newer name, where torch has it: the older one warns there.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Exchange:
    """One message to a process and one from a process, on their way from here until :meth:`wait`.

    Both are posted as one batch, so neither side waits for the other. Messages between two processes arrive in the
    order in which they were posted.
    """

    def __init__(self, group: Group, send: Tensor, to: int, receive: Tensor, source: int):
        self._sent, self._received = send, receive  # alive until the transfer ends
        operations = []
        if send.numel():
            operations.append(dist.P2POp(dist.isend, send, group=group.handle, group_peer=to))
        if receive.numel():
            operations.append(dist.P2POp(dist.irecv, receive, group=group.handle, group_peer=source))
        self._requests = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Tensor:
        """What was received. A process that died raises torch's error here."""
        for request in self._requests:
            request.wait()
        return self._received


def all_gather(group: Group, t: Tensor) -> Tensor:
    """(n, *t.shape): the tensor of each process, all of one shape."""
    gathered = t.new_empty(group.size, *t.shape)
    _all_gather_single(gathered.view(-1), t.reshape(-1), group=group.handle)
    return gathered


def sum_of_shares(group: Group, shares: Tensor) -> Tensor:
    """The sum over the processes of ``shares[own rank]``, added in the order of the processes.

    It sends what a reduce-scatter sends. The order is fixed, so the sum is the same at every run, whatever the backend.
    """
    received = torch.empty_like(shares)
    dist.all_to_all_single(received.view(-1), shares.reshape(-1), group=group.handle)
    total = received[0].clone()
    for share in received[1:]:
        total += share
    return total


def all_to_all(group: Group, parts: list[Tensor], sizes: list[int]) -> list[Tensor]:
    """Sends ``parts[r]``, flat, to process r; returns what each process sent here, ``sizes[r]`` elements from r."""
    sent = torch.cat(parts)
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, sizes, [p.numel() for p in parts], group=group.handle)
    return list(received.split(sizes))


@torch.library.custom_op("flash_attn_ext::of_first_process", mutates_args=())
def of_first_process(t: Tensor, group: str) -> Tensor:
    """The tensor of the group's first process. An operator of torch, for torch.compile."""
    received = t.clone()
    dist.broadcast(received, group=named_group(group).handle, group_src=0)
    return received


@of_first_process.register_fake
def _(t, group):
    return torch.empty_like(t)
