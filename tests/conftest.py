"""Fixtures for all tests, and the device that tests run on.

``FLASH_ATTN_EXT_TEST_DEVICE=cuda`` runs the tests marked ``any_device`` or ``gpu`` with tensors on the GPU. `make gpu`
sets it. By default tests run on the CPU, and tests marked ``gpu`` are skipped.
"""

import gc
import os
import sys

import other_compilers
import pairs
import planted_faults
import pytest
import slow
import torch
from hypothesis import HealthCheck, settings

import flash_attn_ext
from flash_attn_ext.nn import multihead_attention, nested

# One thread, here and in the processes that tests start. The tensors are small. On a busy machine, and with a worker of
# pytest-xdist on each core, several threads wait for each other most of the time. Tests of threads set their number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


# The same examples at every run; no deadline, because no test may depend on the clock.
settings.register_profile("cpu", max_examples=400, deadline=None, derandomize=True, suppress_health_check=HealthCheck)
settings.register_profile("cuda", settings.get_profile("cpu"), max_examples=60)

DEVICE = os.environ.get("FLASH_ATTN_EXT_TEST_DEVICE", "cpu")


def pytest_configure(config):
    gc.disable()  # until the tests are collected: imports make many objects, and almost no garbage
    if DEVICE not in ("cpu", "cuda"):
        raise pytest.UsageError(f"FLASH_ATTN_EXT_TEST_DEVICE: got {DEVICE!r}; allowed: cpu, cuda")
    if DEVICE == "cuda" and not (torch.cuda.is_available() and flash_attn_ext.build_info()["cuda"]):
        raise pytest.UsageError("FLASH_ATTN_EXT_TEST_DEVICE=cuda needs an NVIDIA GPU and a build with the CUDA half")
    settings.load_profile(DEVICE)


def pytest_ignore_collect(collection_path, config):
    """Omits the files that `-m "not slow"` or `-m "not other_compiler"` would deselect. Their imports take seconds."""
    lists = {"not slow": slow.FILES, "not other_compiler": other_compilers.FILES}
    chosen = config.option.markexpr.split(" and ")
    return any(collection_path.stem in lists.get(term, ()) for term in chosen) or None


def pytest_collection_finish(session):
    gc.enable()
    gc.freeze()


def pytest_collection_modifyitems(config, items):
    if DEVICE != "cpu":
        chosen = [item for item in items if item.get_closest_marker("any_device") or item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
    if pairs.ENABLED:
        every, items[:] = list(items), pairs.chosen(items)
        config.hook.pytest_deselected(items=list(set(every).difference(items)))
    items.sort(key=lambda item: slow.order_of(item.path.stem))
    for item in items:
        if slow.is_slow(item.path.stem, item.originalname):
            item.add_marker(pytest.mark.slow)
        if planted_faults.plants_a_fault(item.path.stem, item.originalname):
            item.add_marker(pytest.mark.planted_fault)
        if other_compilers.needs_one(item.path.stem, item.originalname):
            item.add_marker(pytest.mark.other_compiler)
        if item.get_closest_marker("gpu") and DEVICE == "cpu":
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: FLASH_ATTN_EXT_TEST_DEVICE=cuda"))


@pytest.fixture(autouse=True)
def device():
    """The device of tensors that are made without a device, as torch.device."""
    if DEVICE == "cpu":
        yield torch.device("cpu")
        return
    torch.set_default_device(DEVICE)
    yield torch.device(DEVICE)
    torch.set_default_device(None)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def compiled_anew():
    """Resets torch.compile after each test, in 8 us if nothing was compiled.

    torch.compile limits how often one function is compiled again, and skips a function for good after a failure.
    """
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()


@pytest.fixture(params=flash_attn_ext.available_kernels() if DEVICE == "cpu" else [DEVICE])
def isa(request):
    """Runs the test once with the CPU kernels of each instruction set that this machine has; on a GPU once."""
    if DEVICE == "cpu":
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
    """One thread, also where OMP_NUM_THREADS is larger."""
    threads(1)


@pytest.fixture
def calls(monkeypatch):
    """For each call of the kernel by a module: its keyword arguments, q, k, v and out."""
    made = []

    def recorded(kernel):
        def record(q, k, v, *offsets, **kwargs):
            out = kernel(q, k, v, *offsets, **kwargs)
            made.append(dict(kwargs, q=q, k=k, v=v, out=out[0] if kwargs.get("return_lse") else out))
            return out

        return record

    monkeypatch.setattr(multihead_attention, "flash_attn", recorded(multihead_attention.flash_attn))
    monkeypatch.setattr(nested, "flash_attn_varlen", recorded(nested.flash_attn_varlen))  # of nested tensors
    return made


@pytest.fixture
def torch_again():
    """Deactivates after the test, also after a failure, so that torch runs its own operators again."""
    flash_attn_ext.deactivate()
    flash_attn_ext.activation_report(reset=True)
    yield
    flash_attn_ext.deactivate()
    flash_attn_ext.activation_report(reset=True)


@pytest.fixture
def given_masks(monkeypatch):
    """For each call of flash_attn and flash_attn_varlen: (function, mask, options)."""
    from flash_attn_ext.integrations import transformers as integration  # which needs transformers

    given = []

    def record(name):
        kernel = getattr(integration, name)

        def recorded(q, k, v, *args, **options):
            given.append((name, None if name == "flash_attn_varlen" else args[0], options))
            return kernel(q, k, v, *args, **options)

        monkeypatch.setattr(integration, name, recorded)

    record("flash_attn")
    record("flash_attn_varlen")
    return given


@pytest.fixture
def no_dense_masks(monkeypatch):
    """transformers' functions that make masks of S_q x S_k raise."""
    from flash_attn_ext.integrations import transformers as integration

    def refuse(*args, **options):
        raise AssertionError("a mask of S_q x S_k was made")

    monkeypatch.setattr(integration, "sdpa_mask", refuse)
