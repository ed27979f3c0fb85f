"""FlashAttention-3's block quantisation and incoherent processing (flash_attn_ext/reference/float8.py).

tests/algorithms/test_tutorial.py runs the command that prints the paper's table of errors.
"""

import pytest
import torch

from flash_attn_ext import flash_attn
from flash_attn_ext.reference import float8


def test_spread_is_a_product_with_an_orthogonal_matrix():
    signs = float8.random_signs(8)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(3):
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), hadamard)
    matrix = torch.diag(signs) @ hadamard / 8**0.5
    x = torch.randn(5, 8, dtype=torch.float64)
    torch.testing.assert_close(float8.spread(x, signs), x @ matrix)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(8, dtype=torch.float64))
    for d in (0, 12):
        with pytest.raises(ValueError, match=f"t: got {d} columns; allowed: a power of two"):
            float8.spread(torch.ones(5, d), torch.ones(d))


def test_an_outlier_is_spread_over_all_columns():
    x = torch.zeros(1, 64, dtype=torch.float64)
    x[0, 5] = 64.0
    torch.testing.assert_close(float8.spread(x, float8.random_signs(64)).abs(), torch.full((1, 64), 8.0).double())


@pytest.mark.parametrize("block", [None, 1, 16])
def test_quantised_numbers_are_within_half_a_step(block):
    """3 bits after the leading one: a relative error of at most 2^-4, or of the smallest step, 2^-9."""
    x = float8.with_outliers(50, 16)
    x[48] = 0.0
    q = float8.quantise(x, block)
    assert q.codes.dtype == torch.float8_e4m3fn
    assert q.codes.float().isfinite().all()
    assert ((q.rows(slice(0, 50)) - x).abs() <= torch.maximum(x.abs() / 16, q.factors / 1024)).all()
    assert len(q.factors.unique()) == {None: 1, 1: 50, 16: 4}[block]


@pytest.mark.parametrize("signs", [None, float8.random_signs(32)], ids=["plain", "incoherent"])
@pytest.mark.parametrize("block_quantisation", [False, True])
def test_forward_is_attention_with_rounding(signs, block_quantisation):
    q, k, v = (torch.randn(n, 32, dtype=torch.float64) for n in (70, 90, 90))
    exact = torch.softmax(q @ k.T / 32**0.5, 1) @ v
    out = float8.forward(q, k, v, block_q=32, block_k=16, block_quantisation=block_quantisation, signs=signs)
    assert 1e-4 < float8.rms_error(out, exact) < 0.03


def test_the_rounded_inputs_are_the_function_s_inputs():
    """With one factor a tensor, flash_attn takes the same codes and factors. It does not round P to 8 bits."""
    q, k, v = (float8.with_outliers(n, 64) for n in (128, 256, 256))
    eights = [float8.quantise(t) for t in (q, k, v)]
    factors = {f"{name}_descale": t.factors[:1].float() for name, t in zip(("q", "k", "v"), eights, strict=True)}
    ours = flash_attn(*(t.codes[None, None] for t in eights), **factors)[0, 0]
    algorithm = float8.forward(q, k, v, block_quantisation=False)
    exact = torch.softmax(q @ k.T / 8, 1) @ v
    assert float8.rms_error(ours, algorithm) < 0.5 * float8.rms_error(ours, exact)
    assert float8.rms_error(ours, exact) < 1.05 * float8.rms_error(algorithm, exact)
