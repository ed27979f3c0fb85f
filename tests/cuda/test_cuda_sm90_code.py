"""The machine code of the sm90 kernels. There is no warning about wgmma or registers. Exponentials run while a product
runs. No instruction touches a register while a product owns it. A main loop has no more instructions than are listed
here.

Needs nvcc, and for the machine code the packages nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm; no GPU.
"""

import functools
import itertools
import re
from dataclasses import replace

import pytest
import sass
from cubins import CUDA, NVCC, compiled_once
from paths import ROOT

from benchmarks.gpu import sass_listing, switches

# float16 differs in its conversions alone: only builds compile it, and `make gpu`.
SOURCES = sorted((CUDA / "sm90").glob("*_bfloat16.cu"))
# setmaxnreg ignored; wgmma serialised; a wait for wgmma injected
WARNINGS = re.compile(r"C75(08|10|12|13|15|17|19)")
FORWARD, BACKWARD, FLEX_FORWARD, FLEX_BACKWARD, SCORE_FORWARD = (
    [p for p in SOURCES if p.stem.startswith(way)]
    for way in ("forward", "backward", "flex_forward", "flex_backward", "score_forward")
)
# Head dimensions of query and key and of value.
D64, D96, D128, D192, D256 = ((head_dim, head_dim) for head_dim in (64, 96, 128, 192, 256))
D192_128 = 192, 128
KEYS = {D64: 128, D96: 128, D128: 128, D192_128: 128, D192: 112, D256: 80}  # of the forward's tiles
KEYS_WITH_FUNCTIONS = {D64: 128, D128: 128, D256: 64}
# Of the backward, the query rows of a warpgroup's S and the keys of a tile.
BACKWARD_TILES = {D64: (128, 128), D96: (64, 128), D128: (64, 128), D192_128: (32, 64), D192: (32, 64), D256: (32, 64)}
# The largest allowed number of instructions in one iteration of the main loop, masks included. First the plain kernels,
# then the kernels for softcap, key masks and packed sequences, softcap included.
MOST_INSTRUCTIONS = {
    ("forward_kernel", "plain"): {D64: 576, D96: 610, D128: 636, D192_128: 650, D192: 635, D256: 585},
    ("backward_kernel", "plain"): {D64: 920, D96: 580, D128: 580, D192_128: 480, D192: 515, D256: 504},
    ("forward_kernel", "with options"): {D64: 975, D96: 990, D128: 1020, D192_128: 1040, D192: 990, D256: 840},
    ("backward_kernel", "with options"): {D64: 860, D96: 920, D128: 910, D192_128: 660, D192: 691, D256: 690},
    ("forward_kernel", "few rows"): {D64: 970, D128: 1020, D256: 840},
    ("forward_kernel", "with functions"): {D64: 1380, D128: 1440, D256: 1170},
    ("forward_kernel", "with scores"): {D64: 1500, D128: 1590, D256: 1270},
    ("backward_kernel", "with functions"): {D64: 1170, D128: 910, D256: 980},
    ("backward_kernel", "with scores"): {D128: 1130, D256: 1200},
    # The plain forward with one switch of switches.h changed.
    ("forward_kernel", "with a switch changed"): {D64: 600, D128: 650, D256: 585},
    ("backward_kernel", "in pairs"): {D256: 520},
}
PLAIN = "plain", "with a switch changed", "in pairs"
WITH_FUNCTIONS = "with functions", "with scores"
FORMS_OF_SOURCES = {
    "flex_forward_bfloat16": WITH_FUNCTIONS[:1],
    "score_forward_bfloat16": WITH_FUNCTIONS[1:],
    "flex_backward_bfloat16": WITH_FUNCTIONS,
}
# How a kernel's mangled name says which form it is.
FORMS = {
    "forward_kernel": {
        name: rf"NS\d*_4FormE{n}E"
        for n, name in enumerate(("plain", "with options", "few rows", "with functions", "with scores"))
    },
    "backward_kernel": {
        "plain": r"b1ENS\d*_8BackwardI\w*?Lb0ELb0EE",
        "in pairs": r"b1ENS\d*_8BackwardI\w*?Lb0ELb1EE",
        "with options": r"b0ENS\d*_8Backward",
        "with functions": r"b0ENS\d*_12FlexBackward",
        "with scores": r"b0ENS\d*_13ScoreBackward",
    },
}

pytestmark = pytest.mark.skipif(not NVCC.exists(), reason=f"needs nvcc to compile the CUDA kernels; there is no {NVCC}")


@pytest.fixture
def compile_once():
    """A source's cubin, and the messages of ptxas."""
    return lambda source, *flags: compiled_once(source, "90a", *flags)


@functools.cache
def functions_of(cubin):
    try:
        return sass.functions(sass_listing.disassemble(cubin))
    except FileNotFoundError as error:
        pytest.skip(str(error))


def division(form):
    """Divisions and conversions, by which a compiler divides. A softcap adds reciprocals."""
    return re.compile(r"I2F|F2I|CALL" + ("|MUFU\\.RCP" if form in PLAIN else ""))


def code_of(cubin, kernel, dims, form):
    """The kernel's instructions."""
    sizes = "".join(f"Li{size}E" for size in dims)
    pattern = rf"\w*\d{kernel}I\w*?{sizes}L{FORMS[kernel][form if form in FORMS[kernel] else 'plain']}"
    found = [code for name, code in functions_of(cubin).items() if re.match(pattern, name)]
    assert len(found) == 1
    return found[0]


def order_of(cubin, kernel, dims, form):
    """Returns the kernel's machine code with one letter for each instruction."""
    operations = [instruction.operation for instruction in code_of(cubin, kernel, dims, form)]
    if form not in WITH_FUNCTIONS:  # the interpreter keeps a program's values in local memory
        assert not {"LDL", "STL"} & {operation.split(".")[0] for operation in operations}
    marks = {"HGMMA": "P", "MUFU.EX2": "E", "WARPGROUP.DEPBAR": "W", "WARPGROUP.ARRIVE": "A", "USETMAXREG": "R"}
    order = "".join(mark for operation in operations for word, mark in marks.items() if operation.startswith(word))
    assert order.count("R") == 2
    return order.replace("R", "")


def keys_of(dims, form):
    return (KEYS_WITH_FUNCTIONS if form in WITH_FUNCTIONS else KEYS)[dims]


def kernel_of(source):
    return "backward_kernel" if source in BACKWARD + FLEX_BACKWARD else "forward_kernel"


def forms_of(source):
    return [
        form
        for form in FORMS[kernel_of(source)]
        if form in FORMS_OF_SOURCES.get(source.stem, ("plain", "with options", "few rows"))
    ]


def every_kernel(sources):
    """A test runs for each kernel of these sources: its form, its head dimensions."""
    cases = [
        pytest.param(source, form, dims, id=f"{source.stem}-{'x'.join(map(str, dims))}-{form}")
        for source in sources
        for form in forms_of(source)
        for dims in MOST_INSTRUCTIONS[kernel_of(source), form]
    ]
    return pytest.mark.parametrize(("source", "form", "dims"), cases)


def backward_tile(dims, form):
    rows, keys = BACKWARD_TILES[D256 if form in WITH_FUNCTIONS and dims == D128 else dims]
    return rows if form == "plain" else min(rows, 64), keys


def backward_products(dims, form):
    """The numbers of products of S, dP, dV, dK and dQ. A warpgroup's 96 columns of 192 are two products: 64 and 32."""
    rows, keys = backward_tile(dims, form)
    of_rows, of_keys = max(rows, 64) // 16, keys // 16
    parts, parts_v = (2 if size == 192 else 1 for size in dims)
    return dims[0] // 16, dims[1] // 16, parts_v * of_rows, parts * of_rows, parts * of_keys


def main_loop(cubin, kernel, dims, form="plain"):
    """One iteration of a consumer."""
    of_forward = dims[0] // 16, keys_of(dims, form) // 16
    products = of_forward if kernel == "forward_kernel" else backward_products(dims, form)
    return sass.main_loop(code_of(cubin, kernel, dims, form), sum(products))


def check_the_messages_of_ptxas(said):
    assert not WARNINGS.search(said), said
    assert "warning" not in said, said
    assert not re.search(r"[1-9]\d* bytes spill", said), said


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_ptxas_leaves_wgmma_and_registers_alone(compile_once, source):
    check_the_messages_of_ptxas(compile_once(source)[1])


def check_forward_order(cubin, form, dims):
    order = order_of(cubin, "forward_kernel", dims, form)
    scores, output = dims[0] // 16, keys_of(dims, form) // 16
    # The first tile, then the loop (both products, one wait, the softmax, the other wait), then the last product. A
    # thread has 64 x keys / 128 scores: one exponential for each, two with a softcap, and two for the factors of the
    # sums.
    exponentials = "E" * (keys_of(dims, form) // 2 * (1 if form in PLAIN else 2) + 2)
    schedule = "A" + "P" * scores + "W" + exponentials
    # A score function is called in the softmax, so no product may run.
    softmax = "WW" + exponentials if form == "with scores" else "W" + exponentials + "W"
    schedule += "A" + "P" * scores + "A" + "P" * output + softmax
    schedule += "A" + "P" * output + "W"
    assert schedule in order, order


@every_kernel(FORWARD + FLEX_FORWARD + SCORE_FORWARD)
def test_forward_machine_code(compile_once, source, form, dims):
    check_forward_order(compile_once(source)[0], form, dims)


@every_kernel(BACKWARD + FLEX_BACKWARD)
def test_backward_machine_code(compile_once, source, form, dims):
    check_backward_order(compile_once(source)[0], form, dims)


def check_backward_order(cubin, form, dims):
    order = order_of(cubin, "backward_kernel", dims, form)
    rows, keys = backward_tile(dims, form)
    s, dp, dv, dk, dq = ("A" + "P" * count for count in backward_products(dims, form))
    # S and dP; the exponentials while dP runs; dV, dQ and dK, each with its own wait. With split columns dK comes
    # before dQ. There are two ways to P. A softcap doubles the exponentials. A score function is called when no product
    # runs, in a loop over four elements.
    exponentials = "E" * (64 * rows // 128 * (1 if form in PLAIN else 3))
    schedule = s + dp + ("WW" + "E" * 8 if form == "with scores" else "W" + exponentials + "W") + dv
    schedule += (dk + dq if keys == 64 else dq + dk) + "WWW"
    assert schedule in order, order


def check_main_loop(cubin, kernel, form, dims):
    loop = main_loop(cubin, kernel, dims, form)
    assert len(loop) <= MOST_INSTRUCTIONS[kernel, form][dims]
    has_functions = form in WITH_FUNCTIONS  # tiles that meet several blocks divide by the sizes of a block
    assert has_functions or not [str(i) for i in loop if division(form).match(i.operation)]
    # Descriptors are stepped in uniform registers: nothing is moved there between the products of a batch. One kernel
    # moves a single number there, because its function of the user takes the uniform registers.
    allowed = int((kernel, form, dims) == ("backward_kernel", "with scores", D256))
    moves = []
    products = [n for n, i in enumerate(loop) if i.operation.startswith("HGMMA")]
    for a, b in itertools.pairwise(products):
        if "gsb0" not in loop[a].operands:
            moves += [str(i) for i in loop[a:b] if i.operation.startswith("R2UR")]
    assert len(moves) <= allowed, moves
    # No division comes before the first load and the first product, either.
    code = code_of(cubin, kernel, dims, form)
    first = next(n for n, i in enumerate(code) if i.operation.startswith("HGMMA"))
    assert has_functions or not [str(i) for i in code[:first] if division(form).match(i.operation)]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_no_main_loop_divides_or_computes_in_fp64(compile_once, source):
    try:
        listed = sass_listing.functions(sass_listing.disassemble(compile_once(source)[0]))
    except FileNotFoundError as error:
        pytest.skip(str(error))
    kernels = {name: code for name, code in listed.items() if sass_listing.count(code, "HGMMA")}
    assert len(kernels) >= 3
    for name, code in kernels.items():
        assert sass_listing.slow_instructions(sass_listing.main_loop(code)) == [], name


@every_kernel(SOURCES)
def test_no_instruction_needs_more_registers_than_setmaxnreg_leaves(compile_once, source, form, dims):
    code = code_of(compile_once(source)[0], kernel_of(source), dims, form)
    found = sass.registers_after_setmaxnreg(code)
    assert len(found) == 2
    for most, used in found:
        assert 0 < used <= most
    # The check itself: if the producer claimed the consumers' code, it would have too few registers.
    least = min(most for most, _ in found)
    fewer = [replace(i, operands=(*i.operands[:-1], hex(least))) if "USETMAXREG" in i.operation else i for i in code]
    assert any(used > most for most, used in sass.registers_after_setmaxnreg(fewer))


@every_kernel(SOURCES)
def test_main_loop(compile_once, source, form, dims):
    check_main_loop(compile_once(source)[0], kernel_of(source), form, dims)


@pytest.mark.parametrize("switch", switches.switches())
def test_machine_code_with_a_switch_changed(compile_once, switch):
    """The plain forward kernels are as good as with the defaults."""
    cubin, said = compile_once(ROOT / switches.SOURCES[0], f"-D{switch}={switches.other_value(switch)}")
    check_the_messages_of_ptxas(said)
    form = "with a switch changed"
    for dims in MOST_INSTRUCTIONS["forward_kernel", form]:
        check_forward_order(cubin, form, dims)
        check_main_loop(cubin, "forward_kernel", form, dims)
        assert sass.hazards(code_of(cubin, "forward_kernel", dims, form)) == []


def test_machine_code_of_pairs(compile_once):
    """A pair loads Q and dO by multicast, and its main loop waits for no access to memory of other blocks.

    An arrival with a release at the scope of the cluster would wait: MEMBAR.ALL.GPU.
    """
    cubin, said = compile_once(ROOT / switches.BACKWARD_SOURCES[0])
    check_the_messages_of_ptxas(said)
    check_backward_order(cubin, "in pairs", D256)
    check_main_loop(cubin, "backward_kernel", "in pairs", D256)
    assert sass.hazards(code_of(cubin, "backward_kernel", D256, "in pairs")) == []
    for form in "plain", "in pairs":
        operations = [i.operation for i in code_of(cubin, "backward_kernel", D256, form)]
        paired = form == "in pairs"
        # Half of the four panels of Q and of dO; barriers of the cluster at both ends.
        assert sum(".MULTICAST" in operation for operation in operations) == (4 if paired else 0)
        assert any(operation.startswith("UCGABAR") for operation in operations) == paired
        loop = main_loop(cubin, "backward_kernel", D256, form)
        assert not [str(i) for i in loop if re.match(r"MEMBAR\.\w+\.(GPU|SYS)|ERRBAR|CGAERRBAR|CCTL", i.operation)]
        # Lanes 0 and 1 of a warp release Q and dO in both blocks.
        arrivals = [str(i) for i in loop if i.operation.startswith("SYNCS.ARRIVE.TRANS64.RED")]
        assert len(arrivals) == (2 if paired else 0), arrivals


@pytest.mark.parametrize("source", FORWARD, ids=lambda path: path.stem)
def test_output_is_scaled_under_the_scores_of_long_rows(compile_once, source):
    for dims in (D192, D256):
        loop = main_loop(compile_once(source)[0], "forward_kernel", dims)
        products = [n for n, i in enumerate(loop) if i.operation.startswith("HGMMA")]
        under_scores = loop[: products[dims[0] // 16]]
        assert sum(i.operation == "FMUL" for i in under_scores) >= dims[1] // 2


@pytest.mark.parametrize("dims", BACKWARD_TILES, ids=str)
@pytest.mark.parametrize("source", BACKWARD, ids=lambda path: path.stem)
def test_row_terms_are_read_before_the_waits(compile_once, source, dims):
    """lse and delta of a tile are read from shared memory while the products of the tile run."""
    loop = main_loop(compile_once(source)[0], "backward_kernel", dims)
    second_wait = [n for n, i in enumerate(loop) if i.operation.startswith("WARPGROUP.DEPBAR")][1]
    assert not [str(i) for i in loop[second_wait:] if i.operation.startswith("LDS")]


@every_kernel(SOURCES)
def test_nothing_touches_registers_of_a_running_product(compile_once, source, form, dims):
    kernel = kernel_of(source)
    code = code_of(compile_once(source)[0], kernel, dims, form)
    assert sass.hazards(code) == []
    # The check itself: without a wait for a result there is a hazard. Two of the backward's five waits guard tiles in
    # shared memory: the wait for dV, and the wait for dK of split columns. The host run's mutations test these two.
    waits = [n for n, i in enumerate(code) if i.operation.startswith("WARPGROUP.DEPBAR")]
    found = [bool(sass.hazards(code[:n] + code[n + 1 :])) for n in waits]
    if kernel == "forward_kernel":
        # With a score function, a wait for both products follows the wait for the scores.
        assert found == [True, form != "with scores", True, True]
    else:
        # With a score function, the wait for dP follows the wait for S.
        assert found == [form != "with scores", True, False, backward_tile(dims, form)[1] == 128, True]
