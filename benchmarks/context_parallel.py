"""Compares context parallel attention of two processes with one process, with all threads or with half of them.

    python -m benchmarks.context_parallel --S 2048 4096

For each length and method it prints the median time of forward and backward, and its ratio to the time of one process.
It also prints the fraction of the time in which the first process waits for messages. On one machine gloo uses the
loopback device, so these fractions do not apply to a network. The processes share the machine's memory and caches.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks import output
from benchmarks.harness import environment, machine
from flash_attn_ext import flash_attn
from flash_attn_ext.distributed import _exchange, context_parallel_attn, shard_sequence
from flash_attn_ext.distributed.attention import METHODS

ALONE = "one process, threads:"


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


def forward_and_backward(q, k, v, grad, attention):
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    attention(q, k, v, is_causal=True, enable_gqa=True).backward(grad)


def cases(arguments, whole: list[torch.Tensor], rank: int) -> dict[str, Callable[[], None]]:
    """Returns a function for each case. In a case of one process, all other processes wait."""
    each = max(arguments.threads // arguments.n, 1)
    own = [shard_sequence(t, 2) for t in whole]

    def alone(threads: int) -> None:
        if rank == 0:
            torch.set_num_threads(threads)
            forward_and_backward(*whole, flash_attn)
            torch.set_num_threads(each)

    methods = [m for m in METHODS if m != "ulysses" or arguments.H_kv % arguments.n == 0]
    return {f"{ALONE} {threads}": partial(alone, threads) for threads in (arguments.threads, each)} | {
        m: partial(forward_and_backward, *own, partial(context_parallel_attn, method=m)) for m in methods
    }


def work(rank: int, arguments, store: str, results) -> None:
    """Runs all cases in each round, so other load slows all of them equally. The first round does not count."""
    torch.set_num_threads(max(arguments.threads // arguments.n, 1))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=arguments.n)
    waiting = Waiting()
    for seqlen in arguments.S:
        calls = cases(arguments, tensors(arguments, seqlen), rank)
        seconds, waited = ({name: [] for name in calls} for _ in range(2))
        for _ in range(arguments.repeats + 1):
            for name, call in calls.items():
                dist.barrier()
                waiting.seconds, start = 0.0, time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - start)
                waited[name].append(waiting.seconds)
        for name in calls if rank == 0 else ():
            row = {"S": seqlen, "method": name, "seconds": median(seconds[name][1:]), "all_seconds": seconds[name][1:]}
            if not name.startswith(ALONE):
                row["waiting"] = sum(waited[name][1:]) / sum(seconds[name][1:])
            results.put(row)
    if rank == 0:
        results.put(None)
    dist.barrier()
    dist.destroy_process_group()


def measured(arguments) -> list[dict]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(work, (arguments, str(Path(folder) / "store"), results), nprocs=arguments.n)
        return list(iter(results.get, None))


def main(argv: list[str] | None = None) -> int:
    layout = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=layout)
    for name, default in (("B", 1), ("H", 8), ("H_kv", 8), ("D", 64), ("n", 2), ("repeats", 5)):
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=default, help=f"default: {default}")
    parser.add_argument("--S", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of one process (default: all)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="for the table that the terminal shows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for all numbers")
    arguments = parser.parse_args(argv)

    rows = measured(arguments)
    here = {**machine(), "environment": environment()}
    output.write_json({"settings": output.settings(arguments), "machine": here, "rows": rows}, arguments.json)
    alone = {row["S"]: row["seconds"] for row in rows if row["method"] == f"{ALONE} {arguments.threads}"}
    cells = [
        (
            str(row["S"]), row["method"], f"{row['seconds'] * 1e3:.1f}", f"{row['seconds'] / alone[row['S']]:.2f}",
            f"{row['waiting']:.0%}" if "waiting" in row else "",
        )
        for row in rows
    ]  # fmt: skip
    sizes = ", ".join(f"{name} {getattr(arguments, name)}" for name in ("B", "H", "H_kv", "D", "dtype"))
    processes = f"{arguments.n} processes with {max(arguments.threads // arguments.n, 1)} threads each"
    title = f"{here['cpu']}, {here['isa']}, torch {here['torch']}. Causal, forward and backward, {sizes}; {processes}."
    output.write_text([title, output.table(("S", "", "ms", "of all threads", "waiting"), cells)], arguments.text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
