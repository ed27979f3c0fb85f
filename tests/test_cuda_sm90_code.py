"""What ptxas makes of the sm90 kernels: no warning about wgmma or registers, and exponentials while a product runs.

Needs nvcc, and for the machine code the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm; no GPU.
"""

import functools
import os
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import pytest
from test_cuda_compile import CUDA, NVCC, nvcc_flags

SOURCES = sorted((CUDA / "sm90").glob("*.cu"))
# setmaxnreg ignored; wgmma serialised; a wait for wgmma injected
WARNINGS = re.compile(r"C75(08|10|12|13|15|17|19)")
FORWARD, BACKWARD = ([p for p in SOURCES if p.stem.startswith(way)] for way in ("forward", "backward"))
# Exponentials of a tile and the two rescaling factors, by head dimension: 64 x keys / 128 threads + 2.
EXPONENTIALS = {64: 66, 128: 66, 256: 42}
# Of the backward, the query rows of a warpgroup's S and the keys of a tile.
BACKWARD_TILES = {64: (128, 128), 128: (64, 128), 256: (32, 64)}

pytestmark = pytest.mark.skipif(not NVCC.exists(), reason=f"needs nvcc to compile the CUDA kernels; there is no {NVCC}")


def tool(name):
    """Of the CUDA toolkit, or of its package on PyPI."""
    places = [str(NVCC.parent)]
    try:
        files = metadata.files(f"nvidia-cuda-{name}") or []
        places += [str(Path(f.locate()).parent) for f in files if f.name == name]
    except metadata.PackageNotFoundError:
        pass
    found = shutil.which(name, path=os.pathsep.join(places))
    if found is None:
        pytest.skip(f"needs {name}, of the CUDA toolkit or of PyPI's nvidia-cuda-{name}")
    return Path(found)


@pytest.fixture(scope="module")
def compile_once(tmp_path_factory):
    """A source's cubin, and what ptxas said of it."""

    @functools.cache
    def compiled(source):
        output = tmp_path_factory.mktemp("sm90") / "kernels.cubin"
        flags = ["-std=c++20", *nvcc_flags(), "-arch=sm_90a", "-Xptxas", "-v", "-cubin"]
        done = subprocess.run(
            [NVCC, *flags, source, "-o", output], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, done.stdout
        return output, done.stdout

    return compiled


def order_of(cubin, kernel, head_dim):
    """What the kernel's machine code does, a letter an instruction."""
    environment = os.environ | {"PATH": os.pathsep.join([str(tool("nvdisasm").parent), os.environ["PATH"]])}
    command = [tool("cuobjdump"), "-sass", cubin]
    text = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    functions = [f for f in re.split(r"Function : ", text)[1:] if re.match(rf"\w*\d{kernel}I\w*?Li{head_dim}E", f)]
    assert len(functions) == 1
    code = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", functions[0])
    assert not [line for line in code if re.search(r"\b(LDL|STL)\b", line)]
    marks = {"HGMMA": "P", "MUFU.EX2": "E", "WARPGROUP.DEPBAR": "W", "WARPGROUP.ARRIVE": "A", "USETMAXREG": "R"}
    order = "".join(mark for line in code for word, mark in marks.items() if word in line)
    assert order.count("R") == 2
    return order.replace("R", "")


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_ptxas_leaves_wgmma_and_registers_alone(compile_once, source):
    said = compile_once(source)[1]
    assert not WARNINGS.search(said), said
    assert "warning" not in said, said


@pytest.mark.parametrize("head_dim", EXPONENTIALS)
@pytest.mark.parametrize("source", FORWARD, ids=lambda path: path.stem)
def test_forward_machine_code(compile_once, source, head_dim):
    order = order_of(compile_once(source)[0], "forward_kernel", head_dim)
    scores, output = head_dim // 16, (80 if head_dim == 256 else 128) // 16
    # The first tile; the loop: both products, one wait, the softmax, the other wait; the last product.
    exponentials = "E" * EXPONENTIALS[head_dim]
    schedule = "A" + "P" * scores + "W" + exponentials
    schedule += "A" + "P" * scores + "A" + "P" * output + "W" + exponentials + "W"
    schedule += "A" + "P" * output + "W"
    assert schedule in order, order


@pytest.mark.parametrize("head_dim", BACKWARD_TILES)
@pytest.mark.parametrize("source", BACKWARD, ids=lambda path: path.stem)
def test_backward_machine_code(compile_once, source, head_dim):
    order = order_of(compile_once(source)[0], "backward_kernel", head_dim)
    rows, keys = BACKWARD_TILES[head_dim]
    columns, sums = "A" + "P" * (head_dim // 16), "A" + "P" * (max(rows, 64) // 16)
    # S and dP; the exponentials while dP is on its way; dV, dQ and dK, each waited for alone.
    schedule = columns * 2 + "W" + "E" * (64 * rows // 128) + "W" + sums + "A" + "P" * (keys // 16) + sums + "WWW"
    assert schedule in order, order
