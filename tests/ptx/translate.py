"""Translates kernels from PTX to C++ that runs on the host's model of a GPU (tests/cuda_host): docs/design/ptx.md.

python -m ptx.translate kernels.ptx [entry ...] > kernels.cpp      # in tests/
"""

import sys
from pathlib import Path

from ptx import calls, emit, parse

HEADER = '#include "machine.h"\n#define SITE(line, what) (ptx::at_line(line), cuda_host::Site{what, "ptx", line})\n'


def translate(text, names, edits=None):
    """The C++ text of these entries and of the functions that they call.

    The entries are functions ptx_0, ptx_1, ..., in a list for the host's launches.
    """
    entries = [parse.read_entry(text, name) for name in names]
    defined, constants = parse.read_functions(text), parse.read_data(text)
    functions = {
        name: (f"called_{n}", function) for n, (name, function) in enumerate(_called(entries, defined).items())
    }
    body = [
        *(f"{emit.signature(function, name)};" for name, function in functions.values()),
        *(emit.function(function, name, edits, functions, constants) for name, function in functions.values()),
        *(emit.function(entry, f"ptx_{n}", edits, functions, constants) for n, entry in enumerate(entries)),
    ]
    used = [data for data in constants.values() if any(f"D_{data.name}" in piece for piece in body)]
    table = ", ".join(f'{{"{entry.name}", ptx_{n}, {entry.param_bytes}}}' for n, entry in enumerate(entries))
    return "\n".join(
        [HEADER, *map(emit.constant, used), *body, f"const ptx::Kernel ptx::kernels[] = {{{table}, {{}}}};", ""]
    )


def _called(entries, defined):
    """The functions that the entries call, and that these functions call."""
    found, left = {}, list(entries)
    while left:
        names = calls.called(left.pop().body) - found.keys()
        found |= {name: defined[name] for name in names if name in defined}
        left += [defined[name] for name in names if name in defined]
    return found


if __name__ == "__main__":
    path, *chosen = sys.argv[1:]
    ptx = Path(path).read_text()
    print(translate(ptx, chosen or parse.entry_names(ptx)))
