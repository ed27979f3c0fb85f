"""Writes a kernel as a C++ function: a local for each register, a statement for each instruction, labels and goto."""

from ptx import calls, collective, hopper, instructions, memory, parse
from ptx.instructions import TABLE, label
from ptx.values import Values

MODULES = calls, collective, hopper, instructions, memory  # they fill TABLE
LONGEST_NAME = 9  # parts of an opcode


def statement(ins, values):
    """One instruction in C++, without its guard."""
    parts = ins.parts
    for length in range(min(LONGEST_NAME, len(parts)), 0, -1):
        function = TABLE.get(".".join(parts[:length]))
        if function is not None:
            try:
                return function(ins, values)
            except parse.PtxError as error:
                if str(error).startswith("line"):
                    raise
                raise ins.error(str(error)) from error
            except (KeyError, ValueError, IndexError) as error:
                raise ins.error(f"this form is not known ({error!r})") from error
    raise ins.error("the instruction is not known")


def guarded(ins, values, text):
    return f"if ({values.read(ins.guard, 'pred')}) {{ {text} }}" if ins.guard else text


def constant(data):
    """The C++ definition of an array of constants."""
    return f"alignas({data.align}) static const unsigned char D_{data.name}[] = {{{', '.join(map(str, data.values))}}};"


def signature(entry, name):
    if isinstance(entry, parse.Function):
        return f"static void {name}(unsigned char* result, const unsigned char* params)"
    return f'extern "C" void {name}(const unsigned char* params)'


def function(entry, name, edits=None, functions=None, data=()):
    """The C++ function of an entry, or of a function that entries call.

    `edits`: {(line, which of its instructions): [(number, instructions instead)]}; ptx::fault chooses at run time.
    `functions`, `data`: as in Values.
    """
    values = Values(entry, functions, data)
    lines = [
        f"{signature(entry, name)} {{",
        f"constexpr size_t kParamBytes = {entry.param_bytes};",
    ]
    if entry.result:
        lines.append(f"constexpr size_t kResultBytes = {entry.result_bytes};")
    every = [item for item in entry.body if isinstance(item, parse.Instruction)]
    lines += values.place_in_arrays(hopper.asynchronous_registers(every))
    line = which = 0
    for item in entry.body:
        if isinstance(item, parse.Registers):
            lines.append(values.declare(item))
        elif isinstance(item, parse.Local):
            values.locals[item.name] = item.bytes
            lines.append(f"alignas({item.align}) unsigned char L_{item.name}[{item.bytes}];")
        elif isinstance(item, parse.Param):
            lines.append(values.declare_param(item))
        elif isinstance(item, parse.Scope):
            lines.append("{" if item.opens else "}")
            values.enter_scope() if item.opens else values.leave_scope()
        elif isinstance(item, parse.Label):
            lines.append(f"{label(item.name)}:;")
        else:
            which = which + 1 if item.line == line else 0
            line = item.line
            text = guarded(item, values, statement(item, values))
            for number, replacements in (edits or {}).get((line, which), ()):
                other = " ".join(guarded(r, values, statement(r, values)) for r in replacements)
                text = f"if (ptx::fault == {number}) {{ {other} }} else {{ {text} }}"
            lines.append(text)
    return "\n".join([*lines, "}"])
