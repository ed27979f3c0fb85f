"""A barrier that nobody would miss is no barrier: without any one of them, the kernels' host run fails."""

import pytest
from cuda_host import library, mutations

ALL = mutations.mutations()
LISTED = library.HERE / "mutations.md"


@pytest.fixture(scope="module")
def expected(built):
    return mutations.expected_results(built)


@pytest.mark.parametrize("mutation", ALL, ids=str)
def test_a_removed_barrier_is_found(mutation, built, expected):
    assert mutations.what_is_found(mutation, built, expected) is not None


def test_the_list_is_of_these_sources():
    """mutations.md, which shows what was found, is rewritten by `python tests/cuda_host/mutations.py`."""
    mutations.check_list(LISTED.read_text(), ALL)
