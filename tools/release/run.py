"""Makes all files of a release in one folder. make release calls it.

    python -m tools.release.run [--out build/release] [--all] [--only 2.13.0/3.11 ...] [--wheels FOLDER] [--complete]

The folder has the sdist, index.html for `pip install --find-links`, sbom.cdx.json, NOTES.md and SHA256SUMS. It has a
wheel for each pair of HERE in versions.py, or with --all for each pair of PAIRS. A wheel is built from the sdist, and
tested in an empty environment without a compiler.

If the Python or torch of a pair is not available, NOTES.md lists the pair with the reason. With --complete this is an
error. With --wheels nothing is compiled: the release uses the wheels of this folder, which were built and tested
elsewhere (by the tag workflow).
"""

import argparse
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from .listing import write_checksums, write_index
from .notes import notes, table
from .sbom import write_sbom
from .versions import HERE, PAIRS
from .wheels import Wheel, described, make_wheel

ROOT = Path(__file__).parent.parent.parent


def make_sdist(out: Path) -> Path:
    run = subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", str(out)], cwd=ROOT, capture_output=True, text=True
    )
    if run.returncode:
        raise RuntimeError(f"setup.py sdist failed:\n{run.stdout}{run.stderr}")
    return next(out.glob("*.tar.gz"))


def unpacked(sdist: Path, work: Path) -> Path:
    """Unpacks the sdist. Wheels are built from it, so that a missing file is noticed."""
    work.mkdir(parents=True, exist_ok=True)
    with tarfile.open(sdist) as archive:
        top = archive.getnames()[0].split("/")[0]
        shutil.rmtree(work / top, ignore_errors=True)
        archive.extractall(work, filter="data")
    return work / top


def pairs(only: list[str]) -> list[tuple[str, str]]:
    """Returns all pairs (torch, Python), or the pairs of `only`. Raises ValueError for an unknown pair."""
    names = ["/".join(pair) for pair in PAIRS]
    unknown = set(only) - set(names)
    if unknown:
        raise ValueError(f"--only: got {sorted(unknown)}; allowed: {', '.join(names)}")
    return [pair for pair, name in zip(PAIRS, names, strict=True) if not only or name in only]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build/release")
    parser.add_argument("--only", nargs="+", default=[], metavar="TORCH/PYTHON")
    parser.add_argument("--all", action="store_true", help="build every pair, not only the pairs of HERE")
    parser.add_argument("--wheels", type=Path, help="take the wheels of this folder; compile nothing")
    parser.add_argument("--complete", action="store_true", help="a pair without a wheel is an error")
    options = parser.parse_args(arguments)
    chosen = pairs(options.only)

    if not importlib.util.find_spec("cyclonedx"):
        raise ModuleNotFoundError("the bill of materials needs: pip install 'cyclonedx-python-lib[json-validation]'")
    if not options.wheels and not shutil.which("uv"):
        raise FileNotFoundError("uv was not found on PATH: pip install uv, or use make release")
    out, work = options.out, options.out.parent / "release_work"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    version = re.search(r'"(.+)"', (ROOT / "flash_attn_ext/_version.py").read_text().split("__version__")[1])[1]
    sdist = make_sdist(out)

    wheels: list[Wheel] = []
    if options.wheels:
        for file in sorted(options.wheels.glob("**/*.whl")):
            wheels.append(described(file))
            shutil.copy2(file, out)
        have = {(wheel.torch, wheel.python) for wheel in wheels}
        for torch, python in chosen:
            if (torch.rpartition(".")[0], python) not in have:
                wheels.append(Wheel(torch, python, None, "not among the wheels of --wheels"))
    else:
        source = unpacked(sdist, work)
        for torch, python in chosen:
            if not (options.all or options.only or (torch, python) in HERE):
                wheels.append(Wheel(torch, python, None, "not built here: the tag workflow builds it, or --all"))
                continue
            print(f"torch {torch}, Python {python} ...", flush=True)
            wheels.append(make_wheel(source, work, out, torch, python))
            print(f"  {wheels[-1].file or ''} {wheels[-1].result}", flush=True)

    (out / "NOTES.md").write_text(notes((ROOT / "CHANGELOG.md").read_text(), version, wheels))
    write_index(out)
    write_sbom(out, version)
    write_checksums(out)
    print(table(wheels))
    print(f"All files are in {out}")
    missing = sum(wheel.file is None for wheel in wheels)
    if options.complete and missing:
        print(f"{missing} of {len(wheels)} wheels are missing", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
