"""Fixtures of the CUDA kernels' host build."""

import pytest
from cuda_host import library
from helpers import check_against_reference


@pytest.fixture(scope="session")
def built():
    """The path of the CUDA kernels' host build, after rebuilding changed files."""
    return library.build()


@pytest.fixture
def kernels(built):
    """Lets flash_attn on CPU tensors run the CUDA kernels. A test may set the library's order of threads and splits."""
    with library.as_cpu_kernels(library.Library(built)) as loaded:
        yield loaded


@pytest.fixture
def check(kernels):
    """check_against_reference(), and that it was the backward on tensor cores that gave the gradients."""

    def run(*inputs, **options):
        check_against_reference(*inputs, **options)
        assert kernels.flagged_tiles == 0

    return run


@pytest.fixture
def isa():
    """The kernels' name for tests of the CPU kernels that run again here."""
    return "cuda on the host"
