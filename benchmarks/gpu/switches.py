"""Times the sm90 kernels with each switch of csrc/cuda/sm90/switches.h on and off, and compares the results.

Needs nvcc and a GPU of compute capability 9.0. The forward's program is switches.cu. It is compiled once with the
defaults, and once with each switch changed. The backward has one switch, and switches_backward.cu has both kernels.
"""

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks import ROOT, output
from benchmarks.gpu import needs
from benchmarks.gpu.watch import watch
from tools.gpu import units

SOURCES = (
    "benchmarks/gpu/switches.cu",
    "csrc/cuda/combine.cu",
    "csrc/cuda/sm90/few_rows.cpp",
    "csrc/cuda/sm90/sorted_rounds.cpp",
    "csrc/cuda/sm90/task_rounds.cpp",
)
OF_BACKWARD = "FLASH_ATTN_EXT_SM90_BACKWARD_PAIRS"
BACKWARD_SOURCES = ("benchmarks/gpu/switches_backward.cu",)
PROGRAMS = ROOT / "build" / "gpu_switches"
ROUNDS = 3  # the programs alternate; the best time counts
PATIENCE = 10.0  # seconds for one program, which takes one second
AT_THE_END = 2.0  # seconds of the stage for the tables


def switches() -> list[str]:
    """Returns the forward's switches of speed. The switches for shapes of wgmma change no kernel of this benchmark."""
    return [name for name in defaults() if "_WGMMA_" not in name and name != OF_BACKWARD]


def programs() -> list[str | None]:
    """Returns the argument `changed` of each program: None, the switches of the forward, and OF_BACKWARD."""
    return [None, *switches(), OF_BACKWARD]


def defaults() -> dict[str, int]:
    """Returns each switch with its default, 1 or 0."""
    header = (ROOT / "csrc" / "cuda" / "sm90" / "switches.h").read_text()
    return {name: int(value) for name, value in re.findall(r"^#define (\w+) ([01])$", header, re.MULTILINE)}


def other_value(switch: str) -> int:
    """Returns the value that is not the default: 0 turns a switch off, 1 turns it on."""
    return 1 - defaults()[switch]


def program(changed: str | None) -> Path:
    """The program with this switch changed; None: with the defaults. OF_BACKWARD: the backward's program."""
    return PROGRAMS / (f"changed_{changed}" if changed else "defaults")


def command(compiler: str, changed: str | None) -> list[str]:
    """Returns the command that compiles the program."""
    is_forward = changed != OF_BACKWARD
    define = [f"-D{changed}={other_value(changed)}"] if changed and is_forward else []
    sources = [str(ROOT / source) for source in (SOURCES if is_forward else BACKWARD_SOURCES)]
    return [compiler, *units.FLAGS, f"-I{ROOT}", *define, *sources, "-o", str(program(changed))]


def is_compiled(changed: str | None) -> bool:
    done = program(changed)
    if not units.is_newer_than_sources(done):
        return False
    return all(
        done.stat().st_mtime > source.stat().st_mtime for source in Path(__file__).parent.glob("switches*.[ch]*")
    )


def compile_all(compiler: str) -> None:
    PROGRAMS.mkdir(parents=True, exist_ok=True)
    running = [subprocess.Popen(command(compiler, changed)) for changed in programs()]
    if any([process.wait() for process in running]):
        sys.exit("nvcc could not compile the switches' program")


def parsed(text: str) -> dict[tuple[str, ...], tuple[float, str]]:
    """Returns microseconds and checksum by (head dimension, length, causal)."""
    rows = [line.split() for line in text.splitlines()]
    return {tuple(row[:3]): (float(row[3]), row[4]) for row in rows}


def compare(on: list[str], off: list[str]) -> tuple[list[list[str]], bool]:
    """Returns the rows of the table from the output of each round, and whether out is always equal."""
    rounds = [[parsed(text) for text in texts] for texts in (on, off)]
    lines, same = [], True
    for problem in rounds[0][0]:
        best_on, best_off = (min(found[problem][0] for found in side) for side in rounds)
        equal = len({found[problem][1] for side in rounds for found in side}) == 1
        same &= equal
        lines.append(_line(problem, best_on, best_off, equal))
    return lines, same


def table_of_backward(said: str) -> tuple[list[list[str]], bool]:
    """Returns the same for the backward's program, which runs both kernels and compares their gradients."""
    rows = [line.split() for line in said.splitlines()]
    lines = [_line(row, float(row[3]), float(row[4]), row[5] == "yes") for row in rows]
    return lines, all(row[5] == "yes" for row in rows)


def _line(problem: Sequence[str], on: float, off: float, equal: bool) -> list[str]:
    shape = f"D {problem[0]} S {problem[1]} {'causal' if problem[2] == '1' else 'full'}"
    return [shape, f"{on:.1f}", f"{off:.1f}", f"{off / on:.3f}", "yes" if equal else "NO"]


def text(switch: str, lines: list[list[str]]) -> Iterator[str]:
    yield f"{switch}: microseconds with it and without it; above 1 it is worth having\n"
    yield output.table(["", "with", "without", "ratio", "same results"], lines)


def run(changed: str | None, end: float) -> str | None:
    """Returns the program's output. None if it hangs or fails; the other programs are still compared."""
    status, lines = watch([str(program(changed))], PATIENCE, end)
    if status == 0:
        return "\n".join(lines)
    is_late = status is None and time.monotonic() >= end
    why = "no time was left" if is_late else "hangs" if status is None else f"exit status {status}"
    print(f"{program(changed).name}: {why}", flush=True)
    return None


def try_to_compile() -> None:
    """Compiles in parallel to the build. If this fails, the stage `switches` compiles again and reports the failure."""
    compiler = units.nvcc()
    if compiler and not all(is_compiled(changed) for changed in programs()):
        with suppress(SystemExit):
            compile_all(compiler)


def main() -> int:
    needs.a_gpu_and_our_build()
    compiler = units.nvcc()
    if compiler is None:
        print("needs nvcc: CUDA_HOME, /usr/local/cuda and PATH have none")
        return 1
    end = time.monotonic() + needs.seconds_left() - AT_THE_END
    if not all(is_compiled(changed) for changed in programs()):
        compile_all(compiler)
    found: dict[str | None, list[str]] = {changed: [] for changed in (None, *switches())}
    broken: set[str | None] = set()
    for _ in range(ROUNDS):
        for changed, texts in found.items():
            said = None if changed in broken else run(changed, end)
            if said is None:
                broken.add(changed)
            else:
                texts.append(said)
    good = not broken
    for switch in switches():
        if found[None] and found[switch]:
            off, on = (found[switch], found[None]) if defaults()[switch] else (found[None], found[switch])
            lines, same = compare(on, off)
            output.write_text(text(switch, lines), None)
            good &= same
    of_backward = run(OF_BACKWARD, end)
    if of_backward is None:
        return 1
    lines, same = table_of_backward(of_backward)
    output.write_text(text(OF_BACKWARD, lines), None)
    good &= same
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
