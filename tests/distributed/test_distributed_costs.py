"""The bytes that context_parallel_attn sends and allocates, and its default method."""

import os

import pytest
import torch
import torch.distributed as dist
from process_group import group_of, shared
from torch.utils.flop_counter import FlopCounterMode

from flash_attn_ext import flash_attn
from flash_attn_ext.distributed import _agreement, _exchange, context_parallel_attn

METHODS = ("ring", "all_gather", "ulysses")


@pytest.fixture
def processes():
    return shared(4)


class Counted:
    """Counts the bytes that this process passes to torch.distributed, and records the functions."""

    def __enter__(self):
        self.bytes, self.descriptions, self.calls, self.originals = 0, 0, set(), {}
        for module, name in (
            (dist, "batch_isend_irecv"), (_exchange, "_all_gather_single"), (dist, "all_to_all_single"),
            (dist, "broadcast"),
        ):  # fmt: skip
            self.originals[name] = module, getattr(module, name)
            setattr(module, name, getattr(self, name))
        return self

    def __exit__(self, *_):
        for name, (module, original) in self.originals.items():
            setattr(module, name, original)

    def original(self, name):
        self.calls.add(name)
        return self.originals[name][1]

    def batch_isend_irecv(self, operations):
        self.bytes += sum(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return self.original("batch_isend_irecv")(operations)

    def _all_gather_single(self, output, t, group):
        if t.dtype == torch.uint8:  # the description of the call
            assert t.nbytes == _agreement.BYTES
            self.descriptions += 1
            return self.originals["_all_gather_single"][1](output, t, group=group)
        self.bytes += t.nbytes * (dist.get_world_size(group) - 1)
        return self.original("_all_gather_single")(output, t, group=group)

    def all_to_all_single(self, output, t, output_sizes=None, input_sizes=None, group=None):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        own = input_sizes[rank] if input_sizes else t.numel() // size
        self.bytes += (t.numel() - own) * t.element_size()
        return self.original("all_to_all_single")(output, t, output_sizes, input_sizes, group=group)

    def broadcast(self, t, group, group_src):
        raise AssertionError("nothing is broadcast here")


def count_bytes(size, method, dtype, options):
    group = group_of(size)
    batch, heads, heads_kv, seqlen, d, d_v = 2, 8, 4, 32, 8, 16
    q = torch.randn(batch, heads, seqlen // size, d, dtype=dtype, requires_grad=True)
    k = torch.randn(batch, heads_kv, seqlen // size, d, dtype=dtype, requires_grad=True)
    v = torch.randn(batch, heads_kv, seqlen // size, d_v, dtype=dtype, requires_grad=True)
    with Counted() as forward:
        out = context_parallel_attn(q, k, v, method=method, group=group, enable_gqa=True, **options)
    with Counted() as backward:
        out.sum().backward()
    assert (forward.descriptions, backward.descriptions) == (1, 0)
    kv = batch * heads_kv * seqlen // size * (d + d_v)
    own_q, own_out = (batch * heads * seqlen // size * columns for columns in (d, d_v))
    return forward.bytes, backward.bytes, kv, own_q, own_out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_bytes_equal_the_formulas_of_the_docstring(processes, size, dtype):
    e, a, n = dtype.itemsize, max(dtype.itemsize, 4), size
    for method in METHODS:
        for forward, backward, kv, q, o in processes.run(count_bytes, size, method, dtype, dict(is_causal=True)):
            if method == "ring":
                assert (forward, backward) == ((n - 1) * kv * e, (n - 1) * kv * e + n * kv * a)
            elif method == "all_gather":
                assert (forward, backward) == ((n - 1) * kv * e, (n - 1) * kv * (e + a))
            else:
                assert forward == backward == (n - 1) * (q + kv + o) * e // n


def test_a_window_exchanges_with_neighbours_only(processes):
    options = dict(window=(4, 0), balanced=False)
    for forward, backward, kv, _, _ in processes.run(count_bytes, 4, "ring", torch.float32, options):
        assert (forward, backward) == (kv * 4, kv * 4 + 2 * kv * 4)
    # Zigzag: the chunk before is on the previous process, or on the next process in the second half of the sequence.
    for forward, _, kv, _, _ in processes.run(count_bytes, 4, "ring", torch.float32, options | {"balanced": True}):
        assert forward == 2 * kv * 4


def calls_of_default(heads, heads_kv):
    q, k = torch.randn(1, heads, 8, 8), torch.randn(1, heads_kv, 8, 8)
    with Counted() as counted:
        context_parallel_attn(q, k, k, enable_gqa=True, group=group_of(2))
    return counted.calls


def test_the_default_method(processes):
    assert processes.run(calls_of_default, 4, 4)[0] == {"batch_isend_irecv"}  # ring
    assert processes.run(calls_of_default, 4, 2)[0] == {"_all_gather_single"}


def counted_flops(method):
    q, k = torch.randn(2, 4, 8, 16, requires_grad=True), torch.randn(2, 2, 8, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        context_parallel_attn(
            q, k, k, method=method, enable_gqa=True, is_causal=True, group=group_of(2)
        ).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("method", METHODS)
def test_flops_are_shared(processes, method):
    q, k = torch.randn(2, 4, 16, 16, requires_grad=True), torch.randn(2, 2, 16, 16, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        flash_attn(q, k, k, enable_gqa=True, is_causal=True).sum().backward()
    assert processes.run(counted_flops, method) == [counter.get_total_flops() // 2] * 4


def peak_of(size, method, rows):
    """Returns peak memory of forward and backward without the inputs. Unit: this process's query."""
    group = group_of(size)
    q, k, v = (torch.randn(4, 4, rows, 64, requires_grad=True) for _ in range(3))
    grad = torch.randn_like(q)

    def call():
        context_parallel_attn(q, k, v, is_causal=True, method=method, group=group).backward(grad)
        q.grad = k.grad = v.grad = None

    def status(field):
        with open("/proc/self/status") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

    call()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM starts again
    before = status("VmRSS")
    call()
    return (status("VmHWM") - before) / q.nbytes


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="peak memory is read from Linux's /proc")
def test_memory_depends_on_the_shard_only(processes):
    """Two times the processes and two times the length: the same memory on each process, except with all_gather.

    Two processes have one chunk to exchange. With four, the next k, v, dk and dv are in flight besides the tensors
    in use, and dk and dv may wait for a neighbour: at most six tensors more. all_gather holds k, v and their gradients
    of two more processes, and copies of them.
    """
    for method, same in (("ring", True), ("ulysses", True), ("all_gather", False)):
        two, four = (max(processes.run(peak_of, size, method, 128)) for size in (2, 4))
        if same:
            assert four < two + 6, method
            assert four < 20, method
        else:
            assert four > two + 12, method
