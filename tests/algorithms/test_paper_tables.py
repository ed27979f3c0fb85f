"""benchmarks/paper_tables.py: one command writes tables, figure and record, and its measurements are plausible."""

import json
import subprocess
import sys

import pytest
import torch
from paths import ROOT
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks import dram_traffic, paper_tables, peak_memory
from benchmarks.attention_methods import METHODS, Case, standard
from benchmarks.harness import time_in_turn


def test_one_command_writes_tables_figure_and_record(tmp_path):
    command = [sys.executable, "-m", "benchmarks.paper_tables", "--quick", "--out", tmp_path]
    command += ["--lengths", "64", "--methods", "standard", "ours", "--seconds", "0.1"]
    run = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    for name in ("gpt2.md", "lengths.md"):
        text = (tmp_path / name).read_text()
        assert f"torch {torch.__version__}" in text
        assert "--quick" in text
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / "results.json").read_text())
    assert [row["case"]["method"] for row in record["gpt2"]] == ["standard", "ours"] * 2
    assert {(row["case"]["S"], row["case"]["method"]) for row in record["lengths"]} == {
        (64, method) for method in ("standard", "ours")
    }
    plain, ours = record["gpt2"][:2]
    assert plain["GFLOP"] == pytest.approx(839.8 / 64, rel=0.01), "one of the 64 of the table's batch"
    assert plain["peak_bytes"] > 2 * 16 * 1024 * 1024 * 4 > ours["peak_bytes"], "two matrices of scores against none"
    for row in record["gpt2"] + record["lengths"]:
        assert 0 < row["quartiles"][0] <= row["seconds"] <= row["quartiles"][1]


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_standard_algorithm_is_attention(is_causal):
    q, k, v = torch.randn(3, 2, 3, 20, 16).unbind()
    torch.testing.assert_close(
        standard(q, k, v, is_causal=is_causal, dropout_p=0.0), sdpa(q, k, v, is_causal=is_causal)
    )
    assert (standard(q, k, torch.ones_like(v), is_causal=is_causal, dropout_p=0.5) != 1).any()


def test_cases_beyond_memory_are_omitted_and_named(monkeypatch):
    monkeypatch.setattr(paper_tables, "memory_of", lambda device: 10_000)
    monkeypatch.setattr(peak_memory, "measure", lambda case: 1)
    results = paper_tables.measure([Case(method, 1, 1, 64, 16) for method in ("standard", "ours")], seconds=0.01)
    assert [r.seconds is None for r in results] == [True, False]
    assert paper_tables.milliseconds(None) == paper_tables.mebibytes(None) == "-"


def test_a_failing_step_is_an_error_and_not_a_number():
    with pytest.raises(RuntimeError, match="D=1025"):
        peak_memory.measure(Case("ours", 1, 1, 64, 1025))


def test_functions_are_timed_in_turn():
    calls = []
    times = time_in_turn([lambda: calls.append("a"), lambda: calls.append("b")], seconds=0, rounds=(3, 5))
    assert calls == ["a", "b"] * 4, "one round to warm up, three measured"
    assert [len(t) for t in times] == [3, 3]
    assert "ours" in METHODS


NCU_REPORT = """==PROF== Connected to process 1
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1","gemm","dram__bytes_read.sum","byte","1,000"
"0","1","gemm","dram__bytes_write.sum","byte","20"
"1","1","softmax","dram__bytes_read.sum","byte","300"
"1","1","softmax","sm__cycles_active.avg","cycle","7"
"""


def test_the_counters_of_all_kernels_are_added():
    assert dram_traffic.total(NCU_REPORT) == 1320
    with pytest.raises(RuntimeError, match="ncu printed no table"):
        dram_traffic.total("==ERROR== nothing to profile")


def test_without_counters_the_table_says_why(monkeypatch):
    case = Case("ours", 1, 1, 64, 16, device="cuda")
    monkeypatch.setattr(dram_traffic.shutil, "which", lambda name: None)
    assert paper_tables.hardware(case) == {"GB (counters)": "ncu (Nsight Compute) is not on PATH"}
