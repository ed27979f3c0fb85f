"""The tutorial's commands print the text of the page.

`python tests/algorithms/test_tutorial.py` writes outputs and figures anew.
"""

import contextlib
import io
import re
import shlex
from importlib import import_module

import pytest
from paths import ROOT

PAGE = ROOT / "flash_attn_ext/reference/README.md"
BLOCK = re.compile(r"```console\n\$ python -m (.*?)\n(.*?)```", re.DOTALL)


def output_of(command: str) -> str:
    """Returns the output of `python -m <command>`."""
    module, *arguments = shlex.split(command)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        import_module(f"{module}.__main__").main(arguments)
    return "".join(line.rstrip() + "\n" for line in printed.getvalue().splitlines())


def words(text: str) -> list[str]:
    """Without the lines of the tables, which the package rich draws."""
    return re.sub(r"[\u2500-\u257f]", " ", text).split()


@pytest.mark.parametrize(("command", "printed"), BLOCK.findall(PAGE.read_text()), ids=lambda text: text[:50])
def test_every_output_on_the_page_equals_the_command_s_output(command, printed, tmp_path, monkeypatch, one_thread):
    monkeypatch.chdir(tmp_path)  # figures are drawn there
    assert words(output_of(command)) == words(printed), "python tests/algorithms/test_tutorial.py writes the page anew"


def test_python_on_the_page_runs(capsys):
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(code, {})
        assert capsys.readouterr().out


def test_figures_exist_and_are_small():
    figures = re.findall(r"!\[.*?\]\((.*?)\)", PAGE.read_text())
    assert len(figures) == 4
    for name in figures:
        data = (PAGE.parent / name).read_bytes()
        assert data.startswith(b"\x89PNG")
        assert len(data) < 100_000


def test_links_lead_somewhere():
    for target in re.findall(r"(?<!!)\[.*?\]\((.*?)\)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target


if __name__ == "__main__":
    with contextlib.chdir(ROOT):
        page = BLOCK.sub(lambda m: f"```console\n$ python -m {m[1]}\n{output_of(m[1])}```", PAGE.read_text())
    PAGE.write_text(page)
