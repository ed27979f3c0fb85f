"""Instructions in which threads meet: barriers, shuffles, votes, mma.sync."""

from ptx.instructions import Modifiers, instruction
from ptx.memory import elements
from ptx.values import CPP


def site(ins):
    return f'SITE({ins.line}, "{ins.opcode}")'


@instruction("bar", "barrier")
def block_barrier(ins, v):
    m = Modifiers(ins)
    m.take("cta")
    warp = m.take("warp")
    kind = m.take("sync", "red")
    m.take("aligned")
    if warp and kind == "sync":
        m.done()
        return f"ptx::meet_warp({site(ins)}, {v.read(ins.operands[0], 'u32')});"
    if kind == "sync":
        m.done()
        barrier, *threads = ins.operands
        threads = v.read(threads[0], "u32") if threads else "0u"
        return f"ptx::meet({site(ins)}, {v.read(barrier, 'u32')}, {threads});"
    operation = m.take("or", "and")
    m.take("pred")
    m.done()
    d, barrier, *threads, p = ins.operands
    if barrier != "0" or threads or not operation:
        raise ins.error("this form is not known")
    invert = "!" if operation == "and" else ""
    return v.write(d, "pred", f"{invert}cuda_host::meet_block({site(ins)}, {invert}{v.read(p, 'pred')})")


@instruction("shfl")
def shuffle(ins, v):
    m = Modifiers(ins)
    if not m.take("sync"):
        raise ins.error("only shfl.sync is known")
    mode = m.take("idx", "bfly", "up", "down")
    m.take("b32")
    m.done()
    d, a, b, c, mask = ins.operands
    d, _, inside = d.partition("|")
    a, b, c, mask = (v.read(x, "b32") for x in (a, b, c, mask))
    call = f"const auto taken = ptx::shuffle_{mode}({site(ins)}, {a}, {b}, {c}, {mask});"
    writes = v.write(d, "b32", "taken.value") + (v.write(inside, "pred", "taken.inside") if inside else "")
    return f"{{ {call} {writes} }}"


@instruction("vote")
def vote(ins, v):
    m = Modifiers(ins)
    if not m.take("sync"):
        raise ins.error("only vote.sync is known")
    mode = m.take("ballot", "any", "all")
    kind = m.take("b32", "pred")
    m.done()
    d, p, mask = ins.operands
    mask = v.read(mask, "b32")
    ballot = f"ptx::ballot({site(ins)}, {v.read(p, 'pred')}, {mask})"
    value = {"ballot": ballot, "any": f"{ballot} != 0", "all": f"{ballot} == {mask}"}[mode]
    return v.write(d, kind, value)


@instruction("elect")
def elect(ins, v):
    if ins.opcode != "elect.sync":
        raise ins.error("this form is not known")
    d, mask = ins.operands
    d, _, p = d.partition("|")
    call = f"const auto leader = ptx::elect({site(ins)}, {v.read(mask, 'b32')});"
    writes = v.write(d, "b32", "leader") + v.write(p, "pred", "uint32_t(cuda_host::lane()) == leader")
    return f"{{ {call} {writes} }}"


@instruction("mma")
def multiply_matrices(ins, v):
    types = {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": "half"}
    types["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"] = "bfloat16"
    d, a, b, c = (elements(x) for x in ins.operands)
    if ins.opcode == "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32":  # a product with 0 in its other 8 columns
        if [len(x) for x in (d, a, b, c)] != [4, 2, 1, 4]:
            raise ins.error("4, 2, 1, 4 registers are needed")
        types[ins.opcode], a, b = "half", [*a, "0", "0"], [*b, "0"]
    if ins.opcode not in types:
        raise ins.error("this shape or these types are not known")
    if [len(x) for x in (d, a, b, c)] != [4, 4, 2, 4]:
        raise ins.error("4, 4, 2, 4 registers are needed")
    c = ", ".join(v.read(x, "f32") for x in c)
    a = ", ".join(v.read(x, "b32") for x in a)
    b0, b1 = (v.read(x, "b32") for x in b)
    call = f"cuda_host::mma_m16n8k16({site(ins)}, c, a, {b0}, {b1}, ptx::from_{types[ins.opcode]});"
    writes = " ".join(v.write(x, "f32", f"c[{n}]") for n, x in enumerate(d))
    return f"{{ {CPP['f32']} c[4] = {{{c}}}; const uint32_t a[4] = {{{a}}}; {call} {writes} }}"
