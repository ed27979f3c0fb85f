"""docs/support.md says which kernels take which option. The kernels are asked, and every option must be on the page."""

import inspect
import re
import shutil

import pytest
from paths import ROOT

import flash_attn_ext
from tools import support_matrix

PAGE = support_matrix.PAGE.read_text()
FUNCTIONS = ("flash_attn", "flash_attn_varlen", "flash_attn_with_kvcache")


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_the_table_equals_the_kernels_answers(tmp_path):
    table = PAGE.partition(support_matrix.BEGIN)[2].partition(support_matrix.END)[0]
    asked = support_matrix.table(support_matrix.rows(tmp_path))
    assert table == asked, "run: python tools/support_matrix.py --write"


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_option_is_on_the_page(function):
    """Also in the sentence below the tables, which ends patterns with a star."""
    named = {name for code in re.findall(r"`([^`]+)`", PAGE) for name in code.split(", ")}
    prefixes = tuple(name[:-1] for name in named if name.endswith("*"))
    # Other names of the same options, and the tensors.
    same = {"softmax_scale": "scale", "window_size": "window", "return_softmax_lse": "return_lse", "q": "query"}
    same |= {"page_table": "block_table", "learnable_sink": "sink", "cache_seqlens": "k_cache"}
    parameters = list(inspect.signature(getattr(flash_attn_ext, function)).parameters)
    missing = [name for name in parameters if same.get(name, name) not in named and not name.startswith(prefixes)]
    assert missing == []


def test_the_page_names_all_cpu_kernels():
    sources = (ROOT / "csrc" / "cpu").glob("isa_*.cpp")
    assert [path.stem for path in sources if f"`{path.stem.removeprefix('isa_')}`" not in PAGE] == []
