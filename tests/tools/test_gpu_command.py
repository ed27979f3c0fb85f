"""`make gpu` without a GPU: the driver on made-up stages, the needs of each stage, and the arithmetic."""

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from paths import ROOT

from benchmarks.gpu import (
    balance,
    compare,
    compare_methods,
    decode,
    figures,
    kernels,
    memory,
    ncu,
    needs,
    problem,
    switches,
    timing,
    traffic,
    watch,
)
from tools.gpu import build_all, gpu_tests, machine, run, sanitize, smoke_forms, stages, units
from tools.gpu.stages import Stage

without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: the stages would run")


SOON = threading.Event()  # never set: waiting for it gives other processes the processor


def python(program):
    return (sys.executable, "-c", program)


FAKES = [
    Stage("good", python("print('all is well'); open('{out}/good.txt', 'w').write('a table')"), 20),
    Stage("bad", python("print('first'); raise ValueError('no such kernel')"), 20),
    Stage("slow", python("import time; print('hangs', flush=True); time.sleep(3600)"), 20),
    Stage("lacking", python("print('skipped: no ncu'); raise SystemExit(77)"), 20),
    Stage("missing", ("/nowhere/program",), 20),
    Stage("last", python("import os; print(os.environ['GREETING'])"), 20, {"GREETING": "hello"}),
]


@pytest.fixture
def fakes(monkeypatch):
    """Replaces the stages by FAKES, with the folder of their results filled in."""

    def made_up(out, quick):
        return [
            replace(stage, command=tuple(part.replace("{out}", str(out)) for part in stage.command)) for stage in FAKES
        ]

    monkeypatch.setattr(run, "stages", made_up)
    monkeypatch.setattr(run, "describe", lambda commit: {"commit": commit, "GPU": "none | at all"})


@pytest.fixture
def time_is_over(monkeypatch):
    """A stage has time until its log says "hangs". How busy the machine is does not matter."""

    class Process(subprocess.Popen):
        def __init__(self, *args, stdout, **kwargs):
            super().__init__(*args, stdout=stdout, **kwargs)
            self.log = Path(stdout.name)

        def wait(self, timeout=None):
            if timeout is None or timeout <= run.GRACE:
                return super().wait(timeout)
            while self.poll() is None:
                if "hangs" in self.log.read_text():
                    raise subprocess.TimeoutExpired(self.args, timeout)
                SOON.wait(0.01)
            return self.returncode

    monkeypatch.setattr(run.subprocess, "Popen", Process)


@pytest.fixture
def clock(monkeypatch):
    """The clock of run.py, in seconds. A stage takes the seconds in its command, or its whole time.

    No process starts.
    """
    now = [0.0]

    def made_up(stage, log, timeout):
        taken = min(float(stage.command[0]), timeout)
        now[0] += taken
        return run.Result(stage.name, "ok" if taken < timeout else "timed out", taken, timeout, "")

    monkeypatch.setattr(run, "run", made_up)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


@pytest.mark.usefixtures("fakes", "time_is_over")
def test_it_goes_on_past_stages_that_fail_and_says_so(tmp_path, capsys):
    out, pack = tmp_path / "out", tmp_path / "pack"
    out.mkdir()
    (out / "bad.json").write_text("of an earlier run")
    assert run.main(["--out", str(out), "--pack", str(pack), "--commit", "abc"]) == 1
    record = json.loads((out / "summary.json").read_text())
    assert record["machine"]["commit"] == "abc"
    assert [(stage["stage"], stage["status"]) for stage in record["stages"]] == [
        ("good", "ok"), ("bad", "failed"), ("slow", "timed out"), ("lacking", "skipped"), ("missing", "not started"),
        ("last", "ok"),
    ]  # fmt: skip
    says = {stage["stage"]: stage["says"] for stage in record["stages"]}
    assert says["good"] == "all is well"
    assert says["bad"] == "ValueError: no such kernel"
    assert says["slow"] == "hangs"
    assert says["last"] == "hello"
    assert (out / "bad.log").read_text().startswith("first\n")
    table = (out / "summary.md").read_text()
    assert "| good | ok |" in table
    assert "| bad | failed |" in table
    assert table.startswith("## good\n\na table\n# make gpu\n"), "what is cut off is the beginning"
    assert not (out / "bad.json").exists()
    assert "failed: bad, slow, missing" in capsys.readouterr().out
    assert sorted(path.name for path in pack.iterdir()) == ["results.tar.gz", "summary.md"], "few files come back"
    with tarfile.open(pack / "results.tar.gz") as archive:
        assert {"results/summary.json", "results/bad.log", "results/last.log"} <= set(archive.getnames())


@pytest.mark.usefixtures("fakes", "time_is_over")
def test_only_some_stages(tmp_path):
    assert run.main(["--out", str(tmp_path), "--only", "last", "good", "lacking"]) == 0
    record = json.loads((tmp_path / "summary.json").read_text())
    assert [stage["stage"] for stage in record["stages"]] == ["good", "lacking", "last"]
    with pytest.raises(SystemExit, match="--only: got nonsense; allowed: good, bad"):
        run.main(["--out", str(tmp_path), "--only", "nonsense"])


@pytest.mark.usefixtures("time_is_over")
def test_a_stage_that_does_not_want_to_end_is_killed_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "GRACE", 0.3)
    stubborn = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal, time;"
        " signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)'])\n"
        "print('hangs', child.pid, flush=True)\n"
        "time.sleep(3600)\n"
    )
    result = run.run(Stage("stubborn", python(stubborn), 20), tmp_path / "log", 20)
    assert result.status == "timed out"
    while is_running(int(result.says.split()[-1])):
        SOON.wait(0.01)


def is_running(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_a_stage_without_time_left_is_not_started_and_says_how_to_run_it(tmp_path, clock):
    results = run.run_all([Stage("first", ("1",), 5), Stage("last", ("1",), 20)], tmp_path, {}, limit=3, pack=None)
    assert [result.status for result in results] == [run.NO_TIME, run.NO_TIME]
    assert results[1].says.endswith("run it by --only last")


def test_a_hang_takes_no_time_from_the_stages_that_the_limit_holds(tmp_path, clock):
    some = [Stage("hang", ("inf",), 10), Stage("after", ("70",), 80), Stage("later", ("inf",), 120)]
    results = run.run_all(some, tmp_path, {}, limit=120, pack=None)
    assert [result.status for result in results] == ["timed out", "ok", "timed out"]
    assert results[1].timeout == 80, "its whole time-out"
    assert results[2].timeout == 120 - 10 - 70 - run.OVERHEAD, "what is left over"


def test_a_stage_knows_when_its_time_is_over(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: 0.0, time=lambda: 1000.0))
    stage = Stage("any", ("sh", "-c", "echo $GPU_STAGE_END"), 600)
    assert run.run(stage, tmp_path / "log", 600).says == "1600.0"


def test_fewer_stages_get_more_time():
    stages_of_ten = [Stage(str(n), (), 10) for n in range(4)]
    assert sum(run.seconds_of(stages_of_ten, 100)) == pytest.approx(100 - 4 * run.OVERHEAD)
    assert run.seconds_of(stages_of_ten, 30) == [10, 10, 0, 0]


def test_the_most_important_stages_get_their_time(tmp_path):
    """A machine runs one command for at most ten minutes."""
    args, all_stages = run.parse([]), stages.stages(tmp_path, quick=False)
    all_stages = [stage for stage in all_stages if not run.why_not(stage, {"compute capability": "9.0"})]
    assert args.limit + 2 * run.GRACE <= 600
    sure = [
        stage.name
        for stage, seconds in zip(all_stages, run.seconds_of(all_stages, args.limit - run.MACHINE_SECONDS), strict=True)
        if seconds
    ]
    assert sure == [
        "build", "units", "smoke-sm90", "balance", "switches", "smoke-sm80", "smoke-simt", "smoke-forms",
        "compare-16384-1024", "tests-sm90", "tests-sm80", "tests-simt",
    ]  # fmt: skip
    assert all_stages[0].timeout == 200, "of the build"


def test_the_list_shows_every_stage(tmp_path, capsys):
    assert run.main(["--list", "--out", str(tmp_path / "new")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [stage.name for stage in stages.stages(tmp_path, quick=False)]
    assert {"racecheck", "initcheck", "synccheck", "memory", "traffic"} <= {line.split()[0] for line in lines}
    assert "compare --lengths 16384 1024" in "".join(lines)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("capability", "skipped"),
    [
        ("7.5", "units smoke-sm90 balance switches smoke-sm80 tests-sm90 tests-sm80"),
        ("8.9", "units smoke-sm90 balance switches smoke-sm75 tests-sm90 tests-sm75"),
        ("9.0", "smoke-sm75 tests-sm75"),
        ("12.0", "units smoke-sm90 balance switches smoke-sm75 tests-sm90 tests-sm75"),
        (None, ""),
    ],
)
def test_a_stage_that_is_not_for_the_gpu_is_skipped(tmp_path, clock, capability, skipped):
    made_up = [replace(stage, command=("1",)) for stage in stages.stages(tmp_path, quick=False)]
    machine = {"compute capability": capability} if capability else {}
    results = run.run_all(made_up, tmp_path, machine, limit=3600, pack=None)
    assert {result.stage for result in results} == {stage.name for stage in made_up}
    found = {result.stage: result.says for result in results if result.status == "skipped"}
    assert set(found) == set(skipped.split())
    assert all(f"the GPU has {capability}" in says for says in found.values())
    assert found.get("smoke-sm80", "8.0 or later").startswith(("needs compute capability 8.0 or later", "8.0"))


def test_a_turing_measures_in_float16_and_calls_the_tiers_that_it_runs(monkeypatch):
    turing, ampere = ((7, 5), torch.float16, {"simt", "sm75"}), ((8, 0), torch.bfloat16, {"simt", "sm80"})
    for capability, dtype, tiers in (turing, ampere):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda found=capability: found)
        assert timing.dtype_16() == dtype
        assert {tier for tier, _ in sanitize.names()} == tiers


def test_the_build_asks_ptxas_and_a_hopper_gets_its_own_code_only(monkeypatch):
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(build_all, "said", lambda *command: "9.0")
    assert build_all.settings() == {
        "FLASH_ATTN_EXT_CUDA": "1", "NVCC_APPEND_FLAGS": "-Xptxas -v", "TORCH_CUDA_ARCH_LIST": "9.0a"
    }  # fmt: skip
    monkeypatch.setattr(build_all, "said", lambda *command: "8.0")
    assert "TORCH_CUDA_ARCH_LIST" not in build_all.settings()
    monkeypatch.setattr(build_all, "said", lambda *command: "7.5\n7.5")
    assert build_all.settings()["TORCH_CUDA_ARCH_LIST"] == "7.5"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0a;12.0")
    monkeypatch.setattr(build_all, "said", lambda *command: "9.0")
    assert "TORCH_CUDA_ARCH_LIST" not in build_all.settings()


PTXAS = """\
ptxas info    : Compiling entry function '_Z6kernelIfEvPT_' for 'sm_90a'
ptxas info    : Function properties for _Z6kernelIfEvPT_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 4 bytes smem
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored
ptxas info    : Compiling entry function '_Z5otherPf' for 'sm_90a'
    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers
"""


def test_messages_of_ptxas_are_kept():
    found = build_all.kernels(PTXAS)
    assert [(kernel.name, kernel.registers, kernel.spilled) for kernel in found] == [
        ("_Z6kernelIfEvPT_", 168, 0), ("_Z5otherPf", 255, 16),
    ]  # fmt: skip
    lines = list(build_all.text(PTXAS))
    assert "C7508" in lines[0]
    assert lines[1].startswith("sm_90a 255 registers, 16 bytes spilled: ")
    assert lines[-1] == "2 kernels compiled, 1 with spills"


@pytest.mark.parametrize(("version", "enough"), [("77.0.3", True), ("80.1", True), ("68.1.2", False), (None, False)])
def test_a_setuptools_that_the_build_refuses_is_named(version, enough):
    says = machine.setuptools(version)
    assert says.startswith(version or "missing")
    assert ("pip install 'setuptools>=77'" in says) != enough


def test_missing_packages_are_named_with_their_use(monkeypatch, tmp_path, capsys):
    assert machine.missing([]) == "none"
    says = machine.missing(["ninja", "rich"])
    assert says == "ninja (a fast build), rich (measurements): pip install ninja rich"
    monkeypatch.setattr(run, "describe", lambda commit: {"missing packages": says})
    monkeypatch.setattr(run, "stages", lambda out, quick: [Stage("one", python("print('x')"), 20)])
    run.main(["--out", str(tmp_path)])
    assert capsys.readouterr().out.startswith(f"missing packages: {says}\n")  # before the first stage


def test_the_packages_that_stages_import_are_in_the_list():
    ours = {"benchmarks", "tools", "flash_attn_ext", "setup", "torch", "paths"}
    files = [ROOT / "tests/conftest.py", ROOT / "benchmarks/output.py", *(ROOT / "tools/gpu").glob("*.py")]
    files += [*(ROOT / "benchmarks/gpu").glob("*.py"), *(ROOT / "tests/api").glob("*.py")]
    found = set()
    for file in files:
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Import):
                found |= {name.name.split(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.split(".")[0])
    found -= set(sys.stdlib_module_names) | ours | {file.stem for file in (ROOT / "tests").rglob("*.py")}
    assert found <= set(machine.PACKAGES)


def test_the_machine_is_described_even_without_a_gpu():
    facts = run.describe(None)
    assert facts["torch"] == torch.__version__
    assert {"commit", "python", "driver", "nvcc", "GPU"} <= facts.keys()


@without_a_gpu
@pytest.mark.parametrize("script", [balance, compare, decode, memory, ncu, traffic])
def test_a_benchmark_says_that_it_needs_a_gpu(script):
    with pytest.raises(SystemExit, match=r"needs an NVIDIA GPU: torch .* sees none"):
        script.main([])


@without_a_gpu
def test_the_other_stages_say_that_they_need_a_gpu(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_tests.py"])
    for main in (gpu_tests.main, lambda: sanitize.main("memcheck")):
        with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
            main()


@without_a_gpu
def test_a_real_stage_fails_with_the_reason_as_its_last_line(tmp_path):
    stage = next(stage for stage in stages.stages(tmp_path, quick=True) if stage.name == "decode")
    result = run.run(stage, tmp_path / "log", 600)
    assert (result.status, result.says) == ("failed", f"needs an NVIDIA GPU: torch {torch.__version__} sees none")


def test_a_build_without_the_cuda_half_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("flash_attn_ext.build_info", lambda: {"cuda": False})
    with pytest.raises(SystemExit, match="needs flash_attn_ext with its CUDA half: FLASH_ATTN_EXT_CUDA=1"):
        needs.a_gpu_and_our_build()


@pytest.mark.parametrize(("module", "tool"), [(sanitize, "compute-sanitizer"), (traffic, "ncu")])
def test_a_missing_tool_skips_the_stage(module, tool, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(needs, "a_gpu_and_our_build", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(SystemExit) as end:
        module.main("racecheck" if module is sanitize else [])
    assert end.value.code == run.SKIPPED == needs.SKIPPED
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"skipped: {tool} ")


def test_a_sanitizer_that_finds_something_fails_the_stage(monkeypatch, tmp_path):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\nexit {sanitize.FOUND}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(needs, "a_gpu_and_our_build", lambda: None)
    assert sanitize.main("racecheck") == sanitize.FOUND
    arguments = (tmp_path / "arguments").read_text()
    assert "--tool=racecheck --error-exitcode=9" in arguments
    assert arguments.endswith("tools.gpu.sanitize calls 0\n")


@pytest.fixture
def hanging(monkeypatch, tmp_path):
    """A program that has created the file tmp_path / "hangs" prints nothing more: watch() gives it up at once."""
    marker = tmp_path / "hangs"
    real = watch.select.select

    def wait(streams, *_):
        while True:
            hangs = marker.exists()
            ready = real(streams, [], [], 0.02)
            if ready[0]:
                return ready
            if hangs:
                marker.unlink()
                return [], [], []

    monkeypatch.setattr(watch, "select", SimpleNamespace(select=wait))
    return marker


def program(path, text):
    path.write_text(f"#!{sys.executable}\nimport pathlib, sys, time\n{text}")
    path.chmod(0o755)
    return path


def test_a_call_that_hangs_is_given_up_with_its_children(hanging, tmp_path, capsys):
    child = f"import pathlib, time; input(); pathlib.Path({str(hanging)!r}).touch(); time.sleep(3600)"
    parent = program(
        tmp_path / "parent",
        f"import subprocess\nchild = subprocess.Popen([sys.executable, '-c', {child!r}], stdin=subprocess.PIPE)\n"
        "print(child.pid, flush=True)\nchild.communicate(b'now')\n",
    )
    status, lines = watch.watch([parent], 20)
    assert status is None
    while is_running(int(lines[0])):
        SOON.wait(0.01)
    assert watch.watch([program(tmp_path / "good", "print('done'); sys.exit(3)\n")], 20) == (3, ["done"])


def test_a_sanitizer_goes_on_after_a_call_that_hangs(hanging, tmp_path, capsys):
    """The second call hangs, once; the next process makes the third and last calls."""
    names = [", ".join(name) for name in sanitize.names()]
    tool = program(
        tmp_path / "tool",
        f"marker, names, first = pathlib.Path({str(hanging)!r}), {names!r}, int(sys.argv[1])\n"
        "for n, name in enumerate(names):\n"
        "    if n == 1 and first == 0: marker.touch(); time.sleep(3600)\n"
        "    if n >= first: print('called:', name, flush=True)\n",
    )
    assert sanitize.run([str(tool)], dict(os.environ)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"called: {names[0]}", f"hangs: {names[1]}", *[f"called: {name}" for name in names[2:]]]


def test_a_profile_that_hangs_costs_its_own_rows(hanging, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(needs, "a_gpu_and_our_build", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program(
        tmp_path / "ncu",
        f"marker = pathlib.Path({str(hanging)!r})\n"
        f"if sys.argv[-1] == '{ncu.HEAD_DIMS[0]}': marker.touch(); time.sleep(3600)\n"
        "report = sys.argv[sys.argv.index('--log-file') + 1]\n"
        'row = \'"ID","Kernel Name"\\n"",""\\n"1","kernel of D \' + sys.argv[-1] + \'"\\n\'\n'
        "pathlib.Path(report).write_text(row)\n",
    )
    assert ncu.main(["--json", str(tmp_path / "ncu.json"), "--text", str(tmp_path / "ncu.txt")]) == 1
    record = json.loads((tmp_path / "ncu.json").read_text())
    assert [row["Kernel Name"] for row in record["rows"]] == [f"kernel of D {n}" for n in ncu.HEAD_DIMS[1:]]
    assert f"D {ncu.HEAD_DIMS[0]}: hangs" in (tmp_path / "ncu.txt").read_text()


def test_a_switch_that_hangs_costs_its_own_table(hanging, monkeypatch, tmp_path, capsys):
    first, *others = switches.switches()
    monkeypatch.setattr(switches, "PROGRAMS", tmp_path)
    monkeypatch.setattr(switches, "is_compiled", lambda changed: True)
    monkeypatch.setattr(needs, "a_gpu_and_our_build", lambda: None)
    monkeypatch.setattr(units, "nvcc", lambda: "nvcc")
    row = "256 1024 1 10.0 12.0 yes"
    program(switches.program(switches.OF_BACKWARD), f"print({row!r})\n")
    for changed in (None, first, *others):
        stops = f"pathlib.Path({str(hanging)!r}).touch(); time.sleep(3600)\n" if changed == first else ""
        program(switches.program(changed), f"{stops}print('64 1024 0 10.0 ff')\n")
    assert switches.main() == 1
    said = capsys.readouterr().out
    assert said.count("hangs") == 1
    assert [switch for switch in switches.switches() if f"{switch}: microseconds" in said] == others
    assert f"{switches.OF_BACKWARD}: microseconds" in said


def test_a_decoding_that_hangs_costs_its_own_row(monkeypatch):
    """The worker gives up a task that hangs (test_gpu_worker.py)."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    hung = {"error": "hangs: stopped after 10.3 s", "broken": True}

    def ask(task, seconds):
        if task["do"] == "copy":
            return {"result": 4e12}
        return hung if task["problem"]["S_k"] == 8192 else {"result": {"kernels": ["decode"], "seconds": [1e-3]}}

    args = decode.parse(["--batches", "1", "--lengths", "8192", "32768"])
    record = decode.measure_all(args, SimpleNamespace(ask=ask, end=float("inf")))
    assert [row["S_k"] for row in record["rows"]] == [32768] * 3
    assert len(record["failed"]) == 3
    assert "hangs" in record["failed"][0]


def test_causal_rates_over_full_rates():
    assert balance.most(128, 128) == pytest.approx(129 / 256)
    assert balance.most(16384, 128) > 0.99
    # Of 6 x 8 tiles, a causal call has 2 + 3 + 5 + 6 + 8 + 8.
    assert balance.most(1024, 64) == pytest.approx(1025 / 2048 * 48 / 32)
    row = balance.row_of(problem.Problem(1, 16, 1024, 128, True), full=2e-3, causal=1e-3)
    assert row["ratio"] == pytest.approx(1025 / 1024)
    lines = list(balance.text({"machine": "a GPU", "rows": [row], "failed": ["one hangs"]}))
    assert lines[-1] == "one hangs"


@pytest.mark.parametrize(
    ("name", "folder"), [("NVIDIA H200, 1 of them", "h200"), ("NVIDIA GeForce RTX 4090, 2 of them", "geforce_rtx_4090")]
)
def test_results_are_copied_to_the_folder_of_the_gpu(monkeypatch, tmp_path, name, folder):
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    assert run.results_folder({"GPU": name}) is None, "torch sees no GPU"
    target = run.results_folder({"GPU": name, "compute capability": "9.0"})
    assert target == tmp_path / folder
    out = tmp_path / "out"
    out.mkdir()
    for written in ("summary.md", "summary.json", "compare.txt", "compare.png", "build.log", "tests.xml"):
        (out / written).write_text(written)
    target.mkdir()
    (target / "decode.txt").write_text("of an earlier run")
    (target / "measured_by_hand.txt").write_text("")
    run.copy_results(out, target)
    assert sorted(path.name for path in target.iterdir()) == [
        "compare.png",
        "compare.txt",
        "measured_by_hand.txt",
        "summary.json",
        "summary.md",
    ]


def test_each_case_of_the_tests_has_a_time_out(tmp_path):
    with_both = gpu_tests.command(tmp_path / "t.xml", False, {"pytest_timeout", "xdist"})
    assert {"--timeout=30", "--timeout-method=thread", "--numprocesses=8"} <= set(with_both)
    with_neither = gpu_tests.command(None, True, set())
    assert "faulthandler_timeout=30" in with_neither
    assert not any("numprocesses" in argument for argument in with_neither)


@without_a_gpu
def test_the_gpu_tests_are_skipped_visibly():
    program = [
        sys.executable,
        "-m",
        "pytest",
        "-rs",
        "-p",
        "no:cacheprovider",
        "tests/cuda/test_gpu.py",
    ]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert "needs an NVIDIA GPU: FLASH_ATTN_EXT_TEST_DEVICE=cuda" in done.stdout


@pytest.mark.parametrize("form", smoke_forms.FORMS)
def test_each_form_is_right_on_the_cpu(form):
    good, line = smoke_forms.verdict(form, {"result": smoke_forms.check({"name": form})})
    assert good, line
    assert not smoke_forms.verdict(form, {"result": {"out": float("nan")}})[0]


def test_flops_of_attention():
    full = problem.Problem(B=2, H=3, S=100, D=16, causal=False)
    causal = problem.Problem(B=2, H=3, S=100, D=16, causal=True)
    assert full.flops(backward=False) == 2 * (2 * 3 * 100 * 100 * 16) * 2  # two products of 2 FLOPs a multiply-add
    assert full.flops(backward=True) == 2.5 * full.flops(backward=False)  # five products
    assert causal.flops(backward=False) == full.flops(backward=False) / 2
    assert timing.matmul_flops(8192) == 2 * 8192**3


def test_the_sweep_is_that_of_issue_5():
    sweep = list(problem.problems(problem.LENGTHS, problem.HEAD_DIMS))
    assert len(sweep) == 6 * 3 * 2
    assert {one.B * one.S for one in sweep} == {16384}
    assert {one.H * one.D for one in sweep} == {2048}


def test_a_comparison_is_with_the_best_peer():
    taken = {"ours": 2e-3, "ours sm80": 0.5e-3, "torch flash": 3e-3, "torch cudnn": 1e-3}
    row = compare.rates(taken, flops=1e12, peak=8e14)
    assert row["TFLOP/s"] == {
        "ours": 500, "ours sm80": 2000, "torch flash": pytest.approx(1000 / 3), "torch cudnn": 1000
    }  # fmt: skip
    assert (row["best_peer"], row["ratio"]) == ("torch cudnn", 0.5)
    assert row["of_matmul_peak"] == pytest.approx(0.625)
    assert compare.rates({"torch flash": 1.0}, 1.0, 1.0)["ratio"] is None
    assert compare.rates({"ours": 1.0}, 1.0, 1.0)["best_peer"] is None


def test_decoding_counts_k_and_v_once():
    decoding = decode.Problem(B=4, H=32, H_kv=8, S_k=1000)
    assert decoding.bytes() == 2 * (4 * 8 * 1000 * 128) * 2
    assert decode.rates(1e-3, 10**9, 4e12) == {"us": 1000, "GB/s": 1000, "of_copy": 0.25}


def test_the_decode_table_names_the_kernels(tmp_path):
    from benchmarks import output

    names = ["void flash_attn_ext::cuda::sm80::decode_kernel<flash_attn_ext::X<int, 3>>(int)", "memset"]
    row = {"B": 1, "H": 32, "H_kv": 8, "S_k": 8192, **decode.rates(1e-4, 10**8, 3e12)}
    row["kernels"] = [kernels.short_name(name) for name in names]
    record = {"machine": "a GPU", "copy_GB/s": 3000.0, "left_out": [], "failed": ["D 7: hangs"], "rows": [row]}
    output.write_text(decode.text(record), tmp_path / "decode.txt")
    table = (tmp_path / "decode.txt").read_text()
    assert "33% | sm80::decode_kernel, memset |" in table
    assert "D 7: hangs" in table


def test_the_least_traffic_of_gpt2():
    assert traffic.least_bytes(64) == 12 * (64 * 16 * 1024 * 64 * 2)


@pytest.mark.parametrize("backward", [False, True])
def test_the_methods_compute_the_same_and_who_refuses_says_why(backward, one_thread):
    small = problem.Problem(B=1, H=2, S=64, D=16, causal=True)
    functions, refused = compare_methods.calls(small, backward, device="cpu")
    assert {"ours", "torch flash"} <= functions.keys()
    assert {"torch cudnn", "ours sm80"} <= refused.keys()
    assert all(refused.values())
    ours, theirs = functions["ours"](), functions["torch flash"]()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.03)
    assert len(ours) == 3 if backward else ours.shape == (1, 2, 64, 16)


def comparison():
    medians = {"ours": 2e-3, "torch flash": 3e-3}
    row = {"B": 1, "H": 2, "S": 512, "D": 64, "causal": False, "pass": "fwd", **compare.rates(medians, 1e12, 8e14)}
    row["model"] = {"TFLOP/s": 456.0, "bound": "tensor 98%"}
    refusing = {**row, "S": 1024, "model": None, **compare.rates({}, 1e12, 8e14)}
    rows = [row | {"refused": {"torch cudnn": "not today"}}, refusing | {"refused": {"ours": "too long"}}]
    record = {"machine": "a GPU", "dtype": "bfloat16", "matmul_peak_TFLOP/s": 800.0}
    return record | {"left_out": ["the rest"], "rows": rows}


def test_the_tables(tmp_path):
    from benchmarks import output

    output.write_text(compare.text(comparison()), tmp_path / "compare.txt")
    table = (tmp_path / "compare.txt").read_text()
    assert "torch flash |  1.50 |            62% |   456 | tensor 98% |" in table
    assert "torch cudnn: not today" in table
    assert "ours: too long" in table
    assert "Left out, the time was used up: the rest" in table
    rows = [{"method": "ours", "S": 1024, "bytes": 3 << 20, "why": ""}]
    rows += [{"method": "standard", "S": 1024, "bytes": None, "why": "out of memory"}]
    output.write_text(memory.text({"machine": "a GPU", "dtype": "bfloat16", "rows": rows}), tmp_path / "memory.txt")
    assert "| ours            |  3.0 |" in (tmp_path / "memory.txt").read_text()
    assert "standard: out of memory" in (tmp_path / "memory.txt").read_text()


def test_the_figures(tmp_path):
    figures.plot_comparison(comparison(), tmp_path / "compare.png")
    row = {"B": 1, "H": 32, "H_kv": 8, "S_k": 8192, **decode.rates(1e-4, 10**8, 3e12)}
    figures.plot_decoding({"machine": "a GPU", "rows": [row]}, tmp_path / "decode.png")
    for name in ("compare.png", "decode.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_a_switch_is_worth_what_it_saves():
    """The best round counts, and out must be equal in all rounds."""
    on = ["64 1024 0 12.0 ff\n128 8192 1 20.0 aa\n", "64 1024 0 10.0 ff\n128 8192 1 21.0 aa\n"]
    off = ["64 1024 0 11.0 ff\n128 8192 1 20.0 ab\n"]
    lines, same = switches.compare(on, off)
    assert lines == [
        ["D 64 S 1024 full", "10.0", "11.0", "1.100", "yes"], ["D 128 S 8192 causal", "20.0", "20.0", "1.000", "NO"],
    ]  # fmt: skip
    assert not same


def test_the_backward_in_pairs_is_worth_what_it_saves():
    lines, same = switches.table_of_backward("256 1024 0 10.0 11.0 yes\n256 8192 1 9.0 9.0 NO\n")
    assert lines == [
        ["D 256 S 1024 full", "10.0", "11.0", "1.100", "yes"], ["D 256 S 8192 causal", "9.0", "9.0", "1.000", "NO"],
    ]  # fmt: skip
    assert not same


@pytest.mark.skipif(units.nvcc() is None, reason="needs nvcc to compile the switches' program")
@pytest.mark.parametrize("switch", [switches.switches()[0], switches.OF_BACKWARD])
def test_the_switches_compile(monkeypatch, tmp_path, switch):
    monkeypatch.setattr(switches, "PROGRAMS", tmp_path)
    subprocess.run(switches.command(units.nvcc(), switch), check=True)
    if not torch.cuda.is_available():
        done = subprocess.run([switches.program(switch)], capture_output=True, text=True)
        assert (done.returncode, len(done.stdout.splitlines())) == (1, 1), "the error, not a row"


@pytest.mark.skipif(units.nvcc() is None, reason="needs nvcc to compile the units")
def test_the_units_compile_and_name_what_they_need(monkeypatch, tmp_path):
    monkeypatch.setattr(units, "PROGRAM", tmp_path / "gpu_units")
    units.compile_units(units.nvcc())
    listed = subprocess.run([units.PROGRAM, "--list"], capture_output=True, text=True, check=True).stdout
    for name in ("cp.async", "ldmatrix x4 trans", "mma.sync m16n8k16 bf16", "cp.reduce.async.bulk", "setmaxnreg"):
        assert name in listed
    wrappers = (ROOT / "csrc" / "cuda" / "sm90" / "wgmma.h").read_text()
    forms = re.findall(r"inline void (wgmma_\w+)\(float \(&d\)\[(\d+)\]", wrappers)
    assert len(forms) >= 10
    for form, registers in forms:
        for operands in ["k32 e4m3"] if form.endswith("float8") else ["k16 bf16", "k16 f16"]:
            title = rf"^{form} m64n{2 * int(registers)}{operands}( \(if refused: \w+ 0\))?$"
            assert re.search(title, listed, re.MULTILINE), "a unit for every function of wgmma.h"
    if not torch.cuda.is_available():
        done = subprocess.run([units.PROGRAM], capture_output=True, text=True)
        assert done.returncode == 3
        assert "needs a GPU of compute capability 9.0" in done.stdout
