"""Calls of functions. The caller copies the parameters to one block. A function reads them as entries do."""

from ptx.instructions import instruction
from ptx.memory import elements


@instruction("call.uni")
def call(ins, v):
    *result, name, given = ins.operands if len(ins.operands) > 2 else ("", *ins.operands)
    if name not in v.functions:
        raise ins.error(f"the text does not define the function {name}")
    cpp, function = v.functions[name]
    names = elements(given.strip("()")) if given.strip("()").strip() else []
    if len(names) != len(function.params):
        raise ins.error(f"{len(names)} parameters")
    copies = []
    for given_name, (offset, size) in zip(names, function.params.values(), strict=True):
        pointer, first, _ = v.blocks[given_name]
        copies.append(f"std::memcpy(given + {offset}, {pointer} + {first}, {size});")
    to = v.blocks[result[0].strip("()")][0] if result and result[0] else "nullptr"
    block = f"alignas(16) unsigned char given[{max(function.param_bytes, 1)}];"
    return f"{{ {block} {' '.join(copies)} {cpp}({to}, given); }}"


def called(body):
    """The names of the functions that a body calls."""
    return {
        operand
        for item in body
        if getattr(item, "opcode", "") == "call.uni"
        for operand in item.operands
        if not operand.startswith("(")
    }
