"""Every barrier is necessary: without any single one, the kernels' host run fails."""

import pytest
from cuda_host import library, mutations

ALL = mutations.mutations()
LISTED = library.HERE / "mutations.md"


@pytest.fixture(scope="module")
def judge(tmp_path_factory, built):
    return mutations.Judge(tmp_path_factory.mktemp("mutations"), built)


def test_without_a_mutation_nothing_is_found(judge):
    assert judge.find_fault(None) is None


@pytest.mark.parametrize("mutation", ALL, ids=str)
def test_a_removed_barrier_is_found(mutation, judge):
    assert judge.find_fault(mutation) is not None


def test_the_list_is_of_these_sources():
    """`python tests/cuda_host/mutations.py` writes mutations.md, the list of found mutations."""
    mutations.check_list(LISTED.read_text(), ALL)
