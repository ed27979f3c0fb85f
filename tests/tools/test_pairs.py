"""tests/support/pairs.py: the cases that `make test` runs of a test with several parameters."""

from itertools import combinations, product

import pairs
import pytest


def combined(rows, together):
    return {combination for row in rows for combination in combinations(enumerate(row), together)}


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 3, 8), (2, 9, 2, 4)], ids=str)
def test_every_combination_occurs_in_few_cases(sizes, together):
    rows = list(product(*map(range, sizes)))
    rows.remove((0,) * len(sizes))  # a product with a hole
    chosen = [rows[n] for n in pairs.cover(rows, together)]
    assert combined(chosen, together) == combined(rows, together)
    assert len(chosen) < len(rows)


def test_the_table_names_tests(request):
    """Every name in the table exists. A renamed test would run its full product again."""
    for file, names in pairs.EACH_VALUE.items():
        (path,) = (request.config.rootpath / "tests").rglob(f"{file}.py")
        text = path.read_text()
        missing = [name for name in names if f"def {name}(" not in text and f"{name} = " not in text]
        assert not missing, f"{file}: {missing}"
