"""Decides whether two training runs agree. The rule is in this file alone, and needs no torch.

Two correct attention kernels round differently. Every optimiser step makes the difference larger, so the training runs
drift apart. The drift depends on the model, the data, the seed and the number of steps. So no fixed limit can
distinguish this drift from an error.

So three runs are compared. The reference is torch's math kernel, the plain softmax over an S x S matrix. The yardstick
is torch's default kernel: on a CPU its flash kernel. The candidate agrees if its distance from the reference is at
most `FACTOR` times the yardstick's distance from the reference, in each of five statistics. The largest difference of
all steps is not among them, because a single step may differ by chance. There are few validations, so their yardstick
is the larger median of the validation and the training losses.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

# For ten seeds and four instruction sets the largest ratio was 1.6 for the first gradients and 2.0 for the first ten
# steps. For the medians, which depend more on chance, it was 5.5 (benchmarks/results/loss_agreement.txt, by
# seed_sweep.py).
FACTOR = 30.0
# In these steps rounding has grown little. Their largest difference is compared, so a wrong kernel is found here.
EARLY_STEPS = 10
# A relative difference below this is rounding of the loss. This is the limit if the yardstick's difference is 0.
ROUNDING = {"float64": 1e-14, "float32": 2e-6, "bfloat16": 2e-6}


@dataclass(frozen=True)
class Curves:
    """The numbers of one run that are compared."""

    loss: Sequence[float]  # one per step
    validation: Sequence[float]
    first_gradients: Mapping[str, float]  # parameter -> norm


@dataclass(frozen=True)
class Check:
    """One statistic: the distance of the candidate and of the yardstick from the reference, and the limit."""

    name: str
    difference: float
    yardstick: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit  # False for NaN


def compare(reference: Curves, yardstick: Curves, candidate: Curves, rounding: float) -> list[Check]:
    """The five checks. A NaN in any run, or runs of different length, never pass."""
    scale = largest([abs(loss) for loss in reference.loss])
    drift = _median_loss(reference, yardstick)
    checks = []
    for name, distance, at_least, unit in (
        ("first loss", _first_loss, 0.0, scale),
        ("first gradients, relative", _first_gradients, 0.0, 1.0),
        (f"training loss, first {EARLY_STEPS} steps", _early_loss, 0.0, scale),
        ("training loss, median", _median_loss, 0.0, scale),
        ("validation loss, median", _median_validation, drift, scale),
    ):
        apart = largest([distance(reference, yardstick), at_least])
        limit = largest([FACTOR * apart, rounding * unit])
        checks.append(Check(name, distance(reference, candidate), apart, limit))
    return checks


def differences(reference: Sequence[float], candidate: Sequence[float]) -> list[float]:
    """|reference - candidate| step by step; NaN for every step that only one of them has."""
    both = [abs(a - b) for a, b in zip(reference, candidate, strict=False)]
    return both + [math.nan] * abs(len(reference) - len(candidate))


def largest(values: Sequence[float]) -> float:
    """The maximum. NaN counts as the largest value. NaN if there is no value."""
    return _unless_nan(max, values)


def median(values: Sequence[float]) -> float:
    """The median, or NaN if there is no value or any value is NaN."""
    return _unless_nan(statistics.median, values)


def _unless_nan(statistic: Callable[[Sequence[float]], float], values: Sequence[float]) -> float:
    if not values or any(math.isnan(value) for value in values):
        return math.nan
    return statistic(values)


def _first_loss(reference: Curves, other: Curves) -> float:
    return largest(differences(reference.loss[:1], other.loss[:1]))


def _early_loss(reference: Curves, other: Curves) -> float:
    return largest(differences(reference.loss[:EARLY_STEPS], other.loss[:EARLY_STEPS]))


def _median_loss(reference: Curves, other: Curves) -> float:
    return median(differences(reference.loss, other.loss))


def _median_validation(reference: Curves, other: Curves) -> float:
    return median(differences(reference.validation, other.validation))


def _first_gradients(reference: Curves, other: Curves) -> float:
    """The largest |difference| / |reference| of the norms; infinite if only the reference's norm is 0."""
    names = sorted({*reference.first_gradients, *other.first_gradients})
    expected, got = ([run.first_gradients.get(name, math.nan) for name in names] for run in (reference, other))
    pairs = zip(differences(expected, got), expected, strict=True)
    return largest([apart / abs(value) if value else (math.inf if apart else apart) for apart, value in pairs])
