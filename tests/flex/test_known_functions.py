"""Functions that are known from earlier calls: methods of objects, and the number of programs that are kept."""

import pytest
import torch

from flash_attn_ext import flex_attention
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
