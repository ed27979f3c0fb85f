"""Prints the packages of one group of pyproject.toml's optional dependencies: `python tools/requirements.py GROUP`."""

import re
import sys
from pathlib import Path


def packages(group: str) -> list[str]:
    text = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    # A pattern, because Python 3.10 has no parser for TOML.
    # The list ends at the `]` at the end of a line: a package may have one, as in "name[extra]".
    found = re.search(rf"^{re.escape(group)} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
    if not found:
        raise SystemExit(f"requirements.py: pyproject.toml has no group {group!r}")
    return re.findall(r'^[^#]*?"([^"]+)"', found[1].replace(",", ",\n"), re.MULTILINE)


if __name__ == "__main__":
    print(*packages(sys.argv[1]))
