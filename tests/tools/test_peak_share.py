"""benchmarks/peak_share.py: it counts visible scores, and divides each call by the peak of its round."""

import torch

from benchmarks import peak_share


def test_visible_scores_count():
    visible = int(torch.ones(7, 7).tril().sum())
    assert peak_share.flops(7, 16, causal=True) == 4 * peak_share.HEADS * 16 * visible
    assert peak_share.flops(7, 16, causal=False) == 4 * peak_share.HEADS * 16 * 49


def test_the_table(monkeypatch, tmp_path):
    def two_rounds(calls, *, between, **_):
        for _ in range(2):
            between()
        return [[flops / 4e9, flops / 6e9] for flops in (peak_share.flops(32, 8, causal) for causal in (False, True))]

    threads = torch.get_num_threads()
    tops = iter([8e9, 12e9])
    monkeypatch.setattr(peak_share, "time_in_turn", two_rounds)
    monkeypatch.setattr(peak_share.peaks, "flops", lambda *_: next(tops))
    arguments = ["--threads", "1", "--seqlens", "32", "--head-dims", "8", "--text", str(tmp_path / "text")]
    try:
        peak_share.main(arguments)
    finally:
        torch.set_num_threads(threads)
    rows = [line.replace(" ", "") for line in (tmp_path / "text").read_text().splitlines()]
    assert "|1|8|32|5|0.50|5|0.50|" in rows  # 4 of 8 and 6 of 12 GFLOP/s
