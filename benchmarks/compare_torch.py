"""flash_attn against torch's scaled_dot_product_attention on CPU, forward and backward, by shape, dtype and option.

Writes a table to the terminal and, with --json, everything measured to a file.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from harness import gemm_peak, machine, time_pairs
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from flash_attn_ext import flash_attn

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHAPES = [  # B, H, S, D
    (1, 8, 512, 64), (1, 8, 2048, 64), (1, 4, 4096, 64), (1, 4, 2048, 128),
    (8, 12, 1024, 64), (2, 8, 1024, 32), (1, 4, 1024, 256), (32, 8, 128, 64),
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    name: str
    query: tuple[int, int, int, int]
    key: tuple[int, int, int, int]
    dtype: str
    backward: bool
    options: dict = field(default_factory=dict)
    mask: Callable[[], torch.Tensor] | None = None

    def flops(self) -> float:
        """4 B H S_q S_k D forward, 3.5 times that with the backward; half if causal."""
        batch, heads, seqlen_q, head_dim = self.query
        flops = 4 * batch * heads * seqlen_q * self.key[2] * head_dim * (3.5 if self.backward else 1)
        return flops / 2 if self.options.get("is_causal") else flops


def cases(dtypes: list[str], kinds: list[str]) -> Iterator[Case]:
    """The sweep: the main shapes, then options, small sizes and decode."""
    for dtype in dtypes:
        if "shapes" in kinds:
            for shape in SHAPES:
                for causal in (False, True):
                    for backward in (False, True):
                        name = "causal" if causal else "full"
                        yield Case(name, shape, shape, dtype, backward, {"is_causal": causal})
        shape = (2, 8, 1024, 64)
        if "options" in kinds:
            padding = lambda: torch.arange(1024) < torch.tensor([1024, 700])[:, None, None, None]  # noqa: E731
            for backward in (False, True):
                yield Case("dropout 0.1", shape, shape, dtype, backward, {"dropout_p": 0.1})
                yield Case("bool mask", shape, shape, dtype, backward, mask=lambda: torch.rand(1024, 1024) > 0.1)
                float_mask = lambda dtype=dtype: torch.randn(1024, 1024, dtype=DTYPES[dtype])  # noqa: E731
                yield Case("float mask", shape, shape, dtype, backward, mask=float_mask)
                yield Case("key padding", shape, shape, dtype, backward, mask=padding)
                yield Case("GQA 8:1", shape, (2, 1, 1024, 64), dtype, backward, {"enable_gqa": True})
        if "small" in kinds:
            for length in (1, 2, 7, 16, 33, 64, 100):
                for backward in (False, True):
                    yield Case("small", (1, 1, length, 64), (1, 1, length, 64), dtype, backward)
        if "decode" in kinds:
            for heads_kv in (32, 8):
                gqa = {"enable_gqa": True} if heads_kv != 32 else {}
                yield Case("decode", (1, 32, 1, 128), (1, heads_kv, 8192, 128), dtype, False, gqa)


def prepare(case: Case, attention: Callable) -> Callable[[], None]:
    """A function of no arguments that runs the case once, on inputs of a fixed seed."""
    torch.manual_seed(0)
    dtype = DTYPES[case.dtype]
    q, k, v = (torch.randn(s, dtype=dtype, requires_grad=case.backward) for s in (case.query, case.key, case.key))
    mask = case.mask() if case.mask else None
    grad = torch.randn(case.query, dtype=dtype)

    def run() -> None:
        with nullcontext() if case.backward else torch.no_grad():
            out = attention(q, k, v, mask, **case.options)
        if case.backward:
            torch.autograd.grad(out, (q, k, v), grad)

    return run


def torch_attention(backend: str) -> Callable:
    """torch's function, with the backend that it chooses itself or with its math backend."""
    if backend == "default":
        return scaled_dot_product_attention

    def math(*args, **kwargs):
        with sdpa_kernel(SDPBackend.MATH):
            return scaled_dot_product_attention(*args, **kwargs)

    return math


def measure(case: Case, backend: str, seconds: float) -> dict:
    peak = gemm_peak(0.1)
    pairs = time_pairs(prepare(case, flash_attn), prepare(case, torch_attention(backend)), seconds=seconds)
    low, middle, high = pairs.quartiles()
    ours = statistics.median(pairs.ours)
    return {
        "case": case.name, "B,H,S_q,D": case.query, "H_kv,S_k": case.key[1:3], "dtype": case.dtype,
        "pass": "fwd+bwd" if case.backward else "fwd", "ms": ours * 1e3, "GFLOP/s": case.flops() / ours / 1e9,
        "of_gemm_peak": case.flops() / ours / 1e9 / peak, "ratio": middle, "ratio_quartiles": [low, high],
        "pairs": len(pairs.ours),
    }  # fmt: skip


def print_table(rows: list[dict], title: str) -> None:
    table = Table(title=title)
    for column in ("case", "dtype", "pass", "B,H,S_q,D", "H_kv,S_k", "ours ms", "GFLOP/s", "of GEMM", "torch / ours"):
        table.add_column(column, justify="left" if column in ("case", "dtype", "pass") else "right")
    for row in rows:
        low, high = row["ratio_quartiles"]
        ratio = f"{row['ratio']:.2f} [{low:.2f}, {high:.2f}]"
        table.add_row(
            row["case"], row["dtype"], row["pass"], ",".join(map(str, row["B,H,S_q,D"])),
            ",".join(map(str, row["H_kv,S_k"])), f"{row['ms']:.3f}", f"{row['GFLOP/s']:.0f}",
            f"{row['of_gemm_peak']:.0%}", f"[red]{ratio}[/]" if row["ratio"] < 1 else ratio,
        )  # fmt: skip
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    kinds = ["shapes", "options", "small", "decode"]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--backend", choices=["default", "math"], default="default", help="torch's own choice, or math")
    parser.add_argument("--seconds", type=float, default=1.0, help="per case")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="file for everything measured")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [measure(c, args.backend, args.seconds) for c in tqdm(list(cases(args.dtypes, args.kinds)), leave=False)]
    context = {**machine(), "backend": args.backend}
    print_table(rows, f"torch ({args.backend}) / ours; " + ", ".join(f"{k} {v}" for k, v in context.items()))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": context, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
