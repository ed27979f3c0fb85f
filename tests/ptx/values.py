"""PTX types, registers and operands as C++: expressions that read an operand, and statements that set it."""

import re

from ptx.parse import PtxError

INTEGERS = {f"{sign}{bits}": f"{'' if sign == 's' else 'u'}int{bits}_t" for sign in "us" for bits in (8, 16, 32, 64)}
FLOATS = {"f32": "float", "f64": "double"}
# An untyped value is an unsigned number.
CPP = INTEGERS | {f"b{bits}": f"uint{bits}_t" for bits in (8, 16, 32, 64)} | FLOATS | {"pred": "bool"}
BITS = {kind: int(kind[1:]) for kind in CPP if kind != "pred"}
SPECIAL = {f"%{ptx}.{axis}": f"{cpp}.{axis}" for axis in "xyz" for ptx, cpp in [
    ("tid", "threadIdx"), ("ntid", "blockDim"), ("ctaid", "blockIdx"), ("nctaid", "gridDim"),
]} | {"%laneid": "cuda_host::lane()"}  # fmt: skip
ADDRESS = re.compile(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\w+))?\s*\]")


def is_signed(kind):
    return kind[0] == "s"


def unsigned(kind):
    return kind if kind == "pred" else f"b{BITS[kind]}"


class Values:
    """The names that are known at a position of the text. Each register has its declared kind.

    `functions`: C++ names of the functions that may be called, and their parse.Function. `data`: names of constants.
    """

    def __init__(self, entry, functions=None, data=()):
        self.params = entry.params
        self.functions, self.data = functions or {}, data
        # of a name in the space .param: a C++ pointer, the offset from it, and the bytes behind the pointer
        self.blocks = {name: ("params", offset, "kParamBytes") for name, (offset, _) in entry.params.items()}
        if entry.result:
            self.blocks[entry.result] = "result", 0, "kResultBytes"
        self.locals = {}
        self.kinds = {}  # of a register's prefix or of its whole name
        self.outer_kinds = []
        self.arrays = {}  # the place in an array of a register that an asynchronous instruction uses

    def enter_scope(self):
        self.outer_kinds.append(dict(self.kinds))

    def leave_scope(self):
        self.kinds = self.outer_kinds.pop()

    def declare_param(self, param):
        """The C++ declaration of a parameter of a call. Before it is written it has a value that no call gives."""
        name = f"P_{param.name}"
        self.blocks[param.name] = name, 0, f"sizeof {name}"
        return f"alignas(16) unsigned char {name}[{param.bytes}]; std::memset({name}, 0xff, {param.bytes});"

    def block_of(self, operand):
        """The C++ pointer and the bytes of the block that an address like [param0+8] lies in.

        An address in a register lies in the parameters of the entry.
        """
        match = ADDRESS.fullmatch(operand)
        if match is None:
            raise PtxError(f"{operand} is no address")
        pointer, _, size = self.blocks.get(match[1], ("params", 0, "kParamBytes"))
        return f"{pointer}, {size}"

    def declare(self, registers):
        """C++ declarations."""
        kind = "b16" if registers.kind == "f16" else registers.kind  # only converted and packed
        cpp = CPP.get(kind)
        if cpp is None:
            raise PtxError(f"registers of the type .{kind}")
        if registers.count == 0:
            self.kinds[registers.prefix] = kind
            return f"{cpp} {self.name(registers.prefix)};"
        self.kinds[registers.prefix] = kind
        all_of_them = (f"{registers.prefix}{n}" for n in range(1, registers.count))
        names = [self.name(name) for name in all_of_them if name not in self.arrays]
        return f"{cpp} {', '.join(names)};" if names else ""

    def kind_of(self, register):
        """None if this is no register."""
        return self.kinds.get(register) or self.kinds.get(register.rstrip("0123456789"))

    def place_in_arrays(self, lists):
        """C++ declarations of arrays for these lists of registers: {registers: type}."""
        lines = []
        for number, (registers, kind) in enumerate(lists.items()):
            for n, register in enumerate(registers):
                if register in self.arrays:
                    raise PtxError(f"{register} is in two lists of wgmma")
                self.arrays[register] = f"A{number}[{n}]"
            lines.append(f"{CPP[kind]} A{number}[{len(registers)}];")
        return lines

    def array_of(self, registers):
        """The array that place_in_arrays() has made for a list."""
        name = self.arrays[registers[0]].partition("[")[0]
        if [self.arrays.get(register) for register in registers] != [f"{name}[{n}]" for n in range(len(registers))]:
            raise PtxError("another wgmma has these registers in another order")
        return name

    def name(self, register):
        if register in self.arrays:
            return self.arrays[register]
        return f"R_{register[1:]}" if register.startswith("%") else f"S_{register}"

    def read(self, operand, kind):
        """An expression of the C++ type of `kind`."""
        if operand.startswith("!"):
            return f"!{self.read(operand[1:], kind)}"
        declared = self.kind_of(operand)
        if declared is not None:
            return convert(self.name(operand), declared, kind)
        if operand in SPECIAL:
            return f"{CPP[kind]}({SPECIAL[operand]})"
        if operand in self.params:
            return f"{CPP[kind]}(reinterpret_cast<uint64_t>(params + {self.params[operand][0]}))"
        if operand.endswith("shared_bytesE"):  # csrc/cuda/shared_memory.h: the only shared memory
            return f"{CPP[kind]}(ptx::shared_base())"
        if operand in self.data:
            return f"{CPP[kind]}(reinterpret_cast<uint64_t>(D_{operand}))"
        if operand in self.locals:
            return f"{CPP[kind]}(reinterpret_cast<uint64_t>(L_{operand}))"
        return literal(operand, kind)

    def write(self, operand, kind, value):
        """A statement that sets a register to an expression of the C++ type of `kind`."""
        if operand == "_":
            return f"(void)({value});"
        declared = self.kind_of(operand)
        if declared is None:
            raise PtxError(f"{operand} is no register")
        return f"{self.name(operand)} = {convert(value, kind, declared)};"

    def address(self, operand, space):
        """A pointer to the address of an operand like [%rd1+8]. The machine checks that it lies in the space."""
        match = ADDRESS.fullmatch(operand)
        if match is None:
            raise PtxError(f"{operand} is no address")
        base, offset = match[1], int(match[2] or "0", 0)
        if space == "param" and base in self.blocks:
            pointer, first, _ = self.blocks[base]
            return f"{pointer} + {first + offset}"
        kind = "u32" if space == "shared" and BITS.get(self.kind_of(base) or "u32", 32) == 32 else "u64"
        number = self.read(base, kind)
        return f"ptx::{space or 'generic'}_bytes({number}{f' + {offset}' if offset else ''})"


def convert(value, have, want):
    """The same bits as another type. A wider integer loses its upper bits, a narrower one is extended as it says."""
    if have == want:
        return value
    if "pred" in (have, want):
        raise PtxError(f"a predicate as .{want if have == 'pred' else have}")
    if have in FLOATS or want in FLOATS:
        if BITS[have] != BITS[want]:
            raise PtxError(f".{have} as .{want}")
        return f"ptx::bits<{CPP[want]}>({value})"
    return value if CPP[have] == CPP[want] else f"{CPP[want]}({value})"


def literal(text, kind):
    if kind == "pred":
        if text not in ("0", "1", "-1"):
            raise PtxError(f"{text} is no predicate")
        return "false" if text == "0" else "true"
    if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})|0[dD]([0-9a-fA-F]{16})", text):
        have = "b32" if match[1] else "b64"
        number = f"0x{match[1] or match[2]}u" + ("" if match[1] else "l")
        return convert(number, have, kind)
    if not re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        raise PtxError(f"{text} is neither a register nor a number")
    number = int(text.rstrip("U"), 0)
    bits = BITS[kind]
    return convert(
        f"{CPP[unsigned(kind)]}({number & ((1 << bits) - 1):#x}u{'l' if bits == 64 else ''})", unsigned(kind), kind
    )
