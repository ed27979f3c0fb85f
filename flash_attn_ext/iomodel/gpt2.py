"""Compares the table of the FlashAttention paper (2022, figure 2 left) with our counts, and explains the differences.

GPT-2 medium on an A100 (40 GB), sequence length 1024, head dimension 64, 16 heads, batch 64, forward and backward.
"""

from dataclasses import dataclass, replace

from .counts import Counts, Problem, count
from .devices import GPUS
from .roofline import predict

PROBLEM = Problem(B=64, H=16, S=1024, D=64, dtype="float16", backward=True)
ON_CHIP = 65536  # M: with D = 64, B_c = 256 and B_r = 64


@dataclass(frozen=True)
class Published:
    gflop: float
    gigabytes: float
    milliseconds: float


PUBLISHED = {"standard": Published(66.6, 40.3, 41.7), "flash1": Published(75.2, 4.4, 7.3)}


@dataclass(frozen=True)
class Step:
    """One line of the explanation: a quantity as we count it, and the published figure."""

    text: str
    ours: float
    published: float | None = None

    @property
    def ratio(self) -> float:
        return self.ours / self.published


def counted() -> dict[str, Counts]:
    """Counts with dropout, as in GPT-2's training. Standard attention has an additive mask that all heads share."""
    training = replace(PROBLEM, dropout=0.1)
    return {
        "standard": count("standard", replace(training, mask=True), ON_CHIP),
        "flash1": count("flash1", training, ON_CHIP),
    }


def comparison() -> list[tuple[str, Published, Counts, float]]:
    """Algorithm, published figure, our count, and the roofline's milliseconds."""
    device = GPUS["A100-40GB"]
    return [
        (name, PUBLISHED[name], counts, predict(counts, device, PROBLEM.dtype).seconds * 1e3)
        for name, counts in counted().items()
    ]


def traffic_steps() -> list[Step]:
    """Explains the published gigabytes, step by step from the algorithms as printed.

    The numbers are the counts of tensors.
    """
    full = counted()
    plain = count("standard", PROBLEM, ON_CHIP)
    traffic = full["flash1"].traffic
    rounds = _rounds(full["flash1"])
    zeros = traffic["forward", "out"][0] // rounds + traffic["backward", "dq"][0] // rounds
    delta = traffic["backward", "out"][0] * (rounds - 1) // rounds
    printed = full["flash1"].bytes
    return [
        Step("standard, algorithms 0 and 3: no mask, no dropout", plain.bytes / 1e9),
        Step("standard, five kernels: mask and dropout as steps of their own", full["standard"].bytes / 1e9, 40.3),
        Step("FlashAttention, algorithms 2 and 4 as printed", printed / 1e9),
        Step("  without the zeros of O and dQ: neither written nor read back", (printed - 2 * zeros) / 1e9),
        Step("  and delta kept, so that the backward reads O once", (printed - 2 * zeros - delta) / 1e9, 4.4),
    ]


def _rounds(counts: Counts) -> int:
    """T_c: the number of blocks of keys. FlashAttention-1 reads all queries once for each block."""
    return counts.traffic["forward", "q"][0] // (PROBLEM.heads * PROBLEM.S * PROBLEM.D * 2)


def flop_steps() -> list[Step]:
    """The published GFLOP, and the interpretation that agrees with both."""
    full = counted()
    standard, flash = full["standard"], full["flash1"]
    one_product = (flash.matmul_flops - standard.matmul_flops) / 1e9
    difference = PUBLISHED["flash1"].gflop - PUBLISHED["standard"].gflop
    return [
        Step("one product (N, d) x (d, N) of all 1024 heads: FlashAttention's recomputation", one_product),
        Step("  one sixteenth of it, against the published difference", one_product / PROBLEM.H, difference),
        Step("standard, all products", standard.matmul_flops / 1e9),
        Step("standard, everything else", standard.other_flops / 1e9),
        Step("  a sixteenth of the products and everything else", _sixteenth(standard), PUBLISHED["standard"].gflop),
        Step("FlashAttention, all products", flash.matmul_flops / 1e9),
        Step("FlashAttention, everything else", flash.other_flops / 1e9),
        Step("  a sixteenth of the products and everything else", _sixteenth(flash), PUBLISHED["flash1"].gflop),
    ]


def _sixteenth(counts: Counts) -> float:
    return (counts.matmul_flops / PROBLEM.H + counts.other_flops) / 1e9
