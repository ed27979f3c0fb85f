"""What ptxas makes of the sm90 kernels: no warning about wgmma or registers, and the softmax under the second product.

Needs nvcc, and for the machine code the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm; no GPU.
"""

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
# Exponentials of a tile and the two rescaling factors, by head dimension: 64 x keys / 128 threads + 2.
EXPONENTIALS = {64: 66, 128: 66, 256: 42}

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


@pytest.fixture(scope="module", params=SOURCES, ids=lambda path: path.stem)
def compiled(request, tmp_path_factory):
    output = tmp_path_factory.mktemp("sm90") / "kernels.cubin"
    command = [
        NVCC,
        "-std=c++20",
        *nvcc_flags(),
        "-arch=sm_90a",
        "-Xptxas",
        "-v",
        "-cubin",
        request.param,
        "-o",
        output,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return output, done.stdout


@pytest.fixture(scope="module")
def machine_code(compiled):
    """The instructions of each kernel, by its head dimension."""
    environment = os.environ | {"PATH": os.pathsep.join([str(tool("nvdisasm").parent), os.environ["PATH"]])}
    text = subprocess.run(
        [tool("cuobjdump"), "-sass", compiled[0]], capture_output=True, text=True, check=True, env=environment
    ).stdout
    kernels = re.split(r"Function : ", text)[1:]
    code = {int(re.search(r"Li(\d+)E", k).group(1)): re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", k) for k in kernels}
    assert sorted(code) == sorted(EXPONENTIALS)
    return code


def test_ptxas_leaves_wgmma_and_registers_alone(compiled):
    assert not WARNINGS.search(compiled[1]), compiled[1]
    assert "warning" not in compiled[1], compiled[1]


@pytest.mark.parametrize("head_dim", EXPONENTIALS)
def test_machine_code(machine_code, head_dim):
    code = machine_code[head_dim]
    assert not [line for line in code if re.search(r"\b(LDL|STL)\b", line)]
    marks = {"HGMMA": "P", "MUFU.EX2": "E", "WARPGROUP.DEPBAR": "W", "WARPGROUP.ARRIVE": "A", "USETMAXREG": "R"}
    order = "".join(mark for line in code for word, mark in marks.items() if word in line)
    assert order.count("R") == 2
    scores, output = head_dim // 16, (80 if head_dim == 256 else 128) // 16
    # The first tile; the loop: both products, one wait, the softmax, the other wait; the last product.
    exponentials = "E" * EXPONENTIALS[head_dim]
    schedule = "A" + "P" * scores + "W" + exponentials
    schedule += "A" + "P" * scores + "A" + "P" * output + "W" + exponentials + "W"
    schedule += "A" + "P" * output + "W"
    assert schedule in order.replace("R", ""), order
