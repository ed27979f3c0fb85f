"""examples/train_sparse_indexer.py, end to end at a tiny size and on a short text."""

import json

import pytest
from paths import ROOT

TEXT = b"".join(b"def f%d(x):\n    return x + %d\n" % (n, n) for n in range(600))


@pytest.mark.parametrize("attention", ["multi-query", "latent"])
def test_it_trains_measures_and_draws(tmp_path, monkeypatch, attention):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import stdlib_text
    import train_sparse_indexer as example

    monkeypatch.setattr(example, "load_corpus", lambda: stdlib_text.as_corpus(TEXT, TEXT, 1))
    sizes = "--steps 3 --sparse-steps 2 --context 48 --topk 8 --d-model 32 --heads 2 --layers 1 --lengths 64 600"
    assert example.main([*sizes.split(), "--attention", attention, "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert set(results["losses"]) == {"all keys", "chosen keys", "untrained indexer", "window"}
    assert all(0 < loss < 20 for losses in results["losses"].values() for loss in losses.values())
    assert [row["length"] for row in results["layer"]] == [64, 600]
    assert (tmp_path / "sparse_indexer.png").stat().st_size > 10000
