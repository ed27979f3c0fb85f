"""Each PTX instruction as a C++ statement: arithmetic, conversions, control.

memory.py, collective.py and hopper.py have the other instructions.

A function takes an instruction and the Values of its position, and returns the statement. A modifier that the function
does not use is an error, so no meaning is lost.
"""

from ptx.values import BITS, CPP, FLOATS, unsigned

TABLE = {}


def instruction(*names):
    """Registers a function for the opcodes that begin with one of these names."""

    def add(function):
        for name in names:
            TABLE[name] = function
        return function

    return add


class Modifiers:
    """The parts of an opcode behind its name. Each part is taken once. done() refuses the parts that are left."""

    def __init__(self, instruction, skip=1):
        self.instruction = instruction
        self.left = instruction.parts[skip:]

    def take(self, *allowed, default=""):
        """The next part, if it is one of these parts."""
        if self.left and self.left[0] in allowed:
            return self.left.pop(0)
        return default

    def find(self, *allowed, default=""):
        """One of these parts, at any position."""
        for part in self.left:
            if part in allowed:
                self.left.remove(part)
                return part
        return default

    def kind(self):
        """A type: the last part, or the part before another type."""
        if not self.left or self.left[0] not in CPP:
            raise self.instruction.error("no type that is known")
        return self.left.pop(0)

    def done(self):
        if self.left:
            raise self.instruction.error(f"the modifier .{self.left[0]} is not known")


def binary(ins, v, kind, expression, kind_b=None):
    """d = an expression of {a} and {b}."""
    d, a, b = ins.operands
    cpp = CPP[kind]
    value = expression.format(a=v.read(a, kind), b=v.read(b, kind_b or kind), T=cpp)
    return v.write(d, kind, f"{cpp}({value})")


# ---- integers and floats

ROUNDINGS = {"rn": "FE_TONEAREST", "rz": "FE_TOWARDZERO", "rm": "FE_DOWNWARD", "rp": "FE_UPWARD"}


def float_result(m, kind, value, operation):
    """A float operation's value with its rounding, flushing and saturation: the parts that come before the type."""
    rounding = m.take(*ROUNDINGS, default="rn")
    ftz, sat = m.take("ftz"), m.take("sat")
    m.kind()
    m.done()
    if rounding != "rn":
        value = f"ptx::rounded({ROUNDINGS[rounding]}, [&] {{ return {operation}; }})"
    if ftz:
        raise m.instruction.error("the modifier .ftz is not known here")
    return f"ptx::saturated({value})" if sat else value


@instruction("add", "sub", "mul")
def arithmetic(ins, v):
    m = Modifiers(ins)
    sign = {"add": "+", "sub": "-", "mul": "*"}[ins.parts[0]]
    kind = ins.parts[-1]
    if kind in FLOATS:
        d, a, b = ins.operands
        a, b = v.read(a, kind), v.read(b, kind)
        late = f"ptx::opaque({a}) {sign} ptx::opaque({b})"
        return v.write(d, kind, float_result(m, kind, f"{a} {sign} {b}", late))
    if ins.parts[0] == "mul":
        return multiply(ins, v, m)
    kind = m.kind()
    m.done()
    return binary(ins, v, kind, f"{{a}} {sign} {{b}}")


def multiply(ins, v, m):
    part = m.take("lo", "hi", "wide")
    kind = m.kind()
    m.done()
    d, a, b = ins.operands[:3]
    if part == "lo":
        # 16 bits would be promoted to int, and overflow there
        wide = "uint32_t" if BITS[kind] == 16 else CPP[kind]
        return v.write(d, kind, f"{CPP[kind]}({wide}({v.read(a, kind)}) * {wide}({v.read(b, kind)}))")
    if part == "wide":
        wide = f"{kind[0]}{2 * BITS[kind]}"
        return v.write(d, wide, f"{CPP[wide]}({v.read(a, kind)}) * {CPP[wide]}({v.read(b, kind)})")
    return v.write(d, kind, f"ptx::multiply_high({v.read(a, kind)}, {v.read(b, kind)})")


@instruction("mad")
def multiply_add(ins, v):
    m = Modifiers(ins)
    part = m.take("lo", "wide")
    kind = m.kind()
    m.done()
    d, a, b, c = ins.operands
    wide = f"{kind[0]}{2 * BITS[kind]}" if part == "wide" else kind
    a, b, c = v.read(a, kind), v.read(b, kind), v.read(c, wide)
    return v.write(d, wide, f"{CPP[wide]}({CPP[wide]}({a}) * {CPP[wide]}({b}) + {c})")


@instruction("fma")
def fused(ins, v):
    m = Modifiers(ins)
    kind = ins.parts[-1]
    d, a, b, c = ins.operands
    a, b, c = (v.read(x, kind) for x in (a, b, c))
    late = f"std::fma(ptx::opaque({a}), ptx::opaque({b}), ptx::opaque({c}))"
    return v.write(d, kind, float_result(m, kind, f"std::fma({a}, {b}, {c})", late))


@instruction("div", "rem")
def divide(ins, v):
    m = Modifiers(ins)
    kind = ins.parts[-1]
    if kind in FLOATS:
        d, a, b = ins.operands
        a, b = v.read(a, kind), v.read(b, kind)
        return v.write(d, kind, float_result(m, kind, f"{a} / {b}", f"ptx::opaque({a}) / ptx::opaque({b})"))
    kind = m.kind()
    m.done()
    d, a, b = ins.operands
    name = {"div": "quotient", "rem": "remainder"}[ins.parts[0]]
    return v.write(d, kind, f"ptx::{name}({ins.line}, {v.read(a, kind)}, {v.read(b, kind)})")


@instruction("neg", "abs", "sqrt", "rcp")
def unary(ins, v):
    m = Modifiers(ins)
    name, kind = ins.parts[0], ins.parts[-1]
    d, a = ins.operands
    a = v.read(a, kind)
    if kind in FLOATS:
        if m.take("approx"):
            return approximate(ins, v, m)
        operation = {"neg": "-{}", "abs": "std::fabs({})", "sqrt": "std::sqrt({})", "rcp": "1 / {}"}[name]
        late = operation.format(f"ptx::opaque({a})")
        return v.write(d, kind, float_result(m, kind, operation.format(a), late))
    kind = m.kind()
    m.done()
    # Of the least number both are itself.
    return v.write(d, kind, {"neg": f"{CPP[kind]}(-{a})", "abs": f"{CPP[kind]}({a} < 0 ? -{a} : {a})"}[name])


@instruction("ex2", "tanh", "lg2")
def special(ins, v):
    m = Modifiers(ins)
    if not m.take("approx"):
        raise ins.error("only .approx is known")
    return approximate(ins, v, m)


def approximate(ins, v, m):
    """A result with the largest error that the manual allows."""
    ftz = m.take("ftz")
    kind = m.kind()
    m.done()
    known = {
        "ex2": "cuda_host::exp2_fast",
        "lg2": "cuda_host::log2_fast",
        "rcp": "ptx::reciprocal",
        "tanh": "ptx::tanh",
    }
    if ins.opcode == "rcp.approx.ftz.f64":
        known = {"rcp": "ptx::gross_reciprocal"}
    elif ins.opcode == "ex2.approx.f32":
        known = {"ex2": "ptx::exp2"}
    elif kind != "f32" or ins.parts[0] not in known or (not ftz and ins.parts[0] != "tanh"):
        raise ins.error("this approximation is not known")
    return v.write(ins.operands[0], kind, f"{known[ins.parts[0]]}({v.read(ins.operands[1], kind)})")


@instruction("min", "max")
def extremum(ins, v):
    m = Modifiers(ins)
    kind = m.kind()
    m.done()
    sign = {"min": "<", "max": ">"}[ins.parts[0]]
    if kind in FLOATS:
        # for a NaN and a number the function returns the number
        return binary(ins, v, kind, f"ptx::{ins.parts[0]}imum({{a}}, {{b}})")
    return binary(ins, v, kind, f"{{a}} {sign} {{b}} ? {{a}} : {{b}}")


@instruction("copysign")
def copy_sign(ins, v):
    m = Modifiers(ins)
    kind = m.kind()
    m.done()
    return binary(ins, v, kind, "std::copysign({b}, {a})")


# ---- bits


@instruction("and", "or", "xor", "not", "cnot")
def logic(ins, v):
    m = Modifiers(ins)
    kind = m.kind()
    m.done()
    if ins.parts[0] == "not":
        d, a = ins.operands
        return v.write(d, kind, f"!{v.read(a, kind)}" if kind == "pred" else f"{CPP[kind]}(~{v.read(a, kind)})")
    return binary(ins, v, kind, f"{{a}} {dict([('and', '&'), ('or', '|'), ('xor', '^')])[ins.parts[0]]} {{b}}")


@instruction("shl", "shr")
def shift(ins, v):
    m = Modifiers(ins)
    kind = m.kind()
    m.done()
    return binary(ins, v, kind, f"ptx::shift_{'left' if ins.parts[0] == 'shl' else 'right'}({{a}}, {{b}})", "u32")


@instruction("shf")
def funnel_shift(ins, v):
    m = Modifiers(ins)
    side, mode = m.take("l", "r"), m.take("wrap", "clamp")
    kind = m.kind()
    m.done()
    d, a, b, c = ins.operands
    a, b, c = (v.read(x, kind) for x in (a, b, c))
    return v.write(d, kind, f"ptx::funnel_{side}_{mode}({a}, {b}, {c})")


@instruction("bfe", "bfi", "bmsk", "prmt", "lop3", "popc", "clz", "brev", "bfind")
def bit_function(ins, v):
    """Calls the machine's function with the instruction's name."""
    m = Modifiers(ins)
    mode = m.take("clamp", "b32") if ins.parts[0] in ("bmsk", "prmt", "lop3") else ""
    shift = "_shift" if m.take("shiftamt") else ""  # of bfind
    kind = m.kind() if m.left else "b32"
    m.done()
    of_64_bits = ("popc", "clz", "bfi") if kind == "b64" else ("bfe",) if kind == "u64" else ()
    if BITS[kind] != 32 and ins.parts[0] not in of_64_bits:
        raise ins.error("only 32 bits are known")
    d, *rest = ins.operands
    result = "u32" if ins.parts[0] in ("popc", "clz", "bfind") else kind
    kinds = [kind] * 2 + ["u32"] * 2 if ins.parts[0] == "bfi" else [kind] + ["u32"] * (len(rest) - 1)
    arguments = ", ".join(v.read(x, k) for x, k in zip(rest, kinds, strict=False))
    return v.write(d, result, f"ptx::{ins.parts[0]}{'_clamp' if mode == 'clamp' else shift}({arguments})")


# ---- comparisons, selections, moves, conversions

ORDERED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">="}


@instruction("setp")
def compare(ins, v):
    m = Modifiers(ins)
    comparison = m.take(*ORDERED, *UNSIGNED, *(f"{name}u" for name in ORDERED), "num", "nan")
    combine = m.take("and", "or", "xor")
    kind = m.kind()
    m.done()
    d, a, b, *other = ins.operands
    if "|" in d or bool(other) != bool(combine):
        raise ins.error("this form is not known")
    a, b = v.read(a, kind), v.read(b, kind)
    if comparison in ("num", "nan"):
        value = f"{'!' if comparison == 'num' else ''}(std::isnan({a}) || std::isnan({b}))"
    elif comparison in UNSIGNED:
        value = f"{a} {UNSIGNED[comparison]} {b}"
    elif comparison in ORDERED:
        value = f"{a} {ORDERED[comparison]} {b}"
        if kind in FLOATS and comparison == "ne":
            value = f"({a} < {b} || {a} > {b})"  # false with a NaN
    else:
        value = f"({a} {ORDERED[comparison[:-1]]} {b} || std::isnan({a}) || std::isnan({b}))"
    if combine:
        value = f"({value}) {dict([('and', '&'), ('or', '|'), ('xor', '^')])[combine]} {v.read(other[0], 'pred')}"
    return v.write(d, "pred", value)


@instruction("selp")
def select(ins, v):
    m = Modifiers(ins)
    kind = m.kind()
    m.done()
    d, a, b, p = ins.operands
    return v.write(d, kind, f"{v.read(p, 'pred')} ? {v.read(a, kind)} : {v.read(b, kind)}")


@instruction("mov")
def move(ins, v):
    m = Modifiers(ins)
    kind = m.kind()
    m.done()
    d, a = ins.operands
    bits = unsigned(kind)
    if d.startswith("{"):  # parts of a value, the lowest first
        parts = [x.strip() for x in d[1:-1].split(",")]
        width = BITS[kind] // len(parts)
        writes = [v.write(x, f"b{width}", f"uint{width}_t(whole >> {n * width})") for n, x in enumerate(parts)]
        return f"{{ const auto whole = {v.read(a, bits)}; {' '.join(writes)} }}"
    if a.startswith("{"):
        parts = [x.strip() for x in a[1:-1].split(",")]
        width = BITS[kind] // len(parts)
        shifted = [f"{CPP[bits]}({v.read(x, f'b{width}')}) << {n * width}" for n, x in enumerate(parts)]
        return v.write(d, bits, " | ".join(shifted))
    return v.write(d, kind, v.read(a, kind))


@instruction("cvta")
def convert_address(ins, v):
    m = Modifiers(ins)
    to = m.take("to")
    space = m.take("global", "shared", "local", "const", "param")
    kind = m.kind()
    m.done()
    if space == "const":
        raise ins.error("constant memory is not known")
    d, a = ins.operands
    a = v.read(a, kind)
    if space == "shared":
        a = f"ptx::{'generic_to_shared' if to else 'shared_to_generic'}({ins.line}, {a})"
    return v.write(d, kind, a)


HALVES = {"f16": "half", "bf16": "bfloat16"}


@instruction("cvt")
def convert_value(ins, v):
    m = Modifiers(ins)
    if ins.opcode == "cvt.rn.satfinite.e4m3x2.f32":  # the first operand is the upper byte
        d, *rest = ins.operands
        upper, lower = (f"cuda_host::round_to_float8({v.read(x, 'f32')})" for x in rest)
        return v.write(d, "b16", f"uint16_t({upper} << 8 | {lower})")
    if ins.parts[-1] in HALVES or set(ins.parts) & {*HALVES, "f16x2", "bf16x2"}:
        return convert_halves(ins, v, m)
    rounding = m.take("rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi")
    ftz, sat = m.take("ftz"), m.take("sat")
    to, of = m.kind(), m.kind()
    m.done()
    if ftz:
        raise ins.error("the modifier .ftz is not known here")
    d, a = ins.operands
    a = v.read(a, of)
    if of in FLOATS and to in FLOATS:
        if rounding in ("rni", "rzi", "rmi", "rpi"):
            name = {"rni": "nearbyint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}[rounding]
            a = f"std::{name}({a})"
        elif rounding not in ("", "rn"):
            a = f"ptx::rounded({ROUNDINGS[rounding]}, [&] {{ return {CPP[to]}(ptx::opaque({a})); }})"
        value = f"{CPP[to]}({a})"
        return v.write(d, to, f"ptx::saturated({value})" if sat else value)
    if of in FLOATS:
        name = {"rni": "nearbyint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}[rounding]
        return v.write(d, to, f"ptx::to_integer<{CPP[to]}>(std::{name}({a}))")
    if to in FLOATS:
        if rounding == "rn":
            return v.write(d, to, f"{CPP[to]}({a})")
        return v.write(d, to, f"ptx::rounded({ROUNDINGS[rounding]}, [&] {{ return {CPP[to]}(ptx::opaque({a})); }})")
    return v.write(d, to, f"ptx::clamped<{CPP[to]}>({a})" if sat else f"{CPP[to]}({a})")


def convert_halves(ins, v, m):
    rounding = m.take("rn")
    names = m.left
    d, *rest = ins.operands
    if rounding and names in (["f16x2", "f32"], ["bf16x2", "f32"]):  # the first operand is the upper half
        upper, lower = (f"ptx::to_{HALVES[names[0][:-2]]}({v.read(x, 'f32')})" for x in rest)
        return v.write(d, "b32", f"uint32_t({upper}) << 16 | {lower}")
    if rounding and names in (["f16", "f32"], ["bf16", "f32"]):
        return v.write(d, "b16", f"ptx::to_{HALVES[names[0]]}({v.read(rest[0], 'f32')})")
    if not rounding and names in (["f32", "f16"], ["f32", "bf16"]):
        return v.write(d, "f32", f"ptx::from_{HALVES[names[1]]}({v.read(rest[0], 'b16')})")
    raise ins.error("this conversion is not known")


# ---- control


def label(name):
    return f"T_{name.lstrip('$')}"


@instruction("bra")
def branch(ins, v):
    m = Modifiers(ins)
    m.take("uni")
    m.done()
    return f"goto {label(ins.operands[0])};"


@instruction("ret", "exit")
def finish(ins, v):
    m = Modifiers(ins)
    m.take("uni")
    m.done()
    return "return;"


@instruction("trap")
def trap(ins, v):
    return "__trap();"
