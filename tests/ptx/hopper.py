"""Hopper's instructions: mbarriers, TMA and bulk copies, wgmma, setmaxnreg, fences between proxies."""

import re

from ptx.collective import site
from ptx.instructions import HALVES, Modifiers, instruction
from ptx.memory import elements


def exactly(*opcodes):
    """Registers a function for these opcodes, without any other modifier."""

    def add(function):
        def checked(ins, v):
            if ins.opcode not in opcodes:
                raise ins.error("this form is not known")
            return function(ins, v)

        return instruction(*opcodes)(checked)

    return add


# ---- mbarriers


def barrier(operand, v):
    return f"ptx::barrier({v.address(operand, 'shared')})"


@exactly("mbarrier.init.shared.b64", "mbarrier.init.shared::cta.b64")
def init(ins, v):
    at, count = ins.operands
    return f"ptx::at_line({ins.line}); cuda_host::barrier_init({barrier(at, v)}, {v.read(count, 'u32')});"


ARRIVE = "mbarrier.arrive.release.cta.shared::cta.b64"
ARRIVE_EXPECTING = "mbarrier.arrive.expect_tx.release.cta.shared::cta.b64"


@exactly(ARRIVE, ARRIVE_EXPECTING)
def arrive(ins, v):
    """The returned state is 0. The translator knows no instruction that uses it."""
    state, at, *count = ins.operands
    expects = ins.opcode == ARRIVE_EXPECTING
    if count and not expects:
        raise ins.error("more than one arrival is not known")
    count = v.read(count[0], "u32") if expects else "0"
    call = f"ptx::at_line({ins.line}); cuda_host::barrier_arrive({barrier(at, v)}, {count});"
    return f"{call} {v.write(state, 'b64', 'uint64_t{0}')}"


@exactly("mapa.shared::cluster.u32")
def address_in_cluster(ins, v):
    d, a, rank = ins.operands
    return v.write(d, "u32", f"ptx::address_in_cluster({ins.line}, {v.read(a, 'u32')}, {v.read(rank, 'u32')})")


@exactly("mbarrier.arrive.shared::cluster.b64")
def arrive_in_cluster(ins, v):
    nothing, at = ins.operands
    if nothing != "_":
        raise ins.error("an arrival in the cluster has no state")
    at = re.fullmatch(r"\[\s*(\S+)\s*\]", at)[1]
    return f"ptx::arrive_in_cluster({site(ins)}, {v.read(at, 'u32')});"


@exactly("barrier.cluster.arrive.release", "barrier.cluster.wait.acquire")
def cluster_barrier(ins, v):
    return f"ptx::at_line({ins.line}); cuda_host::cluster_{ins.parts[2]}({site(ins)});"


@exactly("mbarrier.try_wait.parity.shared::cta.b64")
def wait(ins, v):
    """On a GPU this instruction may return early, and the program tries again. Here it waits."""
    p, at, parity = ins.operands
    call = f"cuda_host::barrier_wait({site(ins)}, {barrier(at, v)}, {v.read(parity, 'u32')})"
    return f"{call}; {v.write(p, 'pred', 'true')}"


@exactly("fence.mbarrier_init.release.cluster")
def init_fence(ins, v):
    return "cuda_host::barrier_init_fence();"


@exactly("fence.proxy.async.shared::cta", "fence.proxy.async")
def proxy_fence(ins, v):
    return "cuda_host::proxy_fence();"


# ---- copies


def box(operand, v):
    """The map and the corner of an operand [map, {x, y, z}]."""
    match = re.fullmatch(r"\[\s*(\S+)\s*,\s*(\{.*\})\s*\]", operand)
    corner = elements(match[2])
    numbers = ", ".join(v.read(x, "s32") for x in corner)
    return f"const int32_t corner[] = {{{numbers}}};", f"ptx::tensor_map({v.read(match[1], 'u64')})", len(corner)


@instruction("cp.async.bulk.tensor")
def copy_box(ins, v):
    m = Modifiers(ins, 4)
    dimensions = m.take(*(f"{n}d" for n in range(3, 6)))
    way = ".".join(m.left)
    if way == "shared::cluster.global.tile.mbarrier::complete_tx::bytes":
        target, source, at = ins.operands
        corner, tensor, rank = box(source, v)
        call = f"load_box({site(ins)}, {v.address(target, 'shared')}, {tensor}, corner, {rank}, {barrier(at, v)})"
    elif way == "shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster":
        target, source, at, blocks = ins.operands
        corner, tensor, rank = box(source, v)
        call = f"load_box_into_blocks({site(ins)}, {v.address(target, 'shared')}, {tensor}, corner, {rank}, "
        call += f"{barrier(at, v)}, {v.read(blocks, 'u16')})"
    elif way == "global.shared::cta.tile.bulk_group":
        target, source = ins.operands
        corner, tensor, rank = box(target, v)
        call = f"store_box({site(ins)}, {tensor}, corner, {rank}, {v.address(source, 'shared')})"
    else:
        raise ins.error("this form is not known")
    if dimensions != f"{rank}d":
        raise ins.error(f"a corner of {rank} numbers")
    return f"{{ {corner} cuda_host::{call}; }}"


@exactly("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes")
def copy_bytes(ins, v):
    target, source, count, at = ins.operands
    target, source = v.address(target, "shared"), v.address(source, "global")
    return f"cuda_host::load_bytes({site(ins)}, {target}, {source}, {v.read(count, 'u32')}, {barrier(at, v)});"


@exactly("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32")
def add_bytes(ins, v):
    target, source, count = ins.operands
    target, source = v.address(target, "global"), v.address(source, "shared")
    return f"ptx::bulk_add({site(ins)}, {target}, {source}, {v.read(count, 'u32')});"


@exactly("cp.async.bulk.commit_group")
def end_bulk_group(ins, v):
    return "cuda_host::bulk_commit();"


@exactly("cp.async.bulk.wait_group.read", "cp.async.bulk.wait_group")
def wait_for_bulk_groups(ins, v):
    if ins.operands != ("0",):
        raise ins.error("only a wait for all groups is known")
    return f"ptx::at_line({ins.line}); cuda_host::bulk_wait{'_read' if ins.parts[-1] == 'read' else ''}();"


# ---- registers and wgmma


@exactly("setmaxnreg.inc.sync.aligned.u32", "setmaxnreg.dec.sync.aligned.u32")
def set_registers(ins, v):
    name = {"inc": "claim", "dec": "release"}[ins.parts[1]]
    return f"cuda_host::{name}_registers({site(ins)}, {int(ins.operands[0])});"


@exactly("wgmma.fence.sync.aligned")
def wgmma_fence(ins, v):
    return f"ptx::at_line({ins.line}); cuda_host::wgmma_fence({site(ins)});"


@exactly("wgmma.commit_group.sync.aligned")
def wgmma_commit(ins, v):
    return f"ptx::at_line({ins.line}); cuda_host::wgmma_commit({site(ins)});"


@exactly("wgmma.wait_group.sync.aligned")
def wgmma_wait(ins, v):
    return f"cuda_host::wgmma_wait({site(ins)}, {int(ins.operands[0])});"


PRODUCT = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)(?:k16\.f32\.(bf16|f16)\.\2|k32\.f32\.e4m3\.e4m3)")


def asynchronous_registers(instructions):
    """The lists of registers that a wgmma reads or writes until it is waited for, each with its type."""
    lists = {}
    for ins in instructions:
        if ins.opcode.startswith("wgmma.mma_async"):
            lists[tuple(elements(ins.operands[0]))] = "f32"
            if ins.operands[1].startswith("{"):
                lists[tuple(elements(ins.operands[1]))] = "b32"
    return lists


@instruction("wgmma.mma_async")
def multiply(ins, v):
    match = PRODUCT.fullmatch(ins.opcode)
    if not match:
        raise ins.error("this shape or these types are not known")
    columns, is_float8 = int(match[1]), match[2] is None
    widen = "cuda_host::widen_float8" if is_float8 else f"ptx::from_{HALVES[match[2]]}"
    d, a, b, accumulates, scale_a, scale_b, *by_rows = ins.operands
    registers = elements(d)
    if len(registers) != columns // 2:
        raise ins.error(f"{columns // 2} accumulators are needed")
    scales, flags = {"1": 1, "-1": -1}, {"0": "false", "1": "true"}
    negative = "true" if scales[scale_a] * scales[scale_b] < 0 else "false"
    if is_float8:
        if by_rows:
            raise ins.error("8-bit elements have no transposition")
        by_rows = ["0"] if a.startswith("{") else ["0", "0"]
    if a.startswith("{"):
        (b_by_rows,) = by_rows
        first, a_by_rows, held = "0", "0", v.array_of(elements(a))
    else:
        a_by_rows, b_by_rows = by_rows
        first, held = f"ptx::descriptor({ins.line}, {v.read(a, 'b64')})", "nullptr"
    second = f"ptx::descriptor({ins.line}, {v.read(b, 'b64')})"
    product = (
        f"{v.array_of(registers)}, {first}, {second}, {held}, {columns}, {v.read(accumulates, 'pred')}, "
        f"{flags[a_by_rows]}, {flags[b_by_rows]}, {widen}, {negative}, {1 if is_float8 else 2}"
    )
    return f"cuda_host::wgmma({site(ins)}, {{{product}}});"
