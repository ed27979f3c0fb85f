import pytest


@pytest.fixture
def isa():
    """What the CPU kernels' tests, run here again, take as their kernels' name."""
    return "cuda on the host"
