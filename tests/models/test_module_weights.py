"""need_weights=True: precision, memory and derivatives of the attention weights, and top_k.

test_modules.py compares the weights with torch's for all masks. tests/api/test_attention_weights.py tests the operator
that averages them.
"""

import itertools

import pytest
import torch
from module_helpers import FORWARDS, SK, SQ, B, E, H, assert_same, make_inputs, make_masks, make_pair
from tolerances import assert_as_exact_as_torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flash_attn_ext import MultiheadAttention, dropout_mask, new_rng_state
from flash_attn_ext.nn import attention_weights

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=[1, 3], ids=["rows 1", "rows 3"])
def blocks(request, monkeypatch):
    """Blocks of 1 or 3 queries for the weights of all heads, of 2 or 6 for averaged weights. S_q is no multiple."""
    monkeypatch.setattr(attention_weights, "BLOCK_ELEMENTS", request.param * B * H * SK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_as_exact_as_torchs(dtype):
    """Errors against float64 of the weights, and of the gradient of the weights alone. Several tiles."""
    pair = make_pair(dtype, 32, 4, batch_first=True)
    exact = make_pair(torch.float64, 32, 4, batch_first=True)[0]
    exact.load_state_dict(pair[0].state_dict())
    x, grad = torch.randn(2, 150, 32, dtype=dtype), torch.randn(2, 150, 150, dtype=dtype)
    padding = torch.arange(150) >= torch.tensor([[150], [100]])
    results = []
    for module in (*pair, exact):
        leaf = x.to(module.in_proj_weight.dtype).requires_grad_()
        weights = module(leaf, leaf, leaf, padding)[1]
        results.append((weights, *torch.autograd.grad(weights, leaf, grad.to(leaf.dtype))))
    for name, theirs, ours, want in zip(("weights", "dx"), *results, strict=True):
        assert_as_exact_as_torch(name, ours, theirs, want, 3)


@pytest.mark.parametrize("top_k", [None, SK])
def test_dropout(top_k, blocks):
    """Dropout drops the same elements of averaged weights, of the weights of each head, and of blocks."""
    ours = MultiheadAttention(E, H, dropout=0.4, batch_first=True, dtype=torch.float64)
    inputs = make_inputs()
    torch.manual_seed(1)
    _, averaged = ours(*inputs, top_k=top_k)
    torch.manual_seed(1)
    _, per_head = ours(*inputs, average_attn_weights=False)
    assert (per_head == 0).any()
    want = per_head.mean(dim=1)
    assert_same(averaged if top_k is None else averaged[0], want if top_k is None else want.topk(top_k)[0])


@pytest.mark.parametrize("p", [0.4, 1.0])
def test_gradcheck(p):
    """First and second derivatives of out and weights together."""
    ours = MultiheadAttention(4, 2, dropout=p, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)

    def function(x):
        torch.manual_seed(3)
        return ours(x, x, x)

    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


def test_rows_without_any_key():
    _, ours = make_pair(batch_first=True)
    mask = torch.zeros(SQ, SK, dtype=torch.bool)
    mask[2] = True
    out, weights = ours(*make_inputs(), attn_mask=mask)
    (out.square().sum() + weights.square().sum()).backward()
    assert (weights[:, 2] == 0).all()
    assert all(parameter.grad.isfinite().all() for parameter in ours.parameters())


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


def test_dropout_mask_of_some_rows():
    state = new_rng_state()
    whole = dropout_mask(state, 2, 3, 10, 7, 0.4)
    assert torch.equal(dropout_mask(state, 2, 3, 4, 7, 0.4, first_row=5), whole[:, :, 5:9])
    largest = 2**63 - 1 - 4  # the last of 4 rows has a number, too
    for first_row in (-1, largest + 1):
        with pytest.raises(ValueError, match=f"first_row: got {first_row}; allowed: 0 to {largest}"):
            dropout_mask(state, 2, 3, 4, 7, 0.4, first_row)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("masks", ["none", "kpm_bool+attn2_bool"])
@pytest.mark.parametrize("top_k", [None, 4])
def test_no_tensor_is_as_large_as_the_weights_of_all_heads(top_k, masks, dropout, monkeypatch):
    """In forward and backward the largest tensor is the averaged weights, and with top_k a block of them."""
    batch, heads, size = 2, 8, 256
    monkeypatch.setattr(attention_weights, "BLOCK_ELEMENTS", batch * size * 32)
    ours = MultiheadAttention(32, heads, dropout=dropout, batch_first=True)
    x = torch.randn(batch, size, 32, requires_grad=True)
    masks = {} if masks == "none" else {
        "key_padding_mask": torch.arange(size) >= torch.tensor([[size], [100]]),
        "attn_mask": torch.ones(size, size, dtype=torch.bool).triu(1),
    }  # fmt: skip
    with LargestTensor() as largest:
        out, weights = ours(x, x, x, **masks, top_k=top_k)
        values = weights if top_k is None else weights[0]
        (out.sum() + values.square().sum()).backward()
    projection = batch * size * 3 * 32
    weights = batch * size * size if top_k is None else attention_weights.BLOCK_ELEMENTS
    inverted = size * size if masks else 0  # the kernel's bool attn_mask
    largest_allowed = max(projection, weights, inverted)
    assert largest.elements == largest_allowed < batch * heads * size * size / 4


@pytest.mark.parametrize("forward", ["averaged", "per_head"])
@pytest.mark.parametrize("layout", ["batch_first", "unbatched"])
def test_top_k(layout, forward, blocks):
    """Equals torch.topk of all weights, with gradients."""
    _, ours = make_pair(batch_first=True)
    inputs, masks = make_inputs(layout), make_masks("kpm_bool", layout)
    results = []
    for in_module in (True, False):
        q = inputs[0].clone().requires_grad_()
        arguments = (q, *inputs[1:])
        if in_module:
            out, (values, indices) = ours(*arguments, **masks, **FORWARDS[forward], top_k=3)
        else:
            out, weights = ours(*arguments, **masks, **FORWARDS[forward])
            values, indices = weights.topk(3, dim=-1)
        values.square().sum().backward()
        results.append((out, values, q.grad, indices))
    for got, want in zip(results[0][:3], results[1][:3], strict=True):
        assert_same(got, want)
    assert torch.equal(results[0][3], results[1][3])


def test_top_k_of_nested_inputs():
    _, ours = make_pair(batch_first=True)
    x = make_inputs()[0]
    nested = torch.nested.as_nested_tensor([x[0], x[1, :4]], layout=torch.jagged)
    _, (values, indices) = ours(nested, nested, nested, top_k=2)
    expected = ours(x[1, :4], x[1, :4], x[1, :4], top_k=2)[1]
    assert_same(values[1, :4], expected[0])
    assert torch.equal(indices[1, :4], expected[1])
    assert (values[1, 4:] == 0).all()


def test_errors():
    _, ours = make_pair(batch_first=True, add_zero_attn=True)
    inputs = make_inputs()
    assert ours(*inputs, top_k=SK + 1)[1][0].shape == (B, SQ, SK + 1)
    for wrong in (0, SK + 2):
        with pytest.raises(ValueError, match=rf"^top_k: got {wrong}; allowed: 1 to {SK + 1}, the number of keys"):
            ours(*inputs, top_k=wrong)
    with pytest.raises(ValueError, match=r"^top_k: got 2 with need_weights=False"):
        ours(*inputs, need_weights=False, top_k=2)


def test_torch_func_and_compile():
    """The same weights, and no graph break."""
    _, ours = make_pair(batch_first=True)
    q, k, v = make_inputs()
    want = torch.autograd.functional.vjp(lambda x: ours(x, k, v)[1].square().sum(), q)[1]
    assert_same(torch.func.grad(lambda x: ours(x, k, v)[1].square().sum())(q), want)
    assert_same(torch.vmap(lambda x: ours(x, k[0], v[0])[1])(q)[0], ours(q[0], k[0], v[0])[1])
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    leaf = q.clone().requires_grad_()
    compiled(leaf, k, v)[1].square().sum().backward()
    assert_same(leaf.grad, want)


def peak_memory(call):
    """The largest number of bytes that torch has allocated at once during `call`, workspaces of kernels included."""
    with torch.profiler.profile(profile_memory=True) as profile:
        call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(changes))


def test_peak_memory_of_a_step_with_weights():
    """16 heads, S 512: the averaged weights have 1 MiB, the weights of all heads 16 MiB."""
    heads, size = 16, 512
    x = torch.randn(1, size, heads * 16, requires_grad=True)

    def step(module):
        out, weights = module(x, x, x)
        (out.sum() + weights.square().sum()).backward()

    torch_mha, ours = make_pair(torch.float32, heads * 16, heads, batch_first=True)
    for module in (torch_mha, ours):
        step(module)  # allocates the gradients of the parameters
    assert peak_memory(lambda: step(ours)) < 8 * 2**20
    assert peak_memory(lambda: step(torch_mha)) > 32 * 2**20
