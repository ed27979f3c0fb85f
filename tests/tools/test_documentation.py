"""README.md and docs/: every code block runs, alone and as printed; every link leads somewhere."""

import re
import runpy
import shlex
import sys
import types

import pytest
from paths import ROOT

from flash_attn_ext.iomodel import __main__ as iomodel

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page for page in PAGES if "_build" not in page.parts]
INCLUDED = [
    ROOT / path for path in ("flash_attn_ext/reference/README.md", "csrc/README.md", "tests/cuda_host/README.md")
]
TARGETS = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def blocks(language):
    """Returns a test for each block: (code, the package that it needs in addition to torch, or None).

    A comment before the block, `<!-- needs: transformers -->`, names the package.
    """
    fence = re.compile(rf"(?:<!-- needs: (\w+) -->\n)?```{language}\n(.*?)```", re.DOTALL)
    return [
        pytest.param(code, needs, id=f"{page.relative_to(ROOT)}-{number}")
        for page in PAGES
        for number, (needs, code) in enumerate(fence.findall(page.read_text()), 1)
    ]


@pytest.mark.parametrize(("code", "needs"), blocks("python"))
def test_a_block_of_python_runs_alone(code, needs, monkeypatch):
    if needs:
        pytest.importorskip(needs)
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)  # Dynamo looks up the globals of a function there
    exec(compile(code, "the block", "exec"), main.__dict__)


@pytest.mark.parametrize(("code", "needs"), blocks("sh"))
def test_the_calculators_commands_run(code, needs, capsys):
    """The other commands of these blocks install something."""
    for line in code.splitlines():
        command = shlex.split(line, comments=True)
        if command[:3] == ["python", "-m", "flash_attn_ext.iomodel"]:
            iomodel.main(command[3:])
            assert capsys.readouterr().out
        else:
            assert command[:2] == ["pip", "install"], line


@pytest.mark.parametrize("page", PAGES + INCLUDED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_commands_exist(page):
    text = page.read_text()
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing
    commands = re.findall(r"(?:^|`)make ([a-z][a-z0-9-]*)", text, re.MULTILINE)
    assert [command for command in commands if command not in TARGETS] == []


def test_sphinx_reports_every_dead_link():
    """A regression: three links of the tutorial were dead in the built pages, because the warning was suppressed."""
    assert "suppress_warnings" not in (ROOT / "docs" / "conf.py").read_text()


def test_a_link_to_another_markdown_file_becomes_a_link_to_its_page_or_a_download():
    relink = runpy.run_path(str(ROOT / "docs" / "conf.py"))["relink"]
    assert relink("[a](../../csrc/README.md)", "tutorial") == "[a](design/path.md)"
    assert relink("[a](../../csrc/README.md)", "design/choices") == "[a](../design/path.md)"
    profile = "benchmarks/results/cpu_zen5_profile.md"
    assert relink(f"[a](../{profile})", "performance") == f"[a](<path:../{profile}>)"
    assert relink("[a](../performance.md#on-a-gpu)", "design/choices") == "[a](../performance.md#on-a-gpu)"


def test_there_is_something_to_run():
    assert len(blocks("python")) >= 12
    assert len(blocks("sh")) >= 2
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
