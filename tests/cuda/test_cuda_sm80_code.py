"""What ptxas makes of the sm80 tier's forward mode and backward for compute capability 8.0: every product and
exponential once, nothing in local memory, and no more instructions in a main loop than are listed here.

Needs nvcc, cuobjdump and nvdisasm (PyPI's nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm have the last two); no GPU.
"""

import functools
import re

import pytest
from cubins import CUDA, NVCC, compiled_once

from benchmarks.gpu import sass_listing

if not NVCC.exists():
    pytest.skip(f"needs nvcc to compile the CUDA kernels; there is no {NVCC}", allow_module_level=True)
for tool in ("cuobjdump", "nvdisasm"):
    if sass_listing.tool(tool) is None:
        pytest.skip(f"needs {tool}, of the CUDA toolkit or of PyPI's nvidia-cuda-{tool}", allow_module_level=True)

KEYS = {64: 64, 128: 32}  # of a tile of forward mode, by padded head dimension
QUERIES = {64: 64, 128: 32, 192: 32, 256: 32}  # of a tile of the backward
SHARERS = {64: 1, 128: 1, 192: 2, 256: 2}  # the warps that share 16 of its keys
# On the shortest way through a tile: a whole one, no options, tangents of nothing, inner loops once.
MOST_INSTRUCTIONS = {
    "jvp": {64: 911, 128: 857},
    "backward": {64: 990, 128: 694, 192: 533, 256: 587},
    "backward of packed sequences": {64: 984, 128: 669, 192: 506, 256: 571},
}


@functools.cache
def code_of(kernel):
    """The instructions of jvp_kernel or backward_kernel, by padded head dimension and whether sequences are packed."""
    cubin, _ = compiled_once(CUDA / "sm80" / f"{kernel}_bfloat16.cu", "80")
    listed = sass_listing.functions(sass_listing.disassemble(cubin))
    found = {re.search(rf"{kernel}_kernelI\w*?Li(\d+)E(Lb1E)?", name): code for name, code in listed.items()}
    return {(int(match[1]), bool(match[2])): code for match, code in found.items() if match}


@pytest.mark.parametrize("head_dim", KEYS)
def test_machine_code_of_forward_mode(head_dim):
    code, keys = code_of("jvp")[head_dim, False], KEYS[head_dim]
    # S, two for its tangent, O and two for its tangent: 16 x D x keys each, by instructions of 16 x 8 x 16.
    products = head_dim // 16 * keys // 8
    assert sass_listing.count(code, "HMMA.16816") == 6 * products
    assert not sass_listing.count(code, "LDL", "STL")
    loop = sass_listing.main_loop(code)
    assert sass_listing.count(loop, "HMMA.16816") == 3 * products
    # One for each of a thread's scores, and a factor for each of its two rows.
    assert sass_listing.count(loop, "MUFU.EX2") == keys // 2 + 2
    assert len(loop) <= MOST_INSTRUCTIONS["jvp"][head_dim]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("head_dim", QUERIES)
def test_machine_code_of_the_backward(head_dim, packed):
    code = code_of("backward")[head_dim, packed]
    assert not sass_listing.count(code, "LDL", "STL")
    loop = sass_listing.main_loop(code)
    scores = QUERIES[head_dim] // SHARERS[head_dim] // 2  # of a thread
    assert sass_listing.count(loop, "MUFU.EX2") == scores
    # One comparison with -inf for each score: exponentials in their slow form have another one.
    assert sass_listing.count(loop, "FSETP") < 2 * scores
    assert len(loop) <= MOST_INSTRUCTIONS["backward of packed sequences" if packed else "backward"][head_dim]
