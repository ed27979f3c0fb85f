"""Makes the repository of a Hugging Face kernel from a built wheel.

    python -m tools.release.hub_kernel WHEEL... --out build/hub_kernel

The folder has build/<variant>/ for each wheel, as the package `kernels` loads it, and a README.md. After an upload
of the folder, transformers loads it by attn_implementation="org/repo". Before:
LOCAL_KERNELS="org/repo=build/hub_kernel".
"""

import argparse
import json
import re
import shutil
import sys
import zipfile
from pathlib import Path

VERSION = 1  # of the kernel in the Hub
README = """\
---
license: bsd-3-clause
tags: [kernels]
---
# flash_attn_ext

Exact attention on CPU: `AutoModel.from_pretrained(..., attn_implementation="org/repo")`. Variants: {variants}.
"""


def variant(wheel: str) -> str:
    """torch213-cxx11-cpu-x86_64-linux, from the name of a wheel. Raises ValueError for a wheel without torch's version.

    A variant does not name a Python version. Wheels for several Python versions share its folder, because the file
    names of their extensions differ.
    """
    match = re.fullmatch(r"flash_attn_ext-[\d.]+\+torch(\d)\.(\d+)-cp3\d+-cp3\d+-.*(x86_64|aarch64)\.whl", wheel)
    if not match:
        raise ValueError(f"got the wheel {wheel}; allowed: a Linux wheel of make wheel, flash_attn_ext-0.1.0+torch...")
    return name_of_variant(match[1], match[2], match[3])


def name_of_variant(major: str, minor: str, machine: str) -> str:
    """The folder of a build for one minor version of torch, as the package `kernels` looks for it."""
    return f"torch{major}{minor}-cxx11-cpu-{machine}-linux"


def write_metadata(folder: Path, identifier: str) -> None:
    """Writes metadata.json for the package `kernels`. Another build has another identifier."""
    metadata = {
        "id": identifier,
        "name": "flash-attn-ext",
        "version": VERSION,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def make(wheel: Path, out: Path) -> Path:
    """Unpacks the wheel into out/build/<variant> and returns that folder."""
    folder = out / "build" / variant(wheel.name)
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith("flash_attn_ext/")])
    shutil.copy(Path(__file__).parent / "kernel_init.py", folder / "__init__.py")
    write_metadata(folder, "_flash_attn_ext_" + folder.name.replace("-", "_"))
    return folder


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("build/hub_kernel"))
    options = parser.parse_args(arguments)
    shutil.rmtree(options.out, ignore_errors=True)
    made = sorted({make(wheel, options.out).name for wheel in options.wheels})
    (options.out / "README.md").write_text(README.format(variants=", ".join(made)))
    print(f"{options.out}: {', '.join(made)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
