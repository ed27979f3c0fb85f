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
    for n, name in enumerate(
        ("plain backward", "plain packed backward", "backward with options", "backward with dropout")
    )
}
# On the shortest way through a tile: a whole one, no options, tangents of nothing, inner loops once.
MOST_INSTRUCTIONS = {
    "plain forward": {64: 1113, 128: 867, 256: 755},
    "forward": {64: 421, 128: 554, 192: 453, 256: 533},
    "jvp": {64: 862, 128: 731},
    "plain backward": {64: 708, 128: 506, 192: 381, 256: 442},
    "plain packed backward": {64: 708, 128: 514, 192: 379, 256: 439},
    "backward with options": {64: 786, 128: 475, 192: 393, 256: 466},
    "backward with dropout": {64: 1116, 128: 742, 192: 549, 256: 627},
    # With functions of the user, on tiles that no function changes.
    "flex forward": {64: 499, 128: 631, 256: 482},
    "flex backward": {64: 807, 192: 414, 256: 480},
}
FLEX_KEYS = {64: 64, 128: 64, 256: 16}  # of a tile of the forward with functions of the user
# How a kernel's mangled name says that its functions are masks alone.
MASKS_ALONE = r"\w*FunctionsWithILNS\d_13ScoreFunctionE0E"


@functools.cache
def functions_of(source):
    """{mangled name: instructions} of one source file."""
    cubin, _ = compiled_once(CUDA / "sm80" / f"{source}_bfloat16.cu", "80")
    return sass_listing.functions(sass_listing.disassemble(cubin))


def code_of(source, head_dim, form=""):
    """The instructions of a kernel: of jvp_kernel, forward_kernel, or backward_kernel in one of its forms."""
    pattern = rf"{source.removeprefix('flex_')}_kernelI\w*?Li{head_dim}E{form}"
    found = [code for name, code in functions_of(source).items() if re.search(pattern, name)]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("source", ["forward", "decode", "backward", "jvp"])
def test_no_main_loop_divides_or_computes_in_fp64(source):
    loops = 0
    for name, code in functions_of(source).items():
        if sass_listing.count(code, "HMMA"):
            loops += 1
            assert sass_listing.slow_instructions(sass_listing.main_loop(code)) == [], name
    assert loops >= 2


FORWARD_KEYS = {64: 64, 128: 64, 192: 32, 256: 32}  # of a tile of the forward


@pytest.mark.parametrize("head_dim", FORWARD_KEYS)
def test_machine_code_of_the_forward(head_dim):
    keys = FORWARD_KEYS[head_dim]
    loop = sass_listing.main_loop(code_of("forward", head_dim, rf"Li{keys}ELi\dELb0ENS\d_6AmpereELb0E"))
    assert sass_listing.count(loop, "HMMA.16816") == 2 * (head_dim // 16 * keys // 8)
    assert not sass_listing.count(loop, "LDL", "STL")
    assert len(loop) <= MOST_INSTRUCTIONS["forward"][head_dim]


PLAIN_KEYS = {64: 128, 128: 64, 256: 64}  # of a tile of the plain forward
ROW_TILES = {64: 2, 128: 2, 256: 1}  # of a warp
SPILLS = {64: 41, 128: 2, 256: 0}  # accesses to local memory; smaller tiles without them are slower


@pytest.mark.parametrize("head_dim", PLAIN_KEYS)
def test_machine_code_of_the_plain_forward(head_dim):
    keys, row_tiles = PLAIN_KEYS[head_dim], ROW_TILES[head_dim]
    loop = sass_listing.main_loop(code_of("forward", head_dim, rf"Li{keys}ELi1ELb0ENS\d_\w*AmpereELb1E"))
    # One load from shared memory has a part of K or V for four products, of two row tiles. Q has loads of its own.
    products = 2 * row_tiles * (head_dim // 16 * keys // 8)
    assert sass_listing.count(loop, "HMMA.16816") == products
    assert sass_listing.count(loop, "LDSM") == products // (2 * row_tiles) + row_tiles * (head_dim // 16)
    assert sass_listing.count(loop, "LDL", "STL") <= SPILLS[head_dim]
    assert len(loop) <= MOST_INSTRUCTIONS["plain forward"][head_dim]


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


def unconditional_calls(loop):
    """Of the interpreter, for example. The compiler leaves a loop by a call with a predicate."""
    return [str(i) for i in loop if i.name.startswith("CALL") and not i.predicate]


@pytest.mark.parametrize("head_dim", FLEX_KEYS)
def test_machine_code_of_the_forward_with_functions(head_dim):
    keys = FLEX_KEYS[head_dim]
    loop = sass_listing.main_loop(code_of("flex_forward", head_dim, f"Li{keys}E"))
    assert sass_listing.count(loop, "HMMA.16816") == 2 * (head_dim // 16 * keys // 8)
    # One for each of a thread's scores, and a factor for each of its two rows.
    assert sass_listing.count(loop, "MUFU.EX2") == keys // 2 + 2
    assert not unconditional_calls(loop)
    assert sass_listing.count(loop, "LDL", "STL") <= 5  # of the search for the next tile
    assert len(loop) <= MOST_INSTRUCTIONS["flex forward"][head_dim]


@pytest.mark.parametrize("head_dim", MOST_INSTRUCTIONS["flex backward"])
def test_machine_code_of_the_backward_with_a_mask_function(head_dim):
    loop = sass_listing.main_loop(code_of("flex_backward", head_dim, FORMS["backward with options"] + MASKS_ALONE))
    scores = QUERIES[head_dim] // SHARERS[head_dim] // 2  # of a thread
    assert sass_listing.count(loop, "MUFU.EX2") == scores
    assert sass_listing.count(loop, "FSETP") < 2 * scores
    assert not unconditional_calls(loop)
    assert not sass_listing.count(loop, "LDL", "STL")
    assert len(loop) <= MOST_INSTRUCTIONS["flex backward"][head_dim]
