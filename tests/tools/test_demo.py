"""The demo, examples/train_gpt.py, at a tiny size, and the rule by which training runs agree."""

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
import generate
import gpt_plot  # noqa: F401  before a test replaces flash_attn_ext
import train_gpt
import train_packed
from gpt_model import AttentionUnavailable, attention_by_name
from gpt_training import Settings
from loss_agreement import EARLY_STEPS, FACTOR, ROUNDING, Curves, compare, differences
from stdlib_text import VOCABULARY, Tokenizer, as_corpus, load_corpus, random_windows, source_files

STEPS = 30
TINY = f"--steps {STEPS} --context 48 --batch-size 4 --d-model 32 --heads 2 --layers 2".split()


def run_demo(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, train_gpt.__file__, *TINY, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # too small a model for two
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_the_demo_trains_the_same_model_through_each_attention(tmp_path):
    finished = run_demo("--out", str(tmp_path), "--device", "cpu", "--lengths", "64")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "The training runs of flash_attn_ext and of torch's two kernels agree" in finished.stdout
    assert "Part 1 of 2" in finished.stdout
    assert "Part 2 of 2" in finished.stdout
    assert (tmp_path / "loss_curves.png").read_bytes().startswith(b"\x89PNG")

    results = json.loads((tmp_path / "results.json").read_text())
    assert results["agree"] is True
    assert results["settings"]["steps"] == STEPS
    assert results["machine"]["torch"] == torch.__version__
    (comparison,) = results["comparisons"]
    names = comparison["reference"], comparison["yardstick"], comparison["candidate"]
    assert names == ("sdpa-math", "sdpa", "flash_attn_ext")
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
    assert results["runs"][2]["kernel"], "no kernel name: was it flash_attn_ext that ran?"


class InThisProcess:
    """A TrainingProcess without the process: it is quick, and a test can replace its functions."""

    def __init__(self, make, *arguments):
        self.trainer = make(*arguments)

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


@pytest.fixture(scope="module")
def small_corpus():
    """The text of the examples: reading the whole library takes seconds."""
    text = b"".join(path.read_bytes() for path in sorted(Path(train_gpt.__file__).parent.glob("*.py")))
    return as_corpus(text[:40000], text[40000:], files=1)


@pytest.mark.parametrize("attention", [sees_the_future, wrong_scale, loses_a_gradient, nan_in_one_row, correct])
def test_the_exit_status_tells_a_wrong_attention(attention, tmp_path, monkeypatch, capsys, threads, small_corpus):
    threads(1)
    monkeypatch.setattr(train_gpt, "load_corpus", lambda: small_corpus)
    monkeypatch.setattr(train_gpt, "TrainingProcess", InThisProcess)
    monkeypatch.setitem(sys.modules, "flash_attn_ext", SimpleNamespace(flash_attn=attention))

    few = ["--steps", str(EARLY_STEPS + 2), "--lengths"]
    status = train_gpt.main([*TINY, *few, "--out", str(tmp_path), "--device", "cpu"])

    agree = attention is correct
    assert status == (0 if agree else 1)
    assert ("DO NOT agree" in capsys.readouterr().out) is not agree
    assert json.loads((tmp_path / "results.json").read_text())["agree"] is agree


LOSS = [7.0 - 0.1 * step for step in range(30)]
CURVES = Curves(loss=LOSS, validation=[6.5, 5.5, 5.0], first_gradients={"query": 1e-4, "value": 2.0})
# The yardstick's distance from CURVES: 1e-5 in each loss, 1e-5 relative in each gradient.
YARDSTICK = Curves(
    loss=[loss + 1e-5 for loss in LOSS],
    validation=[loss + 1e-5 for loss in CURVES.validation],
    first_gradients={name: value * (1 + 1e-5) for name, value in CURVES.first_gradients.items()},
)


def changed_at(step: int, by: float) -> list[float]:
    return [loss + by if index == step else loss for index, loss in enumerate(LOSS)]


def passed(yardstick: Curves = YARDSTICK, **changed) -> list[bool]:
    checks = compare(CURVES, yardstick, replace(CURVES, **changed), ROUNDING["float32"])
    return [check.passed for check in checks]


def test_equal_runs_agree():
    assert passed() == [True] * 5
    assert passed(CURVES) == [True] * 5, "no distance at all"


@pytest.mark.parametrize("dtype", ROUNDING)
def test_one_step_of_chance_does_not_decide(dtype):
    """At step 302 of 400 the losses of two correct kernels differed by 1.4e-3, the median by 1e-4."""
    late = replace(CURVES, loss=changed_at(20, 0.05))
    checks = compare(CURVES, YARDSTICK, late, ROUNDING[dtype])
    assert all(check.passed for check in checks)


def test_a_candidate_may_be_as_far_as_the_factor():
    near, far = (0.9e-5 * FACTOR, 1.1e-5 * FACTOR)
    assert passed(loss=[loss + near for loss in LOSS]) == [True] * 5
    assert passed(loss=[loss + far for loss in LOSS]) == [False, True, False, False, True]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"loss": changed_at(0, 1e-3)}, [False, True, False, True, True]),
        ({"loss": changed_at(EARLY_STEPS - 1, 1e-3)}, [True, True, False, True, True]),
        ({"loss": changed_at(20, math.nan)}, [True, True, True, False, True]),
        ({"loss": LOSS[:-1]}, [True, True, True, False, True]),
        ({"loss": []}, [False, True, False, False, True]),
        ({"validation": [6.6, 5.6, 5.1]}, [True, True, True, True, False]),
        ({"validation": [6.5, math.nan, 5.0]}, [True, True, True, True, False]),
        ({"first_gradients": {"query": 1.1e-4, "value": 2.0}}, [True, False, True, True, True]),
        ({"first_gradients": {"query": 0.0, "value": 2.0}}, [True, False, True, True, True]),
        ({"first_gradients": {"value": 2.0}}, [True, False, True, True, True]),
        ({"first_gradients": {}}, [True, False, True, True, True]),
    ],
)
def test_runs_that_differ_do_not_agree(changed, expected):
    assert passed(**changed) == expected


def test_a_run_of_nan_or_of_nothing_never_agrees():
    for run in (Curves([math.nan], [math.nan], {"query": math.nan}), Curves([], [], {})):
        for runs in ((run, run, run), (CURVES, run, CURVES), (run, YARDSTICK, run)):
            assert not all(check.passed for check in compare(*runs, ROUNDING["float32"]))
        assert not any(check.passed for check in compare(run, run, run, ROUNDING["float32"]))


def test_a_gradient_of_zero_agrees_only_with_zero():
    zero = replace(CURVES, first_gradients={"query": 0.0, "value": 2.0})
    assert compare(zero, zero, zero, ROUNDING["float32"])[1].passed
    assert compare(zero, zero, CURVES, ROUNDING["float32"])[1].difference == math.inf


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


SMALL = ["--context", "64", "--d-model", "32", "--heads", "2", "--layers", "2"]


def run_in_this_process(example, monkeypatch, capsys, corpus, *arguments: str) -> str:
    """Returns the output of the example."""
    monkeypatch.setattr(example, "load_corpus", lambda: corpus)
    monkeypatch.setattr(sys, "argv", [example.__file__, *SMALL, *arguments])
    example.main()
    return capsys.readouterr().out


def test_generation_through_pages_writes_the_text_of_torch(monkeypatch, capsys, threads, small_corpus):
    threads(1)
    options = ["--steps", "3", "--tokens", "5", "--lengths", "40"]
    printed = run_in_this_process(generate, monkeypatch, capsys, small_corpus, *options)
    assert "100.0% of the tokens are the same" in printed
    assert "keys in the cache" in printed
    assert "flash_attn_with_kvcache of q (4, 8, 64)" in printed, "the plan of explain_kvcache"


def test_packed_documents_train_as_padded_ones_do(monkeypatch, capsys, threads, small_corpus):
    threads(1)
    printed = run_in_this_process(train_packed, monkeypatch, capsys, small_corpus, "--steps", "4")
    apart = [float(line.split("at most ")[1].split()[0]) for line in printed.splitlines() if "at most" in line]
    assert len(apart) == 3
    assert max(apart) < 1e-3
