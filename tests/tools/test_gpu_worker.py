"""Tasks of `make gpu` in a child process: a task that hangs, crashes or computes a wrong result costs only itself."""

import select
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from paths import ROOT

from benchmarks.gpu import compare, compare_methods
from benchmarks.gpu import worker as worker_module
from benchmarks.gpu.problem import Problem
from benchmarks.gpu.worker import Worker
from tools.gpu import smoke
from tools.gpu.calls import CALLS, Call, has_forward_mode

# A child process that obeys commands, without torch.
CHILD = f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.gpu import worker
def obey(task):
    print("noise on stdout")
    if task["do"] == "hang": time.sleep(3600)
    if task["do"] == "crash": os.kill(os.getpid(), signal.SIGSEGV)
    if task["do"] == "fail": raise ValueError("no such kernel\\nand more")
    if task["do"] == "break": worker.cuda_is_broken = lambda: True; raise RuntimeError("illegal address")
    return {{"pid": os.getpid(), **task}}
worker.cuda_is_broken = lambda: False
worker.serve(obey)
"""


class Clock:
    """A clock that stands still, so a busy machine changes no result. With `step`, each reading advances it."""

    now, step = 0.0, 0.0

    def monotonic(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    made_up = Clock()
    monkeypatch.setattr(worker_module, "time", made_up)
    wait_for_ever = SimpleNamespace(select=lambda read, write, error, timeout: select.select(read, write, error))
    monkeypatch.setattr(worker_module, "select", wait_for_ever)
    return made_up


@pytest.fixture
def worker():
    with Worker([sys.executable, "-c", CHILD]) as child:
        yield child


def test_tasks_run_one_after_the_other_in_one_process(worker):
    first, second = (worker.ask({"do": "it", "n": n}, 20)["result"] for n in range(2))
    assert (first["n"], second["n"]) == (0, 1)
    assert first["pid"] == second["pid"]


def test_an_error_is_an_answer_and_the_process_goes_on(worker):
    before = worker.ask({"do": "it"}, 20)["result"]["pid"]
    assert worker.ask({"do": "fail"}, 20) == {"error": "no such kernel"}
    assert worker.ask({"do": "it"}, 20)["result"]["pid"] == before


@pytest.mark.parametrize(
    ("what", "step", "error"),
    [
        ("hang", 30, "hangs: stopped after 20.0 s"),
        ("crash", 0, "its process died: SIGSEGV"),
        ("break", 0, "illegal address"),
    ],
)
def test_the_next_task_gets_a_new_process(worker, clock, what, step, error):
    before = worker.ask({"do": "it"}, 20)["result"]["pid"]
    clock.step = step
    assert worker.ask({"do": what}, 20) == {"error": error, "broken": True}
    clock.step = 0
    assert worker.ask({"do": "it"}, 20)["result"]["pid"] != before


def test_a_child_that_cannot_start_says_so():
    with Worker([sys.executable, "-c", "raise SystemExit(5)"]) as child:
        assert child.ask({}, 20) == {"error": "could not start: its process died: exit status 5", "broken": True}


def test_no_task_after_the_end(clock):
    with Worker([sys.executable, "-c", CHILD], seconds=10) as child:
        clock.now = 11
        assert child.ask({"do": "it"}, 20) == {"error": "the time was used up"}


# ---- smoke


def test_every_tier_has_all_its_passes_and_forwards_come_first():
    for tier in CALLS:
        passes = [task["pass"] for task in smoke.tasks(tier)]
        assert passes[: len(CALLS[tier])] == ["forward"] * len(CALLS[tier])
        counts = {way: passes.count(way) for way in ("forward", "backward", "jvp")}
        with_forward_mode = sum(has_forward_mode(tier, name) for name in CALLS[tier])
        assert counts == {"forward": len(CALLS[tier]), "backward": len(CALLS[tier]), "jvp": with_forward_mode}
    assert not has_forward_mode("sm80", "D 256")
    assert not has_forward_mode("sm90", "D 64")


@pytest.mark.parametrize("way", ["forward", "backward", "jvp"])
@pytest.mark.parametrize("wrong", [0.0, 0.3])
def test_a_smoke_call_is_compared_with_fp64(way, wrong, monkeypatch):
    import flash_attn_ext

    def attention(q, k, v, **options):
        out, lse = flash_attn_ext.flash_attn(q, k, v, **options)
        return out * (1 + wrong), lse

    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    name, call = "one", Call("bfloat16", 1, 2, 1, 30, 40, 16, {"is_causal": True})
    monkeypatch.setitem(smoke.CALLS, "sm90", {name: call})
    errors = smoke.errors(call, attention, way)
    task = {"tier": "sm90", "name": name, "pass": way}
    good, line = smoke.verdict(task, {"result": errors})
    assert good == (wrong == 0)
    assert line.startswith(f"{'ok' if good else 'WRONG':8}sm90 {task['pass']}, bfloat16, one: ")
    assert smoke.verdict(task, {"result": errors | {"dq": float("nan")}})[0] is False
    assert smoke.verdict(task, {"error": "hangs"}) == (False, f"FAILED  sm90 {task['pass']}, bfloat16, one: hangs")


def test_smoke_prints_every_verdict_and_goes_on(tmp_path, capsys):
    child = tmp_path / "child.py"
    child.write_text(
        textwrap.dedent(f"""
        import os, sys
        sys.path.insert(0, {str(ROOT)!r})
        from benchmarks.gpu import worker
        def answer(task):
            if task["name"] == "D 128" and task["pass"] == "forward": os._exit(3)
            return {{"out": 0.001}}
        worker.serve(answer)
        """)
    )
    verdicts = smoke.run("sm80", [sys.executable, str(child)])
    assert len(verdicts) == len(smoke.tasks("sm80"))
    assert [line for good, line in verdicts if not good] == [
        "FAILED  sm80 forward, bfloat16, D 128: its process died: exit status 3"
    ]
    assert capsys.readouterr().out.count("ok      sm80") == len(verdicts) - 1


# ---- comparison

PROBLEM = Problem(B=1, H=2, S=64, D=16, causal=True)


class FakeWorker:
    """Answers "try" from a list, by method."""

    def __init__(self, replies):
        self.replies, self.asked = replies, []

    def ask(self, task, seconds):
        self.asked.append(task["name"])
        return self.replies[task["name"]]


def test_a_wrong_kernel_is_not_timed():
    away, close = ({"result": {"tier": tier, "difference": d}} for tier, d in (("sm90", 0.2), ("sm80", 0.01)))
    worker = FakeWorker({"ours": away, "ours sm80": close})
    tiers, refused = compare.Trials(worker).good(PROBLEM, False)
    assert tiers == {"ours sm80": "sm80"}
    assert refused == {"ours": "wrong result: 0.2 of the largest value away"}


def test_a_hanging_task_is_not_repeated_at_its_head_dimension():
    fine = {"result": {"tier": "sm80", "difference": 0.0}}
    worker = FakeWorker({"ours": {"error": "hangs: stopped after 10 s", "broken": True}, "ours sm80": fine})
    trials = compare.Trials(worker)
    for _ in range(2):
        tiers, refused = trials.good(PROBLEM, True)
        assert tiers == {"ours sm80": "sm80"}
    assert refused == {"ours": "as at S 64: hangs: stopped after 10 s"}
    trials.good(Problem(B=1, H=2, S=64, D=32, causal=True), True)
    assert worker.asked == ["ours", "ours sm80", "ours sm80", "ours", "ours sm80"]


def test_the_same_kernel_is_timed_once():
    fine = {"result": {"tier": "sm80", "difference": 0.0}}
    tiers, refused = compare.Trials(FakeWorker({"ours": fine, "ours sm80": fine})).good(PROBLEM, False)
    assert (tiers, refused) == ({"ours": "sm80"}, {})


@pytest.mark.parametrize("backward", [False, True])
def test_a_trial_compares_with_torch(backward, one_thread):
    tried = compare_methods.try_one(PROBLEM, backward, "ours", device="cpu")
    assert tried["tier"]
    assert tried["difference"] < compare_methods.ALLOWED
    nan = torch.full((2,), torch.nan)
    assert compare_methods.difference(nan, torch.ones(2)) > compare_methods.ALLOWED
    with pytest.raises(RuntimeError, match="sm80"):
        compare_methods.try_one(PROBLEM, backward, "ours sm80", device="cpu")
