"""python -m flash_attn_ext.iomodel: FLOPs, slow-memory traffic and predicted time of attention.

predict   standard attention, FlashAttention-1 and -2 and our kernel on one problem and device; with --visible also
          block-sparse FlashAttention
blocks    the same against the block size
scaling   accesses against N, d, M and the share s of visible blocks, with the exponents of the theorems
gpt2      the table of the FlashAttention paper next to our counts, and why they differ
context   one sequence on many devices: ring, all-gather and Ulysses
devices   the rates that are used
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from ..reference.report import print_table
from . import context_parallel, gpt2, plots, sweeps
from .counts import ALGORITHMS, LABELS, Problem, count
from .devices import DTYPES, GPUS, NAMES, Device, find, this_cpu
from .roofline import predict

# Printed below the predicted times: their assumptions.
CACHES = """\
ms: without a cache, each load of a tile comes from slow memory. least ms: with an unlimited cache, each tensor moves
once; a lower bound. If a GPU's L2 (tens of MB) holds K and V of the heads that run at once, the real time is near
least ms, because L2 serves the repeated loads of K and V. Both omit launches, and assume that arithmetic and traffic
overlap fully."""


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    try:
        args.command(args)
    except ValueError as error:
        raise SystemExit(str(error)) from error


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_ext.iomodel",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    one = commands.add_parser("predict", help="all algorithms on one problem")
    add_problem(one)
    one.add_argument("--json", type=Path, help="file for everything counted, by pass and tensor")
    one.set_defaults(command=run_predict)

    many = commands.add_parser("blocks", help="traffic and predicted time against the block size")
    add_problem(many)
    many.add_argument("--plot", type=Path, help="file for the figure")
    many.set_defaults(command=run_blocks)

    scaling = commands.add_parser("scaling", help="accesses against N, d, M and s, and their exponents")
    scaling.add_argument("--plot", type=Path, help="file for the figure")
    scaling.set_defaults(command=run_scaling)

    paper = commands.add_parser("gpt2", help="the FlashAttention paper's table next to our counts")
    paper.set_defaults(command=run_gpt2)

    context = commands.add_parser("context", help="one sequence over many devices: ring, all-gather and Ulysses")
    add_context(context)
    context.set_defaults(command=run_context)

    devices = commands.add_parser("devices", help="the rates that are used")
    devices.add_argument("--measure", action="store_true", help="also this CPU's, measured in about a second")
    devices.set_defaults(command=run_devices)
    return parser.parse_args(arguments)


def add_problem(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    for name, default, text in (
        ("B", 64, "batch"),
        ("H", 16, "heads"),
        ("S", 1024, "sequence"),
        ("D", 64, "head size"),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default, help=text)
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--M", type=positive, help="on-chip size in elements; the device's, if not given")
    parser.add_argument("--device", choices=NAMES, default="A100-40GB", help="cpu: this one, measured unless given")
    parser.add_argument("--matmul", type=positive, help="FLOP/s of products, in place of the device's")
    parser.add_argument("--bandwidth", type=positive, help="bytes/s of slow memory, in place of the device's")
    parser.add_argument("--forward-only", action="store_true", help="without the backward")
    parser.add_argument("--mask", action="store_true", help="with an (S, S) mask, shared by all heads")
    parser.add_argument("--visible", type=float, default=1.0, help="s: share of visible blocks, for block-sparse")
    parser.add_argument("--dropout", type=float, default=0.0, help="probability; FlashAttention replays it")


def add_context(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.description = context_parallel.__doc__
    for name, default, text in (
        ("B", 1, "sequences at a time"),
        ("H", 32, "heads"),
        ("H-kv", 8, "key heads"),
        ("D", 128, "head size"),
    ):
        parser.add_argument(f"--{name}", type=positive, default=default, help=text)
    K, M = 2**10, 2**20
    parser.add_argument("--S", type=positive, nargs="+", default=[128 * K, 256 * K, 512 * K, M], help="tokens")
    parser.add_argument("--n", type=positive, nargs="+", default=[8, 32, 128, 256], help="devices")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--device", choices=list(GPUS), default="H100")
    parser.add_argument(
        "--efficiency", type=float, default=0.6, help="share of the device's peak that attention reaches"
    )
    parser.add_argument("--link-efficiency", type=float, default=0.8, help="share of the link's peak")
    parser.add_argument("--full", action="store_true", help="without a causal mask")
    parser.add_argument("--forward-only", action="store_true", help="without the backward")


def positive(text: str) -> int:
    """Parses an int above 0. Forms such as 312e12 are allowed."""
    value = int(float(text))
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}; allowed: at least 1")
    return value


def problem_of(args: argparse.Namespace) -> Problem:
    for name in ("dropout", "visible"):
        if not 0 <= getattr(args, name) <= 1:
            raise ValueError(f"--{name}: got {getattr(args, name)}; allowed: 0 to 1")
    sizes, passes = (args.B, args.H, args.S, args.D, args.dtype), not args.forward_only
    return Problem(*sizes, passes, args.mask, args.dropout, visible=args.visible)


def device_of(args: argparse.Namespace) -> tuple[Device, int]:
    device = find(args.device, matmul=args.matmul, bandwidth=args.bandwidth)
    return device, args.M or device.elements(args.dtype)


def describe(problem: Problem, device: Device, M: int) -> str:
    passes = "forward + backward" if problem.backward else "forward"
    described = {
        "mask": problem.mask,
        f"dropout {problem.dropout:g}": problem.dropout,
        f"visible {problem.visible:g}": problem.visible < 1,
    }
    extras = [text for text, used in described.items() if used]
    return (
        f"B {problem.B}, H {problem.H}, S {problem.S}, D {problem.D}, {problem.dtype}, "
        f"{', '.join([passes, *extras])}; {device.name}, M {M}"
    )


def run_predict(args: argparse.Namespace) -> None:
    problem, (device, M) = problem_of(args), device_of(args)
    rows, record = [], {"problem": asdict(problem), "device": asdict(device), "M": M, "algorithms": {}}
    for name in ALGORITHMS:
        if name == "block_sparse" and problem.visible == 1:
            continue  # equals flash1
        counts = count(name, problem, M)
        time = predict(counts, device, problem.dtype)
        record["algorithms"][name] = {
            **asdict(counts),
            "traffic": {" ".join(key): accessed for key, accessed in counts.traffic.items()},
            "predicted_seconds": time.seconds,
            "least_seconds": time.least_seconds,
        }
        rows.append(
            [
                LABELS[name], counts.tiles, f"{counts.flops / 1e9:.1f}", f"{counts.bytes / 1e9:.2f}",
                f"{counts.intensity:.0f}", f"{time.seconds * 1e3:.2f}", time.bound, f"{time.least_seconds * 1e3:.2f}",
                f"{counts.extra_bytes / 2**20:.0f}", f"{counts.chip_peak or '-'}",
            ]
        )  # fmt: skip
    columns = ("", "tiles q x k", "GFLOP", "GB", "FLOP/B", "ms", "bound", "least ms", "extra MiB", "on chip")
    print_table(describe(problem, device, M), columns, rows)
    print(f"roofline from {device.source}: {rates(device, problem.dtype)}")
    print(CACHES)
    print("on chip: elements at the peak; extra: slow memory beyond inputs and results, the sum of both passes")
    if problem.visible < 1:
        print(f"visible {problem.visible:g}: block-sparse skips the hidden blocks; all other rows compute all blocks")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + "\n")


def rates(device: Device, dtype: str) -> str:
    return f"{device.matmul[dtype] / 1e12:.3g} TFLOP/s ({dtype}), {device.bandwidth / 1e9:.4g} GB/s"


def run_blocks(args: argparse.Namespace) -> None:
    problem, (device, M) = problem_of(args), device_of(args)
    points = sweeps.over_blocks(problem, device)
    rows = [
        [
            LABELS[p.algorithm], p.counts.tiles, f"{p.counts.bytes / 1e9:.2f}", f"{p.time.seconds * 1e3:.2f}",
            p.time.bound, p.counts.chip_peak, "yes" if p.counts.chip_peak <= M else "no",
        ]
        for p in points
    ]  # fmt: skip
    columns = ("", "tiles q x k", "GB", "ms", "bound", "on chip", "fits M")
    print_table(describe(problem, device, M), columns, rows)
    print("ms: roofline without a cache: each load of a tile comes from slow memory; predict has both times")
    if args.plot:
        plots.blocks(args.plot, points, describe(problem, device, M), M)


def run_scaling(args: argparse.Namespace) -> None:
    rows = []
    for sweep in sweeps.scaling():
        for algorithm, counts in sweep.counts.items():
            series = [[value(c) for c in counts] for value in sweeps.VALUES.values()]
            exponents = [f"{sweeps.exponent(sweep.values, ys):.2f}" for ys in series]
            rows.append(
                [LABELS[algorithm], f"{sweep.variable} from {sweep.values[0]:g} to {sweep.values[-1]:g}", *exponents]
            )
    centre = f"N {sweeps.CENTRE.S}, d {sweeps.CENTRE.D}, M {sweeps.CENTRE_M}"
    title = f"exponents over the last doubling; one head, forward + backward, around {centre}"
    print_table(title, ("", "sweep", *sweeps.VALUES), rows)
    if args.plot:
        plots.scaling(args.plot, sweeps.scaling())


def run_gpt2(_: argparse.Namespace) -> None:
    rows = [
        [
            LABELS[name], f"{published.gflop} / {counts.flops / 1e9:.1f}",
            f"{published.gigabytes} / {counts.bytes / 1e9:.2f}", f"{published.milliseconds} / {milliseconds:.1f}",
        ]
        for name, published, counts, milliseconds in gpt2.comparison()
    ]  # fmt: skip
    print_table(
        "GPT-2 medium, A100 40 GB, forward + backward: published / counted",
        ("", "GFLOP", "GB", "ms (measured / roofline)"),
        rows,
    )
    for title, steps in (("Gigabytes", gpt2.traffic_steps()), ("GFLOP", gpt2.flop_steps())):
        print_table(
            title,
            ("", "counted", "published", "ratio"),
            [
                [
                    s.text,
                    f"{s.ours:.2f}",
                    *(("", "") if s.published is None else (f"{s.published:.1f}", f"{s.ratio:.3f}")),
                ]
                for s in steps
            ],
        )


def run_context(args: argparse.Namespace) -> None:
    for name in ("efficiency", "link_efficiency"):
        if not 0 < getattr(args, name) <= 1:
            raise ValueError(f"--{name.replace('_', '-')}: got {getattr(args, name)}; allowed: above 0, up to 1")
    model = context_parallel.Sharded(
        args.B, args.H, args.H_kv, 2, args.D, 1, args.dtype, not args.full, not args.forward_only
    )
    rates = {"efficiency": args.efficiency, "link_efficiency": args.link_efficiency}
    rows = []
    for link in context_parallel.LINKS.values():
        for problem, times in context_parallel.over(find(args.device), link, args.S, args.n, model, **rates):
            cells = []
            for method in context_parallel.METHODS:
                time = times.get(method)
                cells += ["-"] * 3 if time is None else [
                    f"{time.seconds * 1e3:.1f}", f"{time.exposed:.0%}", f"{time.memory / 2**30:.1f}"
                ]  # fmt: skip
            rows.append([link.name, f"{problem.S // 2**10}k", problem.n, *cells])
    columns = ["link", "S", "n"]
    columns += [f"{method} {unit}" for method in ("ring", "gather", "ulysses") for unit in ("ms", "idle", "GiB")]
    passes = "forward" if args.forward_only else "forward + backward"
    causal = "full" if args.full else "causal"
    title = f"one layer, B {args.B}, H {args.H}, H_kv {args.H_kv}, D {args.D}, {args.dtype}, {causal}, {passes}"
    print_table(f"{title}; {args.device}; simulated", columns, rows)
    print(
        f"Nothing is measured: products at {args.efficiency:.0%} of the device's peak, links at "
        f"{args.link_efficiency:.0%} of theirs. idle: the share of time in which a device computes nothing.\n"
        "GiB: on each device, inputs, results, gradients and buffers. -: fewer key heads than devices."
    )
    for link in context_parallel.LINKS.values():
        print(f"{link.name}: {link.bandwidth / 1e9:.0f} GB/s, {link.latency * 1e6:.0f} us a message; {link.source}")


def run_devices(args: argparse.Namespace) -> None:
    devices = [*GPUS.values(), *([this_cpu()] if args.measure else [])]
    rows = [
        [
            d.name, f"{d.matmul['float16'] / 1e12:.4g}", f"{d.matmul['float32'] / 1e12:.4g}",
            f"{d.bandwidth / 1e9:.4g}", d.on_chip_bytes // 1024, d.source,
        ]
        for d in devices
    ]  # fmt: skip
    columns = ("", "16-bit TFLOP/s", "fp32", "GB/s", "chip KiB", "source")
    print_table("dense products, slow memory, and the memory of one multiprocessor or core", columns, rows)


if __name__ == "__main__":
    main()
