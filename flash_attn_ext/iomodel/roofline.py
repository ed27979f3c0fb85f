"""The predicted time: the maximum of the time of the arithmetic and the time of the traffic.

Source: Williams, Waterman, Patterson, "Roofline", 2009. Everything overlaps, every unit runs at its peak, and launching
costs nothing. Only the traffic is counted too high, if a cache is between the slow memory and the chip (a GPU's L2):
the algorithms count each load as a load from slow memory. `least_seconds` assumes an unlimited cache, so it is the
lower bound; `seconds` assumes no cache.
"""

from dataclasses import dataclass

from .counts import Counts
from .devices import Device


@dataclass(frozen=True)
class Prediction:
    compute_seconds: float
    memory_seconds: float
    least_memory_seconds: float

    @property
    def seconds(self) -> float:
        """Without a cache."""
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def least_seconds(self) -> float:
        """With a cache that serves every load but the first of an element."""
        return max(self.compute_seconds, self.least_memory_seconds)

    @property
    def bound(self) -> str:
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"


def predict(counts: Counts, device: Device, dtype: str) -> Prediction:
    """Products run at their rate, then all further arithmetic at the fp32 rate."""
    compute = counts.matmul_flops / device.matmul[dtype] + counts.other_flops / device.other
    return Prediction(compute, counts.bytes / device.bandwidth, counts.bytes_once / device.bandwidth)
