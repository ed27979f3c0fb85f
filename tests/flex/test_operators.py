"""Single operators in functions of scores, next to torch's: results and gradients."""

import math

import pytest
import torch
import torch.nn.functional as F

from flash_attn_ext import flex_attention

LENGTH = 9
OPERATORS = {
    "relu": lambda s, w, i, j: F.relu(s),
    "leaky_relu": lambda s, w, i, j: F.leaky_relu(s, 0.2),
    "relu6": lambda s, w, i, j: F.relu6(s * 9),
    "hardtanh": lambda s, w, i, j: F.hardtanh(s, -0.5, 0.25),
    "hardtanh at its limits": lambda s, w, i, j: F.hardtanh(torch.round(s) + (s - s.detach())),
    "elu": lambda s, w, i, j: F.elu(s * 500, 0.7),
    "celu": lambda s, w, i, j: F.celu(s, 1.3),
    "selu": lambda s, w, i, j: F.selu(s),
    "silu": lambda s, w, i, j: F.silu(s),
    "gelu": lambda s, w, i, j: F.gelu(s),
    "softplus": lambda s, w, i, j: F.softplus(s * 50),
    "logsigmoid": lambda s, w, i, j: F.logsigmoid(s * 500),
    "nan_to_num": lambda s, w, i, j: torch.nan_to_num(torch.where(i > j, math.nan, s * w), 2.0),
    "nan_to_num of infinities": lambda s, w, i, j: torch.nan_to_num(torch.where(i > j, math.inf, -s), 0.0, 3.0) * s,
    "lerp": lambda s, w, i, j: torch.lerp(s, w * 2, 0.3),
    "lerp, large weight": lambda s, w, i, j: torch.lerp(s, w * 2, 0.8),
    "lerp, tensor": lambda s, w, i, j: torch.lerp(s, w * 2, torch.sigmoid(s * w)),
    "addcmul": lambda s, w, i, j: torch.addcmul(s, s, w, value=0.5),
    "addcdiv": lambda s, w, i, j: torch.addcdiv(s, s, w, value=0.5),
    "powers of ints": lambda s, w, i, j: s * (i**0 + i**5 % 7 + (j - 4) ** 6 % 5) + 2**j % 3 + 2 ** (j - i),
    "addcmul of ints": lambda s, w, i, j: s + torch.addcmul(i, i, j, value=2) % 5,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_equal_those_of_torch(name):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, LENGTH, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    weight = torch.rand(2, dtype=torch.float64, requires_grad=True)
    operator = OPERATORS[name]
    out = flex_attention(q, k, v, lambda s, b, h, i, j: operator(s, weight[h], i, j)).sin()
    h, i, j = torch.arange(2)[:, None, None], torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    wanted = (operator(q @ k.mT / 2, weight[h], i, j).softmax(-1) @ v).sin()
    torch.testing.assert_close(out, wanted)
    ours, exact = (torch.autograd.grad(o.sum(), (q, k, v, weight), materialize_grads=True) for o in (out, wanted))
    torch.testing.assert_close(ours, exact)


@pytest.mark.parametrize("name", ["relu6", "celu", "selu", "logsigmoid", "nan_to_num", "lerp", "powers of ints"])
def test_operators_in_compiled_code(name):
    torch._dynamo.reset()
    q = torch.randn(1, 2, LENGTH, 4, requires_grad=True)
    operator = OPERATORS[name]

    def attend(q):
        return flex_attention(q, q, q, lambda s, b, h, i, j: operator(s, s * 0.5, i, j)).sin()

    out, wanted = torch.compile(attend, backend="aot_eager", fullgraph=True)(q), attend(q)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(o.sum(), q) for o in (out, wanted)))


@pytest.mark.parametrize(
    ("operator", "message"),
    [
        (lambda s, w, i, j: torch.erfc(s), r"aten.erfc"),
        (lambda s, w, i, j: s + i**j, r"a power of integers .*allowed: exponents that are numbers from 0 on"),
        (lambda s, w, i, j: F.mish(s), r"aten.mish"),
    ],
)
def test_operators_that_are_refused(operator, message):
    q = torch.randn(1, 2, LENGTH, 4)
    with pytest.raises(NotImplementedError, match=message):
        flex_attention(q, q, q, lambda s, b, h, i, j: operator(s, 0.5, i, j))
