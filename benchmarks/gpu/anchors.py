"""The best published TFLOP/s of each cell on an H100 or H200.

`python -m benchmarks.gpu.time_model --anchors` compares them with the time model.

The figures are for bfloat16 or float16, 16384 tokens in a batch and 2048 columns of all heads, from FlashAttention-3
(Shah et al. 2024) and from its measurements of cuDNN.
"""

from benchmarks.gpu.problem import COLUMNS, TOKENS, Problem

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
# Backward, head dimension, causal: TFLOP/s by length. None: nothing is published.
ANCHORS: dict[tuple[bool, int, bool], tuple[int | None, ...]] = {
    (False, 64, False): (340, 392, 460, 476, 496, 497),
    (False, 64, True): (225, 291, 371, 420, 460, 473),
    (False, 128, False): (497, 574, 633, 671, 691, 702),
    (False, 128, True): (315, 423, 567, 667, 685, 673),
    (False, 256, False): (482, 639, 707, 736, 746, 756),
    (False, 256, True): (308, 427, 537, 612, 628, 642),
    (True, 64, False): (272, 363, 422, 453, 472, 474),
    (True, 128, False): (316, 424, 504, 560, 594, 612),
    (True, 128, True): (None, 219, 370, 474, 575, 579),
}
ENOUGH = 0.9  # of the anchor; below this fraction the table names the unit that bounds the kernel


def cells():
    """Yields the problem, the pass and the anchor of each cell with an anchor."""
    for (backward, head_dim, causal), rates in ANCHORS.items():
        for length, rate in zip(LENGTHS, rates, strict=True):
            if rate is not None:
                yield Problem(TOKENS // length, COLUMNS // head_dim, length, head_dim, causal), backward, rate
