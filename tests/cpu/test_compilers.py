"""The CPU kernels see no torch, so that any compiler can read them: clang++ finds nothing to warn of either."""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from paths import ROOT

CPU = ROOT / "csrc" / "cpu"
FLAGS = ["-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-Wno-unused-parameter"]
COMPILERS = ["clang++", *(f"clang++-{version}" for version in range(30, 13, -1))]


@pytest.fixture(scope="module")
def clang():
    compiler = next(filter(shutil.which, COMPILERS), None)
    if compiler is None:
        pytest.skip("needs clang++ 14 or later, as in Debian's clang-19")
    return compiler


def warnings_of(compiler, source):
    command = [compiler, *FLAGS, f"-I{ROOT / 'csrc'}", source]
    return subprocess.run(command, capture_output=True, text=True).stderr


def test_clang_finds_nothing_to_warn_of(clang):
    sources = sorted(CPU.glob("*.cpp"))
    assert len(sources) >= 9
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = dict(zip(sources, pool.map(lambda source: warnings_of(clang, source), sources), strict=True))
    assert {source.name: text for source, text in found.items() if text} == {}


def test_a_warning_is_seen(clang, tmp_path):
    source = tmp_path / "unused.cpp"
    source.write_text("int main() { int unused; }\n")
    assert "unused variable" in warnings_of(clang, source)
