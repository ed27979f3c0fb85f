"""Whole programs: examples/train_distributed.py under torchrun, and the end of a process group."""

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


# A process group that lives until the interpreter ends can abort the process: its threads then need Python's lock.
GROUP_ENDS = """
import torch
import torch.distributed as dist

if not AFTER_INIT:
    from flash_attn_ext.distributed import context_parallel_attn

def threads():
    return {open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")}

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
if AFTER_INIT:
    from flash_attn_ext.distributed import context_parallel_attn
q = torch.randn(1, 2, 8, 16, requires_grad=True)
context_parallel_attn(q, q, q, method=METHOD).sum().backward()
assert any("gloo" in name for name in threads()), threads()
dist.destroy_process_group()
assert not any("gloo" in name for name in threads()), threads()
"""


@pytest.mark.parametrize(
    ("method", "after_init"), [("ring", False), ("all_gather", False), ("ulysses", False), ("ring", True)]
)
def test_destroy_process_group_ends_its_threads(method, after_init):
    """``after_init``: flash_attn_ext.distributed is imported after init_process_group."""
    done = run("-c", f"import os; METHOD, AFTER_INIT = {method!r}, {after_init}\n{GROUP_ENDS}")
    assert done.returncode == 0, done.stderr


def test_without_torchrun_it_says_how_to_start_it(monkeypatch, capsys):
    example = str(ROOT / "examples" / "train_distributed.py")
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", [example])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(example, run_name="__main__")
    assert "start it by torchrun" in capsys.readouterr().err
