"""python -m flash_attn_ext.reference: the algorithms of this folder, run on a small problem and counted.

softmax    naive, safe and online softmax on a row that overflows a naive exp
attention  standard attention, FlashAttention-1 and -2, forward and backward, against fp64 autograd
sparse     block-sparse FlashAttention with block masks, forward and backward, against fp64 autograd
schedule   FlashAttention-3's pipelines: clocks, and how busy each unit was
decode     Flash-Decoding and FlashDecoding++ on a long cache
gemm       FlashDecoding++'s flat GEMM, padded to 8 and to 64 rows
float8     FlashAttention-3's errors in 8 bits, with and without block quantisation and incoherent processing
"""

import argparse
import itertools
from pathlib import Path

import torch

from . import (
    block_sparse,
    flash1,
    flash2,
    flash3_schedule,
    flash_decoding,
    flash_decoding_pp,
    float8,
    plots,
    softmax,
    standard,
)
from .memory import SlowMemory
from .report import print_table

COUNTED = ("product FLOPs", "other FLOPs", "reads", "writes", "extra", "on chip")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_ext.reference",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--N", type=int, help="sequence, or keys in the cache")
    parser.add_argument("--D", type=int, help="head size")
    parser.add_argument("--M", type=int, default=16384, help="on-chip size in elements, for FlashAttention-1's blocks")
    parser.add_argument("--plot", type=Path, help="schedule: file for the timelines")
    args = parser.parse_args(arguments)
    if args.plot and args.what != "schedule":
        parser.error(f"--plot: got it with {args.what}; allowed: with schedule")
    torch.manual_seed(0)
    COMMANDS[args.what](args)


def run_softmax(args: argparse.Namespace) -> None:
    n = args.N or 10_000
    x = torch.randn(1, n, dtype=torch.float64)
    rows = []
    for name, factor in itertools.product(("naive", "safe", "online"), (1, 1000)):
        memory = SlowMemory()
        y = getattr(softmax, f"{name}_softmax")(factor * x, memory=memory)
        wrong = error([y], [torch.softmax(factor * x, 1)])
        rows.append([name, factor, wrong, memory.reads // n, memory.writes // n, memory.chip.peak])
    columns = ("softmax", "scores times", "error", "reads/element", "writes/element", "on chip")
    print_table(f"one row of {n} normal scores, fp64, blocks of 1024", columns, rows)


def run_attention(args: argparse.Namespace) -> None:
    n, d = args.N or 512, args.D or 64
    inputs = [torch.randn(n, d, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    dout = torch.randn(n, d, dtype=torch.float64)
    probs = torch.softmax(inputs[0] @ inputs[1].T / d**0.5, 1)
    expected = probs @ inputs[2]
    expected_grads = torch.autograd.grad(expected, inputs, dout)
    q, k, v = (t.detach() for t in inputs)

    rows = []
    for name in ("standard", "FlashAttention-1", "FlashAttention-2"):
        forward, backward = SlowMemory(), SlowMemory()
        if name == "standard":
            out, saved = standard.forward(q, k, v, memory=forward)
            grads = standard.backward(q, k, v, dout, saved, memory=backward)
        elif name == "FlashAttention-1":
            out, l, m = flash1.forward(q, k, v, M=args.M, memory=forward)
            grads = flash1.backward(q, k, v, out, dout, l, m, M=args.M, memory=backward)
        else:
            out, lse = flash2.forward(q, k, v, memory=forward)
            grads = flash2.backward(q, k, v, out, dout, lse, memory=backward)
        rows.append([f"{name}, forward", error([out], [expected]), *counted(forward)])
        rows.append([f"{name}, backward", error(grads, expected_grads), *counted(backward)])
    B_c, B_r = flash1.block_sizes(args.M, d)
    title = f"N {n}, d {d}, fp64; FlashAttention-1 with M {args.M}: B_c {B_c}, B_r {B_r}; FlashAttention-2: 64 x 64"
    print_table(title, ("", "error", *COUNTED), rows)


def run_sparse(args: argparse.Namespace) -> None:
    n, d = args.N or 1024, args.D or 64
    inputs = [torch.randn(n, d, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    dout = torch.randn(n, d, dtype=torch.float64)
    q, k, v = (t.detach() for t in inputs)
    shape = block_sparse.grid(n, n, d, args.M)
    every = torch.ones(shape, dtype=torch.bool)
    block_masks = {
        "all blocks": every,
        "lower triangle": every.tril(),
        "random": torch.rand(shape) < 0.25,
        "window of 3 blocks": every.tril(1).triu(-1),
        "diagonal": every.tril().triu(),
        "nothing": ~every,
    }

    rows, accesses_of_all = [], 0
    for name, block_mask in block_masks.items():
        visible = block_sparse.expand_block_mask(block_mask, n, n, d, args.M)
        weights = (inputs[0] @ inputs[1].T / d**0.5).exp() * visible
        expected = weights / weights.sum(1, keepdim=True).clamp(min=1e-300) @ inputs[2]  # 0 if a row sees no key
        expected_grads = torch.autograd.grad(expected, inputs, dout)
        memories = forward, backward = SlowMemory(), SlowMemory()
        out, l, m = block_sparse.forward(q, k, v, block_mask, M=args.M, memory=forward)
        grads = block_sparse.backward(q, k, v, out, dout, l, m, block_mask, M=args.M, memory=backward)
        accesses = sum(memory.accesses for memory in memories)
        accesses_of_all = accesses_of_all or accesses
        rows.append(
            [
                name,
                f"{block_mask.double().mean():.3f}",
                error([out, *grads], [expected, *expected_grads]),
                sum(memory.chip.matmul_flops for memory in memories),
                forward.accesses,
                backward.accesses,
                f"{accesses / accesses_of_all:.3f}",
            ]
        )
    B_c, B_r = flash1.block_sizes(args.M, d)
    title = (
        f"N {n}, d {d}, fp64, M {args.M}: {shape[0]} x {shape[1]} blocks of {B_r} x {B_c}; s: share of visible blocks"
    )
    columns = ("block mask", "s", "error", "product FLOPs", "accesses, forward", "backward", "both / all blocks")
    print_table(title, columns, rows)


def error(ours, exact) -> str:
    """The largest error, printed with one digit, so that every machine prints the same text."""
    largest = max((a - b).abs().max().item() for a, b in zip(ours, exact, strict=True))
    return "< 1e-12" if largest < 1e-12 else f"{largest:.0e}"


def counted(memory: SlowMemory) -> list[int]:
    chip = memory.chip
    return [chip.matmul_flops, chip.other_flops, memory.reads, memory.writes, memory.extra_elements, chip.peak]


def run_schedule(args: argparse.Namespace) -> None:
    n, d = args.N or 1024, args.D or 128
    q, k, v = (torch.empty(size, d, dtype=torch.float16, device="meta") for size in (128, n, n))
    runs = {name: flash3_schedule.forward(q, k, v, schedule=name) for name in flash3_schedule.SCHEDULES}
    units = (flash3_schedule.TENSOR_CORES, flash3_schedule.EXP_UNITS, flash3_schedule.LOADS)
    rows = [[name, f"{run.clocks:.0f}", *(f"{run.busy(unit):.0%}" for unit in units)] for name, run in runs.items()]
    rates = flash3_schedule.Rates()
    title = (
        f"128 queries, {n} keys, d {d}, blocks of 128; a clock: {rates.tensor_flops} tensor FLOPs, "
        f"{rates.exponentials} exponentials, {rates.load_bytes} bytes"
    )
    print_table(title, ("schedule", "clocks", *(f"{unit} busy" for unit in units)), rows)
    if args.plot:
        plots.timelines(args.plot, runs)


def run_decode(args: argparse.Namespace) -> None:
    n, d = args.N or 8192, args.D or 128
    q, k, v = (torch.randn(size, d, dtype=torch.float64) for size in (1, n, n))
    rows = []
    for factor, splits in ((1, 1), (1, 8), (300, 8)):
        expected = torch.softmax(factor * q @ k.T / d**0.5, 1) @ v
        for name, module in (("Flash-Decoding", flash_decoding), ("FlashDecoding++", flash_decoding_pp)):
            memory = SlowMemory()
            result = module.decode(factor * q, k, v, num_splits=splits, memory=memory)
            again = "yes" if name == "FlashDecoding++" and result.recomputed.any() else "no"
            chip = memory.chip
            rows.append(
                [
                    name,
                    splits,
                    factor,
                    error([result[0]], [expected]),
                    again,
                    chip.exponentials,
                    chip.other_flops,
                    memory.accesses,
                ]
            )
    columns = ("", "splits", "q times", "error", "computed again", "exps", "other FLOPs", "accesses")
    low, high = flash_decoding_pp.default_limits(torch.float64)
    title = f"one query, {n} keys, d {d}, fp64; phi 0, computed again if a score leaves ({low:.0f}, {high:.0f})"
    print_table(title, columns, rows)


def run_gemm(args: argparse.Namespace) -> None:
    k = args.D or 1024
    rows = []
    for m, pad_to in itertools.product((1, 8, 16), (8, 64)):
        memory = SlowMemory()
        x, weight = (torch.empty(size, dtype=torch.float16, device="meta") for size in ((m, k), (k, k)))
        flash_decoding_pp.flat_gemm(x, weight, pad_to=pad_to, memory=memory)
        useful = 2 * m * k * k / memory.chip.matmul_flops
        rows.append([m, pad_to, memory.chip.matmul_flops, f"{useful:.1%}", memory.accesses])
    columns = ("rows", "padded to multiples of", "FLOPs", "useful", "accesses")
    print_table(f"(rows, {k}) x ({k}, {k})", columns, rows)


def run_float8(args: argparse.Namespace) -> None:
    n, d = args.N or 4096, args.D or 128
    q, k, v = (float8.with_outliers(n, d).float() for _ in range(3))
    exact = (torch.softmax(q @ k.T / d**0.5, 1) @ v).double()  # float32: the errors below are 100 times as large
    signs = float8.random_signs(d, dtype=q.dtype)
    both, one_factor = float8.forward(q, k, v, signs=signs), float8.forward(q, k, v, block_quantisation=False)
    no_blocks = float8.forward(q, k, v, signs=signs, block_quantisation=False)
    columns = ("", "RMS error", "published")
    rows = [
        ["standard, float16", float8.standard_float16(q, k, v), 3.2e-4],
        ["FlashAttention, float16", float8.flash_float16(q, k, v), 1.9e-4],
        ["one factor a tensor, float8", one_factor, 2.4e-2],
        ["FlashAttention-3, float8", both, 9.1e-3],
        ["  without block quantisation", no_blocks, 9.3e-3],
        ["  without incoherent processing", float8.forward(q, k, v), 2.4e-2],
    ]
    errors = {name: float8.rms_error(out, exact) for name, out, _ in rows}
    printed = [[name, f"{errors[name]:.1e}", f"{published:.1e}"] for name, _, published in rows]
    gain = errors["one factor a tensor, float8"] / errors["FlashAttention-3, float8"]
    printed.append(["one factor a tensor / FlashAttention-3", f"{gain:.1f}", "2.6"])
    print_table(f"N {n}, d {d}, normal data with outliers", columns, printed)


COMMANDS = {
    "softmax": run_softmax,
    "attention": run_attention,
    "sparse": run_sparse,
    "schedule": run_schedule,
    "decode": run_decode,
    "gemm": run_gemm,
    "float8": run_float8,
}

if __name__ == "__main__":
    main()
