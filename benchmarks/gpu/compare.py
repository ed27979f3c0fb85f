"""Compares flash_attn with torch's attention kernels, and with flash-attn if it is installed.

In bfloat16, or in float16 on GPUs without bfloat16.

A batch has 16384 tokens, and the heads have 2048 columns together, as in the papers. Times are medians by CUDA events;
the methods alternate. A method that refuses a problem is omitted, with the reason. FLOPs are 4 B H S S D forward, 2.5
times that backward, half if causal. The matmul peak is torch.mm of two 8192 x 8192 matrices in the same run.

"ours" is the tier that the selector chooses; "ours sm80" forces the tier sm80. Each of our kernels is tried before it
is timed, in a process that may hang or crash (worker.py). It is omitted if its result differs from torch's. "model" is
the speed that time_model.py predicts for our sm90 kernel, and the unit that limits it.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict

import torch

from benchmarks import output
from benchmarks.gpu import needs, time_model
from benchmarks.gpu.compare_methods import ALLOWED, OURS, TORCHS, answer, medians, rates, task
from benchmarks.gpu.figures import plot_comparison
from benchmarks.gpu.problem import HEAD_DIMS, LENGTHS, Problem, problems
from benchmarks.gpu.timing import name_of_dtype_16
from benchmarks.gpu.worker import Worker, add_child_argument, child_command, serve

PATIENCE = 10.0  # seconds for one call, in addition to the time of timing
AT_THE_END = 5.0  # seconds of the stage for tables and figure


class Trials:
    """Decides which of our methods may be timed.

    A method that hung or crashed is not tried again at its head dimension.
    """

    def __init__(self, worker: Worker):
        self.worker = worker
        self.given_up: dict[tuple, str] = {}

    def good(self, problem: Problem, backward: bool) -> tuple[dict[str, str], dict[str, str]]:
        """The tiers of the methods that can run, by method; and the reasons of the other methods."""
        tiers, refused = {}, {}
        for name in OURS:
            kind = (name, backward, problem.D)
            why = self.given_up.get(kind)
            if why is None:
                reply = self.worker.ask(task("try", problem, backward, name=name), PATIENCE)
                why = reply.get("error")
                if reply.get("broken"):
                    self.given_up[kind] = f"as at S {problem.S}: {why}"
                elif why is None and not reply["result"]["difference"] <= ALLOWED:
                    why = f"wrong result: {reply['result']['difference']:.2g} of the largest value away"
            if why is None:
                tiers[name] = reply["result"]["tier"]
            else:
                refused[name] = why
        if tiers.get("ours sm80") == tiers.get("ours"):
            tiers.pop("ours sm80", None)  # it is the same kernel
        return tiers, refused


def measure(problem: Problem, backward: bool, args: argparse.Namespace, peak: float, trials: Trials) -> dict:
    tiers, refused = trials.good(problem, backward)
    wanted = task("time", problem, backward, names=[*tiers, *TORCHS, "flash-attn"])
    wanted |= {"seconds": args.seconds, "flush_l2": args.flush_l2}
    reply = trials.worker.ask(wanted, args.seconds + PATIENCE)
    timed = reply.get("result", {"seconds": {}, "refused": {"timing": reply.get("error")}})
    row = {**asdict(problem), "pass": "bwd" if backward else "fwd", "tier": tiers.get("ours")}
    row |= rates(medians(timed["seconds"]), problem.flops(backward), peak)
    row["model"] = (
        time_model.prediction(problem, "backward" if backward else "forward") if row["tier"] == "sm90" else None
    )
    return row | {"refused": refused | timed["refused"], "seconds": timed["seconds"]}


def text(record: dict) -> Iterator:
    yield f"{record['machine']}; {record['dtype']} matmul {record['matmul_peak_TFLOP/s']:.0f} TFLOP/s"
    yield "TFLOP/s; ratio: time of the best peer / ours, above 1 ours is faster; -: refused\n"
    names = list(dict.fromkeys(name for row in record["rows"] for name in (*row["TFLOP/s"], *row["refused"])))
    lines = []
    for row in sorted(record["rows"], key=lambda row: (row["D"], row["causal"], row["pass"] == "bwd", row["S"])):
        line = [f"D {row['D']} {'causal' if row['causal'] else 'full'} {row['pass']}", str(row["S"])]
        line += [f"{row['TFLOP/s'][name]:.0f}" if name in row["TFLOP/s"] else "-" for name in names]
        line += [row["best_peer"] or "-", number(row["ratio"], ".2f"), number(row["of_matmul_peak"], ".0%")]
        model = row["model"]
        line += [f"{model['TFLOP/s']:.0f}", model["bound"]] if model else ["-", "-"]
        lines.append(line)
    yield output.table(["", "S", *names, "best peer", "ratio", "ours of matmul", "model", "bound by"], lines)
    reasons = {f"{name}: {why}" for row in record["rows"] for name, why in row["refused"].items()}
    yield from sorted(reasons)
    if record["left_out"]:
        yield f"Left out, the time was used up: {', '.join(record['left_out'])}"


def number(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", help=f"default {LENGTHS}, with --quick 8192 and 1024")
    parser.add_argument("--head-dims", type=int, nargs="+", default=HEAD_DIMS)
    parser.add_argument("--seconds", type=float, help="per problem; default 0.4, with --quick 0.1")
    parser.add_argument("--budget", type=float, help="seconds, after which no problem is begun; default: the stage's")
    parser.add_argument("--flush-l2", action="store_true", help="empty the GPU's cache before every call")
    parser.add_argument("--quick", action="store_true", help="fewer problems, fewer rounds")
    add_child_argument(parser)
    output.add_arguments(parser)
    args = parser.parse_args(argv)
    args.lengths = args.lengths or ([8192, 1024] if args.quick else LENGTHS)
    args.seconds = args.seconds or (0.1 if args.quick else 0.4)
    args.budget = args.budget or needs.seconds_left() - PATIENCE
    return args


def main(argv: list[str] | None = None) -> None:
    args, start = parse(argv), time.monotonic()
    needs.a_gpu_and_our_build()
    if args.child:
        serve(answer)
        return
    with Worker(child_command(__spec__.name), needs.seconds_left() - AT_THE_END) as worker:
        reply = worker.ask({"do": "peak"}, PATIENCE)
        if "error" in reply:
            sys.exit(f"the matmul that all is compared with: {reply['error']}")
        peak, trials = reply["result"], Trials(worker)
        record = {
            "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
            "settings": output.settings(args),
            "dtype": name_of_dtype_16(),
            "matmul_peak_TFLOP/s": peak / 1e12,
            "rows": [],
            "left_out": [],
        }
        for problem in problems(args.lengths, args.head_dims):
            if time.monotonic() - start > args.budget:
                record["left_out"].append(str(problem))
                continue
            for backward in (False, True):
                record["rows"].append(measure(problem, backward, args, peak, trials))
                output.write_json(record, args.json)  # after each row, so that a time-out does not lose earlier rows
    output.write_text(text(record), args.text)
    plot_comparison(record, args.plot)


if __name__ == "__main__":
    main()
