"""The stages of `make gpu`, in the order in which they run. Each is a command of its own, with a time-out."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")


@dataclass(frozen=True)
class Stage:
    name: str
    command: tuple[str, ...]
    timeout: float  # seconds
    environment: dict[str, str] = field(default_factory=dict)  # beside this process's


def script(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, str(HERE / name), *arguments)


def stages(out: Path, quick: bool) -> list[Stage]:
    """`out` is where the scripts write what they measured. The time-outs add up to more than run.py's --limit."""
    faster = ("--quick",) if quick else ()
    build = (sys.executable, "setup.py", "build_ext", "--inplace")
    return [
        Stage("build", build, 240, {"FLASH_ATTN_EXT_CUDA": "1"}),
        Stage("units", script("units.py"), 90),
        Stage("tests", script("gpu_tests.py", "--junit", str(out / "tests.xml"), *faster), 150),
        *[Stage(tool, script("sanitize.py", tool), 60) for tool in SANITIZERS],
        Stage("compare", script("compare.py", *files(out, "compare"), *faster), 110),
        Stage("decode", script("decode.py", *files(out, "decode"), *faster), 60),
        Stage("memory", script("memory.py", *files(out, "memory")[:2], *faster), 90),
        Stage("traffic", script("traffic.py", *files(out, "traffic")[:2], *faster), 90),
    ]


def files(out: Path, name: str) -> tuple[str, str, str]:
    """For the tables, for everything measured, for the figure."""
    return tuple(f"--{kind}={out / name}.{end}" for kind, end in (("text", "txt"), ("json", "json"), ("plot", "png")))
