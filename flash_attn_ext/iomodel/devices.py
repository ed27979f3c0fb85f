"""The devices of the model: their rates, and the size of their fast memory."""

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .problem import DTYPES


@dataclass(frozen=True)
class Device:
    """Peak rates. `matmul`: FLOP/s of dense products, by dtype. `other`: FLOP/s of all other arithmetic, in fp32."""

    name: str
    matmul: dict[str, float]
    other: float
    bandwidth: float  # bytes/s of the slow memory
    on_chip_bytes: int  # of one multiprocessor or core
    source: str

    def elements(self, dtype: str) -> int:
        """M, if tiles have the dtype `dtype`."""
        return self.on_chip_bytes // DTYPES[dtype].itemsize


# Tensor core rates are dense, without the data sheets' factor 2 for sparsity. On-chip: shared memory of one
# multiprocessor, from NVIDIA's Ampere and Hopper tuning guides. fp32 products run on the CUDA cores, not as TF32.
GPUS = {
    "A100-40GB": Device(
        "A100-40GB",
        {"float16": 312e12, "bfloat16": 312e12, "float32": 19.5e12, "float64": 19.5e12},
        19.5e12,
        1555e9,
        164 * 1024,
        "NVIDIA A100 data sheet, 40 GB",
    ),
    "A100-80GB": Device(
        "A100-80GB",
        {"float16": 312e12, "bfloat16": 312e12, "float32": 19.5e12, "float64": 19.5e12},
        19.5e12,
        2039e9,
        164 * 1024,
        "NVIDIA A100 data sheet, 80 GB SXM",
    ),
    "H100": Device(
        "H100",
        {"float16": 989e12, "bfloat16": 989e12, "float32": 67e12, "float64": 67e12},
        67e12,
        3350e9,
        228 * 1024,
        "NVIDIA H100 data sheet, SXM",
    ),
    "H200": Device(
        "H200",
        {"float16": 989e12, "bfloat16": 989e12, "float32": 67e12, "float64": 67e12},
        67e12,
        4800e9,
        228 * 1024,
        "NVIDIA H200 data sheet, SXM",
    ),
}
NAMES = [*GPUS, "cpu"]


def find(
    name: str, *, matmul: float | None = None, bandwidth: float | None = None, on_chip_bytes: int | None = None
) -> Device:
    """Returns a device by name. Rates of the caller replace the device's rates.

    The CPU's rates are measured by this call.
    """
    if name in GPUS:
        device = GPUS[name]
    elif name == "cpu":
        device = this_cpu(matmul, bandwidth)
    else:
        raise ValueError(f"device: got {name!r}; allowed: {', '.join(NAMES)}")
    if matmul is not None:
        device = replace(device, matmul=dict.fromkeys(DTYPES, matmul), source=device.source + ", --matmul")
    if bandwidth is not None:
        device = replace(device, bandwidth=bandwidth, source=device.source + ", --bandwidth")
    if on_chip_bytes is not None:
        device = replace(device, on_chip_bytes=on_chip_bytes)
    return device


def this_cpu(matmul: float | None = None, bandwidth: float | None = None) -> Device:
    """Describes this machine. Measures torch's fp32 products and a stream of reads in a second or two, unless both are
    given.

    16-bit products have the rate of fp32 products. Other arithmetic has this rate, too, because it uses the same vector
    units. The chip is the L2 cache of one core.
    """
    rate = matmul or measure_products()
    stream = bandwidth or measure_bandwidth()
    rates = {"float16": rate, "bfloat16": rate, "float32": rate, "float64": rate / 2}
    source = "this machine" if matmul and bandwidth else f"this machine, measured on {torch.get_num_threads()} threads"
    return Device("cpu", rates, rate, stream, level_2_cache(), source)


def measure_products(seconds: float = 0.5) -> float:
    """FLOP/s of torch's fp32 products: the faster of MKL's matrix product and oneDNN's convolution.

    Each is repeated for `seconds`, and the best trial counts. On some AMD machines MKL reaches half the rate of oneDNN.
    """
    shapes = (1024, 1024), (1024, 1024), (1, 256, 64, 64), (256, 256, 3, 3)
    a, b, image, kernel = (torch.randn(shape, device="cpu") for shape in shapes)
    with torch.no_grad():
        matmul = 2 * 1024**3 / _best(lambda: torch.mm(a, b), seconds)
        convolution = 2 * 9 * 256**2 * 64**2 / _best(lambda: torch.conv2d(image, kernel, padding=1), seconds)
    return max(matmul, convolution)


def measure_bandwidth(seconds: float = 0.5) -> float:
    """Bytes/s of reading 256 MiB, more than any cache here: the best trial within `seconds`."""
    data = torch.ones(64 * 2**20, device="cpu")
    return data.nbytes / _best(data.sum, seconds)


def _best(function, seconds: float) -> float:
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < seconds:
        before = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - before)
    return best


def level_2_cache(default: int = 1 << 20) -> int:
    """Bytes of one core's L2 cache, from Linux; `default` if Linux does not report it."""
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        if (index / "level").read_text().strip() == "2":
            size = re.fullmatch(r"(\d+)([KM])", (index / "size").read_text().strip())
            return int(size[1]) * {"K": 1 << 10, "M": 1 << 20}[size[2]]
    return default
