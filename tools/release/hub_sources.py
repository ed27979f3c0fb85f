"""Writes build.toml, and compiles a kernel of the Hugging Face Hub from it without nix.

    python -m tools.release.hub_sources --write
    python -m tools.release.hub_sources --build build/hub_sources

build.toml is for Hugging Face's kernel-builder. It lists every source and header, because kernel-builder copies these
files alone, and compiles each source by itself. The second command does the same with g++: it copies the listed files,
compiles them for Python's stable ABI, and makes build/<variant>/ as the package `kernels` loads it.
"""

import argparse
import platform
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any
from unittest import mock

from .hub_kernel import VERSION, name_of_variant, write_metadata

ROOT = Path(__file__).parent.parent.parent
NAME = "flash_attn_ext"
# Sources of csrc/ops that call Python, or that only explain() needs.
LEFT_OUT = ("eager.cpp", "eager_cache.cpp", "eager_captured.cpp", "plan.cpp")
INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
HEADER = """\
# For kernel-builder of the Hugging Face Hub. Made by: python -m tools.release.hub_sources --write
[general]
name = "flash-attn-ext"
version = {version}
license = "BSD-3-Clause"
backends = ["cpu"]

[torch]
src = ["torch-ext/torch_binding.cpp"]
"""
SECTION = """
[kernel.{name}]
backend = "cpu"
depends = ["torch"]
cxx-flags = [{flags}]
src = [
{src}
]
"""
REGISTRATION = """\
#pragma once
#include <Python.h>
#define FA_JOINED(a, b) a##b
#define FA_JOIN(a, b) FA_JOINED(a, b)
#define FA_TEXT(a) #a
#define FA_NAME(a) FA_TEXT(a)
#define REGISTER_EXTENSION(NAME)                                                                \\
  PyMODINIT_FUNC FA_JOIN(PyInit_, NAME)() {                                                     \\
    static PyModuleDef module = {PyModuleDef_HEAD_INIT, FA_NAME(NAME), nullptr, 0, nullptr};    \\
    return PyModule_Create(&module);                                                            \\
  }
"""
OPS = """\
import torch
from . import {extension}
ops = torch.ops.{extension}
"""


def setup_of_package() -> dict[str, Any]:
    """The lists and functions of setup.py. kernel-builder compiles by GCC, so the flags are GCC's."""
    with mock.patch("setuptools.setup"):
        package = runpy.run_path(str(ROOT / "setup.py"))
    package["flags_of_units"].__globals__["is_gcc"] = lambda: True
    return package


def headers_of(source: Path, found: set[Path]) -> set[Path]:
    """Adds the files that a source includes, directly or not, to `found`."""
    for name in INCLUDE.findall(source.read_text()):
        path = next((p for p in ((source.parent / name).resolve(), ROOT / "csrc" / name) if p.exists()), None)
        if path is not None and path not in found:
            found.add(path)
            headers_of(path, found)
    return found


def sections() -> dict[str, tuple[list[str], list[str]]]:
    """The flags and the files of each kernel section of build.toml."""
    package = setup_of_package()
    csrc = ROOT / "csrc"
    operators = sorted(path for path in csrc.glob("ops/**/*.cpp") if path.name not in LEFT_OUT)
    kernels = [csrc / "cpu" / f"{name}.cpp" for name in package["CPU"]]
    light = [*operators, csrc / "cuda/tiers.cpp", *(path for path in kernels if path.stem in package["SLOW_KERNELS"])]
    common = [
        "-std=c++20",
        "-O3",
        "-fopenmp",
        "-fvisibility=hidden",
        "-Wno-psabi",
        "-Wno-unknown-pragmas",
        "-DFA_HUB_KERNEL",
    ]
    result = {}
    for name, sources, flags in [
        ("operators", light, package["flags_of_units"]()),
        ("kernels", [path for path in kernels if path not in light], package["flags_of_kernels"]()),
    ]:
        # A source that another source includes has no unit of its own, so it is listed as a header is.
        headers = set().union(*(headers_of(path, set()) for path in sources))
        files = [*sources, *sorted(headers - set(sources))]
        result[name] = [*common, *flags], [str(path.relative_to(ROOT)) for path in files]
    return result


def build_toml() -> str:
    text = HEADER.format(version=VERSION)
    for name, (flags, files) in sections().items():
        quoted = ", ".join(f'"{flag}"' for flag in flags)
        text += SECTION.format(name=name, flags=quoted, src="\n".join(f'  "{file}",' for file in files))
    return text


def build(out: Path, jobs: int, *, together: bool) -> Path:
    """Compiles the files that build.toml lists, and returns the folder of the variant.

    `together`: sources in csrc/ops are one unit, which takes 45 CPU seconds in place of 300 (torch's headers).
    """
    import tomllib  # Python 3.11 has it
    import torch
    from torch.utils import cpp_extension

    listed = tomllib.loads((ROOT / "build.toml").read_text())
    tree, objects = out / "source", out / "objects"
    for folder in (tree, objects):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    shutil.copytree(ROOT / "torch-ext", tree / "torch-ext")
    (tree / "torch-ext/registration.h").write_text(REGISTRATION)
    extension = f"_{NAME}_cpu_{VERSION}"
    includes = [f"-isystem{path}" for path in (*cpp_extension.include_paths(), sysconfig.get_path("include"))]
    fixed = ["g++", "-fPIC", "-DPy_LIMITED_API=0x03090000", f"-DTORCH_EXTENSION_NAME={extension}", *includes]
    rules, made = [], []
    parts = [(["-O3"], listed["torch"]["src"]), *((k["cxx-flags"], k["src"]) for k in listed["kernel"].values())]
    for flags, files in parts:
        for file in files:
            (tree / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, tree / file)
        units = [file for file in files if file.endswith(".cpp")]
        if together and (joined := [file for file in units if file.startswith("csrc/ops/")]):
            (tree / "operators.cpp").write_text("".join(f'#include "{file}"\n' for file in joined))
            units = ["operators.cpp", *(file for file in units if file not in joined)]
        for file in units:
            made.append(objects.resolve() / f"{file.replace('/', '_')}.o")
            rules.append(f"{made[-1]}:\n\t{' '.join([*fixed, *flags, '-c', file, '-o', str(made[-1])])}\n")
    library = out.resolve() / f"{extension}.abi3.so"
    torch_folders = [f"-L{path}" for path in cpp_extension.library_paths()]
    link = ["g++", "-shared", "-static-libstdc++", "-o", str(library), *map(str, made), *torch_folders]
    rules.insert(
        0, f"{library}: {' '.join(map(str, made))}\n\t{' '.join([*link, '-ltorch', '-ltorch_cpu', '-lc10'])}\n"
    )
    (tree / "Makefile").write_text("\n".join(rules))
    subprocess.run(["make", "-s", f"-j{jobs}", "-C", str(tree)], check=True)
    folder = out / "build" / name_of_variant(*torch.__version__.split(".")[:2], platform.machine())
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "torch-ext" / NAME, folder)
    shutil.move(library, folder / library.name)
    (folder / "_ops.py").write_text(OPS.format(extension=extension))
    write_metadata(folder, extension)
    return folder


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write build.toml")
    parser.add_argument("--build", type=Path, help="compile into this folder")
    parser.add_argument("--together", action="store_true", help="compile csrc/ops as one unit")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    if options.write:
        (ROOT / "build.toml").write_text(build_toml())
    if options.build:
        print(build(options.build, options.jobs, together=options.together))
    return 0


if __name__ == "__main__":
    sys.exit(main())
