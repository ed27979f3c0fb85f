"""The messages between processes. All messages of context parallelism use these functions."""

import torch
import torch.distributed as dist
from torch import Tensor

from ._group import Group, named_group

# The newer name of the function, if torch has it, because then the older name prints a warning.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Exchange:
    """Sends one message and receives another message. Both are in flight until :meth:`wait` returns.

    Both are posted as one batch, so processes cannot deadlock. Messages between two processes arrive in the order of
    posting.
    """

    def __init__(self, group: Group, send: Tensor, to: int, receive: Tensor, source: int):
        self._sent, self._received = send, receive  # both must stay alive until the transfer ends
        operations = []
        if send.numel():
            operations.append(dist.P2POp(dist.isend, send, group=group.handle, group_peer=to))
        if receive.numel():
            operations.append(dist.P2POp(dist.irecv, receive, group=group.handle, group_peer=source))
        self._requests = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> Tensor:
        """Waits for both messages and returns the received one. torch raises here if the other process died."""
        for request in self._requests:
            request.wait()
        return self._received


def all_gather(group: Group, t: Tensor) -> Tensor:
    """Gathers the tensors of n processes, all of one shape, as (n, *t.shape)."""
    gathered = t.new_empty(group.size, *t.shape)
    _all_gather_single(gathered.view(-1), t.reshape(-1), group=group.handle)
    return gathered


def reduce_scatter_in_order(group: Group, shares: Tensor) -> Tensor:
    """Returns the sum over all processes of ``shares[own rank]``, added in the order of the processes.

    Sends as many bytes as a reduce-scatter. The order of the sum is fixed, so every run gives the same bits.
    """
    received = torch.empty_like(shares)
    dist.all_to_all_single(received.view(-1), shares.reshape(-1), group=group.handle)
    total = received[0].clone()
    for share in received[1:]:
        total += share
    return total


def all_to_all(group: Group, parts: list[Tensor], sizes: list[int]) -> list[Tensor]:
    """Sends the flat ``parts[r]`` to process r. Returns one part from each process, ``sizes[r]`` elements from r."""
    sent = torch.cat(parts)
    received = sent.new_empty(sum(sizes))
    dist.all_to_all_single(received, sent, sizes, [p.numel() for p in parts], group=group.handle)
    return list(received.split(sizes))


@torch.library.custom_op("flash_attn_ext::broadcast_first", mutates_args=())
def broadcast_first(t: Tensor, group: str) -> Tensor:
    """Returns the tensor of the group's first process. torch.compile needs an operator of torch here."""
    received = t.clone()
    dist.broadcast(received, group=named_group(group).handle, group_src=0)
    return received


@broadcast_first.register_fake
def _(t, group):
    return torch.empty_like(t)
