"""vLLM on CPU: its own attention operator against our backend, and the decode throughput of a whole model.

Operators: one layer, in the same rounds, each on a cache in its own format. On vLLM's side the operators run that its
CPUAttentionBackend calls for a layer. The schedule of the step is made before. Ours is the backend's forward of a
layer. "32 layers": each call reads the cache of the next layer, as a model does. Otherwise all calls read one cache, so
that a small cache stays in the CPU's caches.

Models (--models): random weights, a process for each backend, one after another. A clock around the layers of attention
measures their share of a decode step.

Needs vLLM (docs/vllm.md): python -m benchmarks.vllm_backend --text FILE
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks import output
from benchmarks.harness import environment, machine, time_in_turn
from flash_attn_ext.integrations.vllm import NAME
from flash_attn_ext.integrations.vllm.cache_format import FORMATS
from flash_attn_ext.integrations.vllm.layer import AttentionLayerCalls
from flash_attn_ext.integrations.vllm.packed_step import PackedStep

PAGE_SIZE = 128  # vLLM's default on CPU


@dataclass(frozen=True)
class Step:
    """One step of the scheduler: (new tokens, tokens in the cache) of each sequence."""

    name: str
    sequences: tuple[tuple[int, int], ...]
    heads: int = 32
    heads_kv: int = 8
    head_dim: int = 128
    dtype: str = "bfloat16"
    cache: str = "auto"
    window: int | None = None
    layers: int = 1


def decode(batch: int, context: int, layers: int = 1, **options) -> Step:
    name = f"decode {batch} x {context}" + (f", {layers} layers" if layers > 1 else "")
    return Step(name, ((1, context - 1),) * batch, layers=layers, **options)


STEPS = [
    *(decode(b, s, dtype=dtype) for dtype in ("bfloat16", "float32")
      for b, s in ((1, 512), (1, 4096), (1, 16384), (8, 512), (8, 4096), (8, 16384), (32, 512), (32, 2048))),
    decode(32, 16384),  # three copies of 2.1 GB
    *(decode(1, 512, layers=32, dtype=dtype) for dtype in ("bfloat16", "float32")),
    *(decode(b, 2048, heads=14, heads_kv=2, head_dim=64) for b in (1, 8, 32)),
    decode(1, 2048, layers=24, heads=14, heads_kv=2, head_dim=64),
    decode(8, 4096, cache="fp8"),
    decode(8, 4096, window=512),
    *(Step("prefill 1 x 512", ((512, 0),), dtype=dtype) for dtype in ("bfloat16", "float32")),
    *(Step("prefill 1 x 2048", ((2048, 0),), dtype=dtype) for dtype in ("bfloat16", "float32")),
    *(Step(f"prefill {b} x {n}", ((n, 0),) * b, dtype=dtype)
      for b, n in ((8, 512), (32, 512)) for dtype in ("bfloat16", "float32")),
    *(Step("512 after 4096", ((512, 4096),), dtype=dtype) for dtype in ("bfloat16", "float32")),
    *(Step("7 decodes, prefill 256", ((1, 1023),) * 7 + ((256, 0),), dtype=dtype) for dtype in ("bfloat16", "float32")),
    Step("guesses: 8 x 4 at 2048", ((4, 2044),) * 8),
]  # fmt: skip


def common_metadata(step: Step) -> tuple[SimpleNamespace, int]:
    """Returns vLLM's metadata for random pages, and the number of pages."""
    new = torch.tensor([n for n, _ in step.sequences])
    used = torch.tensor([n + before for n, before in step.sequences], dtype=torch.int32)
    pages = (used + PAGE_SIZE - 1) // PAGE_SIZE
    total, widest = int(pages.sum()) + 1, int(pages.max())
    numbers, first = torch.randperm(total - 1, dtype=torch.int32) + 1, 0
    table, slots = torch.zeros(len(used), widest, dtype=torch.int32), []
    for b, count in enumerate(pages.tolist()):
        table[b, :count] = numbers[first : first + count]
        first += count
        at = torch.arange(int(used[b] - new[b]), int(used[b]))
        slots.append(table[b, at // PAGE_SIZE].long() * PAGE_SIZE + at % PAGE_SIZE)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), new.cumsum(0)]).int()
    common = SimpleNamespace(
        num_actual_tokens=int(offsets[-1]), query_start_loc=offsets, query_start_loc_cpu=offsets, seq_lens=used,
        block_table_tensor=table, max_query_len=int(new.max()), max_seq_len=int(used.max()),
        slot_mapping=torch.cat(slots), causal=True,
    )  # fmt: skip
    return common, total


def calls_of(step: Step) -> dict[str, Callable[[], None]]:
    """The calls to compare. Both caches get the same rows."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    common, pages = common_metadata(step)
    dtype, tokens = getattr(torch, step.dtype), common.num_actual_tokens
    coded = FORMATS[step.cache].coded
    shape = (pages, step.heads_kv, PAGE_SIZE, 2 * step.head_dim)
    theirs, ours = (
        [torch.zeros(shape, dtype=dtype if coded is None else torch.uint8) for _ in range(step.layers)]
        for _ in range(2)
    )
    next_theirs, next_ours = cycle(theirs), cycle(ours)
    isa = _get_attn_isa(dtype, PAGE_SIZE, step.head_dim, step.cache)
    scale = step.head_dim**-0.5
    layer = AttentionLayerCalls(step.head_dim, step.head_dim, scale, step.cache, step.window)
    packed = PackedStep.from_vllm(common, PAGE_SIZE)
    query = torch.randn(tokens, step.heads, step.head_dim).to(dtype)
    outs = torch.zeros_like(query), torch.zeros_like(query)

    def halves(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return cache.view(pages, step.heads_kv, PAGE_SIZE * 2, -1).chunk(2, dim=2)

    def write_theirs(cache, key, value, slots) -> None:
        ops.cpu_attn_reshape_and_cache(
            key, value, *halves(cache), slots, isa, k_scale=1.0, v_scale=1.0, kv_cache_dtype=step.cache
        )

    all_slots = torch.arange(PAGE_SIZE, pages * PAGE_SIZE)
    for part in all_slots.split(8192):
        key, value = (torch.randn(len(part), step.heads_kv, step.head_dim).to(dtype) for _ in "kv")
        filled = PackedStep.from_vllm(SimpleNamespace(**vars(common) | {"slot_mapping": part}), PAGE_SIZE)
        for n in range(step.layers):
            write_theirs(theirs[n], key, value, part)
            layer.write(key, value, ours[n], filled)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(common.seq_lens), num_heads=step.heads, num_kv_heads=step.heads_kv, head_dim=step.head_dim,
        seq_lens=common.seq_lens, dtype=dtype, query_start_loc=common.query_start_loc, causal=True,
        sliding_window_size=step.window or -1, isa=isa, enable_kv_split=True, dynamic_causal=None,
        kv_cache_dtype=step.cache,
    )  # fmt: skip

    def attend_theirs() -> None:
        key_cache, value_cache = halves(next(next_theirs))
        ops.cpu_attention_with_kv_cache(
            query=query, key_cache=key_cache, value_cache=value_cache, output=outs[0],
            query_start_loc=common.query_start_loc, seq_lens=common.seq_lens, scale=scale, causal=True,
            alibi_slopes=None, sliding_window=step.window or -1, block_table=common.block_table_tensor, softcap=0,
            scheduler_metadata=schedule, s_aux=None, dynamic_causal=None, k_scale=1.0, v_scale=1.0,
            kv_cache_dtype=step.cache,
        )  # fmt: skip

    def attend_ours() -> None:
        layer.attend(query, next(next_ours), packed, outs[1])

    key, value = (torch.randn(tokens, step.heads_kv, step.head_dim).to(dtype) for _ in "kv")
    # A plain read of the same number of bytes from a copy of its own, by all threads: no decode is faster.
    copies = cycle([cache[1:].flatten().view(torch.float32).nan_to_num().clone() for cache in ours])
    attend_theirs(), attend_ours()
    torch.testing.assert_close(outs[1].float(), outs[0].float(), atol=0.03, rtol=0.05)
    return {
        "theirs": attend_theirs, "ours": attend_ours,
        "theirs, write": lambda: write_theirs(next(next_theirs), key, value, common.slot_mapping),
        "ours, write": lambda: layer.write(key, value, next(next_ours), packed),
        "read": lambda: next(copies).sum(),
    }  # fmt: skip


def is_possible(step: Step) -> bool:
    """Whether vLLM has an operator for the step on this CPU. Says if it has none."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    try:
        _get_attn_isa(getattr(torch, step.dtype), PAGE_SIZE, step.head_dim, step.cache)
    except NotImplementedError as reason:
        print(f"left out: {step.name}, cache {step.cache}: {reason}")
        return False
    return True


def measure(step: Step, seconds: float, rounds: tuple[int, int]) -> dict:
    torch.manual_seed(0)
    calls = calls_of(step)
    times = dict(zip(calls, time_in_turn(list(calls.values()), seconds=seconds, rounds=rounds), strict=True))
    row: dict = asdict(step) | {name: statistics.median(values) for name, values in times.items()}
    row["ratio"] = statistics.median(a / b for a, b in zip(times["theirs"], times["ours"], strict=True))
    return row


def table_of(rows: list[dict]):
    return output.table(
        [
            "step", "dtype", "cache", "H, H_k, D", "window", "vLLM ms", "ours ms", "vLLM / ours", "read ms",
            "write: vLLM us", "ours us",
        ],
        [
            [
                row["name"], row["dtype"], row["cache"], f"{row['heads']}, {row['heads_kv']}, {row['head_dim']}",
                str(row["window"] or "-"), f"{1e3 * row['theirs']:.3f}", f"{1e3 * row['ours']:.3f}",
                f"{row['ratio']:.2f}", f"{1e3 * row['read']:.3f}",
                f"{1e6 * row['theirs, write']:.0f}", f"{1e6 * row['ours, write']:.0f}",
            ]
            for row in rows
        ],
    )  # fmt: skip


def table_of_models(rows: list[dict]):
    return output.table(
        [
            "batch", "context", "dtype", "vLLM: ms a step", "ours", "vLLM: attention", "ours", "vLLM tokens/s",
            "ours", "ours / vLLM",
        ],
        [
            [
                str(row["batch"]), str(row["context"]), row["dtype"],
                *(f"{row[side][0]:.1f}" for side in ("theirs", "ours")),
                *(f"{row[side][1]:.2f}" for side in ("theirs", "ours")),
                *(f"{1e3 * row['batch'] / row[side][0]:.1f}" for side in ("theirs", "ours")),
                f"{row['theirs'][0] / row['ours'][0]:.2f}",
            ]
            for row in rows
        ],
    )  # fmt: skip


# About 120 million parameters: the matrices of a token take 240 MB in bfloat16.
MODEL = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=768, intermediate_size=2048,
    num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=4, head_dim=64, vocab_size=32000,
    max_position_embeddings=8192, rms_norm_eps=1e-5, hidden_act="silu", tie_word_embeddings=True,
)  # fmt: skip


class ModelRun:
    """An engine in this process, with a clock around its layers of attention."""

    def __init__(self, backend: str, dtype: str, batches: list[int], context: int, new: int) -> None:
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR"
        )
        from vllm import LLM

        from flash_attn_ext.integrations.vllm.plugin import register

        register()
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(MODEL))
        pages = sum(batches) * (-(-(context + new) // PAGE_SIZE) + 1)
        self.llm = LLM(
            str(folder), skip_tokenizer_init=True, load_format="dummy", enforce_eager=True, dtype=dtype,
            max_model_len=context + new + 1, max_num_seqs=max(batches), num_gpu_blocks_override=pages + 1,
            kv_cache_memory_bytes=1 << 30, attention_config={"backend": backend},
        )  # fmt: skip
        self.context, self.new, self.attention = context, new, 0.0
        self.llm.apply_model(self._add_clock)
        for batch in batches:  # fills the cache of prefixes: later runs are decodes
            self._run(batch, 1)

    def _add_clock(self, model: torch.nn.Module) -> None:
        for module in model.modules():
            impl = getattr(module, "impl", None)
            for name in ("forward", "do_kv_cache_update"):
                if hasattr(impl, "scale") and hasattr(impl, name):
                    setattr(impl, name, self._timed(getattr(impl, name)))

    def _timed(self, function: Callable) -> Callable:
        def timed(*args, **kwargs):
            before = time.perf_counter()
            result = function(*args, **kwargs)
            self.attention += time.perf_counter() - before
            return result

        return timed

    def _run(self, batch: int, count: int) -> tuple[float, float]:
        """Returns the seconds of all and of attention."""
        from vllm import SamplingParams

        random = torch.Generator().manual_seed(batch)
        prompts = [
            {"prompt_token_ids": torch.randint(3, 30000, (self.context,), generator=random).tolist()}
            for _ in range(batch)
        ]
        options = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        self.attention, before = 0.0, time.perf_counter()
        self.llm.generate(prompts, options, use_tqdm=False)
        return time.perf_counter() - before, self.attention

    def measure(self, batch: int, repeats: int) -> tuple[float, float]:
        """Returns milliseconds of a decode step, and of its attention. The first step of a run is subtracted."""
        steps = []
        for _ in range(repeats):
            short, long = self._run(batch, 1), self._run(batch, self.new)
            steps.append([1e3 * (b - a) / (self.new - 1) for a, b in zip(short, long, strict=True)])
        return tuple(statistics.median(column) for column in zip(*steps, strict=True))  # type: ignore[return-value]


BATCHES = [1, 8, 32]


def measure_models(context: int, new: int, repeats: int, threads: int) -> list[dict]:
    """Each backend in a process of its own, one after another."""
    rows = []
    for dtype in ("bfloat16", "float32"):
        steps = []
        for backend in ("CPU_ATTN", NAME):
            given = json.dumps([backend, dtype, context, new, repeats])
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.vllm_backend", "--one-model", given],
                env=os.environ | {"OMP_NUM_THREADS": str(threads)}, stdout=subprocess.PIPE, check=True, text=True,
            )  # fmt: skip
            steps.append(json.loads(done.stdout.splitlines()[-1]))
        for batch, theirs, ours in zip(BATCHES, *steps, strict=True):
            rows.append({"batch": batch, "context": context, "dtype": dtype, "theirs": theirs, "ours": ours})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    output.add_arguments(parser)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each step")
    parser.add_argument("--only", default="", help="steps with this text in their name")
    parser.add_argument("--models", action="store_true", help="whole models in place of operators")
    parser.add_argument("--one-model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one_model:
        backend, dtype, context, new, repeats = json.loads(arguments.one_model)
        run = ModelRun(backend, dtype, BATCHES, context, new)
        print(json.dumps([run.measure(batch, repeats) for batch in BATCHES]))
        return
    torch.set_num_threads(arguments.threads)
    record: dict = {"machine": machine(), "environment": environment()}
    if arguments.models:
        rows = measure_models(1000, 17, 5, arguments.threads)
        table = table_of_models(rows)
    else:
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        with torch.no_grad():  # as vLLM runs its layers
            chosen = [step for step in STEPS if arguments.only in step.name and is_possible(step)]
            rows = [measure(step, arguments.seconds, (5, 500)) for step in chosen]
        table = table_of(rows)
    record["rows"] = rows
    output.write_json(record, arguments.json)
    output.write_text([json.dumps(record["machine"]), table], arguments.text)


if __name__ == "__main__":
    main()
