"""The stages of `make gpu`, in the order in which they run. Each is a separate command with a time-out. The most
informative stages are first: the compiler's messages, units of the hardware, whether sm90 runs, the balance of its
blocks in causal calls, and its switches. Then follow the other tiers and speed. A stage that is not for the machine's
GPU is skipped. On a Hopper the time-outs of the stages up to tests-simt add up to at most run.py's --limit. With 16
cores a build takes less than its time-out; later stages use the remaining time.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from tools.gpu.calls import GPUS


@dataclass(frozen=True)
class Stage:
    name: str
    command: tuple[str, ...]
    timeout: float  # seconds
    environment: dict[str, str] = field(default_factory=dict)  # added to this process's variables
    gpus: range = GPUS["simt"]  # ten times the compute capabilities of its GPUs


def script(module: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", module, *arguments)


def stages(out: Path, quick: bool) -> list[Stage]:
    """`out`: the folder for measurements."""
    faster = ("--quick",) if quick else ()

    def compare(name: str, timeout: float, *lengths: int) -> Stage:
        wanted = ("--lengths", *map(str, lengths))
        return Stage(name, script("benchmarks.gpu.compare", *wanted, *files(out, name), *faster), timeout)

    def tests(tier: str, timeout: float) -> Stage:
        junit = str(out / f"tests-{tier}.xml")
        command = script("tools.gpu.gpu_tests", "--tier", tier, "--junit", junit, *faster)
        return Stage(f"tests-{tier}", command, timeout, gpus=GPUS[tier])

    def smoke(tier: str) -> Stage:
        return Stage(f"smoke-{tier}", script("tools.gpu.smoke", tier), 18, gpus=GPUS[tier])

    hopper = GPUS["sm90"]
    return [
        Stage("build", script("tools.gpu.build_all", files(out, "build")[0]), 200),
        Stage("units", script("tools.gpu.units"), 10, gpus=hopper),
        smoke("sm90"),
        Stage("balance", script("benchmarks.gpu.balance", *files(out, "balance")[:2]), 12, gpus=hopper),
        Stage("switches", script("benchmarks.gpu.switches"), 30, gpus=hopper),
        smoke("sm80"),
        smoke("sm75"),
        smoke("simt"),
        Stage("smoke-forms", script("tools.gpu.smoke_forms"), 15),
        compare("compare-16384-1024", 35, 16384, 1024),
        tests("sm90", 62),
        tests("sm80", 45),
        tests("sm75", 45),
        tests("simt", 61),
        compare("compare-8192", 35, 8192),
        compare("compare-others", 70, 4096, 2048, 512),
        Stage("memcheck", script("tools.gpu.sanitize", "memcheck"), 40),
        Stage("decode", script("benchmarks.gpu.decode", *files(out, "decode"), *faster), 25),
        Stage("ncu", script("benchmarks.gpu.ncu", *files(out, "ncu")[:2]), 45),
        *[Stage(tool, script("tools.gpu.sanitize", tool), 60) for tool in ("racecheck", "synccheck", "initcheck")],
        Stage("memory", script("benchmarks.gpu.memory", *files(out, "memory")[:2], *faster), 90),
        Stage("traffic", script("benchmarks.gpu.traffic", *files(out, "traffic")[:2], *faster), 90),
    ]


def files(out: Path, name: str) -> tuple[str, str, str]:
    """Returns the files for the tables, for all measurements, and for the figure."""
    return tuple(f"--{kind}={out / name}.{end}" for kind, end in (("text", "txt"), ("json", "json"), ("plot", "png")))
