"""benchmarks/undisturbed.py chooses the calls between two short times of torch.exp."""

import gc
import weakref

import pytest

from benchmarks import undisturbed
from benchmarks.undisturbed import FEWEST, Undisturbed, fastest_tenth

pytestmark = pytest.mark.usefixtures("one_thread")


def record(monkeypatch, times):
    """An object for which torch.exp takes `times`: before and after each call."""
    monkeypatch.setattr(undisturbed, "LONGEST_WAIT", 0)
    own, left = Undisturbed(seconds=0), iter(times)

    def seconds(self):
        time = next(left)
        self._shortest = min(self._shortest, time)
        return time

    monkeypatch.setattr(Undisturbed, "_seconds", seconds)
    for _ in range(len(times) // 2):
        own.before(record)
        own.after(record)
    return own


def test_both_sides_of_a_call_must_be_short(monkeypatch):
    own = record(monkeypatch, [1.0, 1.1] * FEWEST + [1.0, 1.2, 1.2, 1.0, 1.14, 1.0])
    assert own.calls(record) == [*range(FEWEST), FEWEST + 2]
    assert own.times_of(record, [float(n) for n in range(FEWEST + 3)]) == [*map(float, range(FEWEST)), FEWEST + 2]


def test_a_later_shorter_time_counts_for_earlier_calls(monkeypatch):
    own = record(monkeypatch, [1.0, 1.0] * 3 + [0.5, 0.5] * FEWEST)
    assert own.calls(record) == list(range(3, 3 + FEWEST))


def test_all_calls_count_if_few_are_undisturbed(monkeypatch):
    own = record(monkeypatch, [1.0, 1.0] * (FEWEST - 1) + [1.0, 2.0] * 4)
    assert own.calls(record) == list(range(FEWEST + 3))


def test_a_real_measurement_has_a_result_for_each_call():
    own, calls = Undisturbed(seconds=0.01), 3
    for _ in range(calls):
        own.before(record)
        own.after(record)
    assert own.times_of(record, [1.0] * calls) == [1.0] * calls


def test_a_call_and_its_tensors_are_not_kept_alive():
    own = Undisturbed(seconds=0.01)

    def call():
        pass

    own.before(call)
    own.after(call)
    alive = weakref.ref(call)
    del call
    gc.collect()
    assert alive() is None


def test_a_tenth_of_the_calls_do_not_exceed_the_fast_time():
    times = [float(n) for n in range(101)]
    assert fastest_tenth(times[::-1]) == 10.0
