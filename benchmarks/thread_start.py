"""Measures the start of OpenMP's threads: an empty parallel region, after the caller has computed for a while.

Run it once for each policy: OMP_WAIT_POLICY=passive python -m benchmarks.thread_start
"""

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

SOURCE = """
extern "C" void empty_region(int threads) {
#pragma omp parallel num_threads(threads)
  { asm volatile("" ::: "memory"); }
}
"""
GAPS = (0.0, 1e-4, 1e-3, 1e-2, 3e-2)  # seconds


def empty_region() -> Callable[[int], None]:
    """Compiles the region. It runs on the threads of torch's libgomp, which torch has loaded."""
    with tempfile.TemporaryDirectory(prefix="flash_attn_ext_threads_") as folder:
        source, built = Path(folder) / "region.cpp", Path(folder) / "region.so"
        source.write_text(SOURCE)
        subprocess.run(["g++", "-O2", "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(built)], check=True)
        return ctypes.CDLL(str(built)).empty_region


def seconds_after(gap: float, region: Callable[[int], None], threads: int) -> list[float]:
    times = []
    for _ in range(40 + int(3 / (gap + 1e-4) / 10)):
        start = time.perf_counter()
        while time.perf_counter() - start < gap:
            pass
        before = time.perf_counter()
        region(threads)
        times.append(time.perf_counter() - before)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    threads = parser.parse_args().threads
    region = empty_region()
    policy = {name: os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    print(f"{threads} threads, {policy}. us after a gap of the caller: median (90th percentile)")
    for _ in range(1000):
        region(threads)
    for gap in GAPS:
        times = seconds_after(gap, region, threads)
        most = statistics.quantiles(times, n=10)[-1]
        print(f"{1e3 * gap:5.1f} ms: {1e6 * statistics.median(times):6.1f} ({1e6 * most:.1f})")


if __name__ == "__main__":
    main()
