"""Fixtures of the kernels that run from their PTX."""

import pytest
from cuda_host import library


@pytest.fixture(scope="session")
def built():
    """The path of the CUDA kernels' host build, after rebuilding changed files."""
    return library.build()
