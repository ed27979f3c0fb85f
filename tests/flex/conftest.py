import pytest

from flash_attn_ext.flex import functions


@pytest.fixture
def traced(monkeypatch):
    """Counts the traces."""
    count = []
    compile_functions = functions.compile_functions
    monkeypatch.setattr(functions, "compile_functions", lambda *a: count.append(a) or compile_functions(*a))
    functions._kept.clear()
    return count
