"""Do two training runs agree? The rule, in one place and without torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """How far two runs in one dtype may be apart.

    In the first step both runs hold the same weights and the same batch: the loss, and the gradient of every
    parameter, differ by the rounding of one pass. A wrong forward or backward shows here, however little it
    would change the loss. From then on every update feeds the rounding back (AdamW divides by the gradient's own
    size, so even the noise in a tiny gradient moves a weight), and the difference grows with the steps and the
    learning rate, whichever two correct kernels are compared. `--attention sdpa sdpa-math` shows how far two of
    torch's own come apart: in float32, with the demo's defaults, 4e-5, where flash_attn_ext and sdpa were 1e-5
    (seed 1) and 3e-5 (seed 0) apart.
    """

    first_loss: float  # relative
    first_gradients: float  # relative, of the norm of each parameter's gradient
    curve: float  # nats per token, the largest of all steps
    validation: float  # nats per token


TOLERANCES = {
    "float64": Tolerance(first_loss=1e-12, first_gradients=1e-10, curve=1e-6, validation=1e-6),
    "float32": Tolerance(first_loss=1e-6, first_gradients=1e-4, curve=1e-3, validation=1e-3),
    "bfloat16": Tolerance(first_loss=1e-3, first_gradients=5e-2, curve=2e-1, validation=1e-1),
}


@dataclass(frozen=True)
class Curves:
    """What is compared of a run."""

    loss: Sequence[float]  # one per step
    validation: Sequence[float]
    first_gradients: Mapping[str, float]  # parameter -> norm


@dataclass(frozen=True)
class Check:
    """One difference and its limit."""

    name: str
    difference: float
    limit: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.limit  # False for NaN


def compare(reference: Curves, candidate: Curves, tolerance: Tolerance) -> list[Check]:
    """The four checks of Tolerance; a NaN on either side, or curves of different length, never pass."""
    first_loss = _relative(reference.loss[:1], candidate.loss[:1])
    names = sorted({*reference.first_gradients, *candidate.first_gradients})
    norms = ([run.first_gradients.get(name, math.nan) for name in names] for run in (reference, candidate))
    first_gradients = _relative(*norms)
    curve = largest(differences(reference.loss, candidate.loss))
    validation = largest(differences(reference.validation, candidate.validation))
    return [
        Check("first loss, relative", first_loss, tolerance.first_loss),
        Check("first gradients, relative", first_gradients, tolerance.first_gradients),
        Check("training loss, largest", curve, tolerance.curve),
        Check("validation loss, largest", validation, tolerance.validation),
    ]


def differences(reference: Sequence[float], candidate: Sequence[float]) -> list[float]:
    """|reference - candidate| step by step; NaN for every step that only one of them has."""
    both = [abs(a - b) for a, b in zip(reference, candidate, strict=False)]
    return both + [math.nan] * abs(len(reference) - len(candidate))


def largest(values: Sequence[float]) -> float:
    """The maximum, where NaN counts as the largest and nothing at all is NaN."""
    if not values or any(math.isnan(value) for value in values):
        return math.nan
    return max(values)


def _relative(reference: Sequence[float], candidate: Sequence[float]) -> float:
    """The largest |difference| / |reference|; infinite where only the reference is 0."""
    pairs = zip(differences(reference, candidate), reference, strict=True)
    return largest([apart / abs(value) if value else (math.inf if apart else apart) for apart, value in pairs])
