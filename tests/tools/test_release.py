"""make release: index page, checksums, notes, bill of materials, the list of wheels, a release of given wheels."""

import hashlib
import json
import re
import subprocess
import sys
import zipfile

import pytest
from paths import ROOT

from tools.release import run, wheels
from tools.release.listing import write_checksums, write_index
from tools.release.notes import notes, section
from tools.release.versions import ABSENT, HERE, PAIRS, PYTHONS, TORCHES
from tools.release.wheels import Wheel, described

NAME = "flash_attn_ext-0.1.0+torch2.13-cp311-cp311-manylinux_2_28_x86_64.whl"


def write_wheel(folder, name=NAME):
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("flash_attn_ext/__init__.py", "")
        archive.writestr(
            "flash_attn_ext-0.1.0+torch2.13.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: flash_attn_ext\nVersion: 0.1.0+torch2.13\n",
        )
        archive.writestr("flash_attn_ext-0.1.0+torch2.13.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("flash_attn_ext-0.1.0+torch2.13.dist-info/RECORD", "")
    return folder / name


def test_pip_finds_a_wheel_through_the_index_page_and_checks_its_sum(tmp_path):
    wheel = write_wheel(tmp_path, "flash_attn_ext-0.1.0+torch2.13-py3-none-any.whl")
    page = write_index(tmp_path)
    command = [sys.executable, "-m", "pip", "download", "--isolated", "--no-index", "--no-deps", "-d", tmp_path / "got"]
    command += ["--find-links", str(page), "flash_attn_ext==0.1.0+torch2.13"]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert (tmp_path / "got" / wheel.name).exists()
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert f"#sha256={digest}" in page.read_text()
    page.write_text(page.read_text().replace(digest, "0" * 64))
    wrong = subprocess.run([*command, "--dest", tmp_path / "no"], capture_output=True, text=True)
    assert wrong.returncode != 0
    assert "DO NOT MATCH" in wrong.stderr


def test_the_checksums_are_of_all_files_and_in_the_form_of_sha256sum(tmp_path):
    write_wheel(tmp_path)
    (tmp_path / "NOTES.md").write_text("text")
    write_checksums(tmp_path)
    assert len((tmp_path / "SHA256SUMS").read_text().splitlines()) == 2
    check = ["sha256sum", "--check", "--strict", "SHA256SUMS"]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 0
    (tmp_path / "NOTES.md").write_text("other")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True).returncode == 1


def test_the_notes_have_the_section_of_the_version_and_a_row_for_each_wheel():
    log = "# Changes\n\n## Unreleased\n\nnew\n\n## [0.1.0] - 2026-12-01\n\nfirst\n"
    assert section(log, "0.1.0") == "first"
    assert section(log, "0.2.0") == "new"
    with pytest.raises(ValueError, match=r"no text below '## 0\.2\.0'"):
        section("# Changes\n\n## 0.1.0\n\nfirst\n", "0.2.0")
    made = Wheel("2.13.0", "3.11", NAME, "9 passed", 12_300_000, 90)
    text = notes(log, "0.1.0", [made, Wheel("2.13.0", "3.14", None, "not built here: no Python")])
    assert f"| 2.13.0 | 3.11 | {NAME} | 12.3 | 1.5 | 9 passed |" in text
    assert "| 2.13.0 | 3.14 |  |  |  | not built here: no Python |" in text
    assert section((ROOT / "CHANGELOG.md").read_text(), "0.1.0")


def test_the_workflow_and_cibuildwheel_build_the_same_list():
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert json.loads(re.search(r"^ +torch: (\[.+\])$", workflow, re.M)[1]) == TORCHES
    build = re.search(r'^build = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert re.findall(r"cp3(\d+)", build) == [python.split(".")[1] for python in PYTHONS]
    skipped = re.findall(r"matrix\.torch == '([\d.]+)' && 'cp3(\d+)-\*'", workflow)
    assert [(torch, f"3.{python}") for torch, python in skipped] == ABSENT


def test_the_default_pair_is_the_makefiles():
    assert re.search(r"^TORCH \?= torch==(.+)$", (ROOT / "Makefile").read_text(), re.M)[1] == HERE[0][0]
    assert set(HERE) < set(PAIRS)
    assert not set(ABSENT) & set(PAIRS)


def test_without_options_only_the_pairs_at_hand_are_built(tmp_path, monkeypatch):
    pytest.importorskip("cyclonedx", reason="needs the packages of the group 'release'")
    monkeypatch.setattr(run.shutil, "which", lambda name: name)
    monkeypatch.setattr(run, "unpacked", lambda sdist, work: work)
    monkeypatch.setattr(run, "make_sdist", lambda out: out)
    built = []
    monkeypatch.setattr(
        run, "make_wheel", lambda *arguments: built.append(arguments[3:]) or Wheel(*arguments[3:], NAME, "1 passed")
    )
    assert run.main(["--out", str(tmp_path / "out")]) == 0
    assert built == HERE
    notes_text = (tmp_path / "out/NOTES.md").read_text()
    assert notes_text.count("not built here: the tag workflow builds it") == len(PAIRS) - len(HERE)
    built.clear()
    assert run.main(["--out", str(tmp_path / "out"), "--all"]) == 0
    assert built == PAIRS


def test_names_and_pairs_that_are_unknown_are_refused(tmp_path):
    assert described(write_wheel(tmp_path)).python == "3.11"
    with pytest.raises(ValueError, match="not the name of a wheel"):
        described(tmp_path / "flash_attn_ext-0.1.0-cp311-cp311-linux_x86_64.whl")
    assert run.pairs(["2.13.0/3.11"]) == [("2.13.0", "3.11")]
    with pytest.raises(ValueError, match=r"--only: got \['2.13/3.11'\]"):
        run.pairs(["2.13/3.11"])


def test_a_python_that_cannot_be_had_is_a_row_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "find_python", lambda version: None)
    wheel = wheels.make_wheel(tmp_path, tmp_path, tmp_path, "2.13.0", "3.14")
    assert wheel.file is None
    assert "Python 3.14 is not installed" in wheel.result


def test_a_release_of_given_wheels(tmp_path):
    """The tag workflow without the compilation."""
    pytest.importorskip("cyclonedx", reason="needs the packages of the group 'release'")
    (tmp_path / "given").mkdir()
    write_wheel(tmp_path / "given")
    arguments = ["--out", str(tmp_path / "out"), "--wheels", str(tmp_path / "given"), "--only", "2.13.0/3.11"]
    assert run.main([*arguments, "--complete"]) == 0
    out = tmp_path / "out"
    names = {"NOTES.md", "SHA256SUMS", "index.html", "sbom.cdx.json", "flash_attn_ext-0.1.0.tar.gz", NAME}
    assert {file.name for file in out.iterdir()} == names
    bill = json.loads((out / "sbom.cdx.json").read_text())
    assert bill["specVersion"] == "1.6"
    files = {part["name"]: part["hashes"][0]["content"] for part in bill["components"] if part["type"] == "file"}
    assert files[NAME] == hashlib.sha256((out / NAME).read_bytes()).hexdigest()
    required = [part["name"] for part in bill["components"] if part.get("scope") == "required"]
    assert required == ["torch"]
    assert run.main([*arguments, "2.12.0/3.11", "--complete"]) == 1
