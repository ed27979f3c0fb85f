import os

import pytest
import slow
import torch
from cuda_host import library

import flash_attn_ext
from flash_attn_ext import _nested, modules

# One thread, here and in the processes that tests start. The tensors are small: on a busy machine, and with a worker of
# pytest-xdist on each core, several threads wait for each other most of the time. Tests of threads set their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_collection_modifyitems(items):
    for item in items:
        if slow.is_slow(item.path.stem, item.originalname):
            item.add_marker(pytest.mark.slow)


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


@pytest.fixture
def one_thread(threads):
    """Whatever OMP_NUM_THREADS says."""
    threads(1)


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
def calls(monkeypatch):
    """The keyword arguments, with q, k, v and the returned out, of every call of the kernel by a module."""
    made = []

    def recorded(kernel):
        def record(q, k, v, *offsets, **kwargs):
            out = kernel(q, k, v, *offsets, **kwargs)
            made.append(dict(kwargs, q=q, k=k, v=v, out=out))
            return out

        return record

    monkeypatch.setattr(modules, "flash_attn", recorded(modules.flash_attn))
    monkeypatch.setattr(_nested, "flash_attn_varlen", recorded(_nested.flash_attn_varlen))  # of nested tensors
    return made
