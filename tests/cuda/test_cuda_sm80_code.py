"""The machine code of the sm80 tier's kernels for compute capability 8.0. Every product and exponential occurs once,
and nothing is in local memory. A main loop has no division, no fp64, and no more instructions than are listed here.

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
FORMS = {
    name: rf"LNS\d_12BackwardFormE{n}E"
    for n, name in enumerate(("dense backward", "packed backward", "backward with dropout"))
}
# On the shortest way through a tile: a whole one, no options, tangents of nothing, inner loops once.
MOST_INSTRUCTIONS = {
    "jvp": {64: 909, 128: 854},
    "dense backward": {64: 809, 128: 574, 192: 447, 256: 498},
    "packed backward": {64: 797, 128: 567, 192: 438, 256: 502},
    "backward with dropout": {64: 1071, 128: 778, 192: 592, 256: 654},
}


@functools.cache
def functions_of(kernel):
    """{mangled name: instructions} of one source file."""
    cubin, _ = compiled_once(CUDA / "sm80" / f"{kernel}_bfloat16.cu", "80")
    return sass_listing.functions(sass_listing.disassemble(cubin))


def code_of(kernel, head_dim, form=""):
    """The instructions of jvp_kernel, or of backward_kernel in one of its forms."""
    pattern = rf"{kernel}_kernelI\w*?Li{head_dim}E{form}"
    found = [code for name, code in functions_of(kernel).items() if re.search(pattern, name)]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("kernel", ["forward", "decode", "backward", "jvp"])
def test_no_main_loop_divides_or_computes_in_fp64(kernel):
    loops = 0
    for name, code in functions_of(kernel).items():
        if sass_listing.count(code, "HMMA"):
            loops += 1
            assert sass_listing.slow_instructions(sass_listing.main_loop(code)) == [], name
    assert loops >= 2


@pytest.mark.parametrize("head_dim", KEYS)
def test_machine_code_of_forward_mode(head_dim):
    code, keys = code_of("jvp", head_dim), KEYS[head_dim]
    # Products: S, two for the tangent of S, O, two for the tangent of O. Each is 16 x D x keys, in instructions of 16 x
    # 8 x 16.
    products = head_dim // 16 * keys // 8
    assert sass_listing.count(code, "HMMA.16816") == 6 * products
    assert not sass_listing.count(code, "LDL", "STL")
    loop = sass_listing.main_loop(code)
    assert sass_listing.count(loop, "HMMA.16816") == 3 * products
    # One for each of a thread's scores, and a factor for each of its two rows.
    assert sass_listing.count(loop, "MUFU.EX2") == keys // 2 + 2
    assert len(loop) <= MOST_INSTRUCTIONS["jvp"][head_dim]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("head_dim", QUERIES)
def test_machine_code_of_the_backward(head_dim, form):
    code = code_of("backward", head_dim, FORMS[form])
    assert not sass_listing.count(code, "LDL", "STL")
    loop = sass_listing.main_loop(code)
    scores = QUERIES[head_dim] // SHARERS[head_dim] // 2  # of a thread
    assert sass_listing.count(loop, "MUFU.EX2") == scores
    # One comparison with -inf for each score: exponentials in their slow form have another one.
    assert sass_listing.count(loop, "FSETP") < 2 * scores
    assert len(loop) <= MOST_INSTRUCTIONS[form][head_dim]
