"""Writes the table of docs/support.md: the options that each kernel supports.

    python tools/support_matrix.py --write

Compiles support_matrix.cpp together with the functions `why_not` of the kernels, and runs it. Needs g++, but no GPU.
tests/tools/test_support_matrix.py compares the answers with the page.
"""

import argparse
import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "support.md"
BEGIN, END = "<!-- written by tools/support_matrix.py -->\n", "<!-- end -->"
FOLDERS = ("cpu", "cuda/simt", "cuda/sm75", "cuda/sm80", "cuda/sm90")
KERNELS = (*(f"csrc/{folder}/why_not.cpp" for folder in FOLDERS), "csrc/cuda/simt/functions.cpp")
FLAGS = [
    "-std=c++20",
    "-O0",
    "-ffunction-sections",
    "-DFLASH_ATTN_EXT_CUDA_ON_HOST",
    "-Icsrc",
    "-Itests/cuda_host/include",
]
# Some of these files also plan workspaces. The linker drops this code and everything that it calls.
LINK = ["-Wl,--gc-sections", "-Wl,--unresolved-symbols=ignore-all"]


class Row(NamedTuple):
    function: str
    options: str  # "": the options of the row before
    case: str
    cpu: str  # the letters of the passes, or "-"
    simt: str
    sm75: str
    sm80: str
    sm90: str


def rows(folder: Path) -> list[Row]:
    """Compiles into `folder`, runs, and returns the rows."""
    compiler = os.environ.get("CXX", "g++")

    def compiled(source: str) -> Path:
        target = folder / (source.replace("/", "_") + ".o")
        subprocess.run([compiler, *FLAGS, "-c", source, "-o", target], cwd=ROOT, check=True)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compiled, ["tools/support_matrix.cpp", *KERNELS]))
    subprocess.run([compiler, *objects, *LINK, "-o", folder / "support_matrix"], check=True)
    printed = subprocess.run([folder / "support_matrix"], check=True, capture_output=True, text=True).stdout
    return [Row(*line.split("|")) for line in printed.splitlines()]


def table(all_rows: list[Row]) -> str:
    lines = []
    for function in dict.fromkeys(row.function for row in all_rows):
        lines += [
            f"## `{function}`",
            "",
            "| option | case | CPU | `simt` | `sm75` | `sm80` | `sm90` |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in all_rows:
            if row.function == function:
                options = ", ".join(f"`{option}`" for option in row.options.split(", ") if option)
                lines.append(f"| {options} | {row.case} | " + " | ".join(row[3:]) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = table(rows(Path(folder)))
    if arguments.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2])
    else:
        print(text)


if __name__ == "__main__":
    main()
