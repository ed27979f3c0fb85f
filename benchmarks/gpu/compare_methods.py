"""The functions that compare.py compares, and the child process that tries and times them."""

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial

import torch

from benchmarks.attention_methods import METHODS, QUADRATIC
from benchmarks.gpu.problem import Problem
from benchmarks.gpu.timing import dtype_16, matmul_peak, time_in_turn

TORCHS = ["torch flash", "torch cudnn", "torch efficient"]
OURS = {"ours": None, "ours sm80": "sm80"}  # method -> the tier that is forced
ALLOWED = 0.03  # difference from a kernel of torch, as a part of the largest value: both round to 16 bits


def flash_attn_2() -> Callable | None:
    """flash-attn's function on (B, H, S, D) tensors, or None if it is not installed."""
    try:
        from flash_attn import flash_attn_func
    except ImportError:
        return None

    def attention(q, k, v, *, is_causal):
        # flash-attn needs (B, S, H, D) with a contiguous last dimension, so a transposed view is enough.
        return flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=is_causal).transpose(1, 2)

    return attention


def by_force(tier: str | None, function: Callable) -> Callable:
    """Returns a function that calls `function` with this tier forced."""
    from flash_attn_ext import force_cuda_tier

    def call(*args, **kwargs):
        force_cuda_tier(tier)
        try:
            return function(*args, **kwargs)
        finally:
            force_cuda_tier(None)

    return call if tier else function


def methods() -> dict[str, Callable]:
    ours = {name: by_force(tier, METHODS["ours"]) for name, tier in OURS.items()}
    peers = {name: METHODS[name] for name in TORCHS if name not in QUADRATIC}
    installed = flash_attn_2()
    return {**ours, **peers, **({"flash-attn": installed} if installed else {})}


def inputs(problem: Problem, requires_grad: bool, device: str) -> tuple[list, torch.Tensor]:
    """q, k, v; and a gradient of out."""
    torch.manual_seed(0)
    shape = (problem.B, problem.H, problem.S, problem.D)
    draw = partial(torch.randn, shape, device=device, dtype=dtype_16())
    return [draw().requires_grad_(requires_grad) for _ in range(3)], draw()


def calls(
    problem: Problem, backward: bool, device: str = "cuda", names: list[str] | None = None
) -> tuple[dict[str, Callable], dict[str, str]]:
    """Returns a function without arguments for each method of `names`, and the reasons of methods that refuse."""
    tensors, grad = inputs(problem, backward, device)
    possible, refused = {}, {}
    for name, attention in methods().items():
        if names is not None and name not in names:
            continue
        try:
            with nullcontext() if backward else torch.no_grad():
                out = attention(*tensors, is_causal=problem.causal)
                if backward:
                    # One forward, then the backward alone again and again.
                    again = partial(torch.autograd.grad, out, tensors, grad, retain_graph=True)
                    possible[name] = by_force(OURS.get(name), again)
                    possible[name]()
        except (RuntimeError, NotImplementedError, ValueError) as error:
            possible.pop(name, None)
            refused[name] = str(error).strip().splitlines()[0]
            continue
        if not backward:
            possible[name] = torch.no_grad()(partial(attention, *tensors, is_causal=problem.causal))
    return possible, refused


def try_one(problem: Problem, backward: bool, name: str, device: str = "cuda") -> dict:
    """Returns the difference from torch's results, as a fraction of the largest value, and the tier that ran."""
    functions, refused = calls(problem, backward, device, [*TORCHS, name])
    if name in refused:
        raise RuntimeError(refused[name])
    reference = next(torchs for torchs in TORCHS if torchs in functions)
    as_list = list if backward else lambda out: [out]
    got, expected = as_list(functions[name]()), as_list(functions[reference]())
    return {"tier": tier_of(problem, backward, name, device), "difference": max(map(difference, got, expected))}


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    if not torch.isfinite(got).all():
        return float("inf")
    return ((got.float() - expected.float()).abs().max() / expected.float().abs().max()).item()


def tier_of(problem: Problem, backward: bool, name: str, device: str) -> str | None:
    from flash_attn_ext import explain

    tensors, _ = inputs(problem, backward, device)
    explained = by_force(OURS[name], explain)(*tensors, is_causal=problem.causal)
    return (explained.backward if backward else explained.forward).kernel


def time_all(problem: Problem, backward: bool, names: list[str], seconds: float, flush_l2: bool) -> dict:
    functions, refused = calls(problem, backward, names=names)
    times = time_in_turn(list(functions.values()), seconds=seconds, rounds=(3, 100), flush_l2=flush_l2)
    return {"seconds": dict(zip(functions, times, strict=True)), "refused": refused}


def answer(task: dict) -> object:
    """In the child process."""
    if task["do"] == "peak":
        return matmul_peak()
    problem, backward = Problem(**task["problem"]), task["backward"]
    if task["do"] == "try":
        return try_one(problem, backward, task["name"])
    return time_all(problem, backward, task["names"], task["seconds"], task["flush_l2"])


def task(do: str, problem: Problem, backward: bool, **more) -> dict:
    return {"do": do, "problem": asdict(problem), "backward": backward, **more}


def rates(medians: dict[str, float], flops: float, peak: float) -> dict:
    """Computes rates from median seconds. "ratio" is the best peer's time divided by ours: above 1, ours is faster."""
    peers = {name: seconds for name, seconds in medians.items() if name not in OURS}
    best = min(peers, key=peers.get) if peers else None
    ours = medians.get("ours")
    return {
        "TFLOP/s": {name: flops / seconds / 1e12 for name, seconds in medians.items()},
        "best_peer": best,
        "ratio": peers[best] / ours if best and ours else None,
        "of_matmul_peak": flops / ours / peak if ours else None,
    }


def medians(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(times) for name, times in seconds.items()}
