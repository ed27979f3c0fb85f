"""Cubins of the CUDA kernels' sources. Each source is compiled once for all tests and all workers."""

import ast
import fcntl
import functools
import hashlib
import os
import subprocess
from pathlib import Path

from paths import ROOT

CUDA = ROOT / "csrc" / "cuda"
NVCC = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / "nvcc"


def nvcc_flags():
    """The flags that setup.py passes to nvcc. torch adds more."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if isinstance(node, ast.Dict):
            flags = {ast.unparse(k): v for k, v in zip(node.keys, node.values, strict=True)}
            if "'nvcc'" in flags:
                return ast.literal_eval(flags["'nvcc'"])
    raise AssertionError("setup.py no longer has a dict of compiler flags with the key 'nvcc'")


def compiled(source, architecture, output, *flags):
    """The messages of nvcc and ptxas for one source and sm_<architecture>. Writes the cubin to `output`."""
    command = [NVCC, "-std=c++20", *nvcc_flags(), f"-arch=sm_{architecture}", "-Xptxas", "-v", f"-I{ROOT}", *flags]
    command += ["-cubin", source, "-o", output]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def compiled_once(source, architecture, *flags):
    """The cubin of one of our sources, and the result of compiled() for it."""
    folder = ROOT / "build" / "cubins" / digest()
    folder.mkdir(parents=True, exist_ok=True)
    cubin = folder / f"{'_'.join([source.parent.name, source.stem, architecture, *flags])}.cubin"
    said = cubin.with_suffix(".txt")
    with cubin.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            said.write_text(compiled(source, architecture, cubin, *flags))
    return cubin, said.read_text()


@functools.cache
def digest():
    """A digest of nvcc's path, its flags and the sources in csrc/cuda and csrc/core."""
    hashed = hashlib.sha256(repr([str(NVCC), *nvcc_flags()]).encode())
    for path in sorted(p for folder in (CUDA, CUDA.parent / "core") for p in folder.rglob("*") if p.is_file()):
        hashed.update(str(path).encode() + path.read_bytes())
    return hashed.hexdigest()[:16]
