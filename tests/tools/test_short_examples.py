"""Examples that train for minutes, at a tiny size: a WGAN-GP with attention, and learned sinks."""

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


def test_sinks_get_gradients_and_their_weights_are_measured(tmp_path, monkeypatch, capsys):
    import stdlib_text
    import train_sinks

    text = b"".join(b"def f%d(x):\n    return x + %d\n" % (n, n) for n in range(200))
    monkeypatch.setattr(train_sinks, "load_corpus", lambda: stdlib_text.as_corpus(text, text, 1))
    sizes = "--steps 2 --batch 2 --context 32 --d-model 16 --heads 2 --layers 1"
    train_sinks.main([*sizes.split(), "--plot", str(tmp_path / "sinks.png")])
    assert "layer 0: sinks" in capsys.readouterr().out
    assert (tmp_path / "sinks.png").stat().st_size > 10000

    attention = train_sinks.SinkAttention(2, with_sink=True)
    attention.sink.data = torch.tensor([0.5, -1.0])
    attention.measured = []
    query, key, value = torch.randn(3, 1, 2, 6, 8)
    attention(query, key, value, is_causal=True).sum().backward()
    assert (attention.sink.grad != 0).all()
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    scores = (query @ key.transpose(-1, -2) / 8**0.5).masked_fill(hidden, -torch.inf)
    sinks = attention.sink[:, None, None].expand(1, 2, 6, 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[0, :, 3:].mean(1)
    torch.testing.assert_close(attention.measured[0], torch.stack([weights[:, 0], weights[:, -1]]))
