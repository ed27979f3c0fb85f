"""Reads SASS, a GPU's machine code, as cuobjdump prints it: loops, and registers of wgmma that are touched too early.

An HGMMA, or a QGMMA of 8-bit elements, runs on its own. Its accumulator and its left operand in registers belong to it
until a wait retires its batch: `gsb0` ends a batch, `WARPGROUP.DEPBAR.LE gsb0, n` waits until at most n batches run.
"""

import re
from dataclasses import dataclass

INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
REGISTER = re.compile(r"(?<![UP\w.])R(\d+)\b(\.64)?")
MOST_PENDING = 3  # more than any wait leaves running
PRODUCTS = "HGMMA", "QGMMA"


@dataclass(frozen=True)
class Instruction:
    address: int
    predicate: str  # "" if it always runs
    operation: str
    operands: tuple[str, ...]

    def __str__(self):
        return f"{self.address:#x}: {self.predicate} {self.operation} {', '.join(self.operands)}"


def functions(text):
    """{mangled name: its instructions}, read from the output of `cuobjdump -sass`."""
    return {f.split()[0]: [parse(*m) for m in INSTRUCTION.findall(f)] for f in re.split(r"Function : ", text)[1:]}


def parse(address, text):
    predicate, text = re.fullmatch(r"(@!?U?P\w+ )?(.*)", text).groups()
    operation, _, operands = text.partition(" ")
    return Instruction(int(address, 16), predicate or "", operation, tuple(operands.split(", ")) if operands else ())


def target(instruction):
    """The target address of a branch, or None."""
    if not instruction.operation.startswith(("BRA", "CALL")):
        return None
    found = re.fullmatch(r"0x[0-9a-f]+", instruction.operands[-1])
    return int(found.group(), 16) if found else None


def main_loop(code, products):
    """The instructions of the shortest loop with at least so many products."""
    index = {instruction.address: n for n, instruction in enumerate(code)}
    loops = []
    for n, instruction in enumerate(code):
        to = target(instruction)
        if instruction.operation.startswith("BRA") and to is not None and to <= instruction.address:
            body = code[index[to] : n + 1]
            if sum(i.operation.startswith(PRODUCTS) for i in body) >= products:
                loops.append(body)
    return min(loops, key=len)


def registers_of_product(instruction):
    """The registers of a product's accumulator, and the registers of its left operand."""
    columns = int(re.match(r"[HQ]GMMA\.64x(\d+)x(?:16|32)\.F32", instruction.operation).group(1))
    registers = [
        int(m.group(1)) for operand in instruction.operands if (m := re.fullmatch(r"R(\d+)(?:\.reuse)?", operand))
    ]
    accumulator = range(registers[0], registers[0] + columns // 2)
    left = range(0)
    if not instruction.operands[1].startswith("gdesc"):
        left = range(registers[1], registers[1] + 4)
    return frozenset(accumulator), frozenset(left)


def touched(instruction):
    """All registers that an instruction names. A wide operand covers further registers after the named one."""
    width = 1
    for pattern, registers in ((r"\.128\b|\.M88\.4", 4), (r"\.64\b|\.WIDE|F64|^D[A-Z]+$", 2)):
        if re.search(pattern, instruction.operation):
            width = registers
            break
    found = set()
    for operand in instruction.operands:
        for number, wide in REGISTER.findall(operand):
            # An address is one register, or two.
            count = (2 if wide else 1) if operand.startswith(("[", "desc")) else width
            found.update(range(int(number), int(number) + count))
    return found


def hazards(code):
    """Descriptions of the instructions that touch a register of a product that may be running."""
    index = {instruction.address: n for n, instruction in enumerate(code)}
    found, seen = {}, set()
    # A position in the code, and the batches in flight there: committed batches, oldest first, then the open batch. A
    # batch is a set of registers. Further products may name the registers of accumulators.
    work = [(0, (), frozenset())]
    while work:
        state = work.pop()
        if state in seen or state[0] >= len(code):
            continue
        seen.add(state)
        n, ended, open_batch = state
        instruction = code[n]
        running = open_batch.union(*ended)
        if instruction.operation.startswith(PRODUCTS):
            accumulator, left = registers_of_product(instruction)
            if left & {register for kind, register in running if kind == "accumulator"}:
                found[n] = f"{instruction} reads registers that a product still writes"
            own = {("accumulator", r) for r in accumulator} | {("left", r) for r in left}
            open_batch = open_batch | own
            if "gsb0" in instruction.operands:
                ended, open_batch = (*ended, open_batch), frozenset()
                if len(ended) > MOST_PENDING:  # in a loop without a wait there would be more and more
                    ended = (ended[0] | ended[1], *ended[2:])
        elif instruction.operation.startswith("WARPGROUP.DEPBAR"):
            pending = int(instruction.operands[1], 16)
            assert pending < MOST_PENDING
            ended = ended[len(ended) - pending :] if pending < len(ended) else ended
            if pending == 0:
                ended = ()
        elif touched(instruction) & {register for _, register in running}:
            found[n] = f"{instruction} touches registers of a product in flight"

        to = target(instruction)
        if to is not None:
            work.append((index[to], ended, open_batch))
        always = not instruction.predicate
        leaves = instruction.operation in ("EXIT", "BRA") and len(instruction.operands) <= 1
        if not (always and (leaves or instruction.operation.startswith("RET"))):
            work.append((n + 1, ended, open_batch))
    return [found[n] for n in sorted(found)]


def registers_after_setmaxnreg(code):
    """For each USETMAXREG its number of registers, and the number that the instructions after it need."""
    index = {instruction.address: n for n, instruction in enumerate(code)}
    found = []
    for start, instruction in enumerate(code):
        if not instruction.operation.startswith("USETMAXREG"):
            continue
        work, seen, highest = [start + 1], set(), -1
        while work:
            n = work.pop()
            if n in seen or n >= len(code) or code[n].operation.startswith("USETMAXREG"):
                continue
            seen.add(n)
            highest = max(highest, *registers_of(code[n]), -1)
            to = target(code[n])
            if to is not None:
                work.append(index[to])
            always = not code[n].predicate
            leaves = code[n].operation in ("EXIT", "BRA") and len(code[n].operands) <= 1
            if not (always and (leaves or code[n].operation.startswith("RET"))):
                work.append(n + 1)
        found.append((int(instruction.operands[-1], 16), highest + 1))
    return found


def registers_of(instruction):
    """All registers that an instruction reads or writes."""
    if instruction.operation.startswith(PRODUCTS):
        return frozenset().union(*registers_of_product(instruction)) | touched(instruction)
    return touched(instruction)
