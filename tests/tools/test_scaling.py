"""benchmarks/scaling.py: the tasks that it simulates are the library's, and threads draw them as the library's do."""

import pytest

from benchmarks import scaling


def test_threads_draw_tasks_in_order():
    tasks = scaling.Pass(1.0, [[("work", 4.0)], [("work", 3.0)], [("work", 2.0)], [("work", 1.0)]])
    assert scaling.makespan(tasks, 1) == 11
    assert scaling.makespan(tasks, 2) == 1 + 5  # 4 + 1 and 3 + 2
    assert scaling.makespan(tasks, 8) == 1 + 4
    assert scaling.efficiency([tasks], 2) == pytest.approx(11 / 12)  # 6 seconds of 2 threads


def test_a_task_waits_for_its_turn():
    first = [("work", 2.0), ("finish", "a", 64), ("work", 5.0), ("finish", "a", 128)]
    second = [("work", 1.0), ("wait", "a", 64), ("work", 1.0), ("wait", "a", 128), ("work", 1.0)]
    assert scaling.makespan(scaling.Pass(0.0, [first, second]), 2) == 8  # from 0 to 7, and one more
    assert scaling.makespan(scaling.Pass(0.0, [first, second]), 1) == 10


def test_a_report_is_read():
    lines = ["call", "pass 9", "task", "work 9", "call", "pass 0.5", "task", "work 2", "wait 0x1 64", "work 1"]
    passes = scaling.read("\n".join([*lines, "finish 0x2 64", "end 0.25"]))
    assert [one.serial for one in passes] == [0.5, 0.25]
    assert passes[0].tasks == [[("work", 2.0), ("wait", "0x1", 64), ("work", 1.0), ("finish", "0x2", 64)]]
    assert sum(map(scaling.work, passes)) == 3.75


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return scaling.build("generic", tmp_path_factory.mktemp("tasks"), "-O0")


def test_the_tasks_are_those_of_the_library(built):
    """As csrc/README.md cuts them: 48 queries in the forward, 64 keys in the backward where heads are few."""
    call = scaling.Workload("small", (2, 3, 3, 100, 130, 8))
    forward = scaling.record(built, call, "forward", 8)
    assert [len(one.tasks) for one in forward if one.tasks] == [2 * 3 * 3]
    few, many = scaling.record(built, call, "backward", 8), scaling.record(built, call, "backward", 1)
    assert [len(one.tasks) for one in few if one.tasks] == [2 * 3 * 2, 2 * 3 * 3, 2 * 3]  # row terms, keys, sums
    assert [len(one.tasks) for one in many if one.tasks] == [2 * 3 * 2, 2 * 3, 2 * 3]
    waits = [[event[0] for event in task].count("wait") for task in few[1].tasks]
    assert waits[:6] == [0] * 6  # the first block of each head begins
    assert min(waits[6:]) > 0
    masked = scaling.Workload("mask", (2, 3, 3, 100, 130, 8), mask=(1, 1, 100, 130))
    gradient = scaling.record(built, masked, "mask_gradient", 8)
    assert len(gradient[-2].tasks) == 2 * 3  # tiles of the mask
