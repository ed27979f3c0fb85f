"""Checks calls of other forms than flash_attn of dense tensors: packed sequences, caches in pages, functions of the
user, keys by index, float8. The selector chooses the tier. As in smoke.py, each form runs in a process that may hang.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch

from benchmarks.gpu import needs
from benchmarks.gpu.timing import dtype_16
from benchmarks.gpu.worker import Worker, child_command
from tools.gpu.smoke import ALLOWED, AT_THE_END, PATIENCE, dense, error, exit_status, judged, parent_arguments

HEADS, HEADS_KV = 4, 2
Results = Iterator[tuple[str, torch.Tensor, torch.Tensor]]  # name, ours, exact


def leaves(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, device="cpu").to(like_default(), dtype_16()).requires_grad_() for shape in shapes]


def like_default() -> torch.device:
    return torch.empty(0).device


def results(out: torch.Tensor, exact: torch.Tensor, inputs: list, exact_inputs: list) -> Results:
    """Yields out and the gradients of the inputs."""
    yield "out", out, exact
    grad = torch.randn(exact.shape, device="cpu", dtype=torch.float64).to(exact.device)
    ours = torch.autograd.grad(out, inputs, grad.to(out.dtype))
    yield from zip(("dq", "dk", "dv"), ours, torch.autograd.grad(exact, exact_inputs, grad), strict=True)


def doubles(inputs: list) -> list:
    return [t.detach().double().requires_grad_() for t in inputs]


def packed(head_dim: int) -> Results:
    from flash_attn_ext import flash_attn_varlen

    offsets_q, offsets_k = [0, 70, 71, 271], [0, 90, 390, 590]
    inputs = leaves((271, HEADS, head_dim), (590, HEADS_KV, head_dim), (590, HEADS_KV, head_dim))
    cu_seqlens = [torch.tensor(offsets, dtype=torch.int32) for offsets in (offsets_q, offsets_k)]
    out = flash_attn_varlen(*inputs, *cu_seqlens, 200, 300, enable_gqa=True, causal="lower_right")
    exact_in, parts = doubles(inputs), []
    for (q0, q1), (k0, k1) in zip(pairwise(offsets_q), pairwise(offsets_k), strict=True):
        rows = [
            t[None, a:b].transpose(1, 2) for t, (a, b) in zip(exact_in, ((q0, q1), (k0, k1), (k0, k1)), strict=True)
        ]
        parts.append(dense(rows, {"causal": "lower_right"})[0][0].transpose(0, 1))
    yield from results(out, torch.cat(parts), inputs, exact_in)


def cache_in_pages() -> Results:
    from flash_attn_ext import flash_attn_with_kvcache

    pages, page, head_dim, lengths = 12, 64, 128, [300, 129]
    with torch.no_grad():
        q, k, v = leaves((2, 3, HEADS, head_dim), *[(pages, page, HEADS_KV, head_dim)] * 2)
        table = torch.randperm(pages, device="cpu").to(q.device)[:10].reshape(2, 5).int()
        seqlens = torch.tensor(lengths, dtype=torch.int32)
        out = flash_attn_with_kvcache(q, k, v, cache_seqlens=seqlens, block_table=table, causal=True)
        for b, length in enumerate(lengths):
            rows = [t[table[b].long()].flatten(0, 1)[None, :length].transpose(1, 2).double() for t in (k, v)]
            exact = dense([q[b : b + 1].transpose(1, 2).double(), *rows], {"causal": "lower_right"})[0]
            yield f"out {b}", out[b : b + 1].transpose(1, 2), exact


def of_functions(head_dim: int, options: dict, mask: torch.Tensor) -> Results:
    """`mask`: what the functions of `options` do, for all elements."""
    from flash_attn_ext import flash_attn

    inputs = leaves((1, HEADS, 200, head_dim), *[(1, HEADS_KV, 300, head_dim)] * 2)
    exact_in = doubles(inputs)
    out = flash_attn(*inputs, enable_gqa=True, **options)
    yield from results(out, dense(exact_in, {"attn_mask": mask})[0], inputs, exact_in)


def distances() -> torch.Tensor:
    return torch.arange(300)[None, :] - torch.arange(200)[:, None]


def mask_function(head_dim: int) -> Results:
    def near(b, h, q_idx, kv_idx):
        return (kv_idx - q_idx) * (kv_idx - q_idx) <= 10000

    yield from of_functions(head_dim, {"mask_mod": near}, distances().abs() <= 100)


def score_function(head_dim: int) -> Results:
    def biased(score, b, h, q_idx, kv_idx):
        return score + (kv_idx - q_idx) * 0.01

    yield from of_functions(head_dim, {"score_mod": biased}, distances().double() * 0.01)


def keys_by_index() -> Results:
    chosen = torch.rand(200, 300, device="cpu").argsort(-1)[:, :50].to(like_default())
    mask = torch.zeros(200, 300, dtype=torch.bool).scatter_(1, chosen, True)
    yield from of_functions(64, {"key_indices": chosen[None, None].int()}, mask)


def float8(head_dim: int) -> Results:
    from flash_attn_ext import flash_attn

    with torch.no_grad():
        inputs = [
            t.to(torch.float8_e4m3fn) for t in leaves((1, HEADS, 300, head_dim), *[(1, HEADS_KV, 333, head_dim)] * 2)
        ]
        exact = dense([t.double() for t in inputs], {"causal": "upper_left"})[0]
        yield "out", flash_attn(*inputs, enable_gqa=True, is_causal=True), exact


FORMS: dict[str, Callable[[], Results]] = {
    "cache in pages": cache_in_pages,
    "keys by index": keys_by_index,
    **{f"packed, D {d}": lambda d=d: packed(d) for d in (64, 128, 256)},
    **{f"mask function, D {d}": lambda d=d: mask_function(d) for d in (64, 128)},
    **{f"score function, D {d}": lambda d=d: score_function(d) for d in (64, 128)},
    **{f"float8, D {d}": lambda d=d: float8(d) for d in (64, 128, 256)},
}  # fmt: skip
OF_FLOAT8 = 0.1  # as ALLOWED in smoke.py; the kernel rounds P to float8


def check(task: dict) -> dict:
    """Runs in the child. Returns the largest error of each result, as a fraction of the largest value."""
    return {name: error(ours, exact) for name, ours, exact in FORMS[task["name"]]()}


def verdict(name: str, reply: dict) -> tuple[bool, str]:
    return judged(name, reply, OF_FLOAT8 if name.startswith("float8") else ALLOWED["bfloat16"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    if parent_arguments(parser, check, argv) is None:
        return 0
    verdicts = []
    with Worker(child_command(__spec__.name), needs.seconds_left() - AT_THE_END) as worker:
        for name in FORMS:
            verdicts.append(verdict(name, worker.ask({"name": name}, PATIENCE)))
            print(verdicts[-1][1], flush=True)
    return exit_status("forms", verdicts)


if __name__ == "__main__":
    sys.exit(main())
