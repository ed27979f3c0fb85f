"""torch.autograd.Function and torch.no_grad() in functions of scores: torch's derivatives."""

import pytest
import torch

from flash_attn_ext import flex_attention

LENGTH = 9


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


rounded = Rounded.apply


class Pair(torch.autograd.Function):
    """Two results, saved tensors, an argument without a gradient, and a backward that is no derivative."""

    @staticmethod
    def forward(ctx, x, factor, count):
        ctx.save_for_backward(x, factor)
        ctx.count = count
        return x.floor(), factor * count

    @staticmethod
    def backward(ctx, of_floor, of_factor):
        x, factor = ctx.saved_tensors
        return rounded(of_floor * factor * 24) / 8 + x, of_factor * ctx.count * 2 + of_floor, None


class WithSetup(torch.autograd.Function):
    """Its forward does not read ``weight``, but its backward gives ``weight`` a gradient."""

    @staticmethod
    def forward(x, weight):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, gradient * x * 5


FACTOR = 2.0


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * FACTOR


class Refused(torch.autograd.Function):
    """Its backward uses an operator that programs do not have."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.lgamma()


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def arguments():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, LENGTH, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    table = torch.rand(2, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    return q, k, v, table, weight


def without_gradient(s, h, table):
    with torch.no_grad():
        part = torch.exp(s) * table[h] + table[h].view_as(s)
    return s * table[h] + part


def rounding_error(s):
    with torch.no_grad():
        return Rounded.apply(s) - s


FUNCTIONS = {
    "straight through": lambda table, weight: lambda s, b, h, i, j: Rounded.apply(s * 4) / 4,
    "kept apply": lambda table, weight: lambda s, b, h, i, j: rounded(s * 4) / 4,
    "both results": lambda table, weight: lambda s, b, h, i, j: (p := Pair.apply(s, table[h], 3))[0] + p[1] * i,
    "one result": lambda table, weight: lambda s, b, h, i, j: Pair.apply(s, table[h], 3)[0],
    "setup_context": lambda table, weight: lambda s, b, h, i, j: WithSetup.apply(s, weight),
    "no_grad": lambda table, weight: lambda s, b, h, i, j: without_gradient(s, h, table),
    "a function under no_grad": lambda table, weight: lambda s, b, h, i, j: s + rounding_error(s),
}


def dense(q, k, v, score_mod):
    h, i, j = torch.arange(2)[:, None, None], torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    h = h.expand(2, LENGTH, LENGTH)
    return score_mod(q @ k.mT / 2, 0, h, i, j).softmax(-1) @ v


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_torch(name, backend):
    torch._dynamo.reset()
    q, k, v, table, weight = x = arguments()
    score_mod = FUNCTIONS[name](table, weight)

    def attend(q):
        return flex_attention(q, k, v, score_mod).sin()

    with torch.no_grad():  # the program of this call is kept
        attend(q)
    out = (attend if backend is None else torch.compile(attend, backend=backend, fullgraph=True))(q)
    wanted = dense(q, k, v, score_mod).sin()
    torch.testing.assert_close(out, wanted)
    ours, exact = (torch.autograd.grad(o.sum(), x, materialize_grads=True) for o in (out, wanted))
    torch.testing.assert_close(ours, exact)
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)  # torch's again


def test_functions_under_torch_func():
    q, k, v, _, weight = (t.detach() for t in arguments())
    apply = WithSetup.apply

    def loss(q, weight, attend=flex_attention):
        return attend(q, k, v, lambda s, b, h, i, j: apply(s, weight)).sin().sum()

    ours = torch.func.grad(loss, argnums=(0, 1))(q, weight)
    x = q.requires_grad_(), weight.requires_grad_()
    torch.testing.assert_close(ours, torch.autograd.grad(loss(*x, dense), x))


def test_values_that_a_backward_reads_may_change(monkeypatch):
    q, k, v, *_ = arguments()

    def gradient():
        (gradient,) = torch.autograd.grad(flex_attention(q, k, v, lambda s, *_: Scaled.apply(s)).sin().sum(), q)
        return gradient

    first = gradient()
    monkeypatch.setitem(globals(), "FACTOR", 4.0)
    torch.testing.assert_close(gradient(), 2 * first)


def test_functions_that_are_refused():
    q, k, v, *_ = arguments()
    with pytest.raises(NotImplementedError, match=r"aten.lgamma.*gradient.lgamma\(\)"):
        flex_attention(q, k, v, lambda s, *_: Refused.apply(s))
    with torch.no_grad():  # needs no backward
        out = flex_attention(q, k, v, lambda s, *_: Refused.apply(s))
    torch.testing.assert_close(out, dense(q, k, v, lambda s, *_: s * 2))
    with pytest.raises(NotImplementedError, match=r"mark_dirty.*ctx.mark_dirty\(x\)"):
        flex_attention(q, k, v, lambda s, *_: Dirty.apply(s))

    def in_place(s, *_):
        with torch.no_grad():
            s += 1
        return s

    with pytest.raises(NotImplementedError, match=r"under torch.no_grad\(\) .*s \+= 1"):
        flex_attention(q, k, v, in_place)


def test_other_derivatives_of_a_function_are_refused():
    q, k, v, *_ = arguments()
    score_mod = FUNCTIONS["straight through"](None, None)
    (gradient,) = torch.autograd.grad(flex_attention(q, k, v, score_mod).sin().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"autograd.Function .*second derivative"):
        gradient.sum().backward()
    with pytest.raises(NotImplementedError, match=r"autograd.Function .*forward mode"):
        torch.func.jvp(lambda q: flex_attention(q, k, v, score_mod), (q,), (q,))
