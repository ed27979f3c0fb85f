"""examples/train_distributed.py under torchrun: two processes have the loss curve of one process."""

import os
import runpy
import subprocess
import sys

import pytest
from paths import ROOT


def run(*arguments):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=300)


def test_two_processes_train_as_one():
    example = str(ROOT / "examples" / "train_distributed.py")
    done = run(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", example, "--steps", "3", "--context",
        "256", "--layers", "1", "--compare",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "median difference of the losses" in done.stdout


def test_without_torchrun_it_says_how_to_start_it(monkeypatch, capsys):
    example = str(ROOT / "examples" / "train_distributed.py")
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", [example])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(example, run_name="__main__")
    assert "start it by torchrun" in capsys.readouterr().err
