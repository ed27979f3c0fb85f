"""Compares forward mode and double backward with our forward and backward, and with torch's math backend.

Three columns are times: jvp in units of our forward, double backward in units of our backward, and torch's math backend
in units of ours. The last column is the growth of peak memory, with each call in a separate process. Double backward is
the gradient of a gradient (attention_jvp and attention_double_backward). Timed calls alternate in one process.
`--cpu-time` counts the process's CPU time instead of wall-clock time, for a busy machine, on one thread.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial

import torch
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import ROOT, harness, output
from benchmarks.harness import environment, machine, quartiles
from benchmarks.peak_memory import status
from flash_attn_ext import flash_attn

BATCH, HEADS = 1, 4


@dataclass(frozen=True)
class Problem:
    length: int
    head_dim: int
    dtype: str
    causal: bool

    def tensors(self) -> list[torch.Tensor]:
        """q, k, v and their tangents."""
        torch.manual_seed(0)
        shape = (BATCH, HEADS, self.length, self.head_dim)
        return [torch.randn(shape, dtype=getattr(torch, self.dtype)) for _ in range(6)]


def attention(which: str, problem: Problem) -> Callable:
    function = flash_attn if which == "ours" else scaled_dot_product_attention
    return partial(function, is_causal=problem.causal)


def jvp(function: Callable, tensors: list[torch.Tensor]) -> None:
    torch.func.jvp(function, tuple(tensors[:3]), tuple(tensors[3:]))


def first_order(function: Callable, tensors: list[torch.Tensor]) -> tuple:
    x = [t.requires_grad_() for t in (t.detach() for t in tensors[:3])]
    out = function(*x)
    cotangent = torch.ones_like(out).requires_grad_()
    return x, cotangent, torch.autograd.grad(out, x, cotangent, create_graph=True)


def backward_again(graph: tuple, tangents: list[torch.Tensor]) -> None:
    x, cotangent, gradients = graph
    torch.autograd.grad(gradients, [*x, cotangent], tangents, retain_graph=True)


def calls_of(problem: Problem, with_math: bool) -> dict[str, Callable]:
    tensors = problem.tensors()
    ours, math = (attention(which, problem) for which in ("ours", "math"))
    leaves = [t.detach().requires_grad_() for t in tensors[:3]]
    out, grad = ours(*leaves), torch.ones_like(tensors[0])
    calls = {
        "forward": lambda: ours(*(t.detach() for t in tensors[:3])),
        "backward": lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True),
        "jvp": lambda: jvp(ours, tensors),
        "double backward": partial(backward_again, first_order(ours, tensors), tensors[3:]),
    }
    if with_math:
        graph = in_math(lambda: first_order(math, tensors))()
        calls["math jvp"] = in_math(lambda: jvp(math, tensors))
        calls["math double backward"] = in_math(partial(backward_again, graph, tensors[3:]))
    return calls


def in_math(call: Callable) -> Callable:
    def run():
        with sdpa_kernel(SDPBackend.MATH):
            return call()

    return run


def measure(problem: Problem, seconds: float, rounds: tuple[int, int], memory: bool) -> dict:
    calls = calls_of(problem, with_math=True)
    taken = harness.time_in_turn(list(calls.values()), seconds=seconds, rounds=rounds)
    times = dict(zip(calls, taken, strict=True))

    def ratio(a: str, b: str) -> list[float]:
        low, middle, high = quartiles([x / y for x, y in zip(times[a], times[b], strict=True)])
        return [middle, low, high]

    row = {
        **asdict(problem), "rounds": len(taken[0]),
        "ms": {name: quartiles(values)[1] * 1e3 for name, values in times.items()},
        "jvp / forward": ratio("jvp", "forward"),
        "double backward / backward": ratio("double backward", "backward"),
        "math jvp / ours": ratio("math jvp", "jvp"),
        "math double backward / ours": ratio("math double backward", "double backward"),
    }  # fmt: skip
    if memory:
        row["bytes"] = {
            f"{which} {pass_name}": peak(problem, which, pass_name)
            for which in ("ours", "math")
            for pass_name in PASSES
        }
    return row


PASSES = ("jvp", "double backward")


def peak(problem: Problem, which: str, pass_name: str) -> int:
    """Returns the growth of the resident set at its peak, in bytes, in a separate process."""
    task = json.dumps({**asdict(problem), "which": which, "pass_name": pass_name})
    command = [sys.executable, "-m", __spec__.name, "--peak", task]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return int(run.stdout)


def grow(which: str, pass_name: str, **problem) -> int:
    def run(case: Problem) -> None:
        function, tensors = attention(which, case), case.tensors()

        def derivatives():
            if pass_name == "jvp":
                return jvp(function, tensors)
            return backward_again(first_order(function, tensors), tensors[3:])

        (derivatives if which == "ours" else in_math(derivatives))()

    case = Problem(**problem)
    run(Problem(64, case.head_dim, case.dtype, case.causal))  # libraries, thread pools
    before = status("VmRSS")
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # the peak starts from here
    run(case)
    return status("VmHWM") - before


def text(record: dict) -> Iterator[str | Table]:
    shown = {key: value for key, value in record["machine"].items() if key != "environment"}
    yield "Derivatives: " + ", ".join(f"{key} {value}" for key, value in shown.items())
    yield f"\nB {BATCH}, H {HEADS}. Medians of ratios within a round, quartiles in brackets.\n"
    ratios = ["jvp / forward", "double backward / backward", "math jvp / ours", "math double backward / ours"]
    with_memory = "bytes" in record["rows"][0]
    columns = ["S", "D", "dtype", "causal", "forward ms", "backward ms", *ratios]
    columns += ["MiB jvp, ours / math", "MiB double backward, ours / math"] if with_memory else []
    lines = []
    for row in record["rows"]:
        line = [str(row["length"]), str(row["head_dim"]), row["dtype"], str(row["causal"])]
        line += [f"{row['ms'][name]:.2f}" for name in ("forward", "backward")]
        line += ["{:.2f} ({:.2f}-{:.2f})".format(*row[name]) for name in ratios]
        if with_memory:
            line += [
                " / ".join(f"{row['bytes'][f'{which} {pass_name}'] / 2**20:.1f}" for which in ("ours", "math"))
                for pass_name in PASSES
            ]
        lines.append(line)
    yield output.table(columns, lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=2.0, help="per problem")
    parser.add_argument("--rounds", type=int, nargs=2, default=(5, 50), help="at least and at most")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU time; needs --threads 1")
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    output.add_arguments(parser)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.peak:
        print(grow(**json.loads(args.peak)))
        return
    if args.cpu_time:
        args.threads = 1
        time.perf_counter = time.process_time  # harness times with it
    torch.set_num_threads(args.threads)
    problems = [
        Problem(length, head_dim, dtype, causal)
        for dtype in args.dtypes
        for head_dim in args.head_dims
        for causal in (False, True)
        for length in args.lengths
    ]
    record = {
        "machine": {**machine(), "environment": environment()},
        "settings": output.settings(args),
        "rows": [measure(p, args.seconds, tuple(args.rounds), not args.no_memory) for p in problems],
    }
    output.write_json(record, args.json)
    output.write_text(text(record), args.text)


if __name__ == "__main__":
    main()
