"""csrc/translation_units: which sources are compiled together."""

import ast
import re
from collections import Counter

from paths import ROOT

CSRC = ROOT / "csrc"
UNITS = sorted((CSRC / "translation_units").glob("*.cpp"))


def test_each_source_that_sees_torch_is_in_one_unit():
    """A source in no unit would be missing in the extension, in some cases without an error."""
    included = Counter(
        (unit.parent / name).resolve()
        for unit in UNITS
        for name in re.findall(r'^#include "(.+)"$', unit.read_text(), re.M)
    )
    sources = [*CSRC.glob("bindings*.cpp"), *CSRC.glob("ops/**/*.cpp"), *CSRC.glob("torch_overrides/*.cpp")]
    assert included == Counter(sources)


def test_setup_compiles_each_unit():
    tree = ast.parse((ROOT / "setup.py").read_text())
    assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    assert ast.literal_eval(assigned["UNITS"]) == [unit.stem for unit in UNITS]
