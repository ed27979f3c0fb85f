"""The predicted time: whichever takes longer, the arithmetic or the traffic.

Source: Williams, Waterman, Patterson, "Roofline", 2009. It is a lower bound: everything overlaps, every unit runs at
its peak, and launching costs nothing.
"""

from dataclasses import dataclass

from .counts import Counts
from .devices import Device


@dataclass(frozen=True)
class Prediction:
    compute_seconds: float
    memory_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def bound(self) -> str:
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"


def predict(counts: Counts, device: Device, dtype: str) -> Prediction:
    """Products run at their rate and everything else at the fp32 rate, one after the other."""
    compute = counts.matmul_flops / device.matmul[dtype] + counts.other_flops / device.other
    return Prediction(compute, counts.bytes / device.bandwidth)
