"""shard_sequence and unshard_sequence are inverse to each other on every process."""

import pytest
import torch
import torch.distributed as dist
from process_group import group_of, shared

from flash_attn_ext.distributed import shard_sequence, unshard_sequence


@pytest.fixture
def processes():
    return shared(4)


def round_trip(size, seqlen, balanced):
    group = group_of(size)
    uneven = seqlen % (2 * size) != 0
    for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16):
        for dim in (0, 1, -1):
            shape = [3, 4, 5]
            shape[dim] = seqlen
            x = torch.randint(0, 100, shape).to(dtype)
            own = shard_sequence(x, dim, group=group, balanced=balanced, uneven=uneven)
            assert own.is_contiguous()
            whole = unshard_sequence(own, dim, group=group, balanced=balanced, seqlen=seqlen if uneven else None)
            assert torch.equal(whole, x)
            assert torch.equal(shard_sequence(whole, dim, group=group, balanced=balanced, uneven=uneven), own)
    rows = shard_sequence(torch.arange(seqlen), 0, group=group, balanced=balanced, uneven=uneven)
    return rows.tolist()


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("seqlen", [16, 19, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_shard_and_unshard(processes, size, seqlen, balanced):
    rows = processes.run(round_trip, size, seqlen, balanced)
    assert sorted(row for own in rows[:size] for row in own) == list(range(seqlen))
    if seqlen == 16 and size == 2:
        assert rows[:2] == ([[0, 1, 2, 3, 12, 13, 14, 15], list(range(4, 12))] if balanced
                            else [list(range(8)), list(range(8, 16))])  # fmt: skip


def unshard_gradient():
    x = torch.arange(4.0).requires_grad_()
    whole = unshard_sequence(x, 0, group=group_of(2))
    (grad,) = torch.autograd.grad(whole, x, torch.arange(8.0) * (1 + dist.get_rank() % 2))
    rows = shard_sequence(torch.arange(8.0), 0, group=group_of(2))
    assert torch.equal(grad, 3 * rows)  # 1 from one process and 2 from the other


def test_unsharding_adds_the_gradients(processes):
    processes.run(unshard_gradient)
