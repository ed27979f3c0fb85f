"""The lists of tests that a command omits: tests/support/slow.py, planted_faults.py and other_compilers.py."""

import re

import other_compilers
import planted_faults
import pytest
import slow
from paths import ROOT

TEXTS = {path.stem: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
LISTS = (slow, planted_faults, other_compilers)


@pytest.mark.parametrize("listed", LISTS, ids=lambda module: module.__name__)
def test_every_listed_test_exists(listed):
    assert not set(listed.FILES) - set(TEXTS)
    every = "".join(TEXTS.values())
    for test in listed.TESTS:
        file, function = test if isinstance(test, tuple) else (None, test)
        assert f"def {function}(" in (TEXTS[file] if file else every), test


def test_a_file_that_runs_nvcc_is_listed():
    """So `make test` needs no CUDA toolkit. test_build.py runs a fake compiler."""
    needs_nvcc = {name for name, text in TEXTS.items() if re.search(r"import .*\bNVCC\b|units\.nvcc\(\)", text)}
    assert len(needs_nvcc) >= 12
    assert needs_nvcc - set(other_compilers.FILES) == {"test_gpu_command"}
