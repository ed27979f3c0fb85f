"""Fixtures of the CUDA kernels' host build."""

import pytest
from cuda_host import library


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
def isa():
    """What the CPU kernels' tests, run here again, take as their kernels' name."""
    return "cuda on the host"
