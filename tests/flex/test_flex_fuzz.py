"""Random programs against torch in float64, and in float32 on every instruction set."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_flex_attention import check

UNARY = {
    "tanh": torch.tanh, "sigmoid": torch.sigmoid, "exp": lambda x: torch.exp(x.clamp(-5, 3)), "abs": torch.abs,
    "log": lambda x: torch.log(x.abs() + 0.5), "log1p": lambda x: torch.log1p(x * x), "sin": torch.sin,
    "cos": torch.cos, "erf": torch.erf, "expm1": lambda x: torch.expm1(x.clamp(-5, 3)), "neg": torch.neg,
    "log2": lambda x: torch.log2(x * x + 1), "sqrt": lambda x: torch.sqrt(x * x + 1), "square": torch.square,
    "clamp": lambda x: x.clamp(-1.5, 2.5),
}  # fmt: skip
BINARY = {
    "add": torch.add, "sub": torch.sub, "mul": lambda a, b: torch.tanh(a) * b, "maximum": torch.maximum,
    "div": lambda a, b: a / (b.abs() + 1), "where": lambda a, b: torch.where(a > b, a, 0.5 * b),
}  # fmt: skip
LEAVES = ("score", "score", "distance", "head", "table", "bias", "constant", "parity")

# A formula is a leaf, (unary, formula) or (binary, formula, formula).
formulas = st.recursive(
    st.sampled_from(LEAVES),
    lambda inner: (
        st.tuples(st.sampled_from(sorted(UNARY)), inner) | st.tuples(st.sampled_from(sorted(BINARY)), inner, inner)
    ),
    max_leaves=6,
)


def function_of(formula):
    table, bias = (torch.rand(n, dtype=torch.float64).requires_grad_() for n in (7, 90))

    def leaf(name, score, h, i, j):
        if name == "score":
            return score
        if name == "distance":
            return (i - j).to(score.dtype) / 16.0
        if name == "head":
            return h.to(score.dtype) * 0.5
        if name == "table":
            return table[(i + 3 * j) % 7]
        if name == "bias":
            return bias[j]
        return torch.where((i // 3) % 2 == 0, 1.0, -0.5).to(score.dtype) if name == "parity" else score * 0.0 + 0.75

    def score_mod(score, b, h, i, j):
        def value(f):
            if isinstance(f, str):
                return leaf(f, score, h, i, j)
            if len(f) == 2:
                return UNARY[f[0]](value(f[1]))
            return BINARY[f[0]](value(f[1]), value(f[2]))

        return score + torch.tanh(value(formula))  # of any size

    return score_mod, tuple(t for name, t in (("table", table), ("bias", bias)) if name in str(formula))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(formulas)
def test_random_programs(formula):
    torch.manual_seed(0)
    score_mod, captured = function_of(formula)
    check((1, 2, 1, 37, 90, 8), torch.float64, score_mod, captured=captured)


VECTORS = {
    "log": (torch.log, (1e-38, 3e38)), "log2": (torch.log2, (1e-38, 3e38)), "log1p": (torch.log1p, (-0.99, 1e6)),
    "expm1": (torch.expm1, (-30.0, 8.0)), "erf": (torch.erf, (-5.0, 5.0)), "sin": (torch.sin, (-1e4, 1e4)),
    "cos": (torch.cos, (-1e4, 1e4)),
}  # fmt: skip


@pytest.mark.parametrize("name", VECTORS)
def test_vector_functions_equal_torch(name, isa):
    """The function of a captured element, read from the logsumexp of one key."""
    from flash_attn_ext import flex_attention

    function, (low, high) = VECTORS[name]
    count = 512
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 4e-15)):
        x = torch.linspace(0, 1, count, dtype=dtype)
        if low > 0:
            x = torch.exp2(math.log2(low) + x * (math.log2(high) - math.log2(low)))
        else:
            x = torch.cat([(low + x * (high - low))[: count - 100], torch.linspace(-0.5, 0.5, 100, dtype=dtype)])
        special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.0], dtype=dtype)
        x = torch.cat([x, special]) if name not in ("sin", "cos") else x
        q = torch.zeros(1, 1, len(x), 1, dtype=dtype)
        _, lse = flex_attention(
            q, q[:, :, :1], q[:, :, :1], lambda s, b, h, i, j, x=x: function(x[i] + s), return_lse=True
        )
        wanted = function(x.double())
        got = lse[0, 0].double()
        shown = wanted.isfinite()
        torch.testing.assert_close(got[shown], wanted[shown], rtol=tolerance, atol=tolerance)
        # lse of a score of inf or NaN is no number; a score of -inf is masked.
        assert not got[~shown].isfinite().any()


def test_powers_equal_torch(isa):
    """Each batch has an exponent, and each row a base."""
    from flash_attn_ext import flex_attention

    for dtype, tolerance in ((torch.float32, 4e-7), (torch.float64, 2e-13)):  # an ulp of float64 times log2(result)
        inf = torch.inf
        bases = torch.cat(
            [torch.logspace(-30, 30, 200), torch.linspace(-6, 6, 97), torch.tensor([0.0, -0.0, inf, -inf])]
        )
        bases = torch.cat([bases, torch.tensor([torch.nan])]).to(dtype)
        exponents = [-inf, -3.0, -2.5, -1.0, 0.0, 0.3, 1.0, 4.0, 7.25, 1025.0, inf, torch.nan]
        exponents = torch.tensor(exponents, dtype=dtype)
        q = torch.zeros(len(exponents), 1, len(bases), 1, dtype=dtype)
        one_key = q[:, :, :1]
        _, lse = flex_attention(
            q, one_key, one_key, lambda s, b, h, i, j, x=bases, y=exponents: (x[i] + s) ** y[b], return_lse=True
        )
        wanted = bases ** exponents[:, None]
        got = lse[:, 0]
        shown = wanted.isfinite()
        # Results below the normal range may be 0.
        torch.testing.assert_close(got[shown], wanted[shown], rtol=tolerance, atol=torch.finfo(dtype).tiny)
        assert not got[~shown].isfinite().any()
