"""examples/train_long.py: every way of attention has the same losses, and a stopped run continues as if it had not."""

import json
import os
import signal
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import islice

import pytest
import torch
from paths import ROOT

import flash_attn_ext

TEXTS = [b"def f%d(x):\n" % n + b"    return x + %d\n" % n * (1 + n % 7) for n in range(300)]
TINY = "--context 64 --d-model 32 --heads 2 --layers 2 --validate-every 2 --validation-packs 1"


class InThisProcess:
    """A TrainingProcess without the process, because each process imports torch anew."""

    def __init__(self, make, *arguments):
        self.trainer, self.ready = make(*arguments), done(None)

    def submit(self, method, *arguments):
        return done(getattr(self.trainer, method)(*arguments))

    def close(self):
        pass


def done(result):
    future = Future()
    future.set_result(result)
    return future


@pytest.fixture
def train_long(monkeypatch, threads, tmp_path):
    threads(1)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'examples'}")  # for the processes of the sharded run
    import packed_text
    import train_long

    torch.save(packed_text.as_documents(TEXTS), tmp_path / "documents.pt")
    return train_long


def train(train_long, folder, way, steps, *more):
    """Returns the training and the validation losses of one run."""
    arguments = [*TINY.split(), "--ways", way, "--steps", str(steps), "--out", str(folder), *more]
    assert train_long.main(arguments) == 0
    (run,) = json.loads((folder / "record.json").read_text())["runs"]
    return [*run["loss"], *(loss for _, loss in run["validation"])]


def test_the_ways_agree_and_a_stopped_run_continues(train_long, tmp_path, monkeypatch):
    sharded = train(train_long, tmp_path, "2 processes", 4, "--dtypes", "float32")
    monkeypatch.setattr(train_long, "TrainingProcess", InThisProcess)
    for dtype, tolerance in (("float32", 2e-5), ("bfloat16", 5e-3)):
        losses = {way: train(train_long, tmp_path, way, 4, "--dtypes", dtype) for way in ("torch", "varlen")}
        flash_attn_ext.activation_report(reset=True)
        try:
            losses["activate"] = train(train_long, tmp_path, "activate", 4, "--dtypes", dtype)
            assert flash_attn_ext.activation_report().taken
        finally:
            flash_attn_ext.deactivate()
        losses |= {"2 processes": sharded} if dtype == "float32" else {}
        for got in losses.values():
            assert len(got) == 6  # 4 steps and 2 validations
            assert got == pytest.approx(losses["torch"], abs=tolerance)
    assert (tmp_path / "train_long.png").stat().st_size > 10000

    once = train(train_long, tmp_path, "varlen", 4, "--dtypes", "float32")
    (tmp_path / "float32-varlen.pt").unlink()
    train(train_long, tmp_path, "varlen", 1, "--dtypes", "float32")
    assert train(train_long, tmp_path, "varlen", 4, "--dtypes", "float32") == once
    with pytest.raises(ValueError, match=r"settings: got .*allowed: the settings of"):
        train(train_long, tmp_path, "varlen", 6, "--dtypes", "float32", "--seed", "1")


@pytest.mark.parametrize("bias", [True, False])
def test_float32_products_round_where_autocast_rounds(train_long, bias):
    from bfloat16_linear import Float32Products

    linear = torch.nn.Linear(48, 32, bias=bias)
    x, grad = torch.randn(2, 64, 48, requires_grad=True), torch.randn(2, 64, 32).bfloat16()

    def results(*contexts):
        with ExitStack() as stack:
            for context in contexts:
                stack.enter_context(context)
            out = linear(x)
        return [out, *torch.autograd.grad(out, [x, *linear.parameters()], grad)]

    autocast = results(torch.autocast("cpu", torch.bfloat16))
    ours = results(torch.autocast("cpu", torch.bfloat16), Float32Products())
    assert len(ours) == 3 + bias
    torch.testing.assert_close(ours, autocast, atol=0.02, rtol=2**-7)  # the sums of the products have another order
    assert [result.dtype for result in ours] == [result.dtype for result in autocast]
    assert not any(torch.equal(got.float(), plain) for got, plain in zip(ours, results(), strict=True))


def test_ctrl_c_saves_and_says_how_to_continue(train_long, tmp_path, monkeypatch, capsys):
    class Interrupted(InThisProcess):
        def submit(self, method, *arguments):
            if method == "step":
                os.kill(os.getpid(), signal.SIGINT)
            return super().submit(method, *arguments)

    monkeypatch.setattr(train_long, "TrainingProcess", Interrupted)
    arguments = [*TINY.split(), "--ways", "torch", "--dtypes", "float32", "--out", str(tmp_path)]
    assert train_long.main(arguments) == 130
    assert "The same command continues" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "record.json").read_text())["runs"][0]["loss"]) == 1
    assert (tmp_path / "float32-torch.pt").exists()


def test_a_pack_holds_each_token_with_its_next_one(train_long):
    from packed_attention import document_mask
    from packed_text import as_documents, packs

    documents = as_documents(TEXTS)
    pairs = {tuple(pair) for pair in documents.train.unfold(0, 2, 1).tolist()}
    count = 0
    for pack in islice(packs(documents.train, documents.train_lengths, 64, seed=0), 20):
        lengths = pack.cu_seqlens.diff()
        assert lengths.min() > 0
        assert lengths.sum() == len(pack.inputs) == len(pack.targets) == 64
        assert set(zip(pack.inputs.tolist(), pack.targets.tolist(), strict=True)) <= pairs
        for begin, end in pack.cu_seqlens.unfold(0, 2, 1).tolist():
            assert torch.equal(pack.inputs[begin + 1 : end], pack.targets[begin : end - 1])
        assert document_mask(pack.cu_seqlens).sum() == (lengths * (lengths + 1) // 2).sum()
        count += len(lengths)
    assert count > 40  # two or more in most packs, so the test of the ways depends on the mask
