"""examples/train_distributed.py, as torchrun starts it: the loss curve of two processes is that of one."""

import os
import subprocess
import sys

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
    alone = run(example)
    assert alone.returncode == 2
    assert "start it by torchrun" in alone.stderr
