"""What ptxas makes of the sm80 tier's forward mode for compute capability 8.0: every product once, nothing in local
memory, and no more instructions in a main loop than are listed here.

Needs nvcc, cuobjdump and nvdisasm (PyPI's nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm have the last two); no GPU.
"""

import re
import subprocess
import sys

import pytest
from paths import ROOT
from test_cuda_compile import CUDA, NVCC, nvcc_flags

sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
import sass_listing

if not NVCC.exists():
    pytest.skip(f"needs nvcc to compile the CUDA kernels; there is no {NVCC}", allow_module_level=True)
for tool in ("cuobjdump", "nvdisasm"):
    if sass_listing.tool(tool) is None:
        pytest.skip(f"needs {tool}, of the CUDA toolkit or of PyPI's nvidia-cuda-{tool}", allow_module_level=True)

KEYS = {64: 64, 128: 32}  # of a tile, by padded head dimension
# On the shortest way through a tile: a whole one, no options, and tangents of nothing.
MOST_INSTRUCTIONS = {64: 911, 128: 857}


@pytest.fixture(scope="module")
def kernels_code(tmp_path_factory):
    """The instructions of each jvp_kernel, by padded head dimension."""
    cubin = tmp_path_factory.mktemp("sm80") / "kernels.cubin"
    command = [NVCC, "-std=c++20", *nvcc_flags(), "-arch=sm_80", "-cubin", CUDA / "sm80" / "jvp_bfloat16.cu"]
    done = subprocess.run([*command, "-o", cubin], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    listed = sass_listing.functions(sass_listing.disassemble(cubin))
    return {int(re.search(r"jvp_kernelI\w*?Li(\d+)E", name)[1]): code for name, code in listed.items()}


@pytest.mark.parametrize("head_dim", KEYS)
def test_machine_code_of_forward_mode(kernels_code, head_dim):
    code, keys = kernels_code[head_dim], KEYS[head_dim]
    # S, two for its tangent, O and two for its tangent: 16 x D x keys each, by instructions of 16 x 8 x 16.
    products = head_dim // 16 * keys // 8
    assert sass_listing.count(code, "HMMA.16816") == 6 * products
    assert not sass_listing.count(code, "LDL", "STL")
    loop = sass_listing.main_loop(code)
    assert sass_listing.count(loop, "HMMA.16816") == 3 * products
    # One for each of a thread's scores, and a factor for each of its two rows.
    assert sass_listing.count(loop, "MUFU.EX2") == keys // 2 + 2
    assert len(loop) <= MOST_INSTRUCTIONS[head_dim]
