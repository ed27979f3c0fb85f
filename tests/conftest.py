import pytest
import torch

import flash_attn_ext


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(params=flash_attn_ext.available_kernels())
def isa(request):
    """Runs the test once with the CPU kernels of each instruction set that this machine has."""
    flash_attn_ext.force_kernel(request.param)
    yield request.param
    flash_attn_ext.force_kernel(None)


@pytest.fixture
def threads():
    """Sets torch's thread count, and restores it."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
