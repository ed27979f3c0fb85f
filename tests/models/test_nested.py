"""MultiheadAttention on nested tensors in both layouts, against torch and against each sequence alone."""

import pytest
import torch
from module_helpers import FORWARDS, E, assert_same, make_inputs, make_pair
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LAYOUTS = {"strided": torch.strided, "jagged": torch.jagged}

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.usefixtures("one_thread"),
]


def nest(x, lengths, layout="strided"):
    parts = [row[:length] for row, length in zip(x, lengths, strict=True)]
    return torch.nested.as_nested_tensor(parts, layout=LAYOUTS[layout])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("forward", FORWARDS)
def test_self_attention(forward, layout):
    """torch supports only the strided layout, in eval without grad."""
    torch_mha, ours = make_pair(torch.float32, batch_first=True)
    x, lengths = make_inputs(dtype=torch.float32)[0], [7, 1, 4]
    nested, given = nest(x, lengths), nest(x, lengths, layout)
    with torch.no_grad():
        want = torch_mha.eval()(nested, nested, nested, **FORWARDS[forward])
        got = ours.eval()(given, given, given, **FORWARDS[forward])
    assert got[0].is_nested
    assert got[0].layout is LAYOUTS[layout]
    for x, y in zip(got[0].unbind(), want[0].unbind(), strict=True):
        assert_same(x, y)
    assert (got[1] is None) == (want[1] is None)
    if want[1] is not None:
        assert_same(got[1], want[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cross_attention_trains(layout):
    """torch supports nested inputs only on its inference path."""
    _, ours = make_pair(batch_first=True)
    q, k, v = make_inputs()
    lengths_q, lengths_k = [7, 2, 0], [3, 10, 4]
    out, _ = ours(
        *(nest(x, n, layout) for x, n in ((q, lengths_q), (k, lengths_k), (v, lengths_k))), need_weights=False
    )
    sum(row.square().sum() for row in out.unbind()).backward()
    got = {name: parameter.grad.clone() for name, parameter in ours.named_parameters()}
    ours.zero_grad()
    for i, (n, m) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        expected, _ = ours(q[i, :n], k[i, :m], v[i, :m], need_weights=False)
        assert_same(out.unbind()[i], expected)
        expected.square().sum().backward()
    for name, parameter in ours.named_parameters():
        assert_same(got[name], parameter.grad)


def test_jagged_output_adds_to_its_input():
    """torch adds jagged tensors only if they share their offsets. Every residual connection needs this."""
    _, ours = make_pair(batch_first=True)
    x = nest(make_inputs()[0], [7, 0, 4], "jagged").requires_grad_()
    y = x + ours(x, x, x, need_weights=False)[0]
    y = y + ours(y, y, y)[0]
    y.values().square().sum().backward()
    assert x.grad.values().abs().sum() > 0


def test_jagged_with_holes():
    """torch.nested.narrow makes tensors with offsets and lengths. Rows in the holes are hidden, even if NaN."""
    _, ours = make_pair(batch_first=True)
    x = make_inputs()[0]
    x[0, 5:], x[1, 2:] = float("nan"), float("nan")
    narrow = torch.nested.narrow(
        x, dim=1, start=torch.tensor([0, 1, 2]), length=torch.tensor([5, 1, 0]), layout=torch.jagged
    )
    out, weights = ours(narrow, narrow, narrow)
    for row, (start, length) in enumerate([(0, 5), (1, 1), (2, 0)]):
        part = x[row, start : start + length]
        expected, expected_weights = ours(part, part, part)
        assert_same(out.unbind()[row], expected)
        assert_same(weights[row, :length, :length], expected_weights)
    assert (narrow + out).unbind()[0].isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_appended_keys(options, layout):
    """The appended keys follow the last key of each sequence. Queries and keys have different offsets."""
    _, ours = make_pair(batch_first=True, **options)
    q, k, v = make_inputs()
    given = [nest(q, [7, 2, 4], layout), nest(k, [3, 10, 5], layout), nest(v, [3, 10, 5], layout)]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out, _ = ours(*given)
            for i, (n, m) in enumerate([(7, 3), (2, 10), (4, 5)]):
                assert_same(out.unbind()[i], ours(q[i, :n], k[i, :m], v[i, :m])[0])


def test_empty_batches():
    _, ours = make_pair(batch_first=True)
    x = torch.nested.nested_tensor_from_jagged(torch.zeros(0, E).double(), torch.zeros(3, dtype=torch.int64))
    assert ours(x, x, x)[0].values().shape == (0, E)


class Shapes(TorchDispatchMode):
    """Records the shapes of the tensors that operators return."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and not t.is_nested]
        self.seen |= {tuple(t.shape) for t in tensors if t.is_floating_point()}
        return out


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_padded(layout):
    """100 sequences of one row and a long one: no tensor has a padded batch."""
    _, ours = make_pair(batch_first=True)
    lengths = [200, *[1] * 100]
    x = nest([torch.randn(n, E).double() for n in lengths], lengths, layout)
    with Shapes() as shapes:
        out, _ = ours(x, x, x, need_weights=False)
        sum(row.sum() for row in out.unbind()).backward()
    assert not any(len(shape) > 1 and shape[0] == len(lengths) for shape in shapes.seen), shapes.seen
    assert any(shape[0] == 300 for shape in shapes.seen if shape)


@pytest.mark.parametrize("average", [True, False])
def test_weights_belong_to_the_output(average):
    """With dropout and a key appended to each sequence, out is the sum of the values times these weights."""
    _, ours = make_pair(batch_first=True, add_bias_kv=True, dropout=0.3)
    lengths_q, lengths_k = [7, 2, 0], [3, 10, 4]
    inputs = [nest(x, n, "jagged") for x, n in zip(make_inputs(), (lengths_q, lengths_k, lengths_k), strict=True)]
    results = []
    for options in ({"need_weights": False}, {"average_attn_weights": average}):
        torch.manual_seed(0)
        results.append(ours(*inputs, **options))
    (out, _), (same, weights) = results
    assert torch.equal(out.values(), same.values())
    assert weights.shape == ((3, 7, 11) if average else (3, 2, 7, 11))
    for b, (n, m) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        kept = weights[b, ..., :n, : m + 1]
        assert (weights[b].sum() - kept.sum()).abs() < 1e-12
        if not average:
            _, _, v = ours._project(*(x.unbind()[b] for x in inputs))
            v = torch.cat([v, ours.bias_v.view(1, -1)]).unflatten(-1, (2, -1)).transpose(0, 1)
            assert_same(out.unbind()[b], ours.out_proj((kept @ v).transpose(0, 1).flatten(1)))


def test_errors():
    _, ours = make_pair(batch_first=True)
    x = make_inputs()[0]
    with pytest.raises(RuntimeError, match=r"^key: got batch size 2, must be query's 3"):
        ours(nest(x, [7, 1, 4]), *[nest(x[:2], [7, 1])] * 2)
    nested = nest(x, [7, 1, 4])
    jagged = nest(x, [7, 1, 4], "jagged")
    with pytest.raises(AssertionError, match=r"^key: got a dense tensor, must be a torch.strided nested"):
        ours(nested, x, x)
    with pytest.raises(AssertionError, match=r"^query: got a dense tensor, must be a torch.jagged nested"):
        ours(x, jagged, jagged)
    with pytest.raises(AssertionError, match=r"^value: got a torch.strided nested tensor, must be a torch.jagged"):
        ours(jagged, jagged, nested)
    for given in (nested, jagged):
        with pytest.raises(AssertionError, match=r"^attn_mask: must be None"):
            ours(given, given, given, attn_mask=torch.zeros(7, 7))
        with pytest.raises(AssertionError, match="batch_first"):
            make_pair()[1](given, given, given)
    for layout in LAYOUTS:
        with pytest.raises(
            AssertionError, match=r"^value: got sequence lengths \[7, 2, 4\], must be key's \[7, 1, 4\]"
        ):
            ours(*(nest(x, n, layout) for n in ([7, 1, 4], [7, 1, 4], [7, 2, 4])))
