"""The model of the AMX kernels' speed: its counts of instructions follow from the shapes of the tiles."""

import math

import pytest

from benchmarks import amx_model

HEAD_DIMS = [64, 80, 128]


@pytest.fixture(scope="module")
def steps():
    try:
        return amx_model.count(HEAD_DIMS)
    except RuntimeError as error:
        if "needs a CPU with" in str(error):
            pytest.skip(str(error))
        raise


def of_pass(steps, name):
    found = {step.head_dim: step for step in steps if step.name == name}
    assert list(found) == HEAD_DIMS
    return found


@pytest.mark.parametrize("name", amx_model.TILES)
def test_products_and_stores_follow_from_the_shapes(steps, name):
    """A product is 16 x 16 x 32. Scores: rows by keys, D deep. Sums: rows or keys by D, 64 deep."""
    for head_dim, step in of_pass(steps, name).items():
        rows, keys, _, _ = amx_model.TILES[name]
        scores = rows // 16 * (keys // 16)
        depth, columns = math.ceil(head_dim / 32), math.ceil(head_dim / 16)
        sums = rows // 16 * columns
        if name == "backward":  # S and dP; dV and dK, as many rows as there are keys, and dQ
            scores, sums = 2 * scores, 3 * sums
        assert step.products == scores * depth + sums * 2
        assert step.stores == scores + sums


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_loads_and_stores_hide_behind_the_products(steps, name):
    """A product loads at most 1.15 operands. Each square of out, or of dq, dk and dv, is loaded once, too."""
    for head_dim, step in of_pass(steps, name).items():
        rows, _, _, _ = amx_model.TILES[name]
        sums = rows // 16 * math.ceil(head_dim / 16) * (3 if name == "backward" else 1)
        assert step.cycles == amx_model.PRODUCT * step.products
        assert step.loads - sums <= 1.15 * step.products


def test_cycles_and_fractions(steps):
    step = of_pass(steps, "forward")[64]
    assert (step.products, step.cycles, step.softmax_cycles) == (48, 768, 1344)
    assert step.fraction_of_peak(step.cycles) == 1
    assert step.fraction_of_peak(2 * step.cycles) == 0.5
    padded = of_pass(steps, "backward")[80]  # 80 is not a whole number of 32
    assert 0.9 < padded.fraction_of_peak(padded.cycles) < 1


def test_the_table_has_a_row_for_each(steps):
    table = amx_model.table(steps)
    assert table.row_count == len(HEAD_DIMS) * len(amx_model.TILES)
