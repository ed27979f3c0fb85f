"""The algorithm text of the CPU kernels: each file compiles by itself, as editors want it."""

import os
import re
import subprocess

import pytest
from paths import ROOT

CPU = ROOT / "csrc" / "cpu"
FILES = sorted(CPU.glob("*/*-inl.h"))
CXX = os.environ.get("CXX", "g++")


def first_include(path):
    """The header that a file includes before any other text, as the compiler reads it, or None."""
    found = re.match(r'(?://[^\n]*\n|#pragma once\n|\n)*#include "([^"]+)"', path.read_text())
    return (path.parent / found[1]).resolve() if found else None


# If a file compiles, its first header compiles by itself: nothing stands before it.
IMPLIED = {first_include(path) for path in FILES}


def test_first_includes_are_found():
    assert first_include(CPU / "kernels" / "tiling-inl.h") == CPU / "vec" / "vec-inl.h"
    assert first_include(CPU / "for_editors.h") == CPU / "int8.h"
    assert first_include(CPU / "vec" / "vec-inl.h") is None, "an #if stands before"


@pytest.mark.parametrize("path", [path for path in FILES if path not in IMPLIED], ids=lambda p: p.stem)
def test_an_inl_file_compiles_by_itself(path):
    command = [CXX, "-std=c++17", "-fsyntax-only", "-Wall", "-Werror", "-Wno-psabi", "-Wno-unknown-pragmas"]
    done = subprocess.run([*command, "-x", "c++", "-"], input=f'#include "{path}"\n', capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_files_are_found():
    assert {"forward-inl", "backward-inl", "decode-inl", "vec-inl", "table-inl"} <= {p.stem for p in FILES}


# A task that multiplies tiles allocates its scratch, or constructs a Pass.
MULTIPLIES = re.compile(
    r"\ballocate_(forward|backward|decode_scratch|indexed|jvp|double_backward|weights)<|choose_keys_of_block<"
    r"|indexed_row_terms<|backward_key_range<|\bPass\b[ (]"
)


def tasks_of(text):
    """The bodies that are handed to for_each_task."""
    for call in re.finditer(r"\bfor_each_task\(", text):
        begin = end = text.index("{", call.end())
        depth = 0
        while depth or end == begin:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        yield text[begin:end]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_each_task_that_multiplies_has_the_registers_for_it(path):
    """Without a ProductUnit the task's first product would be an illegal instruction on a CPU with AMX."""
    for body in tasks_of(path.read_text()):
        assert bool(MULTIPLIES.search(body)) == ("ProductUnit<" in body), body


def test_tasks_that_multiply_are_found():
    bodies = [body for path in FILES for body in tasks_of(path.read_text())]
    assert sum("ProductUnit<" in body for body in bodies) >= 6
    assert not all("ProductUnit<" in body for body in bodies)
