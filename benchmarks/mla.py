"""Multi-head latent attention: decoding from pages of latent rows, and the cost of wide heads.

Decoding: one query for each sequence, 16 to 128 query heads. A token has one row of 576 columns; its first 512 columns
are the value. The same rounds measure three more calls:
- the expanded form on our kernels: keys of 192 and values of 128 columns for each head, with up to 71 times the memory;
- torch's scaled_dot_product_attention of the absorbed form, with caches that are not in pages;
- torch.sum of the cache, a plain read.

Chosen keys: decoding with 2048 of all keys (DeepSeek V3.2), from FlashMLA's 8-bit rows and from rows of the queries'
dtype. Both are compared with all keys of the 8-bit rows.

Wide heads: the time for each multiply-add of a forward and a backward, against D 128.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from rich.table import Table

import flash_attn_ext
from benchmarks import output, peaks
from benchmarks.harness import environment, machine, time_in_turn
from benchmarks.watch import Watch, measure_all, note
from flash_attn_ext import explain, flash_attn, flash_attn_with_kvcache

LATENT, ROTARY, NOPE, V_DIM, PAGE = 512, 64, 128, 128, 64
ROW_BYTES, CHOSEN = 656, 2048  # bytes of a FlashMLA row; keys of a query
WIDE = [(128, 128), (576, 512), (576, 576), (1024, 1024)]  # D and D_v; the other times are relative to the first


@dataclass(frozen=True)
class Decode:
    batch: int
    heads: int
    seqlen_k: int
    dtype: str
    expanded: bool  # True: the expanded caches fit into --most-gib
    torch: bool  # True: torch's function is measured

    def flops(self) -> int:
        return 2 * self.batch * self.heads * self.seqlen_k * (2 * LATENT + ROTARY)


def calls_of(problem: Decode) -> tuple[torch.Tensor, dict[str, Callable[[], torch.Tensor]]]:
    """Returns the cache, and the calls to compare."""
    dtype, batch, length, heads = getattr(torch, problem.dtype), problem.batch, problem.seqlen_k, problem.heads
    pages = -(-length // PAGE)
    cache = torch.randn(batch * pages, PAGE, 1, LATENT + ROTARY, dtype=dtype)
    table = torch.randperm(batch * pages).view(batch, pages)
    rows = cache[table].view(batch, 1, pages * PAGE, LATENT + ROTARY)[:, :, :length]
    q = torch.randn(batch, 1, heads, LATENT + ROTARY, dtype=dtype)
    latent, scale = cache[..., :LATENT], (NOPE + ROTARY) ** -0.5

    def ours() -> torch.Tensor:
        return flash_attn_with_kvcache(q, cache, latent, cache_seqlens=length, block_table=table, softmax_scale=scale)

    def sdpa() -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), rows, rows[..., :LATENT], scale=scale, enable_gqa=True
        )

    calls = {"absorbed": ours, "plain read": cache.sum}
    if problem.torch:
        calls["torch, absorbed"] = sdpa
    if problem.expanded:
        k, v = (torch.randn(batch, length, heads, d, dtype=dtype) for d in (NOPE + ROTARY, V_DIM))
        q_of_head = torch.randn(batch, 1, heads, NOPE + ROTARY, dtype=dtype)
        calls["expanded"] = lambda: flash_attn_with_kvcache(q_of_head, k, v, cache_seqlens=length)
    return cache, calls


def measure_decode(problem: Decode, seconds: float, rounds: tuple[int, int]) -> dict:
    torch.manual_seed(0)
    isa, threads, peak = flash_attn_ext.active_kernel(), torch.get_num_threads(), []
    cache, calls = calls_of(problem)
    with torch.no_grad():
        watch = Watch(calls["absorbed"])

        def between() -> None:
            watch()
            peak.append(peaks.flops(isa, cache.dtype, threads))

        taken = time_in_turn(list(calls.values()), seconds=seconds, rounds=rounds, between=between, shuffle=True)
    times = dict(zip(calls, taken, strict=True))
    ours = times["absorbed"]
    return {
        "B": problem.batch, "H": problem.heads, "S_k": problem.seqlen_k, "dtype": problem.dtype, "isa": isa,
        "rounds": len(peak), "ms": statistics.median(ours) * 1e3, "GB/s": cache.nbytes / statistics.median(ours) / 1e9,
        "of_read": statistics.median(read / t for read, t in zip(times["plain read"], ours, strict=True)),
        "of_peak": statistics.median(problem.flops() / t / p for t, p in zip(ours, peak, strict=True)),
        "peers": {
            name: statistics.median(peer / t for peer, t in zip(times[name], ours, strict=True))
            for name in ("torch, absorbed", "expanded") if name in times
        },
        **watch.row(),
    }  # fmt: skip


@dataclass(frozen=True)
class Chosen:
    heads: int
    dtype: str
    seqlen_k: int


def measure_chosen(problem: Chosen, seconds: float, rounds: tuple[int, int]) -> dict:
    torch.manual_seed(0)
    dtype, length, scale = getattr(torch, problem.dtype), problem.seqlen_k, (NOPE + ROTARY) ** -0.5
    pages = length // PAGE
    coded = torch.randint(0, 120, (pages, PAGE, 1, ROW_BYTES), dtype=torch.uint8)
    coded[..., LATENT:].view(torch.bfloat16).normal_()  # rotary columns; the factors are arbitrary
    coded[..., LATENT : LATENT + 16].view(torch.float32).fill_(2.0**-8)
    rows = torch.randn(pages, PAGE, 1, LATENT + ROTARY, dtype=dtype)
    q = torch.randn(1, 1, problem.heads, LATENT + ROTARY, dtype=dtype)
    indices = torch.rand(1, 1, 1, length).topk(min(CHOSEN, length)).indices.sort().values.int()
    given = {"block_table": torch.randperm(pages)[None], "softmax_scale": scale, "cache_seqlens": length}
    calls = {
        "8 bits": lambda **more: flash_attn_with_kvcache(q, coded, coded, cache_format="flashmla_fp8", **given, **more),
        "rows": lambda **more: flash_attn_with_kvcache(q, rows, rows[..., :LATENT], **given, **more),
    }
    runs = [lambda run=run: run(key_indices=indices) for run in calls.values()] + [calls["8 bits"]]
    with torch.no_grad():
        watch = Watch(runs[0])
        ours, of_rows, all_keys = time_in_turn(runs, seconds=seconds, rounds=rounds, between=watch, shuffle=True)
    return {
        "H": problem.heads, "S_k": length, "dtype": problem.dtype, "isa": flash_attn_ext.active_kernel(),
        "ms": statistics.median(ours) * 1e3,
        "rows": statistics.median(t / o for t, o in zip(of_rows, ours, strict=True)),
        "all keys": statistics.median(t / o for t, o in zip(all_keys, ours, strict=True)),
        **watch.row(),
    }  # fmt: skip


@dataclass(frozen=True)
class Wide:
    dtype: str
    seqlen: int = 512
    heads: int = 4


def measure_wide(problem: Wide, seconds: float, rounds: tuple[int, int]) -> dict:
    """The time for each multiply-add of each of WIDE, divided by the time of D 128 in the same round."""
    torch.manual_seed(0)
    calls, work, memory = [], [], []
    for backward in (False, True):
        for d, d_v in WIDE:
            shape = 1, problem.heads, problem.seqlen
            q, k, v = (
                torch.randn(*shape, n, dtype=getattr(torch, problem.dtype), requires_grad=backward) for n in (d, d, d_v)
            )
            out = flash_attn(q, k, v)
            grad = torch.randn_like(out)
            if backward:
                calls.append(
                    lambda out=out, inputs=(q, k, v), grad=grad: torch.autograd.grad(
                        out, inputs, grad, retain_graph=True
                    )
                )
                work.append(3 * d + 2 * d_v)
            else:
                calls.append(lambda q=q, k=k, v=v: flash_attn(q, k, v))
                work.append(d + d_v)
            said = explain(q, k, v)
            memory.append((said.backward if backward else said.forward).allocates)
    watch = Watch(calls[0])
    times = time_in_turn(calls, seconds=seconds, rounds=rounds, between=watch, shuffle=True)
    count = len(WIDE)

    def relative(n: int) -> float:
        first = n // count * count
        return statistics.median(
            (t / work[n]) / (t_128 / work[first]) for t, t_128 in zip(times[n], times[first], strict=True)
        )

    return {
        "S": problem.seqlen, "H": problem.heads, "dtype": problem.dtype, "isa": flash_attn_ext.active_kernel(),
        "forward": {str(dims): relative(n) for n, dims in enumerate(WIDE)},
        "backward": {str(dims): relative(count + n) for n, dims in enumerate(WIDE)},
        "allocates": {
            name: {str(dims): memory[offset + n] for n, dims in enumerate(WIDE)}
            for name, offset in (("forward", 0), ("backward", count))
        },
        **watch.row(),
    }  # fmt: skip


def text(record: dict) -> Iterator[str | Table]:
    about = {key: value for key, value in record["machine"].items() if key != "environment"}
    quick = "; --quick" if record["settings"]["quick"] else ""
    yield "Latent attention: " + ", ".join(f"{key} {value}" for key, value in about.items()) + quick
    yield f"\nDecoding from pages of {PAGE} latent rows, one query, D 576, D_v 512, one key head.\n"
    lines = []
    for row in record["decode"]:
        peers = [
            f"{row['peers'][name]:.2f}" if name in row["peers"] else "-" for name in ("expanded", "torch, absorbed")
        ]
        line = [str(row[key]) for key in ("H", "B", "S_k", "dtype")]
        line += [f"{row['ms']:.3g}" + " ?" * row["busy"], f"{row['GB/s']:.1f}", f"{row['of_read']:.0%}"]
        lines.append([*line, f"{row['of_peak']:.0%}", *peers])
    columns = ["H", "B", "S_k", "dtype", "ms", "GB/s", "of torch.sum", "of FMA or dot peak", "expanded / ours",
               "torch / ours"]  # fmt: skip
    yield output.table(columns, lines)
    yield note(record["decode"])
    yield f"\nDecoding with {CHOSEN} of the keys, B 1: FlashMLA's 8-bit rows, and other times divided by their time.\n"
    lines = [
        [str(row["H"]), str(row["S_k"]), row["dtype"], f"{row['ms']:.3g}" + " ?" * row["busy"], f"{row['rows']:.2f}",
         f"{row['all keys']:.2f}"]
        for row in record["chosen"]
    ]  # fmt: skip
    yield output.table(["H", "S_k", "dtype", "ms", "rows of the dtype", "all keys, 8 bits"], lines)
    yield note(record["chosen"])
    yield "\nTime for each multiply-add, divided by the time at D 128 in the same round. B 1, H 4.\n"
    lines = [
        [row["dtype"], name, *(f"{row[name][str(dims)]:.2f}" for dims in WIDE)]
        for row in record["wide"] for name in ("forward", "backward")
    ]  # fmt: skip
    yield output.table(["dtype", "pass", *(f"D {d}, D_v {d_v}" for d, d_v in WIDE)], lines)
    yield note(record["wide"])


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--length", type=int, help="tokens of each cache; default 8192, with --quick 512")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--isa", choices=flash_attn_ext.available_kernels(), help="default: the best")
    parser.add_argument("--seconds", type=float, help="per problem; default 3, with --quick 0.2")
    parser.add_argument("--most-gib", type=float, default=4.0, help="of expanded caches; larger ones are skipped")
    parser.add_argument("--torch-heads", type=int, default=16, help="torch is measured to so many: it takes seconds")
    parser.add_argument("--quick", action="store_true", help="small problems, few rounds: for a first look")
    output.add_arguments(parser)
    args = parser.parse_args(argv)
    args.length = args.length or (512 if args.quick else 8192)
    args.seconds = args.seconds or (0.2 if args.quick else 3.0)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    flash_attn_ext.force_kernel(args.isa)
    rounds = (3, 30) if args.quick else (4, 100)
    problems = []
    for dtype in args.dtypes:
        for heads in args.heads:
            expanded = args.batch * args.length * heads * (NOPE + ROTARY + V_DIM) * getattr(torch, dtype).itemsize
            problems.append(
                Decode(
                    args.batch, heads, args.length, dtype, expanded <= args.most_gib * 2**30, heads <= args.torch_heads
                )
            )
    chosen = [
        Chosen(heads, dtype, 4 * args.length) for dtype in args.dtypes for heads in (args.heads[0], args.heads[-1])
    ]
    wide = [Wide(dtype, 128 if args.quick else 512) for dtype in args.dtypes]
    record = {
        "machine": {**machine(), "environment": environment()},
        "settings": output.settings(args),
        "decode": measure_all(problems, lambda problem: measure_decode(problem, args.seconds, rounds), 0),
        "chosen": measure_all(chosen, lambda problem: measure_chosen(problem, args.seconds, rounds), 0),
        "wide": measure_all(wide, lambda problem: measure_wide(problem, args.seconds, rounds), 0),
    }
    output.write_json(record, args.json)
    output.write_text(text(record), args.text)


if __name__ == "__main__":
    main()
