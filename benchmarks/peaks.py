"""Measures the machine's limits, its FMA rate and its memory rate, in the same run as the kernels.

The loops are in peaks.cpp. g++ compiles it at the first use, with the flags of the measured instruction set.
"""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import torch

FLAGS = {
    "generic": [],
    "avx2": ["-mavx2", "-mfma"],
    "avx512": ["-mavx512f", "-mavx2", "-mfma"],
    "avx512_bf16": ["-mavx512f", "-mavx512bf16", "-mavx2", "-mfma"],
    "amx": ["-mamx-tile", "-mamx-bf16", "-mavx512f", "-mavx512bf16", "-mavx2", "-mfma"],
    "neon": [],
    "neon_bf16": ["-march=armv8.2-a+bf16"],
}


@functools.cache
def _library(isa: str) -> ctypes.CDLL:
    """Compiles peaks.cpp for an instruction set of flash_attn_ext.available_kernels()."""
    source = Path(__file__).with_name("peaks.cpp")
    flags = ["-std=c++17", "-O3", "-fno-tree-vectorize", "-Wno-psabi", *FLAGS[isa], "-shared", "-fPIC", "-pthread"]
    with tempfile.TemporaryDirectory(prefix="flash_attn_ext_peaks_") as folder:
        built = Path(folder) / "peaks.so"
        subprocess.run(["g++", *flags, str(source), "-o", str(built)], check=True)
        library = ctypes.CDLL(str(built))  # stays loaded when the file is gone
    for name in ("fma_float", "fma_double", "dot_bfloat16", "tile_bfloat16"):
        getattr(library, name).restype = ctypes.c_double
        getattr(library, name).argtypes = [ctypes.c_int, ctypes.c_int64]
    library.stream_read.restype = ctypes.c_double
    library.stream_read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int64]
    return library


def flops(isa: str, dtype: torch.dtype, threads: int) -> float:
    """Returns the FLOP/s of the multiply-adds of `isa`'s kernels for `dtype`, on registers; best of five."""
    library = _library(isa)
    measure = library.fma_double if dtype == torch.float64 else library.fma_float
    if dtype == torch.bfloat16 and isa in ("avx512_bf16", "amx", "neon_bf16"):
        measure = library.tile_bfloat16 if isa == "amx" else library.dot_bfloat16
    return max(measure(threads, 500_000) for _ in range(5))


def stream_read(tensor: torch.Tensor, isa: str, threads: int) -> float:
    """Returns the bytes per second of reading the tensor in pieces of up to 1 MiB.

    The second of two readings counts. During the first reading other threads may still spin, and caches hold other
    data.
    """
    size = tensor.numel() * tensor.element_size()
    if not tensor.is_contiguous():
        raise ValueError("stream_read reads a range of memory: the tensor must be contiguous")
    _, rate = (_library(isa).stream_read(threads, tensor.data_ptr(), size) for _ in range(2))
    if rate == 0:
        raise ValueError(f"stream_read needs more than {size} bytes for {threads} threads")
    return rate
