"""The demo, examples/train_gpt.py: end to end at a tiny size, and the rule by which two loss curves agree."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from paths import ROOT
from torch.nn.functional import scaled_dot_product_attention as sdpa

sys.path.insert(0, str(ROOT / "examples"))
import train_gpt
from gpt_model import AttentionUnavailable, attention_by_name
from gpt_training import Settings, Trainer
from loss_agreement import TOLERANCES, Curves, compare, differences
from stdlib_text import VOCABULARY, Tokenizer, as_corpus, load_corpus, random_windows, source_files

STEPS = 30
TINY = f"--steps {STEPS} --context 48 --batch-size 4 --d-model 32 --heads 2 --layers 2".split()


def run_demo(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, train_gpt.__file__, *TINY, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # too small a model for two
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_both_attentions_train_the_same_model(tmp_path):
    finished = run_demo("--out", str(tmp_path), "--device", "cpu", "--lengths", "64")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "The two loss curves agree" in finished.stdout
    assert (tmp_path / "loss_curves.png").read_bytes().startswith(b"\x89PNG")

    results = json.loads((tmp_path / "results.json").read_text())
    assert results["agree"] is True
    assert results["settings"]["steps"] == STEPS
    assert results["machine"]["torch"] == torch.__version__
    (comparison,) = results["comparisons"]
    assert (comparison["reference"], comparison["candidate"]) == ("sdpa", "flash_attn_ext")
    assert all(check["difference"] <= check["limit"] for check in comparison["checks"])
    for run in results["runs"]:
        assert len(run["loss"]) == len(run["grad_norm"]) == len(run["step_seconds"]) == STEPS
        assert run["loss"][-1] < run["loss"][0], "it does not learn"
        assert run["validation"][-1]["step"] == STEPS
        assert run["peak_memory_bytes"] > run["memory_at_start_bytes"] > 0
        assert run["sample"]
    alone = json.loads((tmp_path / "attention.json").read_text())["rows"]
    measured = [(row["method"], row["length"]) for row in alone]
    assert measured == [("torch math", 64), ("torch default", 64), ("ours", 64)]
    assert all(row["bytes"] is not None and row["milliseconds"] > 0 for row in alone)
    assert (tmp_path / "attention.png").read_bytes().startswith(b"\x89PNG")
    assert results["runs"][0]["kernel"] is None
    assert results["runs"][1]["kernel"], "no kernel name: was it flash_attn_ext that ran?"


class InThisProcess:
    """A TrainingProcess without the process, to be quick and to see what a test has replaced."""

    def __init__(self, settings, attention, corpus):
        self.trainer = Trainer(settings, attention, corpus)

    def call(self, method, *arguments):
        return getattr(self.trainer, method)(*arguments)

    def close(self):
        pass


def sees_the_future(query, key, value, is_causal):
    return sdpa(query, key, value)


def wrong_scale(query, key, value, is_causal):
    return sdpa(query, key, value, is_causal=is_causal, scale=1.1 * query.shape[-1] ** -0.5)


def loses_a_gradient(query, key, value, is_causal):
    return sdpa(query, key.detach(), value, is_causal=is_causal)


def nan_in_one_row(query, key, value, is_causal):
    out = sdpa(query, key, value, is_causal=is_causal)
    return torch.where(torch.arange(out.shape[2])[:, None] == 7, math.nan, out)


def correct(query, key, value, is_causal):
    return sdpa(query, key, value, is_causal=is_causal)


@pytest.mark.parametrize("attention", [sees_the_future, wrong_scale, loses_a_gradient, nan_in_one_row, correct])
def test_the_exit_status_tells_a_wrong_attention(attention, tmp_path, monkeypatch, capsys, threads):
    threads(1)
    text = Path(train_gpt.__file__).read_bytes()
    corpus = as_corpus(text[:4000], text[4000:], files=1)
    monkeypatch.setattr(train_gpt, "load_corpus", lambda: corpus)
    monkeypatch.setattr(train_gpt, "TrainingProcess", InThisProcess)
    monkeypatch.setitem(sys.modules, "flash_attn_ext", SimpleNamespace(flash_attn=attention))

    status = train_gpt.main([*TINY, "--out", str(tmp_path), "--device", "cpu", "--lengths"])

    agree = attention is correct
    assert status == (0 if agree else 1)
    assert ("DO NOT agree" in capsys.readouterr().out) is not agree
    assert json.loads((tmp_path / "results.json").read_text())["agree"] is agree


CURVES = Curves(loss=[7.0, 6.0, 5.0], validation=[6.5, 5.5], first_gradients={"query": 1e-4, "value": 2.0})


def passed(dtype: str = "float32", **changed) -> list[bool]:
    return [check.passed for check in compare(CURVES, replace(CURVES, **changed), TOLERANCES[dtype])]


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_equal_curves_agree(dtype):
    assert passed(dtype) == [True] * 4


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"loss": [7.0001, 6.0, 5.0]}, [False, True, True, True]),
        ({"loss": [7.0, 6.0, 5.5]}, [True, True, False, True]),
        ({"loss": [7.0, math.nan, 5.0]}, [True, True, False, True]),
        ({"loss": [7.0, 6.0]}, [True, True, False, True]),
        ({"loss": []}, [False, True, False, True]),
        ({"validation": [6.5, 5.9]}, [True, True, True, False]),
        ({"first_gradients": {"query": 1.1e-4, "value": 2.0}}, [True, False, True, True]),
        ({"first_gradients": {"query": 0.0, "value": 2.0}}, [True, False, True, True]),
        ({"first_gradients": {"value": 2.0}}, [True, False, True, True]),
        ({"first_gradients": {}}, [True, False, True, True]),
    ],
)
def test_curves_that_differ_do_not_agree(changed, expected):
    assert passed(**changed) == expected


def test_two_runs_of_nan_or_of_nothing_do_not_agree():
    for run in (Curves([math.nan], [math.nan], {"query": math.nan}), Curves([], [], {})):
        assert not any(check.passed for check in compare(run, run, TOLERANCES["float32"]))


def test_a_gradient_of_zero_agrees_only_with_zero():
    zero = replace(CURVES, first_gradients={"query": 0.0, "value": 2.0})
    assert compare(zero, zero, TOLERANCES["float32"])[1].passed
    assert compare(zero, CURVES, TOLERANCES["float32"])[1].difference == math.inf


def test_differences_keep_the_steps_that_only_one_has():
    assert differences([1.0, 2.0], [1.5])[0] == 0.5
    assert math.isnan(differences([1.0, 2.0], [1.5])[1])


def test_a_missing_extension_names_the_command_that_builds_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_ext", None)
    with pytest.raises(AttentionUnavailable, match="pip install --no-build-isolation -e"):
        attention_by_name("flash_attn_ext")


def test_an_unusable_device_is_an_error_and_auto_is_not():
    with pytest.raises(AttentionUnavailable, match="'meta:7x'"):
        train_gpt.choose_device("meta:7x", ["sdpa"])
    assert train_gpt.choose_device("auto", ["sdpa", "flash_attn_ext"]) in ("cpu", "cuda")


def test_settings_must_be_positive():
    with pytest.raises(ValueError, match="steps is 0"):
        Settings(steps=0)


def test_a_name_that_comes_twice_is_numbered():
    runs = train_gpt.make_runs(["sdpa", "flash_attn_ext", "sdpa"])
    assert [run.name for run in runs] == [
        "sdpa",
        "flash_attn_ext",
        "sdpa #2",
    ]


def test_the_text_is_the_library_without_its_tests():
    files = source_files()
    assert {"argparse.py", "dataclasses.py"} <= {path.name for path in files}
    assert not [path for path in files if "site-packages" in path.parts or "test" in path.parts]


def test_tokens_are_words_and_nothing_is_lost():
    text = "def f(x):\n    return x  # na\u00efve\n\n\ndef g(x):\n    return f(x) + 10\0".encode()
    tokenizer = Tokenizer(text * 3)
    for part in (text, b"not seen before: \xff\t123"):
        assert tokenizer.decode(tokenizer.encode(part).tolist()) == part
    assert b" return" not in tokenizer.pieces, "the indentation and the word are two pieces"
    assert {b"return", b"\n    "} <= set(tokenizer.pieces)
    assert len(tokenizer.encode(text)) < len(text)


def test_the_corpus_is_in_tokens_of_its_own_vocabulary():
    corpus = load_corpus()
    assert corpus.train.max() < len(corpus.tokenizer.pieces) == VOCABULARY
    words = set(corpus.tokenizer.pieces)
    assert {b"self", b" import", b"def", b"\n        "} <= words


def test_the_same_seed_gives_the_same_batches():
    tokens = torch.arange(1000)
    first, again, other = (list(islice(random_windows(tokens, 3, 16, seed), 4)) for seed in (1, 1, 2))
    for (inputs, targets), (same_inputs, same_targets) in zip(first, again, strict=True):
        assert inputs.shape == targets.shape == (3, 16)
        assert torch.equal(inputs + 1, targets)
        assert torch.equal(inputs, same_inputs)
        assert torch.equal(targets, same_targets)
    assert not torch.equal(first[0][0], other[0][0])


def test_generation_through_pages_writes_what_torch_writes():
    command = [sys.executable, str(Path(train_gpt.__file__).with_name("generate.py"))]
    command += ["--steps", "3", "--tokens", "5", "--context", "64", "--d-model", "32", "--heads", "2", "--layers", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert finished.returncode == 0, finished.stderr
    assert "100.0% of the tokens are the same" in finished.stdout


def test_packed_documents_train_as_padded_ones_do():
    command = [sys.executable, str(Path(train_gpt.__file__).with_name("train_packed.py"))]
    command += ["--steps", "4", "--context", "64", "--d-model", "32", "--heads", "2", "--layers", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert finished.returncode == 0, finished.stderr
    apart = [float(line.split("at most ")[1].split()[0]) for line in finished.stdout.splitlines() if "at most" in line]
    assert len(apart) == 3
    assert max(apart) < 1e-3
