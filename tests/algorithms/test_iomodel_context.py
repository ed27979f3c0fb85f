"""The predicted time of context parallel attention: its bytes, its limits, its command."""

import pytest

from flash_attn_ext.iomodel import __main__ as cli
from flash_attn_ext.iomodel import context_parallel as model
from flash_attn_ext.iomodel.devices import GPUS

H100, NVLINK, NETWORK = GPUS["H100"], *model.LINKS.values()


def problem(**changed):
    return model.Sharded(**dict(B=1, H=32, H_kv=8, S=2**17, D=128, n=8) | changed)


def test_bytes_equal_the_docstring_s():
    kv, q = 8 * 2**14 * 2 * 128, 32 * 2**14 * 128
    assert model.sent("ring", problem()).forward == 7 * kv * 2
    assert model.sent("ring", problem()).backward == 7 * kv * 2 + 8 * kv * 4
    assert model.sent("all_gather", problem()).backward == 7 * kv * (2 + 4)
    assert model.sent("ulysses", problem()).bytes == 2 * 7 / 8 * (2 * q + kv) * 2
    assert model.sent("ring", problem(n=1)).bytes == 0
    assert model.sent("ring", problem(backward=False)).backward == 0


def test_long_sequences_hide_the_ring():
    """Computation grows with S^2 and messages with S."""
    for link in (NVLINK, NETWORK):
        idle = [model.predict("ring", problem(S=S), H100, link).exposed for S in (2**15, 2**17, 2**20)]
        assert idle == sorted(idle, reverse=True)
        assert idle[-1] < 0.02
        for method in model.METHODS:
            time = model.predict(method, problem(), H100, link)
            assert time.seconds >= time.compute
            assert time.seconds <= 1.001 * (time.compute + time.communication)


def test_ring_memory_is_that_of_the_shard():
    for method in ("ring", "ulysses"):
        assert model.memory(method, problem(S=2**18, n=16)) == model.memory(method, problem())
    assert model.memory("all_gather", problem(S=2**18, n=16)) > 1.5 * model.memory("all_gather", problem())


def test_impossible_arguments():
    assert not model.possible("ulysses", problem(n=16))
    with pytest.raises(ValueError, match="method: got 'ulysses' for 8 key heads on 16 devices"):
        model.predict("ulysses", problem(n=16), H100, NETWORK)
    with pytest.raises(ValueError, match="S: got 100 for n = 8"):
        problem(S=100)
    with pytest.raises(ValueError, match="H_kv: got 5 for H = 32"):
        problem(H_kv=5)


def test_the_command(capsys):
    cli.main(["context", "--S", "131072", "--n", "8", "16", "--H-kv", "8"])
    text = capsys.readouterr().out
    assert "Nothing is measured" in text
    assert text.count("128k") == 3  # NVLink joins at most 8
    with pytest.raises(SystemExit, match=r"--efficiency: got 2\.0"):
        cli.main(["context", "--efficiency", "2"])
