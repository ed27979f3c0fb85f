"""A pytest plugin that skips a case, with the reason, if the tier forced by FLASH_ATTN_EXT_CUDA_TIER refuses it."""

import os

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    forced = os.environ.get("FLASH_ATTN_EXT_CUDA_TIER")
    try:
        return (yield)
    except NotImplementedError as error:
        if forced and str(error).endswith(f"({forced} is forced)"):
            pytest.skip(str(error))
        raise
