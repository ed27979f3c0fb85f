"""Loads, stores, atomic operations, cp.async and ldmatrix. Each access is checked by tests/cuda_host/memory.cpp."""

from ptx.instructions import Modifiers, instruction
from ptx.values import CPP

SPACES = "param", "shared", "shared::cta", "global", "local"
HINTS = "ca", "cg", "cs", "nc", "weak", "volatile", "L1::no_allocate", "L2::128B", "L2::256B"
SCOPES = "cta", "cluster", "gpu", "sys"


def elements(operand):
    return [x.strip() for x in operand.strip("{}").split(",")]


def space_and_count(m):
    space = m.find(*SPACES).partition("::")[0]
    while m.find(*HINTS):
        pass
    return space, int(m.find("v2", "v4", default="v1")[1])


@instruction("ld", "ldu")
def load(ins, v):
    m = Modifiers(ins)
    order = m.find("relaxed", "acquire")
    scope = m.find(*SCOPES) if order else ""
    space, count = space_and_count(m)
    kind = m.kind()
    m.done()
    d, a = ins.operands
    targets = elements(d)
    if len(targets) != count:
        raise ins.error(f"{len(targets)} registers")
    if order == "acquire":
        if scope == "cta" or kind not in ("s32", "u32", "b32") or space != "global":
            raise ins.error("only an acquire of 32 bits in global memory, for other blocks, is known")
        return v.write(d, kind, f"{CPP[kind]}(ptx::acquire({ins.line}, {v.address(a, space)}))")
    # Also of a vector the address is read before the first register is set.
    cpp = CPP[kind] if count == 1 else f"ptx::Vector<{CPP[kind]}, {count}>"
    of_params = f", {v.block_of(a)}" if space == "param" else ""
    loaded = f"ptx::{'param' if space == 'param' else 'load'}<{cpp}>({ins.line}{of_params}, {v.address(a, space)})"
    if count == 1:
        return v.write(d, kind, loaded)
    writes = " ".join(v.write(t, kind, f"loaded.x[{n}]") for n, t in enumerate(targets))
    return f"{{ const auto loaded = {loaded}; {writes} }}"


@instruction("st")
def store(ins, v):
    m = Modifiers(ins)
    space, count = space_and_count(m)
    kind = m.kind()
    m.done()
    a, d = ins.operands
    values = [v.read(x, kind) for x in elements(d)]
    if len(values) != count:
        raise ins.error("this form is not known")
    value = values[0] if count == 1 else f"ptx::Vector<{CPP[kind]}, {count}>{{{{{', '.join(values)}}}}}"
    if space == "param":
        return f"ptx::store_param({ins.line}, {v.block_of(a)}, {v.address(a, space)}, {value});"
    return f"ptx::store({ins.line}, {v.address(a, space)}, {value});"


@instruction("atom", "red")
def atomic(ins, v):
    m = Modifiers(ins)
    order = m.find("relaxed", "release")
    scope = m.find(*SCOPES, default="gpu")
    space = m.find("global")
    operation = m.find("add", "or", "max")
    kind = m.kind()
    m.done()
    *d, a, b = ins.operands
    if kind in ("u64", "b64") and not order and scope != "cta" and space in ("global", ""):
        value = f"ptx::atomic_{operation}({ins.line}, {v.address(a, space)}, {v.read(b, kind)})"
        return v.write(d[0], kind, value) if d else f"{value};"
    if operation != "add" or scope == "cta" or space != "global" or kind not in ("f32", "s32", "u32"):
        raise ins.error(
            "only additions of 32 bits, and add, or, max of 64 bits, for all blocks in global memory, are known"
        )
    name = "release_add" if order == "release" else "atomic_add"
    value = f"ptx::{name}({ins.line}, {v.address(a, space)}, {v.read(b, kind)})"
    return v.write(d[0], kind, value) if d else f"{value};"


@instruction("cp.async.cg", "cp.async.ca")
def copy_asynchronously(ins, v):
    m = Modifiers(ins, 3)
    if m.take("shared", "shared::cta") == "" or m.take("global") == "":
        raise ins.error("this form is not known")
    while m.take("L2::64B", "L2::128B", "L2::256B"):
        pass
    m.done()
    to, source, size, *read = ins.operands
    read = v.read(read[0], "u32") if read else size
    target, source = v.address(to, "shared"), v.address(source, "global")
    return f"ptx::cp_async({ins.line}, {target}, {source}, {size}, {read});"


@instruction("cp.async.commit_group")
def end_group(ins, v):
    return "cuda_host::cp_async_commit();"


@instruction("cp.async.wait_group")
def wait_for_groups(ins, v):
    return f"ptx::at_line({ins.line}); cuda_host::cp_async_wait({int(ins.operands[0])});"


@instruction("cp.async.wait_all")
def wait_for_all(ins, v):
    return f"ptx::at_line({ins.line}); cuda_host::cp_async_commit(); cuda_host::cp_async_wait(0);"


def matrices(ins):
    m = Modifiers(ins)
    m.take("sync"), m.take("aligned"), m.take("m8n8")
    count = int(m.take("x1", "x2", "x4")[1])
    transposed = m.take("trans")
    if count != 4 or not m.take("shared", "shared::cta") or not m.take("b16"):
        raise ins.error("this form is not known")
    m.done()
    return transposed


@instruction("ldmatrix")
def load_matrices(ins, v):
    transposed = matrices(ins)
    d, a = ins.operands
    writes = " ".join(v.write(x, "b32", f"r[{n}]") for n, x in enumerate(elements(d)))
    way = "true" if transposed else "false"
    call = f'ptx::ldmatrix(SITE({ins.line}, "{ins.opcode}"), r, {v.address(a, "shared")}, {way});'
    return f"{{ uint32_t r[4]; {call} {writes} }}"


@instruction("stmatrix")
def store_matrices(ins, v):
    if matrices(ins):
        raise ins.error("this form is not known")
    a, d = ins.operands
    values = ", ".join(v.read(x, "b32") for x in elements(d))
    call = f'ptx::stmatrix(SITE({ins.line}, "{ins.opcode}"), {v.address(a, "shared")}, r);'
    return f"{{ const uint32_t r[4] = {{{values}}}; {call} }}"
