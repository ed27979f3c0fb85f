"""benchmarks/compare_torch.py, decoding.py and models.py: both sides compute the same, and the record is complete."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flash_attn_ext
from benchmarks import (
    attention_methods,
    cells,
    compare_torch,
    decoding,
    mla,
    models,
    peak_memory,
    peaks,
    summary_figure,
    watch,
)
from benchmarks.harness import Paired, quartiles, time_in_turn
from flash_attn_ext import flash_attn

recorded = partial(pytest.approx, rel=2e-3)  # numbers in records have four digits


@pytest.fixture
def tiny(monkeypatch):
    """Makes the sweep of every kind tiny."""
    monkeypatch.setattr(cells, "SHAPES", [(1, 2, 40, 8)])
    monkeypatch.setattr(cells, "WITH_OPTIONS", (2, 4, 50, 8))
    monkeypatch.setattr(cells, "WITH_WINDOW", (1, 2, 60, 8))
    monkeypatch.setattr(cells, "WINDOWS", [(7, 0), (5, 9)])
    monkeypatch.setattr(cells, "SMALL", [(1, 1, 1, 8)])
    monkeypatch.setattr(cells, "ODD", [(3, 5, 7, 11)])
    monkeypatch.setattr(cells, "DECODE", [(4, 2, 80)])


@pytest.fixture
def detected_kernel():
    yield
    flash_attn_ext.force_kernel(None)


@pytest.mark.usefixtures("tiny", "one_thread")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_both_sides_of_a_cell_compute_the_same(dtype):
    seen = set()
    for cell in cells.cells([dtype], list(cells.KINDS)):
        seen.add(cell.kind)
        if "dropout_p" in cell.options:
            continue
        inputs = cells.Inputs(cell)
        ours, theirs = inputs.ours(flash_attn)(), inputs.torchs(sdpa)()
        assert len(ours) == (3 if cell.backward else 1)
        torch.testing.assert_close(ours, theirs, msg=lambda text, cell=cell: f"{cell}: {text}")
    assert seen == set(cells.KINDS)


def test_flops_count_the_scores_that_are_visible():
    shape = (2, 3, 100, 16)
    full = cells.Cell("shapes", "full", shape, shape, "float32", False)
    causal = cells.Cell("shapes", "causal", shape, shape, "float32", True, {"is_causal": True})
    window = cells.Cell("windows", "window", shape, shape, "float32", False, window=(2, 1))
    assert full.flops() == 4 * 2 * 3 * 100 * 100 * 16
    assert causal.flops() == 3.5 * full.flops() / 2
    assert window.flops() == full.flops() / 100**2 * (4 * 100 - 2 - 1 - 1)  # 4 a row, fewer in the first two and last


def test_k_and_v_are_one_piece_of_memory():
    inputs = cells.Inputs(next(cells.decode("bfloat16")))
    assert inputs.kv.is_contiguous()
    assert inputs.k.data_ptr() == inputs.kv.data_ptr()
    assert inputs.v.data_ptr() == inputs.kv[1].data_ptr()


@pytest.mark.usefixtures("tiny", "one_thread", "detected_kernel")
def test_one_command_writes_text_record_and_figure(tmp_path, monkeypatch):
    monkeypatch.setattr(peak_memory, "measure", lambda case, environ: {"ours": 2**20}.get(case.method, 3 * 2**20))
    isa = flash_attn_ext.available_kernels()[0]
    text, record, figure = (tmp_path / "deep" / name for name in ("t.txt", "r.json", "f.png"))
    arguments = ["--quick", "--dtypes", "float32", "--seconds", "0.001", "--isa", isa]
    compare_torch.main([*arguments, "--text", str(text), "--json", str(record), "--plot", str(figure)])
    measured = json.loads(record.read_text())
    assert measured["machine"]["isa"] == isa
    assert measured["settings"]["quick"] is True
    assert {row["kind"] for row in measured["rows"]} == set(cells.KINDS)
    for row in measured["rows"]:
        low, high = row["ratio_quartiles"]
        assert 0 < low <= row["ratio"] <= high
        assert row["isa"] == isa
        assert row["GFLOP/s"] == recorded(row["of_fma_peak"] * row["fma_peak_GFLOP/s"])
        assert row["of_fma_peak"] > 0
        if row["slowdown"] != watch.BUSY:  # as it is recorded, with four digits
            assert row["busy"] == (row["slowdown"] > watch.BUSY)
        assert ("of_stream" in row) == (row["kind"] == "decode")
    shape = next(row for row in measured["rows"] if (row["kind"], row["pass"]) == ("shapes", "fwd"))
    assert shape["GFLOP/s"] == recorded(4 * 1 * 2 * 40 * 40 * 8 / shape["ms"] / 1e6)
    decode = next(row for row in measured["rows"] if row["kind"] == "decode")
    assert decode["GB/s"] == recorded(2 * 2 * 80 * 128 * 4 / decode["ms"] / 1e6)
    assert (
        "| 1,2,1024,64 | float32 |       0 |  1.0 |           3.0 |        3.0 |            3.0 |" in text.read_text()
    )
    assert all(f"## {kind}" in text.read_text() for kind in cells.KINDS)
    slower = sum(row["ratio"] < 1 for row in measured["rows"])
    assert f"Where torch is faster: {slower} of {len(measured['rows'])}" in text.read_text()
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_a_ratio_follows_from_the_recorded_times():
    row = compare_torch.times(Paired(ours=[1e-3, 2e-3, 4e-3], peer=[2e-3, 6e-3, 4e-3]))
    assert row["ratio"] == 2, "the median of 2, 3 and 1: pair by pair"
    assert row["ratio_quartiles"] == [1.5, 2.5]
    assert (row["ms"], row["torch_ms"], row["pairs"]) == (2, 4, 3)
    assert (row["ms_quartiles"], row["torch_ms_quartiles"]) == ([1.5, 3], [3, 5])


def test_reading_is_compared_round_by_round():
    kv = torch.zeros(2, 500, dtype=torch.float32)  # 4000 bytes
    row = compare_torch.reading(kv, [1e-6, 2e-6, 1e-6], [8e9, 4e9, 4e9])
    assert (row["GB/s"], row["stream_GB/s"], row["of_stream"]) == (4, 4, 0.5)
    # An even number of rounds: the median of the rates would be 3 GB/s, but the table gives the median time.
    assert compare_torch.reading(kv, [1e-6, 2e-6], [4e9, 4e9])["GB/s"] == pytest.approx(4000 / 1.5e-6 / 1e9)


def test_a_busy_cell_is_measured_again_and_marked_if_it_stays_busy():
    reference = {"a": [1.0], "b": [1.5, 1.4, 1.05], "c": [1.3, 1.2, 1.6], "d": [1.1]}
    measured = []

    def measure(name):
        measured.append(name)
        return {"name": name, "reference_ms": reference[name].pop(0)}

    rows = watch.measure_all("abcd", measure, repeats=2)
    assert "".join(measured) == "abcd" + "bc" + "bc"
    assert [(row["name"], row["reference_ms"], row["busy"]) for row in rows] == [
        ("a", 1.0, False), ("b", 1.05, False), ("c", 1.2, True), ("d", 1.1, False),
    ]  # fmt: skip
    assert rows[2]["slowdown"] == 1.2
    assert "? marks 1 of 4 rows" in watch.note(rows)
    assert watch.note(rows[:2]) == ""


def test_the_product_that_notices_a_load_takes_its_share_of_a_long_call(monkeypatch):
    clock = [0.0]
    costs = {"call": 2.0, "product": 0.01}
    monkeypatch.setattr(watch.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(watch.Watch, "_multiply", lambda self: clock.__setitem__(0, clock[0] + costs["product"]))
    seen = watch.Watch(lambda: clock.__setitem__(0, clock[0] + costs["call"]))
    seen()
    assert seen.products == 20, "a tenth of two seconds"
    costs["product"] = 0.03
    seen()
    assert seen.row()["reference_ms"] == pytest.approx(20), "the mean of both rounds"


def test_memory_is_measured_with_the_kernels_and_threads_of_this_process(monkeypatch):
    seen = []
    monkeypatch.setattr(peak_memory, "measure", lambda case, environ: seen.append((case, environ)))
    rows = compare_torch.measure_memory((128,), ["float32", "float64"], threads=3)
    assert [row["dropout"] for row in rows] == [0.0, 0.1]
    assert (
        {case.method for case, _ in seen} == {"ours", "torch default", "torch math"} <= set(attention_methods.METHODS)
    )
    environ = {"OMP_NUM_THREADS": "3", "FLASH_ATTN_EXT_ISA": flash_attn_ext.active_kernel()}
    assert all(given == environ for _, given in seen)


def test_the_measured_process_gets_the_environment():
    with pytest.raises(RuntimeError, match="no_such_isa"):
        peak_memory.measure(attention_methods.Case("ours", 1, 1, 8, 8), {"FLASH_ATTN_EXT_ISA": "no_such_isa"})


@pytest.mark.usefixtures("one_thread", "detected_kernel")
def test_decoding_compares_every_variant(tmp_path):
    text, record, figure = (tmp_path / name for name in ("t.txt", "r.json", "f.png"))
    arguments = ["--quick", "--lengths", "100", "300", "--batches", "1", "2", "--heads-kv", "2", "--seconds", "0.001"]
    arguments += ["--most-gib", "0.001", "--text", str(text), "--json", str(record), "--plot", str(figure)]
    decoding.main(arguments)
    measured = json.loads(record.read_text())
    assert len(measured["rows"]) + len(measured["left_out"]) == 2 * 2 * 2
    assert len(measured["left_out"]) == 1, "float32, B 2, S_k 300: 1.2 MB"
    for row in measured["rows"]:
        assert row["variants"].keys() == decoding.VARIANTS.keys()
        assert row["variants"]["default"]["speed"] == 1
        size = 2 * row["B"] * 2 * row["S_k"] * 128 * getattr(torch, row["dtype"]).itemsize
        for variant in row["variants"].values():
            assert variant["GB/s"] == recorded(size / variant["ms"] / 1e6)
            assert 0 < variant["speed_quartiles"][0] <= variant["speed"] <= variant["speed_quartiles"][1]
    assert "Left out" in text.read_text()
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_variants_of_decoding_are_the_same_attention(dtype):
    problem = decoding.Problem(batch=2, heads_kv=2, seqlen_k=500, dtype=dtype)
    kv = torch.randn(problem.shape(), dtype=getattr(torch, dtype))
    results = {name: call() for name, call in decoding.variants(problem, kv).items()}
    # Where the kernel rounds P to bfloat16, it is relative to the maximum of the split.
    tolerance = {"rtol": 0.02, "atol": 1e-3} if dtype == "bfloat16" else {}
    for out in results.values():
        torch.testing.assert_close(out, results["default"], **tolerance)
    # A wrong guess is computed again, bitwise as without the guess. A right guess is not computed again.
    assert torch.equal(results["default, unified misses"], results["default"])
    if dtype == "float32":
        assert not torch.equal(results["default, unified"], results["default"])


def test_the_figure_of_the_readme_is_drawn_from_a_record(tmp_path):
    record = Path(summary_figure.__file__).parent / "results" / "cpu_zen5.json"
    summary_figure.main(record, tmp_path / "summary.png")
    assert (tmp_path / "summary.png").read_bytes().startswith(b"\x89PNG")


def test_peaks_are_measured():
    isa = flash_attn_ext.active_kernel()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert 0 < peaks.flops(isa, dtype, 1) < math.inf
    data = torch.ones(1 << 20)
    assert 0 < peaks.stream_read(data, isa, 1) < math.inf
    with pytest.raises(ValueError, match="contiguous"):
        peaks.stream_read(data.view(1024, 1024).T, isa, 1)
    with pytest.raises(ValueError, match="more than 40 bytes for 2 threads"):
        peaks.stream_read(data[:10], isa, 2)


def test_between_rounds_something_untimed_runs_first():
    calls = []
    functions = [lambda: calls.append("a"), lambda: calls.append("b")]
    times = time_in_turn(functions, seconds=0, rounds=(2, 9), between=lambda: calls.append("-"))
    assert calls == ["a", "b", *["-", "a", "a", "b"] * 2]
    assert [len(t) for t in times] == [2, 2]


def test_a_function_before_each_timed_call():
    calls = []
    functions = [lambda: calls.append("a"), lambda: calls.append("b")]
    time_in_turn(functions, seconds=0, rounds=(2, 2), before=lambda function: calls.append(functions.index(function)))
    assert calls == ["a", "b", 0, "a", 1, "b", 0, "a", 1, "b"]


def test_shuffled_rounds_run_all_functions_in_changing_order():
    calls = []
    functions = [lambda n=n: calls.append(n) for n in range(4)]
    times = time_in_turn(functions, seconds=0, rounds=(20, 20), shuffle=True)
    rounds = [tuple(calls[at : at + 4]) for at in range(4, len(calls), 4)]
    assert all(sorted(order) == [0, 1, 2, 3] for order in rounds)
    assert len(set(rounds)) > 5
    assert quartiles([float(len(t)) for t in times]) == (20, 20, 20)


def test_whole_models_give_torchs_losses(tmp_path):
    options = [
        "--models",
        "gpt",
        "--lengths",
        "32",
        "--layers",
        "1",
        "--seconds",
        "0",
        "--rounds",
        "2",
        "--repeats",
        "0",
    ]
    models.main([*options, "--modes", "train fp32", "inference fp32", "--json", str(tmp_path / "models.json")])
    rows = json.loads((tmp_path / "models.json").read_text())["rows"]
    assert [row["mode"] for row in rows] == ["train fp32", "inference fp32"]
    for row in rows:
        assert set(row["taken"]) == {"scaled_dot_product_attention"}
        assert row["loss"] == pytest.approx(row["torch_loss"], rel=1e-4)
        assert 0 < row["share"] < 1
    assert not flash_attn_ext.is_active()


@pytest.mark.usefixtures("one_thread")
def test_the_absorbed_forms_of_latent_attention_are_the_same():
    _, calls = mla.calls_of(mla.Decode(batch=2, heads=16, seqlen_k=100, dtype="float32", expanded=True, torch=True))
    ours, torchs = calls["absorbed"](), calls["torch, absorbed"]()
    torch.testing.assert_close(ours, torchs.transpose(1, 2))
    assert calls["expanded"]().shape == (2, 1, 16, mla.V_DIM)


@pytest.mark.usefixtures("one_thread", "detected_kernel")
def test_latent_attention_writes_a_record(tmp_path):
    arguments = [
        "--quick",
        "--heads",
        "16",
        "--length",
        "64",
        "--batch",
        "1",
        "--seconds",
        "0.001",
        "--dtypes",
        "float32",
    ]
    mla.main([*arguments, "--text", str(tmp_path / "t.txt"), "--json", str(tmp_path / "r.json")])
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["decode"][0]["peers"].keys() == {"torch, absorbed", "expanded"}
    assert record["wide"][0]["forward"]["(128, 128)"] == 1
    assert "Latent attention" in (tmp_path / "t.txt").read_text()
