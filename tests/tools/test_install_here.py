"""`make`'s set-up: the packages that each command installs, and the compiler's progress in tools/install_here.py."""

import subprocess
import sys

import pytest
from paths import ROOT

from tools import install_here, requirements


def printing(*lines: str, status: int = 0) -> list[str]:
    return [sys.executable, "-c", f"import sys; print(*{lines!r}, sep='\\n'); sys.exit({status})"]


def test_it_counts_the_compiled_files(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert install_here.main(printing("preparing", "  [1/3] c++ a.cpp", "[2/3] c++ b.cpp", "[3/3] c++ c.cpp")) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("  1 of 3 files compiled, ")
    assert shown[-1].startswith("  3 of 3 files compiled, ")
    assert "preparing" in (tmp_path / install_here.LOG).read_text()


def test_an_error_shows_the_end_of_the_output(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert install_here.main(printing("[1/2] c++ a.cpp", "a.cpp:1: error: no", status=3)) == 3
    shown = capsys.readouterr().err
    assert "a.cpp:1: error: no" in shown
    assert "build/install.log" in shown


@pytest.mark.parametrize(("target", "group"), [("demo", "demo"), ("test-quick", "test"), ("docs", "docs")])
def test_a_command_installs_only_its_own_packages(target, group, tmp_path):
    command = ["make", "-n", target, f"VENV={tmp_path / 'venv'}"]
    finished = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    installed = [line for line in finished.stdout.splitlines() if "requirements.py" in line]
    assert len(installed) == 1
    assert f"requirements.py {group}" in installed[0]


def test_the_demo_needs_few_packages():
    assert requirements.packages("demo") == ["matplotlib", "tqdm", "rich", "numpy"]
    assert "transformers>=5" in requirements.packages("test")


def test_a_package_with_an_extra_does_not_end_the_list():
    assert requirements.packages("release") == ["uv", "cyclonedx-python-lib[json-validation]"]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no parser for TOML")
def test_every_group_is_as_a_parser_of_toml_reads_it():
    import tomllib

    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {group: requirements.packages(group) for group in groups} == groups
