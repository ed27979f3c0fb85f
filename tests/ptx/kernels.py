"""Real kernels as nvcc's PTX, translated, compiled and run in the place of the host's: `translated()`."""

import ctypes
import fcntl
import hashlib
import os
import re
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import cubins
import pytest
from cuda_host import library
from paths import ROOT
from ptx import parse, translate

HERE = Path(__file__).parent
BUILD = ROOT / "build" / "ptx"
# Each operation rounds by itself, integers wrap, and no rounding is computed before it is set.
CXX_FLAGS = (
    "-std=c++20 -g1 -fPIC -fwrapv -ffp-contract=off -fno-strict-aliasing -frounding-math -w -U_FORTIFY_SOURCE"
    f" -DFLASH_ATTN_EXT_CUDA_ON_HOST -I{ROOT}/tests/cuda_host -I{HERE} -I{ROOT}/csrc"
).split()
BFLOAT16 = "__nv_bfloat16"
WRONG = None  # the report of a planted fault that no check finds: a wrong value


@dataclass(frozen=True)
class Kernels:
    """Some kernels of one header, as the launchers name them in their namespace."""

    architecture: str  # "80"
    header: str  # in csrc/cuda
    names: tuple[str, ...]  # "forward_kernel<Config<In, 64, 64, 2>>"
    dtype: str = BFLOAT16  # of In
    also: tuple[str, ...] = ()  # more headers

    def source(self):
        tier = self.header.partition("/")[0]
        space = "flash_attn_ext::cuda" + (f"::{tier}" if "/" in self.header else "")
        uses = ", ".join(f"reinterpret_cast<const void*>(&{name})" for name in self.names)
        includes = "".join(f'#include "csrc/cuda/{header}"\n' for header in (self.header, *self.also))
        return (
            f"{includes}namespace {space} {{\nusing In = {self.dtype};\n"
            f"extern const void* const used[] = {{{uses}}};\n}}\n"
        )

    def ptx(self):
        """The path of nvcc's PTX of these kernels alone. Compiled once for each state of csrc/cuda."""
        source = self.source()
        path = BUILD / cubins.digest() / f"{_hash(source, self.architecture)}.ptx"
        with locked(path):
            if not path.exists():
                cu = path.with_suffix(".cu")
                cu.write_text(source)
                run([*nvcc(self.architecture), cu, "-o", path.with_suffix(".new")])
                path.with_suffix(".new").rename(path)
        return path


@dataclass(frozen=True)
class Fault:
    """A planted fault: replaces the first match of `pattern` in the PTX (behind a match of `after`)."""

    pattern: str
    replacement: str
    after: str = ""
    count: int = 1  # the number of replaced matches


def nvcc(architecture):
    return [cubins.NVCC, "-std=c++20", *cubins.nvcc_flags(), f"-arch=sm_{architecture}", f"-I{ROOT}", "-ptx"]


def run(command):
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(done.stdout[-3000:])


@contextmanager
def locked(path):
    """Locks a path: the workers of pytest-xdist share the built kernels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _hash(*texts):
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]


def objects_of(cpp, host_library):
    """The translated C++ as a shared object, for the host build of the kernels."""
    headers = [*HERE.glob("machine.*"), *(ROOT / "tests" / "cuda_host").rglob("*.h")]
    machine = _hash(*CXX_FLAGS, *(p.read_text() for p in sorted(headers)))
    machine_path = BUILD / "objects" / f"machine_{machine}.o"
    path = BUILD / "objects" / f"{_hash(cpp, machine, str(host_library))}.so"
    with locked(machine_path):
        if not machine_path.exists():
            compile_object(HERE / "machine.cpp", machine_path, "-O2")
    with locked(path):
        if not path.exists():
            source = path.with_suffix(".cpp")
            source.write_text(cpp)
            compile_object(source, path.with_suffix(".o"), "-O1")
            linked = path.with_suffix(".new")
            run([CXX, "-shared", "-o", linked, path.with_suffix(".o"), machine_path, host_library])
            linked.rename(path)
    return path


CXX = os.environ.get("CXX", "g++")


def compile_object(source, target, level):
    new = target.with_suffix(f".{os.getpid()}")
    run([CXX, *CXX_FLAGS, level, "-c", source, "-o", new])
    new.rename(target)


class Translated(library.Library):
    """The host build, with some kernels from PTX. A report names the line of PTX and its text."""

    def __init__(self, path, kernels, faults=(), **options):
        super().__init__(path, **options)
        self.entries, self.objects = [], []
        for chosen in kernels:
            text = chosen.ptx().read_text()
            self.entries += parse.entry_names(text)
            cpp = translate.translate(text, parse.entry_names(text), edits_of(text, faults))
            self.objects.append((load(objects_of(cpp, path)), text.splitlines()))

    @contextmanager
    def installed(self):
        """Inside, launches run the translated kernels."""
        for loaded, _ in self.objects:
            loaded.ptx_install()
        try:
            yield self
        finally:
            self.c.forget_translated()

    @contextmanager
    def running(self, *gpu):
        """Inside, flash_attn on CPU tensors runs these kernels from PTX. All other kernels are the host's.

        `gpu`: the arguments of on_gpu(). One object at a time may run.
        """
        with self.installed(), library.as_cpu_kernels(self), self.on_gpu(*gpu or (8, 0)):
            yield self

    def launches(self, name=""):
        """The number of launches of a kernel since it was installed. With an empty name: of all kernels."""
        return self.c.translated_launches(name.encode())

    @contextmanager
    def with_fault(self, number):
        """Inside, the kernels have this planted fault: 1, 2, ..."""
        for loaded, _ in self.objects:
            loaded.ptx_set_fault(number)
        try:
            yield self
        finally:
            for loaded, _ in self.objects:
                loaded.ptx_set_fault(0)

    @contextmanager
    def finding(self, faults, name):
        """Inside, the kernels have the fault `name` of `faults`, {name: (Fault, report)}, and a check must find it."""
        report = faults[name][1]
        with (
            self.with_fault(1 + list(faults).index(name)),
            pytest.raises(AssertionError if report is WRONG else library.KernelError, match=report),
        ):
            yield

    def check(self, error):
        raise_report(error, self.objects)


def load(path):
    """A shared object of objects_of()."""
    loaded = ctypes.CDLL(str(path))
    loaded.ptx_launch.restype = ctypes.c_char_p
    loaded.ptx_launch.argtypes = [ctypes.c_int, *[ctypes.c_uint] * 2, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t]
    return loaded


def raise_report(error, objects):
    """An error of the host run, with the line of PTX. `objects`: loaded objects, and the lines of their PTX."""
    if error is None:
        return
    lines = [f"line {n} of PTX: {lines[n - 1].strip()}" for o, lines in objects if (n := o.ptx_take_line())]
    raise library.KernelError("; ".join([re.sub(r" \[code 0x[0-9a-f]+\]", "", error.decode()), *lines]))


def edits_of(text, faults):
    """{(line, which of its instructions): [(number of the fault, the instructions instead)]} for translate()."""
    edits = {}
    lines = text.splitlines()
    for number, fault in enumerate(faults, 1):
        begin = next(n for n, line in enumerate(lines) if re.search(fault.after, line))
        places = [n for n in range(begin, len(lines)) if re.search(fault.pattern, lines[n])][: fault.count]
        if len(places) < fault.count:
            raise ValueError(f"{len(places)} lines match {fault.pattern!r} after {fault.after!r}")
        for n in places:
            changed = re.sub(fault.pattern, fault.replacement, lines[n], count=1)
            before, after = (parse.statements(line, n + 1) for line in (lines[n], changed))
            instead = [[x] for x in after] if len(after) == len(before) else [after, *([[]] * (len(before) - 1))]
            for which, (old, new) in enumerate(zip(before, instead, strict=True)):
                if [old] != new:
                    edits.setdefault((n + 1, which), []).append((number, new))
    return edits


@contextmanager
def translated(path, *kernels, gpu=(8, 0)):
    """running() of these kernels, translated for it."""
    with Translated(path, kernels).running(*gpu) as loaded:
        yield loaded
