"""Errors of context parallelism: they name the argument, on every process. A process that dies or does not answer."""

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from process_group import Processes, group_of, shared

from flash_attn_ext.distributed import context_parallel_attn, shard_sequence, unshard_sequence


@pytest.fixture
def processes():
    return shared(4)


def error_of(**changed):
    """Returns the error of a call on two processes. Both change the same arguments."""
    group = group_of(2)
    arguments = dict(
        query=torch.randn(1, 4, 8, 8), key=torch.randn(1, 4, 8, 8), value=torch.randn(1, 4, 8, 8), group=group
    )
    arguments |= changed
    try:
        context_parallel_attn(**arguments)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


X = torch.zeros(1, 4, 8, 8)
ERRORS = {
    "uneven": (dict(query=X[:, :, :7]), "ValueError", "and 2 x 7 rows do not divide into 4"),
    "share": (dict(seqlen=19), "ValueError", "query: got 8 rows on process"),
    "seqlen": (dict(seqlen="16"), "ValueError", "seqlen: got '16'; allowed"),
    "method": (dict(method="rings"), "ValueError", "method: got 'rings'; allowed: None, ring, all_gather, ulysses"),
    "ulysses, key heads": (
        dict(method="ulysses", key=X[:, :1], value=X[:, :1], enable_gqa=True), "ValueError",
        "method: got 'ulysses' with 4 query heads and 1 key heads on 2 processes",
    ),
    "ulysses, mask": (dict(method="ulysses", attn_mask=torch.ones(8, 16) > 0), "ValueError", "which has rows"),
    "gqa": (dict(key=X[:, :2], value=X[:, :2]), "ValueError", "key: got 2 heads for 4 query heads"),
    "3-D": (dict(query=X[0]), "ValueError", "query: got shape [4, 8, 8]; allowed: 4 dimensions"),
    "dtype": (dict(key=X.double()), "TypeError", "key: got dtype"),
    "head dim": (dict(key=X[..., :4]), "ValueError", "key"),
    "value rows": (dict(value=X[:, :, :4]), "ValueError", "value: got 4 rows; allowed: as many as key has, 8"),
    "mask": (dict(attn_mask=torch.ones(8, 8) > 0), "ValueError", "attn_mask"),
    "device": (dict(query=X.to("meta")), "ValueError", "query: got a tensor on meta, which the process group"),
    "dropout": (dict(dropout_p=2.0), "ValueError", "dropout_p: got 2"),
    "causal": (dict(causal="left"), "ValueError", "causal: got 'left'"),
    "cu_seqlens": (dict(cu_seqlens=torch.tensor([0, 12])), "ValueError", "do not ascend from 0 to 16"),
    "cu_seqlens order": (dict(cu_seqlens=torch.tensor([0, 9, 3, 16])), "ValueError", "do not ascend from 0 to 16"),
    "cu_seqlens dtype": (dict(cu_seqlens=torch.tensor([0.0, 16.0])), "TypeError", "cu_seqlens: got torch.float32"),
    "cu_seqlens and mask": (
        dict(cu_seqlens=torch.tensor([0, 16]), attn_mask=torch.ones(16) > 0), "ValueError", "attn_mask: got one",
    ),
    "cu_seqlens and batch": (
        dict(cu_seqlens=torch.tensor([0, 16]), query=torch.zeros(2, 4, 8, 8), key=torch.zeros(2, 4, 8, 8),
             value=torch.zeros(2, 4, 8, 8)), "ValueError", "query: got a batch of 2",
    ),
    "slopes of documents": (
        dict(cu_seqlens=torch.tensor([0, 16]), alibi_slopes=torch.ones(1, 4)), "ValueError", "alibi_slopes: got shape",
    ),
    "group": (dict(group=3), "TypeError", "group: got int; allowed"),
    "mesh": (dict(group=None, mesh=3), "TypeError", "mesh: got int; allowed: a DeviceMesh"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors_name_the_argument(processes, name):
    changed, kind, text = ERRORS[name]
    got_kind, got = processes.run(error_of, **changed)[0]
    assert got_kind == kind
    assert text in got


X64 = X.double()
# Arguments that only the second of two processes changes, and the error of both processes.
DIFFERENT = {
    "rows": (dict(query=X[:, :, :6], key=X[:, :, :6], value=X[:, :, :6]), "query: got [1, 4, 8, 8] on process 0 and ["),
    "rows of keys": (dict(key=X[:, :, :6], value=X[:, :, :6]), "key: got [1, 4, 8, 8] on process 0 and [1, 4, 6, 8]"),
    "batch": (dict(query=X[:0], key=X[:0], value=X[:0]), "query: got [1, 4, 8, 8] on process 0 and [0, 4, 8, 8]"),
    "head dimension": (dict(query=X[..., :4], key=X[..., :4]), "query: got [1, 4, 8, 8] on process 0 and ["),
    "dtype": (dict(query=X64, key=X64, value=X64), "query.dtype: got torch.float32 on process 0 and torch.float64"),
    "method": (dict(method="ulysses"), "method: got ring on process 0 and ulysses on process 1"),
    "causal": (dict(is_causal=True), "causal: got False on process 0 and True on process 1"),
    "window": (dict(window=(3, 0)), "lower_right: got False on process 0 and True on process 1"),
    "scale": (dict(scale=0.5), "scale: got None on process 0 and 0.5 on process 1"),
    "balanced": (dict(balanced=False), "balanced: got True on process 0 and False on process 1"),
    "seqlen": (dict(seqlen=16), "query: got [1, 4, 8, 8] on process 0 and [1, 4, -1, 8] on process 1"),
    "key mask": (dict(key_mask=torch.ones(1, 16) > 0), "key_mask: got None on process 0 and [1, 16] on process 1"),
    "documents": (dict(cu_seqlens=torch.tensor([0, 16])), "cu_seqlens: got None on process 0 and 2 offsets"),
    "an error": (dict(key=X[:, :2], value=X[:, :2]), "key: got 2 heads for 4 query heads"),
}  # fmt: skip


def errors_of_different_calls():
    """Returns the error of each case. A successful call comes first, as if only the last batch differed."""
    group, second = group_of(2), dist.get_rank() % 2 == 1
    arguments = dict(query=X, key=X, value=X, method="ring", group=group)
    caught = []
    for changed, _ in DIFFERENT.values():
        context_parallel_attn(**arguments)
        with pytest.raises(ValueError) as error:  # noqa: PT011  the text is compared below
            context_parallel_attn(**arguments | (changed if second else {}))
        caught.append(str(error.value))
    return caught


def test_calls_that_differ_raise_on_every_process(processes):
    answers = processes.run(errors_of_different_calls)
    for n, (name, (_, text)) in enumerate(DIFFERENT.items()):
        for rank in range(2):
            assert text in answers[rank][n], name
    refused = list(DIFFERENT).index("an error")
    assert answers[0][refused].startswith("process 1 of 2 refused its arguments: key: got 2 heads")
    assert answers[1][refused].startswith("key: got 2 heads")


def errors_of_unequal_shards(method):
    """63 rows by torch.chunk: 32 on one process, 31 on the other."""
    own = torch.zeros(1, 4, 63, 8).chunk(2, dim=2)[dist.get_rank() % 2]
    with pytest.raises(ValueError, match="Shards of unequal length need seqlen="):
        context_parallel_attn(own, own, own, balanced=False, method=method, group=group_of(2))
    with pytest.raises(ValueError, match=r"x: got .* Shards of unequal length need seqlen="):
        unshard_sequence(own, 2, balanced=False, group=group_of(2))
    out = context_parallel_attn(own, own, own, balanced=False, method=method, seqlen=63, group=group_of(2))
    assert unshard_sequence(out, 2, balanced=False, seqlen=63, group=group_of(2)).shape[2] == 63


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_unequal_shards_raise_on_every_process(processes, method):
    processes.run(errors_of_unequal_shards, method)


def wrong_groups():
    group = dist.new_group([0, 1])
    q = torch.zeros(1, 1, 4, 4)
    if dist.get_rank() > 1:
        for call in (lambda: context_parallel_attn(q, q, q, group=group), lambda: shard_sequence(q, 2, group=group)):
            with pytest.raises(ValueError, match="group: got one without this process"):
                call()
    with pytest.raises(ValueError, match="x: got 6 rows in dimension 1 for 4 chunks"):
        shard_sequence(torch.zeros(2, 6), 1, group=group_of(2))
    with pytest.raises(ValueError, match="dim: got 2 for a tensor of 2 dimensions"):
        shard_sequence(torch.zeros(2, 6), 2, group=group_of(2))
    with pytest.raises(ValueError, match="x: got 3 rows on process"):
        unshard_sequence(torch.zeros(2, 3), 1, group=group_of(2))


def test_a_wrong_group(processes):
    processes.run(wrong_groups)


def test_without_torch_distributed_started():
    q = torch.zeros(1, 1, 4, 4)
    with pytest.raises(ValueError, match="group, mesh: got neither"):
        context_parallel_attn(q, q, q)
    with pytest.raises(ValueError, match="group, mesh: got neither"):
        shard_sequence(q, 2)


def survivor(method):
    q = torch.randn(1, 2, 64, 8, requires_grad=True)
    out = context_parallel_attn(q, q, q, is_causal=True, method=method)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):  # from torch.distributed
        out.sum().backward()
    with pytest.raises(RuntimeError):
        context_parallel_attn(q, q, q, is_causal=True, method=method)
    return "alive"


@pytest.mark.parametrize("method", ["ring", "all_gather", "ulysses"])
def test_a_dead_process_is_an_error_on_the_living_one(method):
    started = Processes(2)
    try:
        assert started.first_answer(survivor, method) == "alive"
    finally:
        started.close()


def left_alone():
    group = dist.new_group([0, 1])
    q = torch.randn(1, 2, 64, 8, requires_grad=True)
    out = context_parallel_attn(q, q, q, is_causal=True, method="all_gather", group=group)
    if dist.get_rank() == 0:  # the other process lives, but does not call backward
        dist.distributed_c10d._set_pg_timeout(timedelta(milliseconds=100), group)
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            out.sum().backward()


def test_a_process_that_does_not_answer_is_an_error():
    started = Processes(2)
    try:
        started.run(left_alone)
    finally:
        started.close()
