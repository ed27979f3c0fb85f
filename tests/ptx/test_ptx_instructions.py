"""The translator of PTX alone: single instructions, and the error that names an unknown instruction."""

import ctypes
import math
import struct

import pytest
from cuda_host import library
from ptx import kernels, parse, translate

NAN = math.nan
# instruction of d, a, b, c; the type of d; the types of a, b and c; inputs; result.
CASES = [
    ("add.s32", "s32", "s32 s32", (2**31 - 1, 1), -(2**31)),
    ("mul.lo.s16", "s16", "s16 s16", (300, 300), 90000 - 65536),
    ("mul.hi.s32", "s32", "s32 s32", (-5, 1 << 30), -2),
    ("mul.wide.s32", "s64", "s32 s32", (-5, 1 << 30), -5 << 30),
    ("mad.lo.s32", "s32", "s32 s32 s32", (-5, 7, 3), -32),
    ("div.s32", "s32", "s32 s32", (-7, 2), -3),
    ("rem.s32", "s32", "s32 s32", (-7, 2), -1),
    ("min.u32", "u32", "u32 u32", (-1, 5), 5),
    ("min.s32", "s32", "s32 s32", (-1, 5), -1),
    ("abs.s64", "s64", "s64", (-(2**40),), 2**40),
    ("not.b32", "u32", "u32", (1,), 2**32 - 2),
    ("shl.b32", "u32", "u32 u32", (1, 40), 0),
    ("shr.u32", "u32", "u32 u32", (-1, 31), 1),
    ("shr.s32", "s32", "s32 u32", (-8, 40), -1),
    ("shf.l.wrap.b32", "u32", "u32 u32 u32", (0x80000000, 1, 33), 3),
    ("bfe.u32", "u32", "u32 u32 u32", (0x1234, 4, 8), 0x23),
    ("bfe.s32", "s32", "s32 u32 u32", (0xF0, 4, 4), -1),
    ("bfi.b32", "u32", "u32 u32 u32 u32", (0xF, 0, 4, 4), 0xF0),
    ("bfi.b64", "u64", "u64 u64 u32 u32", (0xABC, 0, 40, 8), 0xBC << 40),
    ("bmsk.clamp.b32", "u32", "u32 u32", (4, 100), 0xFFFFFFF0),
    ("prmt.b32", "u32", "u32 u32 u32", (0x44332211, 0x88776655, 0x7250), 0x88331155 & 0xFFFF0000 | 0x6611),
    ("popc.b32", "u32", "u32", (0xFF0,), 8),
    ("bfind.shiftamt.u32", "u32", "u32", (0xFF,), 24),
    ("clz.b32", "u32", "u32", (1,), 31),
    ("min.f32", "f32", "f32 f32", (NAN, 2.0), 2.0),
    ("max.f32", "f32", "f32 f32", (-0.0, 0.0), 0.0),
    ("copysign.f32", "f32", "f32 f32", (-1.0, 3.0), -3.0),
    ("fma.rn.f32", "f32", "f32 f32 f32", (1 + 2**-12, 1 + 2**-12, -1 - 2**-11), 2**-24),
    ("add.f32", "f32", "f32 f32", (1.0, 2**-24), 1.0),
    ("fma.rm.f32", "f32", "f32 f32 f32", (1.0, 1.0, -(2**-30)), 1 - 2**-24),
    ("cvt.sat.f32.f32", "f32", "f32", (NAN,), 0.0),
    ("cvt.rn.f32.f64", "f32", "f64", (1 + 2**-24 + 2**-50,), 1 + 2**-23),
    ("cvt.rzi.s32.f32", "s32", "f32", (-3e9,), -(2**31)),
    ("cvt.rzi.s32.f32", "s32", "f32", (NAN,), 0),
    ("cvt.rni.s32.f32", "s32", "f32", (2.5,), 2),
    ("cvt.s32.s8", "s32", "s32", (0x1FF,), -1),
    ("cvt.u32.u16", "u32", "u16", (0xFFFF,), 0xFFFF),
    ("cvt.rn.bf16x2.f32", "u32", "f32 f32", (1.0, 2.0), 0x3F804000),
    ("cvt.rn.f16x2.f32", "u32", "f32 f32", (1.0, 2.0), 0x3C004000),
    ("cvt.rn.satfinite.e4m3x2.f32", "u16", "f32 f32", (1000.0, -1.0625), 0x7EB8),
    ("cvt.rn.satfinite.e4m3x2.f32", "u16", "f32 f32", (NAN, 2**-10 * 1.5), 0x7F01),
    ("ex2.approx.ftz.f32", "f32", "f32", (-130.0,), 0.0),
    ("ex2.approx.f32", "f32", "f32", (-149.0,), 2.0**-149),
    ("lg2.approx.ftz.f32", "f32", "f32", (2.0**-130,), -math.inf),
]
# Comparisons of a and b.
COMPARISONS = [
    ("eq.f32", NAN, NAN, False), ("ne.f32", NAN, 1.0, False), ("neu.f32", NAN, 1.0, True), ("ltu.f32", NAN, 1.0, True),
    ("lt.f32", 0.5, 1.0, True), ("nan.f32", NAN, 1.0, True), ("num.f32", NAN, 1.0, False), ("lt.s32", -1, 1, True),
    ("lt.u32", -1, 1, False), ("hi.u32", -1, 1, True),
]  # fmt: skip
FORMATS = {"f32": "f", "f64": "d", "s16": "h", "u16": "H", "s32": "i", "u32": "I", "s64": "q", "u64": "Q"}
SLOT = 64  # bytes of a case: up to 7 inputs of 8 bytes, then the result


def bits(kind, value):
    size = struct.calcsize(FORMATS[kind])
    return struct.pack(FORMATS[kind], value) if kind[0] == "f" else (value % 256**size).to_bytes(size, "little")


def program(lines):
    body = "\n".join(lines)
    kinds = {"p": "pred", "h": "b16", "r": "b32", "d": "b64", "f": "f32", "g": "f64"}
    registers = "\n".join(f".reg .{kind} %{prefix}<9>;" for prefix, kind in kinds.items())
    return f".visible .entry test(\n.param .u64 data\n)\n{{\n{registers}\nld.param.u64 %d8, [data];\n{body}\nret;\n}}\n"


def register(kind, n):
    return "%" + {"f32": "f", "f64": "g"}.get(kind, {"16": "h", "32": "r", "64": "d"}[kind[1:]]) + str(n)


def case_lines(at, opcode, result, kinds):
    names = [register(kind, n + 1) for n, kind in enumerate(kinds)]
    for n, (kind, name) in enumerate(zip(kinds, names, strict=True)):
        yield f"ld.global.{kind} {name}, [%d8+{at + 8 * n}];"
    d = register(result, 7)
    yield f"{opcode} {', '.join([d, *names])};"
    yield f"st.global.{result} [%d8+{at + 56}], {d};"


@pytest.fixture(scope="module")
def results(built):
    """The result of each case, then of each comparison, as bytes."""
    cases = [(opcode, result, kinds.split(), inputs) for opcode, result, kinds, inputs, _ in CASES]
    lines, data = [], b""
    for n, (opcode, result, kinds, inputs) in enumerate(cases):
        lines += case_lines(SLOT * n, opcode, result, kinds)
        data += b"".join(bits(k, x).ljust(8, b"\0") for k, x in zip(kinds, inputs, strict=True)).ljust(SLOT, b"\0")
    for n, (opcode, a, b, _) in enumerate(COMPARISONS, len(cases)):
        kind = opcode.split(".")[1]
        lines += [
            f"ld.global.{kind} {register(kind, 1)}, [%d8+{SLOT * n}];",
            f"ld.global.{kind} {register(kind, 2)}, [%d8+{SLOT * n + 8}];",
            f"setp.{opcode} %p1, {register(kind, 1)}, {register(kind, 2)};",
            "selp.u32 %r7, 1, 0, %p1;",
            f"st.global.u32 [%d8+{SLOT * n + 56}], %r7;",
        ]
        data += (bits(kind, a).ljust(8, b"\0") + bits(kind, b).ljust(8, b"\0")).ljust(SLOT, b"\0")
    host = library.Library(built)
    loaded = kernels.load(kernels.objects_of(translate.translate(program(lines), ["test"]), built))
    memory = ctypes.create_string_buffer(data, len(data))
    host.c.forget_buffers()
    host.c.register_buffer(ctypes.addressof(memory), len(data), 1, b"data", True, True)
    error = loaded.ptx_launch(0, 1, 1, 0, ctypes.byref(ctypes.c_uint64(ctypes.addressof(memory))), 8)
    assert error is None, error
    return [memory.raw[SLOT * n + 56 : SLOT * (n + 1)] for n in range(len(CASES) + len(COMPARISONS))]


@pytest.mark.parametrize("n", range(len(CASES)), ids=[f"{case[0]}{case[3]}" for case in CASES])
def test_an_instruction(results, n):
    _, kind, _, _, expected = CASES[n]
    size = struct.calcsize(FORMATS[kind])
    assert results[n][:size] == bits(kind, expected)


@pytest.mark.parametrize("n", range(len(COMPARISONS)), ids=[f"{c[0]} {c[1]} {c[2]}" for c in COMPARISONS])
def test_a_comparison(results, n):
    assert results[len(CASES) + n][0] == COMPARISONS[n][3]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("frobnicate.b32 %r1, %r2;", "line 12: frobnicate.b32 %r1, %r2: the instruction is not known"),
        ("add.sat.s32 %r1, %r2, %r3;", r"line 12: add.sat.s32 .*no type"),
        ("add.s32.sat %r1, %r2, %r3;", r"modifier .sat is not known|no type"),
        ("add.f32 %r1, %f2, %q3;", "%q3 is neither a register nor a number"),
        ("mov.b64 %f1, %d1;", ".b64 as .f32"),
        ("ld.const.u32 %r1, [%d1];", "line 12: ld.const.u32"),
        ("fence.mbarrier_init.release.cta;", "fence.mbarrier_init.release.cta : the instruction is not known"),
        ("mbarrier.arrive.release.cluster.shared::cta.b64 %d1, [%r1];", "the instruction is not known"),
        ("fence.proxy.async.global;", "this form is not known"),
        ("cp.async.bulk.tensor.4d.shared::cta.global.tile.bulk_group [%r1], [%d1, {%r1, %r2, %r3, %r4}];", "form"),
        ("wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%f1, %f2, %f3, %f4}, %d1, %d2, 1, 1, 1;", "this shape"),
        ("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%f1, %f2, %f3, %f4}, %d1, %d2, 1, 1, 1, 1;", "no tra"),
        ("wgmma.mma_async.sync.aligned.m64n8k32.f32.e5m2.e5m2 {%f1, %f2, %f3, %f4}, %d1, %d2, 1, 1, 1;", "this shape"),
        ("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};", "this shape"),
        ("atom.shared.add.u32 %r1, [%r2], 1;", "line 12: atom.shared.add.u32"),
        ("ld.acquire.cta.global.u32 %r1, [%d1];", "only an acquire"),
    ],
)
def test_an_unknown_instruction_fails_by_name(line, reason):
    with pytest.raises(parse.PtxError, match=reason):
        translate.translate(program([line]), ["test"])
