"""Pages that list names: environment variables, operators and glossary. The sources are searched for the names."""

import importlib
import re

import torch
from paths import ROOT

import flash_attn_ext

DOCS = ROOT / "docs"
SOURCES = ("csrc", "flash_attn_ext", "setup.py", "tests", "tools", "Makefile", "pyproject.toml", ".github")


def test_every_environment_variable_is_on_the_page():
    """The page has no variable that the sources do not have."""
    files = [file for name in SOURCES for file in (ROOT / name, *(ROOT / name).rglob("*")) if file.is_file()]
    variable = re.compile(r"FLASH_ATTN_EXT_[A-Z0-9_]*[A-Z0-9]")
    found = set()
    for file in files:
        if file.suffix not in (".png", ".md", ".so", ".pyc"):
            found |= set(variable.findall(file.read_text(errors="replace")))
    on_the_page = set(variable.findall((DOCS / "environment.md").read_text()))
    # Parts of names that sources put together.
    missing = {name for name in found - on_the_page if not any(other.startswith(name + "_") for other in found)}
    assert (missing, on_the_page - found) == (set(), set())


def test_every_operator_is_on_the_page():
    importlib.import_module("flash_attn_ext.distributed")  # registers operators, too
    schemas = torch._C._jit_get_all_schemas()
    names = {
        schema.name.removeprefix("flash_attn_ext::") for schema in schemas if schema.name.startswith("flash_attn_ext::")
    }
    assert len(names) > 10
    text = (DOCS / "operators.md").read_text()
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def test_the_api_page_has_every_public_name():
    text = (DOCS / "api.md").read_text()
    names = [name for name in flash_attn_ext.__all__ if not name.startswith("__")]
    assert [name for name in names if not re.search(rf"\b{name}\b", text)] == []


def test_the_glossary_is_sorted():
    terms = re.findall(r"^(\S.*)\n: ", (DOCS / "glossary.md").read_text(), re.MULTILINE)
    assert len(terms) > 30
    assert terms == sorted(terms, key=str.lower)
