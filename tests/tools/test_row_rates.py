"""benchmarks/row_rates.py: the calls of each form compute attention, and the record names the dips."""

import json

import pytest
import reference
import torch

from benchmarks import row_rates
from flash_attn_ext import flash_attn

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(row_rates, "KEYS", 160)
    monkeypatch.setattr(row_rates, "PREFILL", 3)
    monkeypatch.setattr(row_rates, "D", 8)
    monkeypatch.setattr(row_rates, "ROWS", [1, 4, 8])


def test_operations_count_the_visible_scores():
    mask = torch.ones(3, 7).tril(diagonal=4)  # lower right corner
    assert row_rates.flops(2, [(3, 7), (1, 5)]) == 4 * 2 * row_rates.D * (int(mask.sum()) + 5)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("group", [1, 4])
def test_every_form_has_a_call_for_each_count_of_rows(group):
    for form, calls in row_rates.FORMS.items():
        counts = [count for _, count in calls(group, torch.float32)]
        assert len(counts) == len(row_rates.rows_of_group(group)), form
        assert counts == sorted(counts), form


@pytest.mark.usefixtures("tiny")
def test_the_paged_call_is_attention():
    torch.manual_seed(0)
    *_, (call, _) = row_rates.paged(4, torch.float32)
    torch.manual_seed(0)
    cache = row_rates.Pages([160], 16, torch.float32)
    k, v = (t[cache.table[0].long()].flatten(0, 1).transpose(0, 1)[None] for t in (cache.keys, cache.values))
    for rows in (4, 8):
        q = torch.randn(1, rows // 4, 16, 8)
    exact, _ = reference.attention(q.transpose(1, 2), k, v, causal="lower_right")
    torch.testing.assert_close(call().transpose(1, 2).double(), exact.double(), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("tiny")
def test_a_dip_is_named(monkeypatch, tmp_path):
    seconds = iter([1.0, 1.0, 4.0])  # 4 rows are 4 times as fast as 1, and 8 rows half as fast as 4
    monkeypatch.setattr(row_rates, "time_in_turn", lambda calls, **_: [[next(seconds)] * 2 for _ in calls])
    monkeypatch.setattr(row_rates.Undisturbed, "times_of", lambda _self, _call, times: times)
    monkeypatch.setattr(row_rates.peaks, "flops", lambda *_: 1e9)
    arguments = ["--forms", "dense", "--groups", "1", "--dtypes", "float32", "--json", str(tmp_path / "record")]
    row_rates.main([*arguments, "--text", str(tmp_path / "text"), "--threads", "1"])
    (curve,) = json.loads((tmp_path / "record").read_text())["curves"]
    assert curve["rows"] == [1, 4, 8]
    ((left, right, ratio),) = curve["dips"]
    assert (left, right) == (4, 8)
    assert ratio == pytest.approx(0.5, abs=0.02)
    assert curve["fast_GFLOP/s"] == curve["GFLOP/s"]  # all calls take the same time
    assert "4 to 8 rows: 0.49" in (tmp_path / "text").read_text()


def test_flash_attn_is_called_with_the_lower_right_corner(monkeypatch):
    seen = []
    monkeypatch.setattr(row_rates, "KEYS", 32)
    monkeypatch.setattr(row_rates, "ROWS", [2])
    monkeypatch.setattr(
        row_rates, "flash_attn", lambda *a, **options: seen.append(options) or flash_attn(*a, **options)
    )
    for call, _ in row_rates.dense(1, torch.float32):
        call()
    assert seen == [{"enable_gqa": True, "causal": "lower_right"}]
