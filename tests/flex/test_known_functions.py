"""Functions that are known from earlier calls: methods of objects, and the number of programs that are kept."""

import pytest
import torch

from flash_attn_ext import flash_attn, flex_attention
from flash_attn_ext.flex import dependencies, functions


class Biased:
    """A method that reads attributes of its object."""

    scale = 2.0

    def __init__(self):
        self.table, self.cap = torch.randn(3), 5.0

    def score(self, score, b, h, i, j):
        return torch.tanh(score / self.cap) + self.table[j]

    def with_attribute_of_class(self, score, b, h, i, j):
        return score * self.scale

    def with_item(self, score, b, h, i, j):
        return score * self[0]

    def __getitem__(self, n):
        return self.cap


class BiasedModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.cap = torch.nn.Parameter(torch.randn(3)), 5.0

    score = Biased.score


@pytest.mark.parametrize("cls", [Biased, BiasedModule])
def test_methods_of_objects_are_known(traced, cls):
    """Two objects have one program. It is traced again if a number changes, but not for another table."""
    q = torch.randn(1, 1, 3, 4)
    model, other = cls(), cls()
    for cap, traces in ((5.0, 1), (2.0, 2), (5.0, 2)):
        for x in (model, other):
            x.cap = cap
            wanted = (torch.tanh(q @ q.mT / 2 / cap) + x.table).softmax(-1) @ q
            torch.testing.assert_close(flex_attention(q, q, q, x.score), wanted)
        assert len(traced) == traces
    assert dependencies.QuickKey(model.score).is_complete


def test_methods_that_are_not_quick(monkeypatch):
    q, model = torch.randn(1, 1, 3, 4), Biased()
    for method in (model.with_attribute_of_class, model.with_item):
        assert not dependencies.QuickKey(method).is_complete
    first = flex_attention(q, q, q, model.with_attribute_of_class)
    monkeypatch.setattr(Biased, "scale", 3.0)
    second = flex_attention(q, q, q, model.with_attribute_of_class)
    torch.testing.assert_close(first, flex_attention(q * 2, q, q))
    torch.testing.assert_close(second, flex_attention(q * 3, q, q))


def test_the_oldest_program_is_dropped(traced, monkeypatch):
    monkeypatch.setattr(functions, "_MOST_KEPT", 2)
    monkeypatch.setattr(functions, "_kept", {})
    q = torch.randn(1, 1, 3, 4)
    for number in (1.0, 2.0, 2.0, 1.0):
        flex_attention(q, q, q, lambda s, b, h, i, j, number=number: s * number)
        assert len(functions._kept) <= 2
    assert len(traced) <= 3


def written_by_numpy(t, index, value):
    """Changes an element, but not the tensor's version."""
    version = t._version
    t.numpy()[index] = value
    assert t._version == version


def test_elements_are_read_in_each_call(traced):
    """A known function reads the present elements of its tensors, of any dtype and any strides."""
    q = torch.randn(1, 1, 4, 8)
    document = torch.tensor([[0, 9], [0, 9], [1, 9], [1, 9]])[:, 0]
    kind = torch.tensor([0, 1, 0, 1], dtype=torch.int16)
    table = torch.randn(2, 4).mT
    factor = torch.rand(4).half()

    def score(s, b, h, i, j):
        return s * factor[i] + table[j, kind[i]]

    def mask(b, h, i, j):
        return document[i] == document[j]

    for value in (1, 0):
        written_by_numpy(document, 2, value)
        written_by_numpy(table, (1, 0), float(value))
        scores = q @ q.mT / 8**0.5 * factor[:, None] + table[:, kind.long()].mT
        wanted = scores.masked_fill(document[:, None] != document, -torch.inf).softmax(-1) @ q
        torch.testing.assert_close(flash_attn(q, q, q, score_mod=score, mask_mod=mask), wanted)
    assert len(traced) == 1


def test_each_call_checks_the_range_of_integers():
    q, document = torch.randn(1, 1, 4, 8), torch.arange(4)
    mask = lambda b, h, i, j: document[i] >= document[j]  # noqa: E731
    flash_attn(q, q, q, mask_mod=mask)
    for value in (2**31, -(2**31) - 1):
        written_by_numpy(document, 1, value)
        with pytest.raises(ValueError, match=rf"got a captured torch.int64 tensor with elements from .*{value}"):
            flash_attn(q, q, q, mask_mod=mask)
    flash_attn(q.double(), q.double(), q.double(), mask_mod=mask)
