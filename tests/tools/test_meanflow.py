"""examples/meanflow.py, end to end at a tiny size."""

import os
import subprocess
import sys

from paths import ROOT


def test_it_trains_and_draws(tmp_path):
    figure = tmp_path / "meanflow.png"
    command = [sys.executable, ROOT / "examples/meanflow.py", "--steps", "3", "--batch", "4", "--plot", figure]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert run.returncode == 0, run.stderr
    assert "step     2" in run.stdout
    assert "made in one step" in run.stdout
    assert figure.stat().st_size > 10000
