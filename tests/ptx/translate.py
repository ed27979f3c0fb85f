"""Translates kernels from PTX to C++ that runs on the host's model of a GPU (tests/cuda_host): docs/design/ptx.md.

python -m ptx.translate kernels.ptx [entry ...] > kernels.cpp      # in tests/
"""

import sys
from pathlib import Path

from ptx import emit, parse

HEADER = '#include "machine.h"\n#define SITE(line, what) (ptx::at_line(line), cuda_host::Site{what, "ptx", line})\n'


def translate(text, names, edits=None):
    """The C++ text of these entries: functions ptx_0, ptx_1, ..., and a list of them for the host's launches."""
    entries = [parse.read_entry(text, name) for name in names]
    functions = [emit.function(entry, f"ptx_{n}", edits) for n, entry in enumerate(entries)]
    table = ", ".join(f'{{"{entry.name}", ptx_{n}, {entry.param_bytes}}}' for n, entry in enumerate(entries))
    return "\n".join([HEADER, *functions, f"const ptx::Kernel ptx::kernels[] = {{{table}, {{}}}};", ""])


if __name__ == "__main__":
    path, *chosen = sys.argv[1:]
    ptx = Path(path).read_text()
    print(translate(ptx, chosen or parse.entry_names(ptx)))
