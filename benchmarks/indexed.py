"""Compares attention by index with dense attention: multiply-adds per second, alternating in one process.

    python -m benchmarks.indexed            forward, backward, and time against the number of keys
    python -m benchmarks.indexed --heads 1  another number of query heads for the key head

A number of the first table is the rate of flash_attn(key_indices=...) divided by the rate of the dense flash_attn with
the same heads. The rate counts the products of the keys that a query lists. The lists are random among 8192 keys, and
sorted.
"""

import argparse
from functools import partial

import torch

from benchmarks.harness import environment, machine, quartiles, time_in_turn
from flash_attn_ext import flash_attn

KEYS, DENSE = 8192, 1024  # keys of the sparse calls; queries and keys of the dense call
PAIRS = 1 << 18  # queries times chosen keys of a sparse call


def step(call, inputs: list[torch.Tensor]) -> None:
    out = call(*inputs)
    torch.autograd.grad(out, inputs, torch.ones_like(out))


def tensors(heads: int, queries: int, keys: int, head_dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    shapes = ((1, heads, queries, head_dim), (1, 1, keys, head_dim), (1, 1, keys, head_dim))
    return [torch.randn(shape, dtype=torch.float32).to(dtype).requires_grad_() for shape in shapes]


def indices(queries: int, chosen: int) -> torch.Tensor:
    return torch.rand(1, 1, queries, KEYS).topk(chosen).indices.int()


def rates(heads: int, head_dim: int, dtype: torch.dtype, chosen: int, seconds: float) -> list[str]:
    """Returns the relative rates of the forward, and of forward and backward."""
    queries = PAIRS // chosen
    sparse, dense = tensors(heads, queries, KEYS, head_dim, dtype), tensors(heads, DENSE, DENSE, head_dim, dtype)
    by_index = partial(flash_attn, enable_gqa=True, key_indices=indices(queries, chosen))
    whole = partial(flash_attn, enable_gqa=True)
    texts = []
    for train in (False, True):
        if train:
            functions = [partial(step, by_index, sparse), partial(step, whole, dense)]
        else:
            functions = [partial(by_index, *(t.detach() for t in sparse)), partial(whole, *(t.detach() for t in dense))]
        ours, peer = time_in_turn(functions, seconds=seconds, rounds=(5, 40))
        work = queries * chosen / DENSE**2
        low, middle, high = quartiles([work * p / o for o, p in zip(ours, peer, strict=True)])
        texts.append(f"{middle:.2f} [{low:.2f}, {high:.2f}]")
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16, help="query heads that share the key head")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each cell")
    arguments = parser.parse_args()
    print(machine(), environment(), sep="\n")
    print(f"\n{arguments.heads} heads a key head. Rate / dense rate: median [quartiles]")
    print(f"{'':24}{'keys':>6}{'forward':>26}{'forward and backward':>26}")
    for dtype in (torch.float32, torch.bfloat16):
        for head_dim in (64, 128):
            for chosen in (512, 2048):
                forward, both = rates(arguments.heads, head_dim, dtype, chosen, arguments.seconds)
                print(f"{str(dtype)[6:]:14}D {head_dim:<8}{chosen:>6}{forward:>26}{both:>26}", flush=True)


if __name__ == "__main__":
    main()
