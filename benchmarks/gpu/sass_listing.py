"""Reads machine code (SASS): a kernel's instructions, and the instructions of one iteration of its main loop."""

import heapq
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# Address, predicate, name, operands, and the upper half of the 128 bits.
LINE = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/"
    r"\s*/\* 0x([0-9a-f]{16}) \*/"
)
PRODUCTS = ("HGMMA", "QGMMA", "HMMA")
# Instructions that a main loop must not have: arithmetic in fp64, and conversions between integers and floats, by which
# the compiler divides integers.
SLOW = re.compile(r"D(ADD|MUL|FMA|SETP|MNMX)|MUFU\.\w+64H|F2F\.\S*F64|F2I|I2F")


@dataclass(frozen=True)
class Instruction:
    address: int
    predicate: str  # empty: the instruction always runs
    name: str  # with its modifiers: MUFU.EX2
    operands: str
    stall: int  # cycles after which the warp may issue its next instruction, as the compiler wrote it

    @property
    def target(self) -> int | None:
        """The target address of a branch."""
        found = re.search(r"0x([0-9a-f]+)$", self.operands) if self.name.split(".")[0] == "BRA" else None
        return int(found[1], 16) if found else None

    @property
    def always_branches(self) -> bool:
        return self.name == "BRA" and not self.predicate and not re.match(r"!?U?P", self.operands)

    @property
    def ends(self) -> bool:
        return not self.predicate and self.name.split(".")[0] in ("EXIT", "RET")


def tool(name: str) -> Path | None:
    """Finds cuobjdump or nvdisasm: in the CUDA toolkit, or in its package on PyPI."""
    places = [str(Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"), os.environ.get("PATH", "")]
    try:
        files = metadata.files(f"nvidia-cuda-{name}") or []
        places += [str(Path(f.locate()).parent) for f in files if f.name == name]
    except metadata.PackageNotFoundError:
        pass
    found = shutil.which(name, path=os.pathsep.join(places))
    return Path(found) if found else None


def disassemble(binary: Path) -> str:
    """All functions of a cubin or an object file. Needs cuobjdump, which needs nvdisasm."""
    tools = [tool("cuobjdump"), tool("nvdisasm")]
    if None in tools:
        raise FileNotFoundError("needs cuobjdump and nvdisasm, of the CUDA toolkit or of PyPI's nvidia-cuda-...")
    environment = os.environ | {"PATH": os.pathsep.join([str(tools[1].parent), os.environ.get("PATH", "")])}
    command = [tools[0], "-sass", binary]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout


def functions(text: str) -> dict[str, list[Instruction]]:
    """By mangled name."""
    result = {}
    for part in re.split(r"Function : ", text)[1:]:
        name, body = part.split("\n", 1)
        result[name.strip()] = [
            Instruction(int(a, 16), p or "", n, o, max(1, int(upper, 16) >> 41 & 15))
            for a, p, n, o, upper in LINE.findall(body)
        ]
    return result


def main_loop(code: list[Instruction]) -> list[Instruction]:
    """Returns the instructions of one iteration of the loop with the most products, on its shortest path.

    The shortest path computes a whole tile after its copies have landed. It omits the code for tiles at the edge and
    the loops that wait.
    """
    place = {instruction.address: n for n, instruction in enumerate(code)}
    backward = [(place[i.target], n) for n, i in enumerate(code) if i.target in place and place[i.target] <= n]
    iterations = [[code[n] for n in way] for begin, end in backward if (way := shortest_way(code, place, begin, end))]
    return max(iterations, key=lambda iteration: (count(iteration, *PRODUCTS), -len(iteration)))


def copying_loop(code: list[Instruction]) -> list[Instruction]:
    """Returns the instructions of one iteration of the shortest loop from shared memory to shared memory, on its
    shortest path: the transposition of V.
    """
    place = {instruction.address: n for n, instruction in enumerate(code)}
    loops = [code[place[i.target] : n + 1] for n, i in enumerate(code) if i.target in place and place[i.target] <= n]
    copies = [loop for loop in loops if count(loop, "LDSM") and count(loop, "STSM")]
    shortest = min(copies, key=len)
    begin, end = place[shortest[0].address], place[shortest[-1].address]
    return [code[n] for n in shortest_way(code, place, begin, end)]


def slow_instructions(code: list[Instruction]) -> list[str]:
    """The instructions of `code` that a main loop must not have."""
    return [f"{i.address:#x}: {i.name} {i.operands}" for i in code if SLOW.match(i.name)]


def count(code: list[Instruction], *names: str) -> int:
    return sum(instruction.name.startswith(names) for instruction in code)


def shortest_way(code: list[Instruction], place: dict[int, int], begin: int, end: int) -> list[int]:
    """Returns the shortest path from one instruction to another; empty if there is no path."""
    came_from, waiting = {begin: begin}, [(0, begin)]
    while waiting:
        length, n = heapq.heappop(waiting)
        if n == end:
            break
        instruction = code[n]
        after = [] if instruction.always_branches or instruction.ends else [n + 1]
        if instruction.target in place and instruction.name != "BRA.DIV":
            after.append(place[instruction.target])
        for m in after:
            if m < len(code) and m not in came_from:
                came_from[m] = n
                heapq.heappush(waiting, (length + 1, m))
    if end not in came_from:
        return []
    way = [end]
    while way[-1] != begin:
        way.append(came_from[way[-1]])
    return way[::-1]
