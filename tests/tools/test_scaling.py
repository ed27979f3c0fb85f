"""benchmarks/scaling.py simulates the library's tasks, and its threads draw them as the library's threads do."""

import pytest

from benchmarks import scaling


def test_threads_draw_tasks_in_order():
    tasks = scaling.Pass(1.0, [[("work", 4.0)], [("work", 3.0)], [("work", 2.0)], [("work", 1.0)]])
    assert scaling.makespan(tasks, 1) == 11
    assert scaling.makespan(tasks, 2) == 1 + 5  # 4 + 1 and 3 + 2
    assert scaling.makespan(tasks, 8) == 1 + 4
    assert scaling.efficiency([tasks], 2) == pytest.approx(11 / 12)  # 6 seconds of 2 threads


def test_a_task_waits_for_its_turn():
    first = [("next", "a", 0), ("work", 2.0), ("next", "a", 1), ("work", 5.0), ("next", "a", 2)]
    second = [("work", 1.0), ("wait", "a", 0), ("work", 1.0), ("wait", "a", 1), ("work", 1.0)]
    assert scaling.makespan(scaling.Pass(0.0, [first, second]), 2) == 8  # from 0 to 7, and one more
    assert scaling.makespan(scaling.Pass(0.0, [first, second]), 1) == 10


def test_a_report_is_read():
    lines = ["call", "pass 9", "task", "work 9", "call", "pass 0.5", "task", "work 2", "wait 0x1 5", "work 1"]
    passes = scaling.read("\n".join([*lines, "next 0x2 6", "end 0.25"]))
    assert [one.serial for one in passes] == [0.5, 0.25]
    assert passes[0].tasks == [[("work", 2.0), ("wait", "0x1", 5), ("work", 1.0), ("next", "0x2", 6)]]
    assert sum(map(scaling.work, passes)) == 3.75


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return scaling.build("generic", tmp_path_factory.mktemp("tasks"), "-O0")


def test_the_tasks_equal_the_tasks_of_the_library(built):
    """As in csrc/README.md: 48 queries in the forward, and 64 keys in the backward if there are few heads."""
    call = scaling.Workload("small", (2, 3, 3, 100, 130, 8))
    forward = scaling.record(built, call, "forward", 8)
    assert [len(one.tasks) for one in forward if one.tasks] == [2 * 3 * 3]
    few, many = scaling.record(built, call, "backward", 8), scaling.record(built, call, "backward", 1)
    assert [len(one.tasks) for one in few if one.tasks] == [2 * 3 * 2, 2 * 3 * 3]  # row terms, keys
    assert [len(one.tasks) for one in many if one.tasks] == [2 * 3 * 2, 2 * 3]
    waits = [[event[0] for event in task].count("wait") for task in few[1].tasks]
    assert waits[:6] == [0] * 6  # the first block of each head begins
    assert min(waits[6:]) > 0
    masked = scaling.Workload("mask", (2, 3, 3, 100, 130, 8), mask=(1, 1, 100, 130))
    gradient = scaling.record(built, masked, "mask_gradient", 8)
    assert len(gradient[-2].tasks) == 2 * 3  # tiles of the mask
    one_row = scaling.Workload("row", (4, 3, 3, 100, 130, 8), mask=(1, 1, 1, 130))
    shared = scaling.record(built, one_row, "mask_gradient", 8)
    assert [len(one.tasks) for one in shared[-3:-1]] == [3 * 3, 3]  # 24 tiles of scores for each, by eight; their sums


def in_tiles(task):
    """Returns the task with a second for each tile, a fifth of it at dQ. It does not depend on the machine."""
    kinds = ["next", *(event[0] for event in task), ""]
    seconds = {("next", "wait"): 0.8, ("wait", "wait"): 0.2, ("next", "next"): 1.0}
    before_and_after = zip(kinds, kinds[2:], strict=False)
    return [
        ("work", seconds.get(ends, 0.0)) if event[0] == "work" else event
        for event, ends in zip(task, before_and_after, strict=True)
    ]


@pytest.mark.parametrize("window", [(-1, 0), (128, 0)])
def test_blocks_of_keys_of_a_band_do_not_wait_for_each_other(built, window):
    """If all blocks began with the first queries, each would start at a tile that the block before it works on."""
    call = scaling.Workload("chain", (1, 1, 1, 2048, 2048, 8), window=window)
    keys = scaling.Pass(0.0, [in_tiles(task) for task in scaling.record(built, call, "backward", 32)[1].tasks])
    longest = max(scaling.work(scaling.Pass(0.0, [task])) for task in keys.tasks)
    assert scaling.makespan(keys, 32) < 2 * longest
