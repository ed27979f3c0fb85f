"""Reads the text that `nvcc -ptx` writes: entries and functions with their parameters, registers, labels and
instructions; constants."""

import re
from dataclasses import dataclass, field


class PtxError(Exception):
    """Something in the text that the translator does not know, by name and line."""


@dataclass(frozen=True)
class Instruction:
    line: int
    guard: str  # "%p1", "!%p1" or ""
    opcode: str  # "ld.global.v2.f32"
    operands: tuple[str, ...]

    @property
    def parts(self):
        return self.opcode.split(".")

    def error(self, why):
        return PtxError(f"line {self.line}: {self.opcode} {', '.join(self.operands)}: {why}")


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Registers:
    """A declaration: `count` names of one kind, made of `prefix` and a number.

    If `count` is 0, the one name `prefix`.
    """

    kind: str  # "b32"
    prefix: str
    count: int


@dataclass(frozen=True)
class Local:
    """An array of a thread."""

    name: str
    align: int
    bytes: int


@dataclass(frozen=True)
class Param:
    """A parameter, or the result, of a call: a variable of the scope that makes the call."""

    name: str
    align: int
    bytes: int


@dataclass(frozen=True)
class Scope:
    """A brace of the text: registers that are declared inside are known inside."""

    opens: bool


@dataclass
class Entry:
    name: str
    line: int
    params: dict[str, tuple[int, int]] = field(default_factory=dict)  # offset, bytes
    body: list = field(default_factory=list)
    result: str = ""  # the name of a function's result; "" without one
    result_bytes: int = 0

    @property
    def param_bytes(self):
        return max((offset + size for offset, size in self.params.values()), default=0)


@dataclass
class Function(Entry):
    """A function that kernels call."""


@dataclass(frozen=True)
class Data:
    """An array of constants in global memory."""

    name: str
    align: int
    values: tuple[int, ...]


BYTES = {"pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2}
BYTES |= {"b32": 4, "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8, "s64": 8, "f64": 8}

ENTRY = re.compile(r"^\.(?:visible|weak) +\.entry +(\w+)\(", re.MULTILINE)
PARAM = re.compile(r"\.param +(?:\.align +(\d+) +)?\.(\w+)(?: +\.ptr[^\]\[,]*?)? +(\w+)(?:\[(\d+)\])?")
FUNCTION = re.compile(r"^(?:\.(?:visible|weak) +)?\.func +(?:\(([^)]*)\)\s*)?(\w+)\s*\(", re.MULTILINE)
DATA = re.compile(r"^\.global +\.align +(\d+) +\.b8 +(\w+)\[\d+\] = \{([\d, ]*)\};", re.MULTILINE)
REGISTERS = re.compile(r"\.reg +\.(\w+) +(.*)", re.DOTALL)
LOCAL = re.compile(r"\.local +\.align +(\d+) +\.b8\s+(\w+)\[(\d+)\]")
STATEMENT = re.compile(r"(?:@(!?[%$\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
# A comment, white space, a brace that begins a statement, a label, or a statement to its end.
TOKEN = re.compile(r"(//[^\n]*|\s+)|([{}])|([$\w]+):(?!:)|([^;]*);")
COMMENT = re.compile(r"//[^\n]*")


def entry_names(text):
    return ENTRY.findall(text)


def read_entry(text, name):
    """One kernel. The translator reads no other kernel of the text, which may hold unknown instructions."""
    starts = [match for match in ENTRY.finditer(text) if match[1] == name]
    if len(starts) != 1:
        raise PtxError(f"{len(starts)} entries named {name}; there are: {', '.join(entry_names(text))}")
    entry = Entry(name, _line_of(text, starts[0].start()))
    _read_after_name(text, starts[0].end(), entry)
    return entry


def read_functions(text):
    """The functions that the text defines, by name."""
    functions = {}
    for start in FUNCTION.finditer(text):
        if re.compile(r"\)\s*;").match(text, text.index(")", start.end())):
            continue  # a declaration
        function = Function(start[2], _line_of(text, start.start()))
        for _, kind, result, count in PARAM.findall(start[1] or ""):
            function.result, function.result_bytes = result, BYTES[kind] * int(count or 1)
        _read_after_name(text, start.end(), function)
        functions[function.name] = function
    return functions


def read_data(text):
    """The constants of the text, by name."""
    return {
        name: Data(name, int(align), tuple(map(int, values.split(",")))) for align, name, values in DATA.findall(text)
    }


def _line_of(text, at):
    return text.count("\n", 0, at) + 1


def _read_after_name(text, at, entry):
    """Reads the parameters and the body of an entry or a function. `at`: after the first parenthesis."""
    params_end = text.index(")", at)
    offset = 0
    for align, kind, param, count in PARAM.findall(text, at, params_end):
        size = BYTES[kind] * int(count or 1)
        align = int(align or BYTES[kind])
        offset = -(-offset // align) * align
        entry.params[param] = offset, size
        offset += size
    begin = text.index("{", params_end)
    _read_body(text, begin + 1, _line_of(text, begin), entry.body)


def statements(text, line):
    """The instructions of a piece of a body."""
    body = []
    _read_body(f"{text}\n}}", 0, line, body)
    return [item for item in body if isinstance(item, Instruction)]


def _read_body(text, at, line, body):
    depth = 0
    while True:
        token = TOKEN.match(text, at)
        if token is None:
            raise PtxError(f"line {line}: {text[at : at + 40]!r} is no statement")
        skipped, brace, label, statement = token.groups()
        if brace:
            depth += 1 if brace == "{" else -1
            if depth < 0:
                return
            body.append(Scope(brace == "{"))
        elif label:
            body.append(Label(label))
        elif skipped is None:
            body.extend(_statement(COMMENT.sub(" ", statement).strip(), line))
        line += token[0].count("\n")
        at = token.end()


def _statement(text, line):
    if text.startswith(".reg"):
        kind, names = REGISTERS.fullmatch(text).groups()
        for name in (n.strip() for n in names.split(",")):
            prefix, _, count = name.partition("<")
            yield Registers(kind, prefix, int(count[:-1]) if count else 0)
    elif local := LOCAL.fullmatch(text):
        yield Local(local[2], int(local[1]), int(local[3]))
    elif param := PARAM.fullmatch(text):
        align, kind, name, count = param.groups()
        yield Param(name, int(align or BYTES[kind]), BYTES[kind] * int(count or 1))
    elif text.startswith(".pragma"):
        pass
    elif statement := STATEMENT.fullmatch(text):
        guard, opcode, operands = statement.groups()
        yield Instruction(line, guard or "", opcode, tuple(split_operands(operands)))
    elif text:
        raise PtxError(f"line {line}: {text!r} is no statement")


def split_operands(text):
    """Splits at the commas outside brackets, braces and parentheses."""
    depth, begin, found = 0, 0, []
    if not any(opening in text for opening in "{[("):
        return [o.strip() for o in text.split(",")] if text else []
    for n, letter in enumerate(text):
        if letter in "{[(":
            depth += 1
        elif letter in "}])":
            depth -= 1
        elif letter == "," and depth == 0:
            found.append(text[begin:n].strip())
            begin = n + 1
    return [*found, text[begin:].strip()] if text else []
