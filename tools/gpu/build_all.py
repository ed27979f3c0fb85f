"""Builds the extension in place, and the programs of later stages. Prints the messages of ptxas for each kernel.

On a Hopper and on a Turing, builds for this GPU only: code for other GPUs takes time, and does not run there.
TORCH_CUDA_ARCH_LIST overrides this.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import ROOT
from benchmarks.gpu import switches, time_model
from tools.gpu import units
from tools.gpu.machine import said

# GPUs for which only their own code is built: compute capability, and the list for torch.
OWN_CODE = {"7.5": "7.5", "9.0": "9.0a"}
COMMAND = (sys.executable, "setup.py", "build_ext", "--inplace")


@dataclass(frozen=True)
class Kernel:
    name: str
    architecture: str
    registers: int
    spilled: int  # bytes stored


def kernels(log: str) -> list[Kernel]:
    """Returns the kernels that `ptxas -v` reports, in its order."""
    found = []
    for entry in re.split(r"Compiling entry function ", log)[1:]:
        name = re.match(r"'(\S+)' for '(\w+)'", entry)
        spilled, registers = re.search(r"(\d+) bytes spill stores", entry), re.search(r"Used (\d+) registers", entry)
        if name and spilled and registers:
            found.append(Kernel(name[1], name[2], int(registers[1]), int(spilled[1])))
    return found


def text(log: str) -> Iterator[str]:
    """Yields warnings, then kernels with spills, then the other kernels."""
    yield from dict.fromkeys(line for line in log.splitlines() if re.search(r"\bwarning\b|C75\d\d", line))
    found = sorted(kernels(log), key=lambda kernel: (-kernel.spilled, -kernel.registers))
    names = demangled([kernel.name for kernel in found])
    for kernel, name in zip(found, names, strict=True):
        yield f"{kernel.architecture} {kernel.registers:3} registers, {kernel.spilled} bytes spilled: {name}"
    yield f"{len(found)} kernels compiled, {sum(kernel.spilled > 0 for kernel in found)} with spills"


def demangled(names: list[str]) -> list[str]:
    """Demangles names, without arguments, if c++filt is installed."""
    if shutil.which("c++filt") is None or not names:
        return names
    lines = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True).stdout.splitlines()
    return [re.sub(r"\(.*|^void |flash_attn_ext::cuda::", "", line) for line in lines]


def settings() -> dict[str, str]:
    """Environment variables of the build."""
    result = {"FLASH_ATTN_EXT_CUDA": "1", "NVCC_APPEND_FLAGS": "-Xptxas -v"}
    if "TORCH_CUDA_ARCH_LIST" not in os.environ and capability() in OWN_CODE:
        result["TORCH_CUDA_ARCH_LIST"] = OWN_CODE[capability()]
    return result


def capability() -> str:
    """The compute capability of the first GPU, as "9.0"."""
    return said("nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader").split("\n")[0]


def run(command: tuple[str, ...]) -> tuple[int, str]:
    """Returns the exit status and the output, which is also printed immediately."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | settings(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    return process.wait(), "".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, metavar="FILE", help="for ptxas's messages")
    args = parser.parse_args(argv)
    of_hopper = (units.try_to_compile, switches.try_to_compile, time_model.iterations) if capability() == "9.0" else ()
    jobs = [threading.Thread(target=compile_it) for compile_it in of_hopper]
    for thread in jobs:
        thread.start()
    status, log = run(COMMAND)
    for thread in jobs:
        thread.join()
    lines = list(text(log))
    if args.text:
        args.text.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
