"""The predicted time: whichever takes longer, the arithmetic or the traffic.

Source: Williams, Waterman, Patterson, "Roofline", 2009. Everything overlaps, every unit runs at its peak, and launching
costs nothing. The one thing that is counted too high is the traffic, where a cache lies between the slow memory and the
chip (a GPU's L2): the algorithms count each load as one of slow memory. `least_seconds` has that cache as large as can
be, so that is the lower bound; `seconds` has none.
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
    """Products run at their rate and everything else at the fp32 rate, one after the other."""
    compute = counts.matmul_flops / device.matmul[dtype] + counts.other_flops / device.other
    return Prediction(compute, counts.bytes / device.bandwidth, counts.bytes_once / device.bandwidth)
