"""Checks that a tier runs and is correct: small calls with the tier forced, each pass of each call compared with fp64.

If a call hangs or breaks the CUDA context, a few seconds are lost, and the next call runs in a new process. The error
limit is only a rough form of the tests' rule: it distinguishes a wrong kernel from rounding.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.gpu import needs
from benchmarks.gpu.worker import Worker, add_child_argument, child_command, serve
from tools.gpu.calls import CALLS, Call, has_forward_mode, inputs

PATIENCE = 8.0  # seconds for one call: milliseconds, and up to 5 seconds for the first import of torch.func
AT_THE_END = 1.0  # seconds of the stage for the verdict
AT_ONCE = 4  # processes, so that a hang delays only a part of the calls
# Fractions of the largest value. Gradients are sums of more terms.
ALLOWED = {"bfloat16": 0.03, "float16": 0.005, "float32": 1e-4, "float64": 1e-10}


def tasks(tier: str) -> list[dict]:
    """Returns all forwards first, because a backward needs one."""
    calls = [(way, name) for way in ("forward", "backward", "jvp") for name in CALLS[tier]]
    return [
        {"tier": tier, "name": name, "pass": way} for way, name in calls if way != "jvp" or has_forward_mode(tier, name)
    ]


def check(task: dict) -> dict:
    """Runs in the child. Returns the largest error of each result, as a fraction of the largest value."""
    import flash_attn_ext

    flash_attn_ext.force_cuda_tier(task["tier"])
    call = CALLS[task["tier"]][task["name"]]
    return errors(call, flash_attn_ext.flash_attn, task["pass"])


def errors(call: Call, attention, way: str) -> dict:
    """`way`: a pass of tasks()."""
    import torch

    if way == "jvp":
        return jvp_errors(call, attention)
    backward = way == "backward"
    given = inputs(call, requires_grad=backward)
    names = ["dq", "dk", "dv"] if backward else ["out", "lse"]
    ours = attention(*given, enable_gqa=True, return_lse=True, **call.options)
    exact_in = [t.detach().double().requires_grad_(backward) for t in given]
    exact = dense(exact_in, call.options)
    if backward:
        grad = torch.randn(exact[0].shape, dtype=torch.float64, device="cpu").to(exact[0].device)
        ours = torch.autograd.grad(ours[0], given, grad.to(given[0].dtype))
        exact = torch.autograd.grad(exact[0], exact_in, grad.to(given[0].dtype).double())
    return {name: error(a, b) for name, a, b in zip(names, ours, exact, strict=True)}


def jvp_errors(call: Call, attention) -> dict:
    import torch

    given = inputs(call, requires_grad=False)
    tangents = [t.flip(2) for t in given]
    exact_in, exact_tangents = ([t.double() for t in side] for side in (given, tangents))

    def ours(*tensors):
        return attention(*tensors, enable_gqa=True, return_lse=True, **call.options)

    computed = torch.func.jvp(ours, tuple(given), tuple(tangents))
    exact = torch.func.jvp(lambda *t: dense(t, call.options), tuple(exact_in), tuple(exact_tangents))
    pairs = zip([*computed[0], *computed[1]], [*exact[0], *exact[1]], strict=True)
    return {name: error(a, b) for name, (a, b) in zip(["out", "lse", "t_out", "t_lse"], pairs, strict=True)}


def dense(tensors: Sequence, options: dict) -> tuple:
    """Computes the results by the tests' reference."""
    from tests.support import reference

    reference_options = {name: value for name, value in options.items() if name not in ("is_causal", "deterministic")}
    if options.get("is_causal"):
        reference_options["causal"] = "upper_left"
    return reference.attention(*tensors, **reference_options)


def error(ours, exact) -> float:
    """Returns the error. NaN if infinite values are at different places."""
    import torch

    if not torch.equal(torch.isfinite(ours), torch.isfinite(exact)):
        return float("nan")
    finite = torch.isfinite(exact)
    difference = (ours.double() - exact)[finite].abs()
    return (difference.max() / exact[finite].abs().max()).item() if difference.numel() else 0.0


def verdict(task: dict, reply: dict) -> tuple[bool, str]:
    call = CALLS[task["tier"]][task["name"]]
    return judged(f"{task['tier']} {task['pass']}, {call.dtype}, {task['name']}", reply, ALLOWED[call.dtype])


def judged(case: str, reply: dict, allowed: float) -> tuple[bool, str]:
    """Returns whether the worker's reply is good, and a line about it. `allowed`: as in ALLOWED."""
    if "error" in reply:
        return False, f"FAILED  {case}: {reply['error']}"
    wrong = {name: e for name, e in reply["result"].items() if not e <= allowed}
    errors = ", ".join(f"{name} {e:.1e}" for name, e in reply["result"].items())
    if wrong:
        return False, f"WRONG   {case}: errors {errors}; allowed {allowed:g}"
    return True, f"ok      {case}: {errors}"


def run(tier: str, command: list[str]) -> list[tuple[bool, str]]:
    """Returns the verdicts, and prints each immediately."""

    def some(part: list[dict]) -> list[tuple[bool, str]]:
        found = []
        with Worker(command, needs.seconds_left() - AT_THE_END) as worker:
            for task in part:
                found.append(verdict(task, worker.ask(task, PATIENCE)))
                print(found[-1][1], flush=True)
        return found

    parts = [part for n in range(AT_ONCE) if (part := tasks(tier)[n::AT_ONCE])]
    with ThreadPoolExecutor(len(parts)) as pool:
        return [one for part in pool.map(some, parts) for one in part]


def parent_arguments(
    parser: argparse.ArgumentParser, answer: Callable[[dict], dict], argv: list[str] | None
) -> argparse.Namespace | None:
    """Returns the arguments in the parent. In the child it answers tasks on stdin, and then returns None."""
    add_child_argument(parser)
    args = parser.parse_args(argv)
    if not args.child:
        needs.a_gpu_and_our_build()
        return args
    import torch

    torch.set_default_device("cuda")
    serve(answer)
    return None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tier", choices=CALLS)
    args = parent_arguments(parser, check, argv)
    if args is None:
        return 0
    verdicts = run(args.tier, child_command(__spec__.name, args.tier))
    return exit_status(args.tier, verdicts)


def exit_status(title: str, verdicts: list[tuple[bool, str]]) -> int:
    """Prints the last line of a stage's log. Returns the exit status."""
    bad = [line for good, line in verdicts if not good]
    print(f"{title}: {len(verdicts)} calls, {len(bad)} bad" + (f"; the first: {bad[0]}" if bad else ""))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
