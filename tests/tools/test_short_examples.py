"""Examples that train for minutes, at a tiny size: a WGAN-GP with attention."""

import pytest
import torch
from paths import ROOT


@pytest.fixture(autouse=True)
def _examples(monkeypatch, threads):
    threads(1)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


def test_the_gradient_penalty_has_the_gradients_of_torchs_math_kernel():
    import wgan_gp
    from gpt_model import attention_by_name

    gradients = []
    for name in ("flash_attn_ext", "sdpa-math"):
        torch.manual_seed(0)
        critic = wgan_gp.Critic(attention_by_name(name)).double()
        real, made = torch.randn(2, 3, 16, 2, dtype=torch.float64)
        wgan_gp.penalty(critic, real, made).backward()
        gradients.append([weight.grad for weight in critic.parameters() if weight.grad is not None])
    assert len(gradients[0]) > 20
    torch.testing.assert_close(*gradients)


def test_the_wgan_trains_and_draws(tmp_path, capsys):
    import wgan_gp

    wgan_gp.main(["--steps", "1", "--batch", "2", "--plot", str(tmp_path / "wgan.png")])
    assert "penalty" in capsys.readouterr().out
    assert (tmp_path / "wgan.png").stat().st_size > 10000
