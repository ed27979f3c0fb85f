"""Tiny models with random weights in vLLM, in this process: no download, no tokenizer."""

import gc
import json
import os
import tempfile
import zlib
from pathlib import Path

import torch

# Before vLLM is imported: the engine runs in this process, and its threads stay where they are.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

VOCABULARY = 256
SIZES = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, vocab_size=VOCABULARY, max_position_embeddings=2048, torch_dtype="float32", bos_token_id=1,
    eos_token_id=2, pad_token_id=0, rms_norm_eps=1e-5, hidden_act="silu",
)  # fmt: skip
GEMMA = dict(hidden_activation="gelu_pytorch_tanh", hidden_act="gelu_pytorch_tanh", query_pre_attn_scalar=32)
CONFIGS = {
    "llama": dict(architectures=["LlamaForCausalLM"], model_type="llama", tie_word_embeddings=False),
    "qwen3": dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", tie_word_embeddings=False),
    "gemma2": dict(
        architectures=["Gemma2ForCausalLM"], model_type="gemma2", sliding_window=24, attn_logit_softcapping=5.0,
        final_logit_softcapping=None, **GEMMA,
    ),
    "gemma3": dict(
        architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", sliding_window=24,
        layer_types=["sliding_attention", "full_attention"], **GEMMA,
    ),
    "gpt_oss": dict(
        architectures=["GptOssForCausalLM"], model_type="gpt_oss", sliding_window=24, num_local_experts=4,
        num_experts_per_tok=2, layer_types=["sliding_attention", "full_attention"], attention_bias=True,
    ),
    "bloom": dict(architectures=["BloomForCausalLM"], model_type="bloom", n_layer=2, n_head=4),
}  # fmt: skip


def randomize(model: torch.nn.Module) -> None:
    """Weights large enough that attention changes the tokens: vLLM's dummy weights are about 1e-3.

    Equal in each run.
    """
    for name, parameter in model.named_parameters():
        random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        given = torch.randn(parameter.shape, generator=random)
        if parameter.dim() >= 2:
            given *= 1.5 if "embed" not in name and parameter.dim() == 2 else 1.0
            given /= 1.0 if "embed" in name else parameter.shape[-1] ** 0.5
        elif "norm" in name:
            given = 1 + 0.1 * given
        parameter.data.copy_(given)


def implementations(model: torch.nn.Module) -> set[str]:
    """The names of the classes that run attention."""
    return {type(m.impl).__name__ for m in model.modules() if hasattr(getattr(m, "impl", None), "scale")}


def folder_of(name: str, **changes) -> str:
    """Writes the model's config.json, and returns its folder."""
    folder = Path(tempfile.mkdtemp(prefix="vllm_model_"))
    (folder / "config.json").write_text(json.dumps(SIZES | CONFIGS[name] | changes))
    return str(folder)


class Engine:
    """An engine with random weights. Leaving the context frees its memory and its process group."""

    def __init__(self, name: str, backend: str | None, changes: dict | None = None, **options) -> None:
        from vllm import LLM

        given = dict(
            model=folder_of(name, **(changes or {})), skip_tokenizer_init=True, load_format="dummy", enforce_eager=True,
            dtype="float32", max_model_len=1024, block_size=32, num_gpu_blocks_override=128, max_num_seqs=8,
            kv_cache_memory_bytes=64 << 20, disable_log_stats=False, attention_config={"backend": backend},
        )  # fmt: skip
        try:
            self.llm = LLM(**given | options)
        except BaseException:
            _clean_up()
            raise
        self.llm.apply_model(randomize)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error) -> None:
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        _clean_up()

    def tokens(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Returns the greedy continuation of each prompt."""
        from vllm import SamplingParams

        options = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [list(out.outputs[0].token_ids) for out in self.llm.generate(given, options, use_tqdm=False)]

    def counter(self, name: str) -> int:
        """Returns one of vLLM's counters, such as "num_preemptions"."""
        return sum(int(metric.value) for metric in self.llm.get_metrics() if metric.name == f"vllm:{name}")

    def classes_of_layers(self) -> set[str]:
        """Returns the names of the implementations of attention."""
        return set.union(*self.llm.apply_model(implementations))


def _clean_up() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()
    gc.collect()


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (length,), generator=random).tolist() for length in lengths]
