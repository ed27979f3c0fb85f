"""benchmarks/side_by_side.py: a peer's result is compared before the clock starts, and a missing cell has a reason."""

import json

import pytest
import torch

from benchmarks import side_by_side
from benchmarks.side_by_side import Call, Problem

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def tiny(monkeypatch):
    def problems(dtype):
        yield Problem("prefill, causal", 1, 2, 2, 5, 5, 8, True, dtype)
        yield Problem("decode, group 2", 2, 4, 2, 1, 7, 8, False, dtype)

    monkeypatch.setattr(side_by_side, "problems", problems)


def replace_torch(monkeypatch, peer):
    monkeypatch.setitem(side_by_side.PEERS, "torch", ("torch", "torch", peer))


@pytest.mark.usefixtures("tiny")
def test_record_and_text_have_every_cell(tmp_path):
    paths = tmp_path / "a.txt", tmp_path / "a.json"
    side_by_side.main(
        ["--peers", "torch", "--threads", "1", "--seconds", "0", "--text", str(paths[0]), "--json", str(paths[1])]
    )
    record = json.loads(paths[1].read_text())
    assert [(row["name"], row["dtype"]) for row in record["rows"]] == [
        (name, dtype) for dtype in ("float32", "bfloat16") for name in ("prefill, causal", "decode, group 2")
    ]
    assert all(len(row["ratios"]["torch"]) == 3 and row["ms"] > 0 for row in record["rows"])
    assert f"torch {torch.__version__}" in paths[0].read_text()


@pytest.mark.usefixtures("tiny")
def test_a_refusal_is_a_reason_in_the_text(monkeypatch, tmp_path):
    def refuse(problem, q, k, v):
        raise side_by_side.NotSupported("no kernel here")

    replace_torch(monkeypatch, refuse)
    path = tmp_path / "a.txt"
    side_by_side.main(["--peers", "torch", "--threads", "1", "--seconds", "0", "--text", str(path)])
    assert "torch: no kernel here" in path.read_text()


def test_a_wrong_result_is_an_error(monkeypatch):
    def wrong(problem, q, k, v):
        return Call(lambda: None, lambda: torch.zeros_like(q))

    replace_torch(monkeypatch, wrong)
    with pytest.raises(AssertionError, match="torch differs: Problem"):
        side_by_side.measure(Problem("decode", 1, 1, 1, 1, 4, 8, False, "float32"), ["torch"], seconds=0)
