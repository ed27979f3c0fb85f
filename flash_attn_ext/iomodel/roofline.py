"""The predicted time: the maximum of the time of the arithmetic and the time of the traffic.

Source: Williams, Waterman, Patterson, "Roofline", 2009. Arithmetic and traffic overlap fully, each unit runs at its
peak, and a launch takes no time. `seconds` assumes no cache: each load comes from slow memory, so it is too high if a
GPU's L2 serves loads. `least_seconds` assumes an unlimited cache, so it is a lower bound.
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
        """With an unlimited cache: only the first load of an element comes from slow memory."""
        return max(self.compute_seconds, self.least_memory_seconds)

    @property
    def bound(self) -> str:
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"


def predict(counts: Counts, device: Device, dtype: str) -> Prediction:
    """Products run at the rate of `dtype`, and all other arithmetic at the fp32 rate, one after the other."""
    compute = counts.matmul_flops / device.matmul[dtype] + counts.other_flops / device.other
    return Prediction(compute, counts.bytes / device.bandwidth, counts.bytes_once / device.bandwidth)
