"""examples/meanflow_digits.py at a tiny size, with images of its own: scikit-learn is not among the tests' packages."""

import sys

import pytest
import torch
from paths import ROOT


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import meanflow_digits

    return meanflow_digits


def test_tokens_are_patches_and_become_images_again(example):
    images = torch.arange(2.0 * 8 * 8).reshape(2, 8, 8)
    tokens = example.as_tokens(images)
    assert tokens.shape == (2, 16, 4)
    assert tokens[0, 1].tolist() == [2, 3, 10, 11]
    assert torch.equal(example.as_images(tokens), images)


def test_the_judge_reads_the_nearest_real_image(example):
    real = torch.stack([torch.full((8, 8), float(digit)) for digit in range(10)])
    digits = torch.arange(10)
    assert example.judge(real + 0.25, digits, real, digits) == pytest.approx((1.0, 2.0))
    assert example.judge(real, digits.flip(0), real, digits)[0] == 0.0


def test_it_trains_and_draws(example, monkeypatch, tmp_path, capsys):
    digits = torch.arange(20) // 2
    monkeypatch.setattr(example, "real_images", lambda: (digits[:, None, None].expand(20, 8, 8) / 5 - 1, digits))
    figure = tmp_path / "digits.png"
    example.main(["--minutes", "0.001", "--batch", "4", "--count", "10", "--plot", str(figure)])
    printed = capsys.readouterr().out
    assert "1 evaluations:" in printed
    assert "half against half: 100.0%" in printed
    assert figure.stat().st_size > 10000


def test_it_says_where_the_images_are(example, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(SystemExit, match="pip install scikit-learn"):
        example.main([])
