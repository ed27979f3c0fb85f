"""Functions with instructions that a baseline CPU lacks are in the namespace of their instruction set.

If several object files define an inline function, the linker keeps one copy: perhaps the copy compiled for AVX-512. So
an object file for AVX-512 may export inline functions only in its own namespace, which no other file uses.
"""

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import flash_attn_ext._C
import pytest
from cases import KERNELS
from paths import ROOT

CPU = ROOT / "csrc" / "cpu"
NAMESPACE = {f"isa_{isa}": f"flash_attn_ext::cpu::{isa}::" for isa in KERNELS if isa != "generic"}
NAMESPACE |= {name: f"flash_attn_ext::cpu::{name}::" for name in ("int8_avx2", "int8_avx512", "int8_avx512_vnni")}
BASELINE = ["isa_generic", "select", "task_list"]

FUNCTION = re.compile(r"^[0-9a-f]+ <(.+)>:$")
VEX_OR_EVEX = re.compile(r":\s+v[a-z]|%[yz]mm|%k[0-7]")  # nothing else in user code starts with v
EXPORTED = "TWVuiBDRGS"  # letters of nm: global, weak and unique symbols

CXX = os.environ.get("CXX", "g++")

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="needs x86-64: the names and flags are its own")


def setup_flags():
    """Returns the flags of setup.py and of torch's BuildExtension."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if (
            isinstance(node, ast.Assign)
            and ast.unparse(node.targets[0]) == "flags"
            and isinstance(node.value, ast.List)
        ):
            return [*ast.literal_eval(node.value), "-std=c++20", "-fPIC"]
    raise AssertionError("setup.py no longer assigns a list to `flags`: read the compiler's flags from elsewhere")


def compile_object(source, folder, flags):
    target = folder / f"{source.stem}.o"
    command = [CXX, *flags, f"-I{CPU}", "-c", source, "-o", target]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def tool(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def exported_names(path):
    """Returns the symbols that other object files can link to: mangled name -> readable name."""
    rows = [line.split() for line in tool("nm", "--defined-only", "--format=posix", path).splitlines()]
    mangled = [row[0] for row in rows if row[1] in EXPORTED]
    return dict(zip(mangled, tool("c++filt", *mangled).splitlines(), strict=True))


class Code:
    """The machine code of an object file. Reading avx512 takes seconds, so code_of() reads each file once."""

    WORDS = ("%ymm", "%zmm", "vdpbf16ps", "tdpbf16ps", "tileloadd", "tilestored", "tilezero", "vpdp")

    def __init__(self, path):
        text = tool("objdump", "-d", "--no-show-raw-insn", path)
        self.count = {word: text.count(word) for word in self.WORDS}
        self.functions_with_tiles = [part for part in text.split("\n\n") if "ldtilecfg" in part]
        # The functions with AVX instructions: mangled name -> one AVX instruction.
        self.avx_by_function, function = {}, None
        for line in text.splitlines():
            if line.endswith(">:") and (header := FUNCTION.match(line)):
                function = header.group(1)
            elif function not in self.avx_by_function and VEX_OR_EVEX.search(line):
                self.avx_by_function[function] = line.split(":", 1)[1].strip()


code_of = functools.cache(Code)


def leaks(path, namespace):
    """Returns exported functions with AVX instructions outside `namespace`."""
    avx = code_of(path).avx_by_function
    parts = "".join(f"{len(part)}{part}" for part in namespace.removesuffix("::").split("::"))
    return [
        name
        for mangled, name in exported_names(path).items()
        # c++filt leaves some names of lambdas as they are.
        if mangled in avx and namespace not in name and not mangled.startswith(("_ZN" + parts, "_ZNK" + parts))
    ]


def built():
    """Returns the folder of the extension's object files. None if they are missing or older than a source."""
    folder = ROOT / "build" / f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "csrc" / "cpu"
    objects = [folder / f"{name}.o" for name in (*NAMESPACE, *BASELINE)]
    if not all(path.exists() for path in objects):
        return None
    sources = [ROOT / "setup.py", *CPU.rglob("*"), *(CPU.parent / "core").rglob("*")]
    linked = ROOT / "flash_attn_ext" / Path(flash_attn_ext._C.__file__).name
    newest = max(path.stat().st_mtime for path in sources)
    return folder if linked.exists() and newest < linked.stat().st_mtime else None


@pytest.fixture(scope="session")
def objects(tmp_path_factory):
    """Returns the object files of the build, or compiles them with the same flags."""
    missing = [name for name in (CXX, "nm", "objdump", "c++filt") if shutil.which(name) is None]
    if missing:
        pytest.fail(f"needs a C++ compiler and GNU binutils; not found: {', '.join(missing)}")
    names = [*NAMESPACE, *BASELINE]
    if folder := built():
        return {name: folder / f"{name}.o" for name in names}
    folder = tmp_path_factory.mktemp("objects")
    flags = setup_flags()  # before there are threads: Python 3.11's ast may fail in several at once
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        paths = pool.map(lambda name: compile_object(CPU / f"{name}.cpp", folder, flags), names)
        return dict(zip(names, paths, strict=True))


@pytest.mark.parametrize("name", NAMESPACE)
def test_avx_only_behind_own_names(objects, name):
    assert leaks(objects[name], NAMESPACE[name]) == []


@pytest.mark.parametrize("name", BASELINE)
def test_baseline_has_no_avx(objects, name):
    assert code_of(objects[name]).avx_by_function == {}
    assert len(exported_names(objects[name])) >= 3


@pytest.mark.parametrize(
    ("name", "used", "absent"),
    [
        ("isa_avx2", "%ymm", "%zmm"),
        ("isa_avx512", "%zmm", "vdpbf16ps"),
        ("isa_avx512_bf16", "%zmm", None),
        ("isa_avx512_bf16", "vdpbf16ps", "tdpbf16ps"),
        ("isa_amx", "%zmm", None),
        ("int8_avx2", "%ymm", "%zmm"),
        ("int8_avx512", "%zmm", "vpdp"),
        ("int8_avx512_vnni", "vpdp", None),
    ],
)
def test_each_kernel_uses_its_own_instructions(objects, name, used, absent):
    code = code_of(objects[name])
    assert code.count[used] > 100
    assert absent is None or code.count[absent] == 0
    exported = exported_names(objects[name])
    kernels = [exported[function] for function in code.avx_by_function if function in exported]
    assert any("forward_query_block" in kernel or "int8_forward" in kernel for kernel in kernels)


TILE_FUNCTIONS = ["isa_avx512", "isa_avx512_bf16", "isa_amx", "int8_avx2", "int8_avx512", "int8_avx512_vnni"]


@pytest.mark.parametrize("name", TILE_FUNCTIONS)
def test_kernels_with_other_products_share_tile_functions(objects, name):
    """They call the functions of a tile in the table without their instructions (tile_frame.h)."""
    symbols = tool("nm", "--demangle", "--defined-only", objects[name])
    assert ("::load_bias_as<float, float>" in symbols) == (name == "isa_avx512")


@pytest.mark.parametrize("name", ["isa_generic", "isa_avx2", "isa_avx512"])
def test_passes_that_widen_rows_have_one_text_for_16_bits(objects, name):
    """Attention by index, and the indexer's scores and loss: for_row_type() chooses the type of the rows in a call."""
    symbols = tool("nm", "--demangle", "--defined-only", objects[name])
    passes = set(re.findall(r"::(indexed|indexed_backward|indexer_loss|indexer_scores)<([^>]+)>\(", symbols))
    assert {types for _, types in passes} == {"float", "double", "float, float", "double, double"}


def test_tile_registers_are_given_back(objects):
    """Each function that configures the tile registers also releases them, so that no other code finds them in use."""
    code = code_of(objects["isa_amx"])
    assert len(code.functions_with_tiles) >= 5  # forward, backward and its row terms, the mask's gradient, forward mode
    assert all("tilerelease" in function for function in code.functions_with_tiles)
    for instruction in ("tdpbf16ps", "tileloadd", "tilestored", "tilezero"):
        assert code.count[instruction] >= 20


@pytest.mark.parametrize("included", ["inside", "before"])
def test_standard_header_inside_the_region_is_caught(tmp_path, included):
    """A standard header inside the target region of an isa_avx2.cpp makes a test fail."""
    begin = 'FA_TARGET_BEGIN("avx2,fma,f16c")\n'
    text = (CPU / "isa_avx2.cpp").read_text()
    header = "#include <random>\n"
    user = "double draw(std::mt19937& r, std::normal_distribution<double>& d) { return d(r); }\n"
    for old, new in {
        begin: begin + header if included == "inside" else header + begin,
        '#include "kernels/table-inl.h"\n': user + "constexpr Kernels kKernels = {};\n",
    }.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    source = tmp_path / "isa_avx2.cpp"
    source.write_text(text)
    found = leaks(compile_object(source, tmp_path, setup_flags()), NAMESPACE["isa_avx2"])
    if included == "before":
        assert found == []
    else:
        assert found
        assert all("std::" in name for name in found)
