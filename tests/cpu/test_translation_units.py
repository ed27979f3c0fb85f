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


def test_setup_compiles_each_unit():
    tree = ast.parse((ROOT / "setup.py").read_text())
    assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    assert ast.literal_eval(assigned["UNITS"]) == [unit.stem for unit in UNITS.glob("*.cpp")]


def test_each_cuda_source_is_compiled_once():
    """As a source of setup.py, or in one of its units."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    lists = [
        node
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AugAssign)
        and ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target) in ("CUDA", "CUDA_UNITS")
    ]
    names = {}
    exec(compile(ast.Module(lists, []), "setup.py", "exec"), names)
    assert sorted(names["CUDA_UNITS"]) == sorted(unit.stem for unit in UNITS.glob("*.cu"))
    alone = Counter(CSRC / "cuda" / name for name in names["CUDA"])
    assert alone + sources_in_units(".cu") == Counter(
        path for path in (CSRC / "cuda").rglob("*") if path.suffix in (".cpp", ".cu") and path.name != "tiers.cpp"
    )
