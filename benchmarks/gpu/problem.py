"""The problems of the comparison: self-attention with the sizes of the papers."""

from collections.abc import Iterator
from dataclasses import dataclass

TOKENS, COLUMNS = 16384, 2048  # of a batch, of all heads
LENGTHS = [16384, 1024, 8192, 4096, 2048, 512]  # the most informative problems come first
HEAD_DIMS = [128, 64, 256]


@dataclass(frozen=True)
class Problem:
    B: int
    H: int
    S: int
    D: int
    causal: bool

    def flops(self, backward: bool) -> float:
        forward = 4 * self.B * self.H * self.S**2 * self.D / (2 if self.causal else 1)
        return 2.5 * forward if backward else forward


def problems(lengths: list[int], head_dims: list[int]) -> Iterator[Problem]:
    """Yields the most informative problems first, because a time-out loses the last problems."""
    for length in lengths:
        for head_dim in head_dims:
            for causal in (False, True):
                yield Problem(max(1, TOKENS // length), COLUMNS // head_dim, length, head_dim, causal)
