"""Context parallel attention on this machine's CPU: one process with all threads, against two with half of them each.

    python benchmarks/context_parallel.py --S 2048 4096

For each length and method: the median time of forward and backward, its ratio to one process's, and the share of the
time that the first process waits for messages. Between processes of one machine gloo goes through the loopback device;
the shares say nothing about a network. The processes share the machine's memory and caches with each other.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from flash_attn_ext import flash_attn
from flash_attn_ext.distributed import _exchange, context_parallel_attn, shard_sequence
from flash_attn_ext.distributed.attention import METHODS


class Waiting:
    """Adds up the time that this process spends in torch.distributed's calls and waits."""

    def __init__(self):
        self.seconds = 0.0
        _exchange.Exchange.wait = self._timed(_exchange.Exchange.wait)
        _exchange.Exchange.__init__ = self._timed(_exchange.Exchange.__init__)
        _exchange._all_gather_single = self._timed(_exchange._all_gather_single)
        dist.all_to_all_single = self._timed(dist.all_to_all_single)

    def _timed(self, function):
        def call(*args, **kwargs):
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return call


def tensors(arguments, seqlen: int) -> list[torch.Tensor]:
    """q, k, v and the gradient of out, the same in every process."""
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    heads = (arguments.H, arguments.H_kv, arguments.H_kv, arguments.H)
    return [torch.randn(arguments.B, h, seqlen, arguments.D).to(dtype) for h in heads]


def times(call, repeats: int) -> list[float]:
    """Seconds of each call, after one that warms up."""
    measured = []
    for n in range(repeats + 1):
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        call()
        if n:
            measured.append(time.perf_counter() - start)
    return measured


def forward_and_backward(q, k, v, grad, attention):
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    attention(q, k, v, is_causal=True, enable_gqa=True).backward(grad)


def work(rank: int, arguments, store: str, results) -> None:
    torch.set_num_threads(max(arguments.threads // arguments.n, 1))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.n)
    waiting = Waiting()
    for seqlen in arguments.S:
        own = [shard_sequence(t, 2) for t in tensors(arguments, seqlen)]
        for method in METHODS:
            if method == "ulysses" and arguments.H_kv % arguments.n:
                continue

            def call(own=own, method=method):
                forward_and_backward(*own, lambda *a, **o: context_parallel_attn(*a, **o, method=method))

            call()
            waiting.seconds = 0.0
            measured = times(call, arguments.repeats)
            if rank == 0:
                share = waiting.seconds / (sum(measured) * (arguments.repeats + 1) / arguments.repeats)
                results.put((seqlen, method, median(measured), share))
    dist.barrier()
    dist.destroy_process_group()


def main(argv: list[str] | None = None) -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    for name, default in (("B", 1), ("H", 8), ("H_kv", 8), ("D", 64), ("n", 2), ("repeats", 5)):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default, help=f"default: {default}")
    parser.add_argument("--S", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of one process (default: all)")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    arguments = parser.parse_args(argv)

    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    rows = []
    torch.set_num_threads(arguments.threads)
    for seqlen in arguments.S:
        q, k, v, grad = tensors(arguments, seqlen)
        seconds = median(times(lambda: forward_and_backward(q, k, v, grad, flash_attn), arguments.repeats))  # noqa: B023
        rows.append({"S": seqlen, "method": "one process", "seconds": seconds})
    store = f"/tmp/flash_attn_ext_benchmark_{os.getpid()}"
    multiprocessing.spawn(work, (arguments, store, results), nprocs=arguments.n)
    while not results.empty():
        seqlen, method, seconds, share = results.get()
        rows.append({"S": seqlen, "method": method, "seconds": seconds, "waiting": share})
    alone = {row["S"]: row["seconds"] for row in rows if row["method"] == "one process"}
    each = max(arguments.threads // arguments.n, 1)
    print(f"one process with {arguments.threads} threads, {arguments.n} with {each}")
    print(f"{'S':>7}  {'':12}{'ms':>9}{'of one':>8}{'waiting':>9}")
    for row in sorted(rows, key=lambda row: row["S"]):
        ratio, share = row["seconds"] / alone[row["S"]], row.get("waiting")
        waits = "" if share is None else f"{share:.0%}"
        print(f"{row['S']:>7}  {row['method']:12}{row['seconds'] * 1e3:>9.1f}{ratio:>8.2f}{waits:>9}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"arguments": vars(arguments), "rows": rows}, default=str, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
