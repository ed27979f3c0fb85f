"""Without any single barrier, wait, fence or arrival of the sm90 kernels, their host run fails."""

import pytest
from cuda_host import library, mutations, mutations_sm90

ALL = mutations_sm90.mutations()
LISTED = library.HERE / "mutations_sm90.md"


@pytest.fixture(scope="module")
def judge(tmp_path_factory, built):
    return mutations_sm90.Judge(tmp_path_factory.mktemp("mutations"), built)


def test_without_a_mutation_nothing_is_found(judge):
    assert judge.find_fault(None) is None


@pytest.mark.parametrize("mutation", ALL, ids=str)
def test_a_statement_left_out_is_found(mutation, judge):
    assert judge.find_fault(mutation) is not None


def test_the_list_is_of_these_sources():
    """mutations_sm90.md is rewritten by `python tests/cuda_host/mutations_sm90.py`."""
    mutations.check_list(LISTED.read_text(), ALL)
