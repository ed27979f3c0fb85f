"""The algorithm text of the CPU kernels: each file compiles by itself, as editors want it."""

import os
import subprocess

import pytest
from paths import ROOT

CPU = ROOT / "csrc" / "cpu"
FILES = sorted(CPU.glob("*/*-inl.h"))
CXX = os.environ.get("CXX", "g++")


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_an_inl_file_compiles_by_itself(path):
    command = [CXX, "-std=c++17", "-fsyntax-only", "-Wall", "-Werror", "-Wno-psabi", "-Wno-unknown-pragmas"]
    done = subprocess.run([*command, "-x", "c++", "-"], input=f'#include "{path}"\n', capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_files_are_found():
    assert {"forward-inl", "backward-inl", "decode-inl", "vec-inl", "table-inl"} <= {p.stem for p in FILES}
