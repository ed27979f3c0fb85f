"""From functions to programs: known functions, functions traced again, and functions refused by name."""

import functools

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask

from flash_attn_ext import _ops, flex_attention
from flash_attn_ext.flex import functions
from flash_attn_ext.flex.lowering import lower
from flash_attn_ext.flex.operations import OPERATIONS
from flash_attn_ext.flex.program import Rank
from flash_attn_ext.flex.tracing import trace

Q = torch.linspace(-1, 1, 2 * 6 * 4).view(1, 2, 6, 4)


def attend(score_mod):
    return flex_attention(Q, Q, Q, score_mod)


def test_operations_equal_the_kernels_list():
    assert [(name, o.arguments, o.result) for name, o in OPERATIONS.items()] == _ops.program_operations


def test_a_known_function_is_not_traced_again(traced):
    def make(factor, table):
        return lambda score, b, h, q, k: score * factor + table[h]

    a, b = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    first = attend(make(2.0, a))
    assert torch.equal(attend(make(2.0, a)), first)
    assert len(traced) == 1
    other_table = attend(make(2.0, b))  # the same text with another tensor: the program is known
    assert len(traced) == 1
    assert torch.allclose(other_table, first, atol=1e-6)  # a constant in each head changes no weight
    assert not torch.allclose(attend(make(3.0, a)), first)
    assert len(traced) == 2


def test_one_tensor_in_two_places_may_become_two(traced):
    def make(x, y):
        return lambda score, b, h, q, k: score * x[q] + y[k]

    x, y = torch.randn(6), torch.randn(6)
    results = {}
    for pairs in (((x, x), (x, y)), ((x, y), (x, x))):
        functions._kept.clear()
        for pair in pairs:
            result = attend(make(*pair))
            assert torch.equal(results.setdefault(pair[0] is pair[1], result), result)
    assert not torch.equal(results[True], results[False])


def test_values_that_a_function_reads_may_change(traced):
    class Settings:
        def __init__(self):
            self.factor = 1.0

    settings = Settings()
    table = torch.zeros(2, 6)

    def score_mod(score, b, h, q, k):
        return score * settings.factor + table[h, k]

    before = attend(score_mod)
    settings.factor = 8.0
    assert not torch.equal(attend(score_mod), before)
    assert len(traced) == 2
    settings.factor = 1.0
    table[:, 0] = 5.0
    assert not torch.equal(attend(score_mod), before)
    assert len(traced) == 2


def test_functions_of_modules_and_partials(traced):
    class Bias(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.tensor([0.5, -0.5]))
            self.scale = 2.0

        def score_mod(self, score, b, h, q, k):
            return score * self.scale + self.bias[h] * k

    module = Bias()
    out = attend(module.score_mod)
    attend(module.score_mod)
    assert len(traced) == 1
    out.sum().backward()
    assert module.bias.grad.abs().sum() > 0

    def scaled(score, b, h, q, k, factor):
        return score * factor

    assert torch.equal(attend(functools.partial(scaled, factor=2.0)), attend(lambda s, *_: s * 2.0))


class Cap:
    """A function that is an object, and an object that a function reads in several ways."""

    def __init__(self, factor):
        self.factor, self.by_name, self.tensor = factor, {"factor": factor}, torch.tensor(factor)

    def __call__(self, score, *_):
        return score * self.factor

    def __getitem__(self, name):
        return self.by_name[name]

    @property
    def doubled(self):
        return 2 * self.factor

    def method(self, score, *_):
        return self.helper(score)

    def helper(self, score):
        return score * self.factor


class CapModule(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, score, *_):
        return score * self.factor


def factor_of(cap):
    return cap.factor


class Attributes:
    factor = 1.0


def reads_class(factor):
    Attributes.factor = factor
    return lambda score, *_: score * Attributes.factor


READS = {
    "object": Cap,
    "module": CapModule,
    "object in a closure": lambda factor: (lambda cap: lambda score, *_: cap(score))(Cap(factor)),
    "module in a closure": lambda factor: (lambda cap: lambda score, *_: cap(score))(CapModule(factor)),
    "module of torch": lambda factor: (lambda act: lambda score, *_: act(-score.abs()))(nn.LeakyReLU(factor)),
    "index": lambda factor: (lambda cap: lambda score, *_: score * cap["factor"])(Cap(factor)),
    "property": lambda factor: (lambda cap: lambda score, *_: score * cap.doubled)(Cap(factor)),
    "helper method": lambda factor: Cap(factor).method,
    "helper function": lambda factor: (lambda cap: lambda score, *_: score * factor_of(cap))(Cap(factor)),
    "getattr": lambda factor: (lambda cap: lambda score, *_: score * getattr(cap, "fac" + "tor"))(Cap(factor)),
    "class": reads_class,
    "method of a dict": lambda factor: (lambda get: lambda score, *_: score * get("factor"))({"factor": factor}.get),
    "cached": lambda factor: functools.lru_cache(lambda score, *_: score * factor),
}


@pytest.mark.parametrize("name", READS)
def test_another_value_gives_another_program(name):
    functions._kept.clear()
    make = READS[name]
    for factor in (1.0, 8.0, 1.0):
        score_mod = make(factor)
        got = attend(score_mod)
        functions._kept.clear()
        assert torch.equal(got, attend(score_mod)), factor  # traced without a known program
    assert not torch.equal(attend(make(1.0)), attend(make(8.0)))


def test_an_object_changes_between_calls():
    cap, module = Cap(1.0), CapModule(1.0)
    for score_mod in (cap, cap.method, module, module.forward):
        cap.factor = module.factor = 1.0
        first = attend(score_mod)
        cap.factor = module.factor = 8.0
        assert torch.equal(attend(score_mod), attend(lambda s, *_: s * 8.0))
        assert not torch.equal(attend(score_mod), first)


NUMBERS = {
    "item": lambda t: t.item(),
    "float": float,
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: float(t.numpy()),
    "if": lambda t: 8.0 if t > 2 else 1.0,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_elements_that_are_read_as_numbers_may_change(name):
    t, number = torch.tensor(1.0), NUMBERS[name]

    def score_mod(score, b, h, q, k):
        return score * number(t)

    attend(score_mod)
    t.fill_(8.0)
    assert torch.equal(attend(score_mod), attend(lambda s, *_: s * 8.0))


def test_callable_objects_are_known(traced):
    for score_mod in (Cap(2.0), CapModule(2.0), Cap(2.0).method):
        traced.clear()
        attend(score_mod)
        attend(score_mod)
        assert len(traced) == 1


def test_derived_tensors_are_computed_at_each_call():
    log_slopes = torch.tensor([0.1, 0.2], requires_grad=True)

    def score_mod(score, b, h, q, k):
        slopes = torch.exp(log_slopes)
        return score - slopes[h] * (q - k).abs()

    attend(score_mod).square().sum().backward()
    got, log_slopes.grad = log_slopes.grad, None
    slopes = torch.exp(log_slopes)
    attend(lambda s, b, h, q, k: s - slopes[h] * (q - k).abs()).square().sum().backward()
    torch.testing.assert_close(got, log_slopes.grad)


def test_ranks_of_values():
    def mask_mod(b, h, q, k):
        return (q // 3) * 3 >= k - h

    program = trace(
        mask_mod, "mask_mod", lower, with_score=False, device=torch.device("cpu"), dtype=torch.float32
    ).program
    ranks = {program.builder.nodes[n].operation: program.builder.ranks[n] for n in program.used()}
    assert ranks["int_divide"] == ranks["int_multiply"] == Rank.QUERY
    assert ranks["int_subtract"] == Rank.KEY
    assert ranks["int_less_equal"] == Rank.TILE


def test_indices_outside_a_captured_tensor():
    table = torch.arange(4.0)
    out = attend(lambda s, b, h, q, k: table[k - 6] * 0 + s + table[k + 100] + table[-1])
    assert torch.allclose(out, attend(lambda s, *_: s + 6.0))


def test_operators_in_place():
    table = torch.randn(2, 6)

    def in_place(s, b, h, q, k):
        before = s.clone()
        s += table[h, k]
        s *= 2
        near = q >= k
        near &= q - k < 4
        q += 1
        return torch.where(near, s + before, before.clamp_(max=0)) + 0.1 * q * k

    def plain(s, b, h, q, k):
        return torch.where((q >= k) & (q - k < 4), (s + table[h, k]) * 2 + s, s.clamp(max=0)) + 0.1 * (q + 1) * k

    assert torch.allclose(attend(in_place), attend(plain))
    with pytest.raises(NotImplementedError, match=r"aten.add_.Tensor of torch.float32 into torch.int32"):
        attend(lambda s, b, h, q, k: s + q.add_(0.5))
    with pytest.raises(NotImplementedError, match=r"aten.add_.Tensor \(line"):
        attend(lambda s, b, h, q, k: s + table[0, 0].add_(s))


def test_rounding_to_decimals():
    assert torch.equal(attend(lambda s, *_: s.round(decimals=1)), attend(lambda s, *_: (s * 10).round() / 10))


def lines_of(error):
    return str(error.value)


def test_an_error_names_the_line():
    table = torch.randn(4, 4)

    def decides(score, b, h, q, k):
        return score if q > k else score * 2

    def unknown(score, b, h, q, k):
        return torch.lgamma(score)

    def random(score, b, h, q, k):
        return score + torch.rand(())

    def whole_row(score, b, h, q, k):
        return score + table[h].sum()

    for function, words in (
        (decides, "torch.where in place of if"),
        (unknown, "aten.lgamma"),
        (random, "random operator"),
        (whole_row, "aten.sum"),
    ):
        with pytest.raises(NotImplementedError, match=words) as error:
            attend(function)
        assert "score_mod" in lines_of(error)
        assert "test_tracing.py" in lines_of(error)


def test_dynamo_does_not_compile_the_tracer():
    """Dynamo cannot trace this call, so it runs the call. A compiled tracer would leave its mode on torch's stack."""
    row = torch.randn(6)
    attention = torch.compile(
        lambda q: flex_attention(q, q, q, lambda s, b, h, i, j: s + row[i:].sum()), backend="eager"
    )
    with pytest.raises(NotImplementedError) as error:
        attention(Q)
    names = [frame.name for frame in error.traceback if frame.path.name == "tracing.py"]
    assert "trace" in names
    assert not any("resume" in name for name in names)


def test_wrong_arguments_are_named():
    causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 6, 6, "cpu")
    with pytest.raises(TypeError, match=r"score_mod: got float; allowed: a function"):
        attend(1.0)
    with pytest.raises(TypeError, match=r"score_mod: got a result of type NoneType"):
        attend(lambda *_: None)
    with pytest.raises(ValueError, match=r"block_mask: got a mask for \(q_len, kv_len\) = \(6, 6\)"):
        flex_attention(Q[:, :, :5], Q, Q, block_mask=causal)
    with pytest.raises(TypeError, match=r"block_mask: got Tensor"):
        flex_attention(Q, Q, Q, block_mask=torch.ones(6, 6))
    with pytest.raises(NotImplementedError, match=r"max_scores"):
        flex_attention(Q, Q, Q, return_aux=AuxRequest(max_scores=True))
    traced = []
    with pytest.raises(ValueError, match=r"key, value: got 1 heads for 2 query heads"):
        flex_attention(Q, Q[:, :1], Q[:, :1], lambda s, *_: traced.append(s) or s)
    assert not traced
    far = torch.full((6,), 2**40)
    with pytest.raises(ValueError, match=r"elements of 32 bits"):
        attend(lambda s, b, h, q, k: s + far[q])


def test_a_malformed_program_is_refused():
    def run(words):
        return _ops.attention_flex(Q, Q, Q, programs=torch.tensor(words))

    good = functions.compile_functions(lambda s, b, h, q, k: s + k, None, torch.device("cpu"), torch.float32).programs
    words = good.tolist()
    run(words)
    for position, wrong in ((4, 2), (5, 10**6), (8, -1), (12, 10**6), (13, 10**9), (10, 4 * 10**6)):
        with pytest.raises(ValueError, match="programs: got"):
            run([*words[:position], wrong, *words[position + 1 :]])
    with pytest.raises(ValueError, match="programs: got"):
        run(words[:9])
    # The kernel of the Meta key returns memory without values.
    with pytest.raises(ValueError, match="programs: got a tensor on meta; allowed: cpu"):
        _ops.attention_flex(Q, Q, Q, programs=good.to("meta"))


def test_schema_meta_and_autograd_agree():
    table = torch.randn(2, 11, requires_grad=True)
    compiled = functions.compile_functions(
        lambda s, b, h, q, k: s + table[h, q - k + 5], lambda b, h, q, k: q >= k, torch.device("cpu"), torch.float32
    )
    tensors = {"captured": table.detach().reshape(-1).requires_grad_(), "programs": compiled.programs}
    q = Q.clone().requires_grad_()
    torch.library.opcheck(_ops.attention_flex, (q, Q, Q), tensors)


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.log_slopes = nn.Parameter(torch.tensor([0.1, 0.2]))

        def forward(self, q):
            slopes = torch.exp(self.log_slopes)
            return flex_attention(q, q, q, lambda s, b, h, i, j: s - slopes[h] * (i - j).abs())

    module = Biased()
    exported = torch.export.export(module, (Q,), strict=strict).module()
    torch.testing.assert_close(exported(Q), module(Q))
    with torch.no_grad():
        for m in (module, exported):
            m.log_slopes.fill_(1.0)
    torch.testing.assert_close(exported(Q), module(Q))


def test_compiled_code_may_call_it():
    table = torch.randn(2, 11)

    def model(q):
        return flex_attention(q * 2, q, q, lambda s, b, h, i, j: s + table[h, i - j + 5]) + 1

    q = Q.clone().requires_grad_()
    wanted, out = model(q), torch.compile(model, backend="eager", fullgraph=True)(q)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(o.sum(), q)[0] for o in (out, wanted)))
