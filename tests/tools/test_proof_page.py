"""docs/proof.md: its numbers of planted faults are the numbers in the lists and tests."""

import ast
import collections
import re

import pytest
from paths import ROOT

PAGE = (ROOT / "docs/proof.md").read_text()


def findings(name):
    """How each removal of a list is found, and how often."""
    rows = [line.split("|") for line in (ROOT / "tests/cuda_host" / name).read_text().splitlines()]
    return collections.Counter(row[3].strip() for row in rows if len(row) == 5 and ".cu" in row[1])


def number_in_row(start):
    return int(re.search(rf"^\| {start}[^|]*\| (\d+) \|", PAGE, re.M)[1])


@pytest.mark.parametrize(
    ("name", "row"), [("mutations.md", "a barrier, wait or commit"), ("mutations_sm90.md", "a statement of `sm90`")]
)
def test_the_numbers_of_removed_statements(name, row):
    found = findings(name)
    assert number_in_row(row) == sum(found.values())
    assert f"{found['wrong values']} as wrong values" in re.search(rf"^\| {row}.*$", PAGE, re.M)[0]
    assert "" not in found


def test_the_number_of_faults_in_ptx():
    count = 0
    for file in sorted([*(ROOT / "tests/ptx").glob("test_ptx_sm*.py"), ROOT / "tests/ptx/test_ptx_pairs.py"]):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "FAULTS":
                count += len(node.value.keys)
    assert count == number_in_row("one fault in the PTX")
