"""benchmarks/caches.py: its caches hold the same rows, and its table divides by the bfloat16 cache's time."""

import pytest
import torch

from benchmarks import caches
from flash_attn_ext import flash_attn_with_kvcache

# Errors of out relative to its largest element. Pages hold the same values.
ERRORS = {"int8": 0.05, "e4m3": 0.1, "e5m2": 0.2, "int4": 0.4, "pages": 0, "bfloat16": 0}


@pytest.mark.parametrize("name", caches.FORMATS)
def test_the_formats_hold_the_same_rows(name):
    torch.manual_seed(0)
    k, v = torch.randn(2, 2, 64, 2, caches.D).bfloat16()
    q = torch.randn(2, 1, 4, caches.D).bfloat16()
    exact = flash_attn_with_kvcache(q, k, v)
    if name == "pages of 16":  # in order, so that each sequence has its own rows
        own = caches.in_pages(k, v) | {"block_table": torch.arange(8, dtype=torch.int32).view(2, 4)}
    else:
        own = caches.FORMATS[name](k, v)
    error = (flash_attn_with_kvcache(q, **own) - exact).abs().max() / exact.abs().max()
    allowed = next(bound for start, bound in ERRORS.items() if name.startswith(start))
    assert error <= allowed


def test_pages_share_no_memory_with_the_bfloat16_cache():
    k, v = torch.randn(2, 1, 32, 2, caches.D).bfloat16()
    own = caches.in_pages(k, v)
    assert own["k_cache"].data_ptr() != k.data_ptr()
    assert own["v_cache"].data_ptr() != v.data_ptr()


def test_the_table(monkeypatch, tmp_path):
    threads, path, befores = torch.get_num_threads(), tmp_path / "text", []

    def times(calls, *, before, **_):
        befores.append(before)
        return [[0.002 * (n + 1)] for n in range(len(calls))]

    monkeypatch.setattr(caches, "time_in_turn", times)
    monkeypatch.setattr(caches.Undisturbed, "times_of", lambda _self, _call, times: times)
    monkeypatch.setattr(caches, "FITS", 4 * 32 * caches.D)
    try:
        caches.main(["--shapes", "1,2,1,32", "1,2,1,64", "--threads", "1", "--text", str(path)])
    finally:
        torch.set_num_threads(threads)
    rows = [line.replace(" ", "") for line in path.read_text().splitlines()]
    for first in ("1,2,1,32|memory", "1,2,1,32|repeated", "1,2,1,64|memory"):
        assert f"|{first}|2.00|2.00|3.00|4.00|5.00|6.00|7.00|8.00|9.00|" in rows
    assert not any(row.startswith("|1,2,1,64|repeated") for row in rows)
    calls = []
    befores[3](lambda: calls.append(1))  # of the first shape, "repeated"
    assert calls == [1]
