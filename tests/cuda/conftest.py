"""Fixtures of the CUDA kernels' host build."""

import pytest
from cuda_host import library
from helpers import check_against_reference


@pytest.fixture(scope="session")
def built():
    """Where the CUDA kernels' host build lies, after rebuilding what changed."""
    return library.build()


@pytest.fixture
def kernels(built):
    """flash_attn on CPU tensors runs the CUDA kernels; the library, whose order of threads and splits may be set."""
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
    """What the CPU kernels' tests, run here again, take as their kernels' name."""
    return "cuda on the host"
