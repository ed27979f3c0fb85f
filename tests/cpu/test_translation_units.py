"""csrc/translation_units: which sources are compiled together."""

import ast
import re
from collections import Counter

from paths import ROOT

CSRC = ROOT / "csrc"
UNITS = CSRC / "translation_units"


def sources_in_units(suffix):
    """{source: number of units that include it}."""
    return Counter(
        (UNITS / name).resolve()
        for unit in UNITS.glob(f"*{suffix}")
        for name in re.findall(r'^#include "(.+)"$', unit.read_text(), re.M)
    )


def test_each_source_that_sees_torch_is_in_one_unit():
    """A source in no unit would be missing in the extension, in some cases without an error."""
    sources = [*CSRC.glob("bindings*.cpp"), *CSRC.glob("ops/**/*.cpp"), *CSRC.glob("torch_overrides/*.cpp")]
    assert sources_in_units(".cpp") == Counter(sources)


def lists_of_setup(*names):
    """{name: list} for these lists of setup.py."""
    statements = [
        node
        for node in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(node, ast.Assign | ast.AugAssign)
        and ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target) in names
    ]
    lists = {}
    exec(compile(ast.Module(statements, []), "setup.py", "exec"), lists)
    return lists


def test_setup_compiles_each_unit():
    assert lists_of_setup("UNITS")["UNITS"] == [unit.stem for unit in UNITS.glob("*.cpp")]


def test_each_cuda_source_is_compiled_once():
    """As a source of setup.py, or in one of its units."""
    names = lists_of_setup("CUDA", "CUDA_UNITS")
    assert sorted(names["CUDA_UNITS"]) == sorted(unit.stem for unit in UNITS.glob("*.cu"))
    alone = Counter(CSRC / "cuda" / name for name in names["CUDA"])
    assert alone + sources_in_units(".cu") == Counter(
        path for path in (CSRC / "cuda").rglob("*") if path.suffix in (".cpp", ".cu") and path.name != "tiers.cpp"
    )
